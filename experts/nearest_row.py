"""How far an expert's task can be done without learning: prints the baseline of each expert.

    python experts/nearest_row.py --rows 4000 --test 200

Every test question gets the answer of the training question that is most alike.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from data_making.judged import share_right
from data_making.loading import generator_of
from data_making.nearest import Nearest
from data_making.rows import make_rows

DOMAINS = {
    "expert-json": "json",
    "expert-sql": "sql",
    "expert-neo4j": "cypher",
    "expert-typescript": "typescript",
}


def baseline(name: str, *, rows: int, test: int, seed: int = 7) -> float:
    """The share of test questions that the nearest training row answers rightly."""
    draw = generator_of(Path(__file__).parent / name).draw
    nearest = Nearest(make_rows(draw, rows, "train", seed))
    asked = make_rows(draw, test, "test", seed)
    return share_right(DOMAINS[name], asked, [nearest.answer(row.prompt) for row in asked])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--test", type=int, default=200)
    args = parser.parse_args()
    for name in DOMAINS:
        print(f"{name:20} {baseline(name, rows=args.rows, test=args.test):6.1%}", flush=True)
