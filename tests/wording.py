"""The sentences of the product that tests assert: `wording(key)` reads tests/golden/wording.toml.

Improving a sentence touches the source and that list, and no test. An entry used as `match=` is a
pattern; `{names}` in an entry are filled by keyword arguments.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "wording.toml"
TABLES: dict[str, dict[str, str]] = tomllib.loads(GOLDEN.read_text(encoding="utf-8"))
SENTENCES = {key: text for table in TABLES.values() for key, text in table.items()}


def wording(key: str, /, **values: object) -> str:
    """Return the sentence under `key`, its `{names}` filled in if `values` are given."""
    return SENTENCES[key].format(**values) if values else SENTENCES[key]
