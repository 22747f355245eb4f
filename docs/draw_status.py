"""Writes the performance section of STATUS.md from measured records: never typed, always made.

    .venv/bin/python docs/draw_status.py

It reads docs/benchmarks: ladders as `expert benchmark --to` writes them, and the records of the
scripts under benchmarks/. It replaces what stands between the two marks in STATUS.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from record_tables import WRITERS

from expert.insight.ladder.ladder import Ladder, read_ladder
from expert.insight.ladder.table import as_markdown, headline

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
STATUS = ROOT / "STATUS.md"
BEGIN = "<!-- performance: made by docs/draw_status.py, do not edit -->"
END = "<!-- end of performance -->"
NEW = f"# Status\n\n## Performance\n\n{BEGIN}\n{END}\n"


def ladders(folder: Path = BENCHMARKS) -> list[tuple[Path, Ladder]]:
    """Every committed result, by name."""
    return [(path, read_ladder(path)) for path in sorted(folder.glob("ladder-*.json"))]


def section(found: list[tuple[Path, Ladder]]) -> str:
    """The ladders: one line for each, then each of them whole."""
    lines = [
        f"- {headline(ladder)} ([data](docs/benchmarks/{path.name}))" for path, ladder in found
    ]
    whole = [as_markdown(ladder, level=3).rstrip() for _, ladder in found]
    return "\n\n".join(["\n".join(lines), *whole])


def made(folder: Path = BENCHMARKS) -> str:
    """All that the records in a folder say; a record that is not there leaves its part out."""
    parts = []
    for name, write in WRITERS.items():
        path = folder / name
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            parts.append(f"{write(record)}\n\nFrom [{name}](docs/benchmarks/{name}).")
    found = ladders(folder)
    if found:
        parts.append(section(found))
    return "\n\n".join(parts)


def status_with(text: str, made: str) -> str:
    """The document with the section between its marks; without marks it is an error."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"STATUS.md has no place for it: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    text = STATUS.read_text(encoding="utf-8") if STATUS.exists() else NEW
    STATUS.write_text(status_with(text, made()), encoding="utf-8")


if __name__ == "__main__":
    main()
