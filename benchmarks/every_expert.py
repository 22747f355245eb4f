"""Every expert with `tiny`, as its README says: rows made, learnt, judged beside the untuned base.

    python benchmarks/every_expert.py --out FILE [--rows N] [--only NAME ...]

Minutes for each on a CPU. Nothing is timed here: other work may go on beside it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from surroundings import environment

EXPERTS = Path(__file__).parents[1] / "experts"
NAMES = ("expert-json", "expert-sql", "expert-neo4j", "expert-typescript")
PROMISED = {"expert-json": 0.95}
"""What the gate asks for by default; of the others it is asked that they beat their base."""
KEPT = ("accuracy", "interval", "passed", "failed", "without_oracle", "exact", "rows", "tasks")


def judged(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One expert in a copy of its folder; what `expert validate` says of it and of its base."""
    place = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    nothing = shutil.ignore_patterns("datasets*", "runs")
    shutil.copytree(EXPERTS / name, place / name, ignore=nothing)
    shutil.copytree(EXPERTS / "data_making", place / "data_making")
    made = [str(place / name / "make_data.py"), "--rows", str(args.rows)]
    subprocess.run([sys.executable, *made], check=True)
    command = [sys.executable, "-m", "expert"]
    manifest = str(place / name / "manifest.json")
    subprocess.run([*command, "train", "--manifest", manifest, "--model", "tiny"], check=True)
    asked = ["--expert", str(place / name), "--baseline", "base", "--json"]
    # The exit code tells of the gate, which asks for 95 %; what was reached is in the answer.
    told = subprocess.run(
        [*command, "validate", *asked], stdout=subprocess.PIPE, check=False, text=True
    )
    found = json.loads(told.stdout)
    shutil.rmtree(place)
    sides = {"tuned": found, "base": found["baseline"]}
    facts = {side: {key: one.get(key) for key in KEPT} for side, one in sides.items()}
    return {"expert": name, "gate": found["gate"], **facts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in args.only:
        results.append(judged(name, args))
        record = {
            "environment": environment(),
            "model": "tiny",
            "rows": args.rows,
            "results": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lost = []
    for one in results:
        tuned, base = one["tuned"], one["base"]
        print(
            f"{one['expert']:18} {tuned['accuracy']:6.1%}  the base alone {base['accuracy']:6.1%}"
        )
        if tuned["interval"][0] <= base["interval"][1]:
            lost.append(f"{one['expert']} does not beat its base outside the interval")
        if tuned["accuracy"] < PROMISED.get(one["expert"], 0.0):
            lost.append(f"{one['expert']} stays below {PROMISED[one['expert']]:.0%}")
    if lost:
        sys.exit("; ".join(lost))


if __name__ == "__main__":
    main()
