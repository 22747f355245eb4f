"""The four experts with `tiny` on this machine: data is made, learnt and judged. Minutes each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expert.jobs.training import train
from expert.jobs.validating import Validation, validate
from expert.judging.oracle import missing_packages

EXPERTS = Path(__file__).parents[2] / "experts"
DOMAINS = {
    "expert-json": "json",
    "expert-sql": "sql",
    "expert-neo4j": "cypher",
    "expert-typescript": "typescript",
}
# What the gate of `expert validate` asks for by default; only this expert is promised to pass it
# with a model of 3.8 million weights.
PROMISED = {"expert-json": 0.95}


def trained_and_judged(name: str, folder: Path) -> Validation:
    """An expert as its README says, in a copy of its folder."""
    shutil.copytree(
        EXPERTS / name, folder / name, ignore=shutil.ignore_patterns("datasets", "runs")
    )
    shutil.copytree(EXPERTS / "data_making", folder / "data_making")
    subprocess.run([sys.executable, str(folder / name / "make_data.py")], check=True)
    done = train(folder / name / "manifest.json", model="tiny")
    assert done.exit_code == 0
    found = validate(folder / name, baseline="base")
    rows = (folder / name / "datasets" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert found.reached.score.cases == len([json.loads(row) for row in rows])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DOMAINS))
def test_an_expert_beats_its_base_outside_the_confidence_interval(name, tmp_path):
    missing = missing_packages(DOMAINS[name])
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'expert-cli[validate]'")
    found = trained_and_judged(name, tmp_path)
    assert found.baseline is not None
    tuned, base = found.reached.score, found.baseline.score
    assert tuned.interval is not None
    assert base.interval is not None
    assert tuned.interval[0] > base.interval[1]
    assert tuned.accuracy is not None
    assert tuned.accuracy >= PROMISED.get(name, 0.0)
    assert base.accuracy is not None
    assert base.accuracy < 0.5
