"""Writes the tables of docs/COMING_FROM.md that follow from the code.

    .venv/bin/python docs/draw_coming_from.py

What stands outside the two marks is written by hand, and a test reads every line of it through the
reader of manifests. A test holds the tables to the code's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from expert.manifest.peers.keys import CONVERTED, SPECIAL
from expert.manifest.peers.sections import SECTIONS
from expert.manifest.peers.unused import ANSWERS, FAMILIES, KeyAnswer

FILE = Path(__file__).parent / "COMING_FROM.md"
BEGIN = "<!-- names: made by docs/draw_coming_from.py, do not edit -->"
END = "<!-- end of names -->"


def document(text: str) -> str:
    """The document with its tables made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{FILE.name} has lost its marks")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """Other spellings of values, and the keys that are converted, not used or refused."""
    parts = [
        "### Other spellings of a value\n",
        *_spellings(),
        "### Keys that are converted\n",
        f"{_listed([*CONVERTED, *SPECIAL])}.\n",
        "### Sections whose keys are read as if they were at the top level\n",
        f"{_listed([*SECTIONS, 'optimizer', 'lr_scheduler'])}.\n",
        "### Keys that are not used here\n",
        *_answers(refused=False),
        "### Keys that are refused\n",
        *_answers(refused=True),
    ]
    return "\n".join(parts)


def _spellings() -> Iterable[str]:
    yield "| key | written | read as |"
    yield "|---|---|---|"
    for place, table in (("training.config", CONFIG_VALUES), ("base_models[]", MODEL_VALUES)):
        for key, values in table.items():
            meant: dict[str, list[str]] = {}
            for written, known in values.items():
                meant.setdefault(str(known), []).append(str(written).lower())
            for known, spelled in meant.items():
                yield f"| `{place}.{key}` | {_listed(spelled)} | `{known}` |"
    yield ""


def _answers(*, refused: bool) -> Iterable[str]:
    found: dict[KeyAnswer, list[str]] = {}
    for key, answer in {**ANSWERS, **{f"{start}*": a for start, a in FAMILIES.items()}}.items():
        if answer.refused == refused:
            found.setdefault(answer, []).append(key)
    yield f"| keys | reason |{' what to do |' if refused else ''}"
    yield f"|---|---|{'---|' if refused else ''}"
    for answer, keys in found.items():
        fix = f" {answer.fix.replace('<', '&lt;')} |" if refused else ""
        yield f"| {_listed(keys)} | {answer.reason} |{fix}"
    yield ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    written = document(FILE.read_text(encoding="utf-8"))
    FILE.write_text(written, encoding="utf-8")
    sys.stdout.write(f"{FILE.name} written\n")
