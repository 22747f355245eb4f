"""Results that need the rows of a source, cached until its files change: the hash of their content,
the survey of their columns, the check of tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from expert.core.files import read_json
from expert.core.hashed import file_integrity, write_hashed
from expert.core.rundir import waiting_lock
from expert.data.examples.column_survey import ColumnSurvey, survey_rows
from expert.data.read.sources import Source, content_hash, iterate

Waits = Callable[[str], None]
"""Shows what this process is waiting for."""
HASHES_FILE = ".hashes.json"
COLUMNS_FILE = ".columns.json"
FORMAT = 6
"""Increased when the same rows give other results, so that stored ones are not reused."""
# Old states are dropped: nobody switches between more versions of a data set.
STATES_KEPT = 50


def cached_content_hash(
    source: Source, cache: Path, *, keep: bool = True, waits: Waits = lambda sentence: None
) -> str:
    """The hash of a source's bytes. Files whose path, size and time have not changed are not read
    again, so that opening a large prepared data set is fast. `keep`: store a new hash."""
    whole, file = replace(source, max_samples=None), cache / HASHES_FILE
    return str(cached(whole, file, "", lambda: content_hash(source), keep=keep, waits=waits))


def cached_survey(
    source: Source, cache: Path, most: int | None, *, keep: bool, waits: Waits
) -> ColumnSurvey:
    """The columns of a source. Reads every row once: 25,000 rows of 300 bytes take 0.2 s. `most`:
    only the first rows, for a stream; `keep`: store the result."""

    def survey() -> dict[str, Any]:
        return asdict(survey_rows(iterate(source), most))

    file = cache / COLUMNS_FILE
    return ColumnSurvey(**cached(source, file, str(most), survey, keep=keep, waits=waits))


def cached(
    source: Source,
    memory: Path,
    how: str,
    make: Callable[[], Any],
    *,
    keep: bool,
    waits: Waits = lambda sentence: None,
) -> Any:
    """The stored value for a source as its files are, or a new one; one process makes it while
    others wait. `how`: everything else that determines it."""
    if source.kind not in ("files", "saved") or not source.files:
        return make()
    stamps = []
    for path in source.files:
        status = path.stat()
        stamps.append([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino])
    options = [source.format, source.max_chars, source.max_samples, source.encoding]
    read_as = [FORMAT, how, stamps, *options]
    state = hashlib.sha256(json.dumps(read_as).encode("utf-8")).hexdigest()

    def stored() -> dict[str, Any]:
        """Empty if damaged or without a hash, since a wrong hash or column would train on the
        wrong rows."""
        with contextlib.suppress(OSError, ValueError):
            if file_integrity(memory) == "sound" and isinstance(known := read_json(memory), dict):
                return known
        return {}

    known = stored()
    if state in known or not keep:
        return known[state] if state in known else make()
    with waiting_lock(memory, "reading the rows", waits):
        known = stored()
        if state not in known:
            known[state] = make()
            kept = dict(list(known.items())[-STATES_KEPT:])
            with contextlib.suppress(OSError):  # a read-only cache: made again at each start
                write_hashed(memory, json.dumps(kept, indent=2))
    return known[state]
