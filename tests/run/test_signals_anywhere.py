"""Signals at random moments of every phase of a run: the exit code, and an equal end."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from expert.core.publish import damage
from expert.core.rundir import RunFolder, runs_in
from tests.faults.counting import cases
from tests.jobs.runs import events_of, losses_of, weights_of
from tests.jobs.trainer import PHASES, begun, ended
from tests.run.test_training_signals import assert_equal_in_the_end, own, whole  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow
CALLS = {"step": 12, "evaluation": 4, "saving": 6}
"""How often a phase begins in an undisturbed run, where that is more than once."""


def trained(manifest: Path, signals: dict[str, Any]) -> tuple[int, str]:
    """How the command ended that starts or resumes the only run of a manifest."""
    found = runs_in(manifest.parent / "runs")
    words = ["train", "-m", str(manifest), "--device", "cpu"]
    words += ["--resume", str(found[0].path)] if found else []
    output = manifest.with_name("output.txt")
    return ended(begun(words=words, signals=signals, output=str(output))), output.read_text()


def interrupted(
    whole: tuple[Path, Path],  # noqa: F811
    folder: Path,
    number: int,
    chance: random.Random,
    *,
    twice: bool = False,
) -> None:
    """One run with a signal; then again until it has finished, equal to the undisturbed."""
    phase = chance.choice(list(PHASES))
    told = {
        "phase": phase,
        "call": chance.randint(1, CALLS.get(phase, 1)),
        "number": number,
        "delays": [chance.uniform(0.0, 0.05) for _ in range(1 + twice)],
    }
    manifest = own(whole, folder)
    if phase == "preparing":
        shutil.rmtree(manifest.parent / "datasets_optimized")
    code, text = trained(manifest, told)
    allowed = (0, 128 + number) if number != signal.SIGUSR1 else (0,)
    assert code in allowed, f"{told}: exit code {code}: {text[-2000:]}"
    assert "Traceback" not in text, f"{told}: {text[-3000:]}"
    for run in runs_in(manifest.parent / "runs"):
        for path in (*run.checkpoints.glob("step-*"), *run.path.glob("final")):
            assert damage(path) == "", told
    if code:
        code, text = trained(manifest, {})
        assert code == 0, f"{told}: not resumed: {text[-2000:]}"
    (run,) = runs_in(manifest.parent / "runs")
    assert_equal_in_the_end(run.path, whole)
    shutil.rmtree(manifest.parent)


def test_what_is_compared_is_not_empty(whole):  # noqa: F811
    folder = whole[1]
    assert len(losses_of(folder)) == CALLS["step"]
    assert len(events_of(folder, "saved")) == CALLS["saving"]
    assert weights_of(folder)
    assert RunFolder(folder).was_started


@pytest.mark.fault(4)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_at_any_moment_leaves_a_run_that_ends_the_same(whole, tmp_path, name):  # noqa: F811
    chance = random.Random(name)
    for _ in cases(34):
        interrupted(whole, tmp_path, getattr(signal, name), chance)


@pytest.mark.fault(5)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_ctrl_c_at_any_moment_leaves_a_run_that_ends_the_same(whole, tmp_path, twice):  # noqa: F811
    chance = random.Random(twice)
    for _ in cases(25):
        interrupted(whole, tmp_path, signal.SIGINT, chance, twice=twice)
