"""Tokenises once: documents and their answer spans as Arrow files, keyed by everything that
determines them.

A prepared folder is published complete. Its tokens are made piece by piece in a `.parts` folder
beside it, so that a crash loses at most one piece. One of several processes works while the others
wait; on a file system without locks they make the same pieces, and the first to rename wins. With
`--part` each process makes its own pieces, and the one that finds none missing publishes. The last
steps write DONE, with the size and sha256 of every file, and rename the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expert.core.files import read_bytes, read_json, read_text
from expert.core.hashed import file_integrity, free_name, write_hashed
from expert.core.links import refuse_links, refuse_links_inside
from expert.core.publish import (
    DONE,
    PublishError,
    cached_damage,
    listed_hash,
    publishing,
    remove_leftovers,
)
from expert.core.resources import disk_full_error, free_bytes
from expert.core.rundir import waiting_lock
from expert.core.text import counted
from expert.data.records import DataError
from expert.data.tokens.documents import write_dataset_files
from expert.data.tokens.shards import (
    Blocks,
    TokeniseJob,
    make_pieces,
    pieces_of,
    too_many_bad_rows,
    write_shards,
)
from expert.data.tokens.statistics import DocumentStatistics

FORMAT = 1
RECIPE = "recipe.json"
STATISTICS = "statistics.json"
REJECTS = "rejects.jsonl"
MADE_FOR = "made_for.txt"
TRIES = 20
"""Attempts to rebuild damaged pieces, one piece each."""
DAMAGED = "the cache was damaged"
PREPARED_DATA = "the prepared data"
FREE_SPACE_FIX = (
    "make room, then give the same command again: it continues; or set "
    "training.config.pretokenized_cache to a folder on another disk"
)
MIN_FREE_SHARE = 0.5
"""Share of the estimated size: with less free space, preparing does not start."""
_TOKENS = "tokens-"
_KEY_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the tokens; equal recipes give the same folder."""

    data: str
    tokenizer: str
    template: str
    columns: str
    learn_prompt: bool
    checks: str = ""
    max_samples: int | None = None
    """Rows used, if limited."""
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Omits a limit that is not set, so that keys from before there was one stay valid."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def key(self) -> str:
        text = json.dumps(self.as_dict(), sort_keys=True)
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
            "max_samples": "max_samples",
            "format": "the format of the cache",
        }
        changed = [words for key, words in names.items() if mine[key] != other.get(key)]
        return f"{' and '.join(changed)} changed" if changed else "nothing changed"


def short_key(key: str) -> str:
    """The digits of a recipe's key that are part of its folder's name."""
    return key[:_KEY_DIGITS]


def tokens_folder(key: str) -> str:
    """The folder name for a recipe's key."""
    return _TOKENS + short_key(key)


def short_key_of(folder: Path) -> str:
    """The key digits in a folder's name; "" if the user chose the name."""
    digits = folder.name.removeprefix(_TOKENS)
    is_ours = len(digits) == _KEY_DIGITS and folder.name == tokens_folder(digits)
    return digits if is_ours else ""


@dataclass(frozen=True)
class Prepared:
    """A finished folder, whether it existed before, and why or why not."""

    folder: Path
    hit: bool
    because: str
    statistics: DocumentStatistics
    key: str
    """Identifies the content, whatever the folder is called."""
    damaged: bool = False
    """A damaged folder was moved aside."""

    @property
    def left_out(self) -> str:
        """A message about rows that were dropped as asked for, and about tolerated bad rows; "" if
        there were none."""
        count, dropped = self.statistics.bad_rows, self.statistics.dropped
        rows = "1 bad row was" if count == 1 else f"{count:,} bad rows were"
        texts = [f"{rows} left out, and kept in {self.folder / REJECTS}"] if count else []
        if dropped:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())
            all_rows = counted(self.statistics.rows_in, "row")
            texts.append(f"{sum(dropped.values()):,} of {all_rows} were left out: {reasons}")
        return "; ".join(texts)


def prepare(work: TokeniseJob, recipe: Recipe, folder: Path) -> Prepared:
    """Open the prepared folder if it exists and matches the recipe, else build it, or wait for
    another process that does."""
    because = "made from the same data and settings"
    state = look(folder, recipe, made_for=work.made_for)
    if state is not None:
        with waiting_lock(folder, _preparing(work), work.waits):
            state = inspect(folder, recipe, made_for=work.made_for)
            if state is None:
                because = "another process has prepared it meanwhile"
            else:
                because = state
                _build(work, recipe, folder)
        trim_memory()
    statistics, damaged = read_statistics(folder), because.startswith(DAMAGED)
    return Prepared(folder, state is None, because, statistics, recipe.key(), damaged)


def _preparing(work: TokeniseJob) -> str:
    return f"preparing {work.made_for}"


def _build(work: TokeniseJob, recipe: Recipe, folder: Path) -> None:
    """Make and publish everything, reusing the pieces of unfinished parts."""
    blocks = next(iter(_blocks_in_progress(folder, recipe)), Blocks())
    begun = _pieces_folder(folder, recipe, blocks).exists()
    if not begun and free_bytes(folder) < MIN_FREE_SHARE * (work.expected_bytes or 0):
        raise disk_full_error(
            folder, what=PREPARED_DATA, needed=work.expected_bytes, fix=FREE_SPACE_FIX
        )
    with _pieces_at(blocks, recipe, folder) as place:
        rows = make_pieces(work, place, blocks, partial(is_finished, folder))
        _publish(work, recipe, folder, blocks, rows)


def trim_memory() -> None:
    """Return memory used for encoding to the system: the C library keeps more than 100 MB of freed
    memory after a data set of any size."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def inspect(folder: Path, recipe: Recipe, *, made_for: str) -> str | None:
    """None if the folder can be used, else why not; a damaged one is moved aside, a foreign one
    raises. Only within `waiting_lock`: a process might move aside what another just made."""
    if not folder.exists() or _is_empty(folder):
        return _why_missing(folder, recipe, made_for)
    why = folder_mismatch(folder, recipe)
    if why:
        raise DataError(
            f"{folder}: {why}  (remove it, or name another folder in "
            "training.config.pretokenized_cache; without it caches are keyed by content)"
        )
    fault = find_damage(folder, recipe)
    if fault:
        aside = free_name(folder.with_name(f"{folder.name}.bad"))
        try:
            os.rename(folder, aside)
        except FileNotFoundError:  # another process was first
            pass
        except OSError as error:
            raise DataError(
                f"{folder}: is damaged ({fault}) and cannot be put aside: {error.strerror}  (name "
                "another folder in training.config.pretokenized_cache)"
            ) from error
        return f"{DAMAGED} ({fault}); it was put aside as {aside.name}"
    return None


def folder_mismatch(folder: Path, recipe: Recipe) -> str:
    """Why a named folder cannot hold the tokens of a recipe; "" if missing, empty, theirs or
    damaged."""
    if short_key_of(folder) == short_key(recipe.key()):
        return ""  # its name rules out anything else
    if not folder.is_dir() or _is_empty(folder):
        return "it is a file" if folder.exists() and not folder.is_dir() else ""
    if not is_prepared(folder):
        return "it is not a prepared-token folder"
    made_by = _made_by(folder)
    if made_by in (None, recipe.as_dict()):
        return ""
    return f"it was made from something else: {recipe.difference(made_by)}"


def is_prepared(folder: Path) -> bool:
    """Whether Expert made this folder, complete or damaged."""
    return is_finished(folder) or (folder / RECIPE).is_file()


def _made_by(folder: Path) -> dict[str, Any] | None:
    """The recipe of a folder; None if it is damaged."""
    try:
        text = read_bytes(folder / RECIPE)
        recipe = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    listed = listed_hash(folder, RECIPE)
    other = listed and hashlib.sha256(text).hexdigest() != listed
    return recipe if isinstance(recipe, dict) and not other else None


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not os.listdir(folder)


def look(folder: Path, recipe: Recipe, *, made_for: str = "") -> str | None:
    """`inspect` without side effects: nothing is moved or raised."""
    if not folder.exists():
        return _why_missing(folder, recipe, made_for)
    return folder_mismatch(folder, recipe) or find_damage(folder, recipe) or None


def _why_missing(folder: Path, recipe: Recipe, made_for: str) -> str:
    """Compare with the newest neighbour of the same split, to explain what changed."""
    neighbours = sorted(folder.parent.glob(f"*/{RECIPE}"), key=_written_at, reverse=True)
    if not neighbours:
        return "first use of this data"
    for neighbour in neighbours:
        try:
            other = read_json(neighbour)
            purpose = read_text(neighbour.with_name(MADE_FOR)).strip()
        except (OSError, ValueError):  # damaged, or from a version that did not record its purpose
            continue
        if purpose == made_for and isinstance(other, dict):
            return recipe.difference(other)
    return "it was not prepared before"


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has just published or removed its folder
        return 0.0


def find_damage(folder: Path, recipe: Recipe) -> str:
    """What is wrong with a finished folder; "" if nothing. Files of other tools in it, such as
    `datasets`, are ignored.

    Every process hashes every file once: a flipped bit changes neither size nor time, and must not
    be trained on. A core hashes 1.2 GB/s, which is 300 million tokens; four threads share the
    files.
    """
    same = _made_by(folder) == recipe.as_dict()
    return cached_damage(folder) or ("" if same else f"{RECIPE} belongs to other tokens")


def read_statistics(folder: Path) -> DocumentStatistics:
    text = read_text(folder / STATISTICS)
    return DocumentStatistics.from_json(json.loads(text))


def is_finished(folder: Path) -> bool:
    """DONE is written last, before the folder gets its name."""
    return (folder / DONE).is_file()


def _publish(work: TokeniseJob, recipe: Recipe, folder: Path, blocks: Blocks, rows: int) -> None:
    """Publish the finished pieces, after making those that are missing or damaged."""
    place = _pieces_folder(folder, recipe, blocks)
    pieces, tries = pieces_of(place, blocks, rows, check=True), 0
    while pieces is None and tries < TRIES:
        tries += 1
        rows = make_pieces(work, place, blocks, partial(is_finished, folder))
        pieces = pieces_of(place, blocks, rows, check=True)
    if is_finished(folder):
        return
    if pieces is None:
        raise DataError(f"{place}: token pieces disappear or change  (remove it, try again)")
    bad = [row for piece in pieces for row in piece.bad()]
    if len(bad) > work.max_bad_rows:
        raise too_many_bad_rows(bad, rows, (), work)
    remove_leftovers(folder.parent, name=folder.name)
    if _is_empty(folder):
        folder.rmdir()  # created by the user for the tokens
    try:
        with publishing(folder) as temporary:
            names, total = write_shards(place, pieces, temporary, work.shard_rows)
            total.bad_rows = len(bad)
            if total.trainable_tokens == 0:
                raise DataError(_nothing_to_train_on(total))
            write_dataset_files(temporary, names, recipe.key())
            texts = {
                RECIPE: json.dumps(recipe.as_dict(), indent=2),
                STATISTICS: json.dumps(total.to_json(), indent=2),
                MADE_FOR: work.made_for + "\n",
                **work.records,
                REJECTS: "".join(json.dumps(row.to_json()) + "\n" for row in bad),
            }
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")
    except PublishError:
        # Another process published first, with the same content.
        if not is_finished(folder):
            raise


def _nothing_to_train_on(total: DocumentStatistics) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in total.dropped.items())
    detail = f"{counted(total.rows_in, 'row')} read, {total.bad_rows} bad"
    detail += f", left out: {left_out}" if left_out else ""
    return (
        f"there is nothing to train on: {detail}, none of the other tokens belongs to an answer  "
        "(check the columns with expert dataset check, or set train_on_prompt: true)"
    )


# --- the folder of pieces, and parts -------------------------------------------------------------


class Part(NamedTuple):
    """One of several processes that share the work; counted from 1."""

    number: int
    of: int


def _pieces_folder(folder: Path, recipe: Recipe, blocks: Blocks) -> Path:
    suffix = f"-{blocks.parts}x{blocks.rows}" if blocks.parts > 1 else ""
    return folder.with_name(f"{folder.name}.parts-{recipe.key()[:12]}{suffix}")


def _blocks_in_progress(folder: Path, recipe: Recipe) -> list[Blocks]:
    """How rows are distributed over the parts in progress."""
    own = re.compile(re.escape(_pieces_folder(folder, recipe, Blocks()).name) + r"-(\d+)x(\d+)")
    names = sorted(os.listdir(folder.parent)) if folder.parent.is_dir() else []
    matches = filter(None, map(own.fullmatch, names))
    return [Blocks(int(match[1]), int(match[2])) for match in matches]


@contextlib.contextmanager
def _pieces_at(blocks: Blocks, recipe: Recipe, folder: Path) -> Iterator[Path]:
    """The folder of the pieces: removed once the tokens are published; after an error it is kept,
    unless empty, to continue from."""
    place = _pieces_folder(folder, recipe, blocks)
    refuse_links(place, below=folder.parent)
    refuse_links_inside(place)
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    except FileNotFoundError:
        # Another process published the folder and removed the pieces.
        if not is_finished(folder):
            raise
    finally:
        if not _clear(recipe, folder):
            with contextlib.suppress(OSError):
                place.rmdir()


def _clear(recipe: Recipe, folder: Path) -> bool:
    """Remove all pieces if the folder is published; processes still making some will notice."""
    if not is_finished(folder):
        return False
    for blocks in (Blocks(), *_blocks_in_progress(folder, recipe)):
        shutil.rmtree(_pieces_folder(folder, recipe, blocks), ignore_errors=True)
    return True


def make_part(work: TokeniseJob, recipe: Recipe, folder: Path, part: Part) -> None:
    """Make the pieces of one part, and mark it as done."""
    with waiting_lock(folder, _preparing(work), work.waits):
        state = inspect(folder, recipe, made_for=work.made_for)
    if state is None:
        _clear(recipe, folder)  # left by an interrupted process
        return
    refuse_other_parts(recipe, folder, part)
    blocks = next(iter(_blocks_in_progress(folder, recipe)), Blocks.for_parts(part.of, work))
    own, published = replace(blocks, part=part.number - 1), partial(is_finished, folder)
    with _pieces_at(blocks, recipe, folder) as place:
        refuse_other_parts(recipe, folder, part)  # started at the same moment
        if part.number not in _done(place):
            rows = make_pieces(work, place, own, published)
            if not published():
                write_hashed(place / f"part-{part.number}.json", json.dumps(rows))
    trim_memory()


def missing_parts(recipe: Recipe, folder: Path, parts: int) -> set[int]:
    if is_finished(folder):
        return set()
    places = [
        _pieces_folder(folder, recipe, blocks) for blocks in _blocks_in_progress(folder, recipe)
    ]
    return set(range(1, parts + 1)) - {part for place in places for part in _done(place)}


def publish_parts(work: TokeniseJob, recipe: Recipe, folder: Path) -> None:
    """Publish the pieces of all parts, unless another process has."""
    with waiting_lock(folder, _preparing(work), work.waits):
        for blocks in [] if is_finished(folder) else _blocks_in_progress(folder, recipe):
            with _pieces_at(blocks, recipe, folder) as place:
                _publish(work, recipe, folder, blocks, max(_done(place).values()))


def refuse_other_parts(recipe: Recipe, folder: Path, part: Part) -> None:
    """Raise if the work was started with another number of parts."""
    for blocks in _blocks_in_progress(folder, recipe):
        if blocks.parts != part.of and not is_finished(folder):
            place = _pieces_folder(folder, recipe, blocks)
            raise DataError(
                f"{folder}: the work was started in {blocks.parts} parts ({len(_done(place))} "
                f"done), not {part.of}  (use --part K/{blocks.parts}; to divide it differently, "
                f"stop them and remove {place})"
            )


def _done(place: Path) -> dict[int, int]:
    """The parts that are done, and how many rows each has counted."""
    done = {}
    for path in place.glob("part-*.json"):
        if file_integrity(path) != "sound":  # those of earlier versions are done again
            continue
        with contextlib.suppress(OSError, ValueError):
            rows = int(read_json(path))
            done[int(path.stem.removeprefix("part-"))] = rows
    return done
