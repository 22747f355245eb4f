"""Writes the performance section of STATUS.md from measured ladders: never typed, always made.

    .venv/bin/python docs/draw_status.py

It reads docs/benchmarks/ladder-*.json, as `expert benchmark --to` writes them, and replaces what
stands between the two marks in STATUS.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from expert.insight.ladder import Ladder, as_markdown, headline, read_ladder

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
    """The section: one line for each ladder, then each of them whole."""
    lines = [
        f"- {headline(ladder)} ([data](docs/benchmarks/{path.name}))" for path, ladder in found
    ]
    whole = [as_markdown(ladder, level=3).rstrip() for _, ladder in found]
    return "\n\n".join(["\n".join(lines), *whole])


def status_with(text: str, made: str) -> str:
    """The document with the section between its marks; without marks it is an error."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"STATUS.md has no place for it: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    found = ladders()
    if not found:
        sys.exit(f"there is no ladder-*.json in {BENCHMARKS}")
    text = STATUS.read_text(encoding="utf-8") if STATUS.exists() else NEW
    STATUS.write_text(status_with(text, section(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
