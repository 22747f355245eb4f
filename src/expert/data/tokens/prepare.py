"""Tokenises once: documents and their answer spans as Arrow files, keyed by everything that
determines them.

A prepared folder is published complete: shards are written under a temporary name, then DONE with
the size and sha256 of every file, then the folder gets its name. An interrupted preparation starts
over. One of several processes works while the others wait; on a file system without locks they do
the same work, and the first to rename wins.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from expert.core.files import read_bytes, read_json
from expert.core.hashed import free_name
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
from expert.data.records import BadRow, DataError
from expert.data.tokens.documents import Ids, dataset_files, write_shard
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.statistics import DocumentStatistics
from expert.data.tokens.tokenise import TokenisedRows, TokeniseJob, tokenised_portions

FORMAT = 1
RECIPE = "recipe.json"
STATISTICS = "statistics.json"
REJECTS = "rejects.jsonl"
DAMAGED = "the cache was damaged"
PREPARED_DATA = "the prepared data"
FREE_SPACE_FIX = (
    "make room, then give the same command again; or set training.config.pretokenized_cache to a "
    "folder on another disk"
)
MIN_FREE_SHARE = 0.5
"""Share of the estimated size: with less free space, preparing does not start."""
SHARD_ROWS = 4096
SHARD_TOKENS = 4_000_000
SHOWN_BAD_ROWS = 5
LOOKED_AT_FURTHER = 100_000
"""Rows read after too many bad ones, to count the others: takes some seconds."""


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
        """Without a limit that is not set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def key(self) -> str:
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def difference(self, other: dict[str, Any]) -> str:
        """What differs from another recipe, in words."""
        special = {"template": "the prompt template", "learn_prompt": "train_on_prompt"}
        changed = [
            special.get(name, name if name == "max_samples" else f"the {name}")
            for name, value in asdict(self).items()
            if value != other.get(name)
        ]
        return f"{' and '.join(changed)} changed" if changed else "nothing changed"


def short_key(key: str) -> str:
    """The digits of a recipe's key that are part of its folder's name."""
    return key[:16]


@dataclass(frozen=True)
class Prepared:
    """A finished folder, whether it existed before, and why or why not."""

    folder: Path
    hit: bool
    because: str
    statistics: DocumentStatistics
    key: str
    """Identifies the content, whatever the folder is called."""

    @property
    def damaged(self) -> bool:
        """Whether a damaged folder was moved aside."""
        return self.because.startswith(DAMAGED)

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
    state = look(folder, recipe)
    if state is not None:
        with waiting_lock(folder, f"preparing {work.made_for}", work.waits):
            state = look(folder, recipe)
            if state is None:
                because = "another process has prepared it meanwhile"
            else:
                because = _make_room(folder, state)
                if free_bytes(folder) < MIN_FREE_SHARE * (work.expected_bytes or 0):
                    raise disk_full_error(
                        folder, what=PREPARED_DATA, needed=work.expected_bytes, fix=FREE_SPACE_FIX
                    )
                try:
                    _build(work, recipe, folder)
                except PublishError:  # another process published first, with the same content
                    if not (folder / DONE).is_file():
                        raise
        # The C library keeps more than 100 MB of freed memory after a data set of any size.
        ctypes.CDLL(None).malloc_trim(0)
    return Prepared(folder, state is None, because, read_statistics(folder), recipe.key())


def _make_room(folder: Path, why: str) -> str:
    """Put a damaged folder aside; returns why the tokens are made."""
    if not folder.exists():
        return why
    aside = free_name(folder.with_name(f"{folder.name}.bad"))
    try:
        os.rename(folder, aside)
    except OSError as error:
        what = f"is damaged ({why}) and cannot be put aside: {error.strerror}"
        fix = "name another folder in training.config.pretokenized_cache"
        raise DataError(f"{folder}: {what}  ({fix})") from error
    return f"{DAMAGED} ({why}); it was put aside as {aside.name}"


def _build(work: TokeniseJob, recipe: Recipe, folder: Path) -> None:
    """Tokenise all rows and publish them."""
    if work.row_count is not None:
        work.expect(work.row_count)
    remove_leftovers(folder.parent, name=folder.name)
    with publishing(folder) as temporary:
        names: list[str] = []
        total, bad = DocumentStatistics(), list[BadRow]()
        with closing(tokenised_portions(work)) as portions:  # ends its processes
            for batch, rows, facts in _shards(work, portions, bad):
                names.append(f"data-{len(names):05d}.arrow")
                write_shard(temporary / names[-1], batch, rows)
                total = total.plus(facts)
        total.bad_rows = len(bad)
        if total.trainable_tokens == 0:
            left_out = ", ".join(f"{number} {why}" for why, number in total.dropped.items())
            detail = f"{counted(total.rows_in, 'row')} read, {total.bad_rows} bad"
            detail += f", left out: {left_out}" if left_out else ""
            fix = "check the columns with expert dataset check, or set train_on_prompt: true"
            what = f"there is nothing to train on: {detail}, no other token belongs to an answer"
            raise DataError(f"{what}  ({fix})")
        texts = {
            **dataset_files(names, recipe.key()),
            RECIPE: json.dumps(recipe.as_dict(), indent=2),
            STATISTICS: json.dumps(asdict(total), indent=2),
            REJECTS: "".join(json.dumps(row.to_json()) + "\n" for row in bad),
        }
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")


def _shards(
    work: TokeniseJob, portions: Iterator[TokenisedRows], bad: list[BadRow]
) -> Iterator[tuple[EncodedBatch, Ids, DocumentStatistics]]:
    """Portions joined to shards: the documents, their rows, and statistics. Bad rows are added to
    `bad`, and are an error if there are too many."""
    kept: list[TokenisedRows] = []
    done = told = 0

    def joined() -> tuple[EncodedBatch, Ids, DocumentStatistics]:
        columns = ("ids", "lengths", "spans", "span_counts")
        parts = [[getattr(each.batch, name) for each in kept] for name in columns]
        batch = EncodedBatch(*map(np.concatenate, parts))
        dropped = sum((each.dropped for each in kept), Counter[str]())
        rows = sum(each.rows for each in kept)
        facts = DocumentStatistics.of(batch, rows_in=rows, dropped=dropped)
        return batch, np.concatenate([each.numbers for each in kept]), facts

    for portion in portions:
        kept.append(portion._replace(numbers=portion.numbers + done))
        done += portion.rows
        told += len(portion.batch.ids)
        bad += portion.bad
        if len(bad) > work.max_bad_rows:
            raise _too_many_bad_rows(bad, portions, work)
        work.tell(done, told)
        tokens = sum(len(each.batch.ids) for each in kept)
        if sum(each.rows for each in kept) >= SHARD_ROWS or tokens >= SHARD_TOKENS:
            yield joined()
            kept = []
    if kept:
        yield joined()


def _too_many_bad_rows(
    bad: list[BadRow], coming: Iterator[TokenisedRows], work: TokeniseJob
) -> DataError:
    """The error for too many bad rows: the first ones and how many there are. Counts later rows
    too, so that not each bad row costs another attempt."""
    every, looked_at = [*bad], 0
    for portion in islice(coming, -(-LOOKED_AT_FURTHER // work.portion_rows)):
        looked_at += portion.rows
        every += portion.bad
    least = "at least " if looked_at >= LOOKED_AT_FURTHER else ""
    words = "a row" if len(every) == 1 else f"{least}{len(every):,} rows"
    shown = every[:SHOWN_BAD_ROWS]
    file = shown[0].file if len({row.file for row in shown}) == 1 else ""
    lines = [f"  - {row.within(file)}" for row in shown]
    if rest := len(every) - len(lines):
        lines.append(
            f"  … and {rest:,} more" + (f": {work.list_command}" if work.list_command else "")
        )
    listed = "\n".join(lines)
    fix = f"leave them out: --set training.dataset.max_bad_rows={len(every)}"
    what = f"{file}{': ' if file else ''}{words} cannot be used"
    return DataError(f"{what}\n{listed}\n  (fix the data, or {fix})")


def is_prepared(folder: Path) -> bool:
    """Whether Expert made this folder, complete or damaged."""
    return (folder / DONE).is_file() or (folder / RECIPE).is_file()


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


def look(folder: Path, recipe: Recipe) -> str | None:
    """Why a folder cannot be used; None if it can."""
    if not folder.exists():
        # What differs from the tokens beside it that are most like them.
        known = [made for each in folder.parent.glob("tokens-*") if (made := _made_by(each))]
        if not known:
            return "first use of this data"

        def alike(made: dict[str, Any]) -> int:
            return sum(made.get(name) == value for name, value in asdict(recipe).items())

        return recipe.difference(max(known, key=alike))
    # Every process hashes every file once: a flipped bit changes neither size nor time, and must
    # not be trained on. A core hashes 1.2 GB/s, which is 300 million tokens; four threads share the
    # files. Files of other tools in the folder, such as `datasets`, are ignored.
    same = _made_by(folder) == recipe.as_dict()
    return cached_damage(folder) or (None if same else f"{RECIPE} belongs to other tokens")


def read_statistics(folder: Path) -> DocumentStatistics:
    return DocumentStatistics(**read_json(folder / STATISTICS))
