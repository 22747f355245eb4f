"""Content hashes that are computed once for every state of the files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from expert.core.files import write_text_atomically
from expert.data.sources import Source, content_hash

MEMORY = ".hashes.json"
# Old states are forgotten: nobody goes back and forth between more versions of a data set.
STATES_KEPT = 50


def remembered_content_hash(source: Source, cache: Path, *, keep: bool = True) -> str:
    """The hash of a source's bytes. Files whose path, size and time are as they were when they
    were hashed last are not read again, so opening a large prepared data set takes no longer.
    `keep`: a hash that was not known may be written down."""
    if source.kind not in ("files", "saved") or not source.files:
        return content_hash(source)
    memory = cache / MEMORY
    known = _read(memory)
    state = _state(source)
    if state not in known:
        known[state] = content_hash(source)
        if not keep:
            return known[state]
        kept = dict(list(known.items())[-STATES_KEPT:])
        with contextlib.suppress(OSError):  # a cache that is only read: hashed at each start
            write_text_atomically(memory, json.dumps(kept, indent=2))
    return known[state]


def _state(source: Source) -> str:
    stamps = []
    for path in source.files:
        status = path.stat()
        stamps.append([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino])
    text = json.dumps([stamps, source.format, source.max_chars])
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _read(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
