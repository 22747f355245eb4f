"""Draws docs/images/plan.svg, the picture in the README: `.venv/bin/python docs/draw_plan.py`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

import expert
from expert.cli.plan import show_plan

MANIFEST = "examples/expert-json/manifest.json"
CARD = "rtx-4090"


def main() -> None:
    """Record what the terminal shows, as SVG without fonts from elsewhere."""
    console = Console(
        record=True, width=100, force_terminal=True, file=io.StringIO(), highlight=False
    )
    show_plan(expert.plan(MANIFEST, gpu=CARD), console, full=False)
    svg = console.export_svg(title=f"expert plan --manifest {MANIFEST} --gpu {CARD}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (Path(__file__).parent / "images" / "plan.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
