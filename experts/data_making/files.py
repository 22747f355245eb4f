"""The command line of every make_data.py: rows into files, or cases into test_cases.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_making.rows import Draw, Made, Split, make_rows

CASES = 50
CASES_SEED = 2024
"""Test cases are drawn from the skeletons of the test split, with a seed of their own."""


def main(draw: Draw, domain: str, folder: Path, arguments: list[str] | None = None) -> None:
    """Make the data set beside the manifest; with --cases also the committed test cases."""
    parser = argparse.ArgumentParser(description=f"Makes the rows of {folder.name}.")
    parser.add_argument("--rows", type=int, default=8000, help="training rows")
    parser.add_argument("--held-out", type=int, default=200, help="validation rows, test rows")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("datasets"), help="below this expert")
    parser.add_argument("--cases", action="store_true", help="write test_cases.json as well")
    args = parser.parse_args(arguments)
    out = folder / args.out
    sizes: dict[Split, int] = {
        "train": args.rows,
        "validation": args.held_out,
        "test": args.held_out,
    }
    for split, count in sizes.items():
        rows = make_rows(draw, count, split, args.seed)
        write_rows(out / f"{split}.jsonl", (row.as_row() for row in rows))
        print(f"{out / split}.jsonl: {len(rows):,} rows")
    if args.cases:
        write_cases(folder / "test_cases.json", domain, make_cases(draw))
        print(f"{folder / 'test_cases.json'}: {CASES} cases")


def make_cases(draw: Draw) -> list[Made]:
    """The cases that are committed; their skeletons are in no training row."""
    return make_rows(draw, CASES, "test", CASES_SEED)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_cases(path: Path, domain: str, cases: list[Made]) -> None:
    path.write_text(cases_text(domain, cases), encoding="utf-8")


def cases_text(domain: str, cases: list[Made]) -> str:
    """One case on each line, so that a change of one is a change of one line."""
    lines = (json.dumps(case.as_case(n), ensure_ascii=False) for n, case in enumerate(cases, 1))
    head = f'{{"version": 1, "domain": {json.dumps(domain)}, "cases": [\n  '
    return head + ",\n  ".join(lines) + "\n]}\n"
