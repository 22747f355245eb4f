"""Tokenise once: documents and their answer spans as Arrow, keyed by everything that decides them.

A prepared folder is published whole. Shards are finished one by one in a `.parts` folder beside it,
each under its final name only when it is complete, so a crash loses at most one of them, and two
processes that build the same folder write the same shards: whoever renames first wins, the other
uses what is there. The last step gathers them in a private folder, writes DONE with the size and
sha256 of every file, and renames the folder to its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expert.core.files import sync_folder, write_text_atomically
from expert.data.documents import write_dataset_files, write_shard
from expert.data.encoder import Encoder
from expert.data.helper_process import Helper
from expert.data.records import BadRow, DataError, Row, Segment
from expert.data.statistics import DocumentStatistics

FORMAT = 1
SHARD_ROWS = 4096
# A tokenizer holds about 150 bytes for each token while it encodes: this bounds it at 0.15 GB.
SHARD_CHARACTERS = 4_000_000
DONE = "DONE"
RECIPE = "recipe.json"
STATISTICS = "statistics.json"
REJECTS = "rejects.jsonl"
MADE_FOR = "made_for.txt"
SHOWN_BAD_ROWS = 10
_TOKENS = "tokens-"
_KEY_DIGITS = 16


@dataclass(frozen=True)
class Dropped:
    """A row that a check of the manifest leaves out, and which one."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the tokens. Two equal recipes give the same folder."""

    data: str
    tokenizer: str
    template: str
    columns: str
    learn_prompt: bool
    checks: str = ""
    format: int = FORMAT

    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def difference(self, other: dict[str, Any]) -> str:
        """What differs from another recipe, in words."""
        mine = asdict(self)
        names = {
            "data": "the data",
            "tokenizer": "the tokenizer",
            "template": "the prompt template",
            "columns": "the columns",
            "learn_prompt": "train_on_prompt",
            "checks": "the row checks",
            "format": "the format of the cache",
        }
        changed = [words for key, words in names.items() if mine[key] != other.get(key)]
        return f"{' and '.join(changed)} changed" if changed else "nothing changed"


def short_key(key: str) -> str:
    """The digits of a recipe's key that the name of its folder has."""
    return key[:_KEY_DIGITS]


def tokens_folder(key: str) -> str:
    """The name of the folder with the tokens of a recipe, by its key."""
    return _TOKENS + short_key(key)


def short_key_of(folder: Path) -> str:
    """The digits of the key in the name of a folder; "" where the user has named it."""
    digits = folder.name.removeprefix(_TOKENS)
    is_ours = len(digits) == _KEY_DIGITS and folder.name == tokens_folder(digits)
    return digits if is_ours else ""


@dataclass(frozen=True)
class Prepared:
    """A finished folder, whether it was there already, and why or why not."""

    folder: Path
    hit: bool
    because: str
    statistics: DocumentStatistics
    key: str
    """What the content follows from, whatever the folder is called."""


@dataclass
class Work:
    """What the builder needs: rows, how they become segments, and who is told of the progress."""

    rows: Callable[[], Iterator[Row | BadRow]]
    segments_of: Callable[[Row], list[Segment] | BadRow | Dropped]
    encoder: Encoder
    made_for: str = ""
    """The split and its source, as people name them; a miss is explained by others of the same."""
    max_bad_rows: int = 0
    tell: Callable[[int, int], None] = field(default=lambda rows, tokens: None)
    shard_rows: int = SHARD_ROWS
    with_helper: bool = False
    """Let a second process encode every other shard, where processes can be forked."""


def prepare(work: Work, recipe: Recipe, folder: Path) -> Prepared:
    """Open the prepared folder if it is there and made by this recipe, else build it."""
    state = inspect(folder, recipe, made_for=work.made_for)
    if state is None:
        because = "made from the same data and settings"
        return Prepared(folder, True, because, read_statistics(folder), recipe.key())
    _build(work, recipe, folder)
    give_memory_back()
    return Prepared(folder, False, state, read_statistics(folder), recipe.key())


def give_memory_back() -> None:
    """Return to the system what encoding has used: the C library keeps freed pieces for itself,
    more than 100 MB of them after a data set of any size."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc knows the call
        ctypes.CDLL(None).malloc_trim(0)


def inspect(folder: Path, recipe: Recipe, *, made_for: str = "") -> str | None:
    """None where the folder can be used; otherwise why not. A foreign folder is an error."""
    if not folder.exists():
        return _why_missing(folder, recipe, made_for)
    if not (folder / DONE).is_file() or not (folder / RECIPE).is_file():
        raise DataError(
            f"{folder}: is no folder of prepared tokens  (remove it, or name another folder in "
            "training.config.pretokenized_cache)"
        )
    made_by = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    if made_by != asdict(recipe):
        raise DataError(
            f"{folder}: was made from something else: {recipe.difference(made_by)}  (remove it, or "
            "leave training.config.pretokenized_cache out: caches are then keyed by content)"
        )
    damage = find_damage(folder)
    if damage:
        shutil.move(folder, _free_name(folder.with_name(f"{folder.name}.bad")))
        return f"the cache was damaged ({damage}); it was put aside as {folder.name}.bad"
    return None


def look(folder: Path, recipe: Recipe, *, made_for: str = "") -> str | None:
    """As `inspect`, for those who only want to know: nothing is moved, read whole, or raised."""
    if not folder.exists():
        return _why_missing(folder, recipe, made_for)
    try:
        made_by = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        listed = json.loads((folder / DONE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in listed}
    except (OSError, ValueError):
        return f"{folder} is no finished folder of prepared tokens"
    if made_by != asdict(recipe):
        return recipe.difference(made_by)
    wrong = [name for name, entry in listed.items() if sizes[name] != entry["size"]]
    return f"{wrong[0]} is damaged" if wrong else None


def _why_missing(folder: Path, recipe: Recipe, made_for: str) -> str:
    """Compare with the newest neighbour of the same split, so that a miss says what changed."""
    neighbours = sorted(
        folder.parent.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    if not neighbours:
        return "nothing was prepared yet"
    for neighbour in neighbours:
        try:
            other = json.loads(neighbour.read_text(encoding="utf-8"))
            told = neighbour.with_name(MADE_FOR).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):  # damaged, or of a version that did not say what it is for
            continue
        if told == made_for:
            return recipe.difference(other)
    return "it was not prepared before"


def find_damage(folder: Path) -> str:
    """What is wrong with a finished folder, or nothing.

    Sizes are looked at always, hashes once for every state of the files (size and time), so that
    opening a large cache does not read it.
    """
    listed = json.loads((folder / DONE).read_text(encoding="utf-8"))
    seen = folder.with_name(f".{folder.name}.verified")
    stamps: dict[str, list[int]] = {}
    for name, entry in listed.items():
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        if status.st_size != entry["size"]:
            return f"{name} has {status.st_size} bytes instead of {entry['size']}"
        stamps[name] = [status.st_size, status.st_mtime_ns]
    text = json.dumps(stamps)
    if seen.is_file() and seen.read_text(encoding="utf-8") == text:
        return ""
    for name, entry in listed.items():
        if _sha256(folder / name) != entry["sha256"]:
            return f"{name} has other bytes than were written"
    write_text_atomically(seen, text)
    return ""


def read_statistics(folder: Path) -> DocumentStatistics:
    text = (folder / STATISTICS).read_text(encoding="utf-8")
    return DocumentStatistics.from_json(json.loads(text))


def _build(work: Work, recipe: Recipe, folder: Path) -> None:
    parts = folder.with_name(f"{folder.name}.parts-{recipe.key()[:12]}")
    parts.mkdir(parents=True, exist_ok=True)
    bad = _Rejects(work.max_bad_rows)
    try:
        shards = _make_shards(work, bad, parts, folder)
        if not is_finished(folder):
            _publish(parts, folder, recipe, shards, bad, work.made_for)
    except FileNotFoundError:
        # Another process published the folder and cleared the parts that this one was filling.
        if not is_finished(folder):
            raise
    except BaseException:
        with contextlib.suppress(OSError):  # what is finished is kept, to go on from there
            parts.rmdir()
        raise
    shutil.rmtree(parts, ignore_errors=True)


def is_finished(folder: Path) -> bool:
    """DONE is written last, and the folder gets its name after that."""
    return (folder / DONE).is_file()


def _make_shards(work: Work, bad: _Rejects, parts: Path, folder: Path) -> int:
    """Finish shard after shard; stops early where another process has published the folder.

    What a helper was to make and has not, because it was killed, is made here after all.
    """
    helper = Helper(lambda: _help(work, parts, folder), wanted=work.with_helper)
    try:
        with helper:
            shards = _pass_over(work, bad, parts, folder, others=helper.is_there)
    finally:
        for half in parts.glob(f".*.{helper.pid}"):  # it may have been ended while it wrote
            half.unlink(missing_ok=True)
    names = [_shard_name(index) for index in range(shards)]
    if not is_finished(folder) and not all((parts / f"{name}.json").is_file() for name in names):
        _pass_over(work, _Rejects(work.max_bad_rows), parts, folder, others=False)
    return shards


def _pass_over(work: Work, bad: _Rejects, parts: Path, folder: Path, *, others: bool) -> int:
    """Read and format every row and finish the shards, or every other one; returns how many.

    A thread encodes: where the tokenizer does it, on every core and outside the interpreter's lock,
    the next shard is read and formatted meanwhile.
    """
    shards = rows = tokens = 0
    with ThreadPoolExecutor(1) as encoder_thread:
        waiting: Future[tuple[int, int]] | None = None
        for shard in _shards(work, bad):
            if is_finished(folder):
                return shards
            rows += shard.rows_in
            if not (others and shards % 2):
                tokens += waiting.result()[1] if waiting is not None else 0
                waiting = encoder_thread.submit(_finish_shard, parts, shards, shard, work.encoder)
            work.tell(rows, tokens)
            shards += 1
        if waiting is not None:
            tokens += waiting.result()[1]
            work.tell(rows, tokens)
    return shards


def _help(work: Work, parts: Path, folder: Path) -> None:
    """In the helper: every other shard. Bad rows are the first process's business."""
    began_under = os.getppid()
    for index, shard in enumerate(_shards(work, _Rejects(sys.maxsize))):
        if is_finished(folder) or os.getppid() != began_under:
            return
        if index % 2:
            _finish_shard(parts, index, shard, work.encoder)


@dataclass
class _Shard:
    """Rows of one shard: their numbers and their segments, and what was left out of it."""

    numbers: list[int] = field(default_factory=list)
    documents: list[list[Segment]] = field(default_factory=list)
    rows_in: int = 0
    characters: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class _Rejects:
    """Bad rows: counted, kept for rejects.jsonl, and fatal when there are too many."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.rows: list[BadRow] = []
        self.count = 0

    def add(self, bad: BadRow) -> None:
        self.count += 1
        self.rows.append(bad)
        if self.count > self.allowed:
            shown = "\n".join(f"  - {row}" for row in self.rows[-SHOWN_BAD_ROWS:])
            words = "a row" if self.count == 1 else f"{self.count} rows"
            raise DataError(
                f"{words} cannot be used\n{shown}\n"
                "  (mend the data, or tolerate some: --set training.dataset.max_bad_rows=100)"
            )


def _shards(work: Work, bad: _Rejects) -> Iterator[_Shard]:
    shard = _Shard()
    for number, row in enumerate(work.rows()):
        shard.rows_in += 1
        made = row if isinstance(row, BadRow) else work.segments_of(row)
        if isinstance(made, BadRow):
            bad.add(made)
        elif isinstance(made, Dropped):
            shard.dropped[made.reason] = shard.dropped.get(made.reason, 0) + 1
        else:
            shard.numbers.append(number)
            shard.documents.append(made)
            shard.characters += sum(len(segment.text) for segment in made)
        if shard.rows_in >= work.shard_rows or shard.characters >= SHARD_CHARACTERS:
            yield shard
            shard = _Shard()
    if shard.rows_in:
        yield shard


def _finish_shard(parts: Path, index: int, shard: _Shard, encoder: Encoder) -> tuple[int, int]:
    """Encode and write a shard, unless an earlier run or another process has finished it."""
    final, facts_file = parts / _shard_name(index), parts / f"{_shard_name(index)}.json"
    if final.is_file() and facts_file.is_file():
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
        return facts["rows_in"], facts["tokens"]
    batch = encoder.encode(shard.documents)
    facts = DocumentStatistics.of(batch, rows_in=shard.rows_in, dropped=shard.dropped)
    temporary = parts / f".{final.name}.{os.getpid()}"
    write_shard(temporary, batch, np.array(shard.numbers, np.int32))
    _sync(temporary)
    os.replace(temporary, final)
    write_text_atomically(facts_file, json.dumps(facts.to_json()))
    return facts.rows_in, facts.tokens


def _shard_name(index: int) -> str:
    return f"data-{index:05d}.arrow"


def _publish(
    parts: Path, folder: Path, recipe: Recipe, shards: int, bad: _Rejects, made_for: str
) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    names = [_shard_name(index) for index in range(shards)]
    try:
        total = _gather(parts, temporary, names)
        total.bad_rows = bad.count
        if total.trainable_tokens == 0:
            raise DataError(_nothing_to_learn(total))
        write_dataset_files(temporary, names, recipe.key())
        texts = {
            RECIPE: json.dumps(asdict(recipe), indent=2),
            STATISTICS: json.dumps(total.to_json(), indent=2),
            MADE_FOR: made_for + "\n",
            REJECTS: "".join(json.dumps(asdict(row)) + "\n" for row in bad.rows),
        }
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        _write_done(temporary)
        _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _gather(parts: Path, temporary: Path, names: Sequence[str]) -> DocumentStatistics:
    total = DocumentStatistics()
    for name in names:
        facts = json.loads((parts / f"{name}.json").read_text(encoding="utf-8"))
        total = total.plus(DocumentStatistics.from_json(facts))
        try:
            os.link(parts / name, temporary / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(parts / name, temporary / name)
    return total


def _write_done(folder: Path) -> None:
    listed = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        listed[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    done = folder / DONE
    done.write_text(json.dumps(listed, indent=2), encoding="utf-8")
    _sync(done)
    sync_folder(folder)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        # The name is taken: another process was first, and its folder is as good as ours.
        if not is_finished(folder):
            raise
    sync_folder(folder.parent)


def _nothing_to_learn(total: DocumentStatistics) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in total.dropped.items())
    detail = f"{total.rows_in} rows read, {total.bad_rows} bad"
    detail += f", left out: {left_out}" if left_out else ""
    return (
        f"there is nothing to learn: {detail}, no token of the rest is an answer  "
        "(check the columns with expert dataset check, or set train_on_prompt: true)"
    )


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb+") as stream:  # Windows syncs only what is open for writing
        os.fsync(stream.fileno())
