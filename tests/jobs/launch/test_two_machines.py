"""Two machines started by hand, as in docs/MANY_GPUS.md: train, lose one, resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from expert.core.errors import EXIT_OK
from expert.jobs.diagnose.diagnose import diagnose_run
from tests.cli.running import ROOT
from tests.jobs.launch.two_machines import Machine, joined, shape, why_not
from tests.jobs.runs import base_model, events_of, run, run_with_steps, until, write_expert
from tests.parallel.test_worlds import CLOSE, numbers_of

PATIENCE_SECONDS = 300.0
PORT = 29500

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with joined() as both:
        yield both


def by_hand(manifest: Path, machine: Machine, node: int, first: Machine) -> subprocess.Popen[str]:
    """The line of the guide on one machine."""
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(node), "--master-addr", first.address, "--master-port", str(PORT)),
        *("-m", "expert", "train", "--manifest", str(manifest), "--resume", "if-any"),
    ]
    env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return machine.start(words, env=env, stdout=pipe, stderr=both)


def run_of(manifest: Path, steps: int, started: list[subprocess.Popen[str]]) -> Path:
    def found() -> Path | None:
        for each in started:
            assert each.poll() is None, each.communicate()[0]
        return run_with_steps(manifest.parent / "runs", steps)

    return until(found, PATIENCE_SECONDS)


def test_over_a_slow_link_losses_are_the_same_and_the_diagnosis_names_the_link(machines, tmp_path):
    for each in machines:
        reason = shape(each, rate="4mbit", delay="5ms")
        if reason:
            pytest.skip(reason)
    config = {"device": "cpu", "epochs": 4, "rank": 64}
    manifest = write_expert(tmp_path / "expert", base_model(), config)
    try:
        started = [by_hand(manifest, each, node, machines[0]) for node, each in enumerate(machines)]
        outs = [each.communicate(timeout=PATIENCE_SECONDS)[0] for each in started]
    finally:
        for each in machines:
            shape(each, rate="1gbit", delay="1ms")
    (folder,) = (manifest.parent / "runs").iterdir()
    assert len(events_of(folder, "finished")) == 1, "\n".join(outs)[-3000:]
    alone = run(write_expert(tmp_path / "alone", base_model(), config)).folder
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)
    link = next(each for each in diagnose_run(folder).findings if each.name == "slow-link")
    share = int(link.evidence.split(" %")[0])
    assert 20 <= share < 100
    assert events_of(folder, "step")[-1]["time_communication"] > 0


def test_two_machines_train_lose_one_and_resume(machines, tmp_path):
    config = {"device": "cpu", "epochs": 40, "save_steps": 5}
    manifest = write_expert(tmp_path / "expert", base_model(), config)
    first = machines[0]
    started = [by_hand(manifest, each, node, first) for node, each in enumerate(machines)]
    folder = run_of(manifest, 14, started)
    machines[1].fail()
    out, _ = (each.communicate(timeout=PATIENCE_SECONDS)[0] for each in started)
    assert started[0].returncode != EXIT_OK
    assert "rank 1" in out or "another rank" in out, out[-3000:]
    assert events_of(folder, "finished") == []

    again = [by_hand(manifest, each, node, first) for node, each in enumerate(machines)]
    outs = [each.communicate(timeout=PATIENCE_SECONDS)[0] for each in again]
    # torchrun itself may fail at its exit barrier when the agent that keeps the store leaves first.
    codes = [
        each.returncode if "_barrier_nonblocking" not in out else EXIT_OK
        for each, out in zip(again, outs, strict=True)
    ]
    assert codes == [EXIT_OK, EXIT_OK], "\n".join(outs)[-3000:]
    assert len(events_of(folder, "resumed")) == 1
    assert len(events_of(folder, "finished")) == 1
    assert (folder / "ranks" / "rank-1.log").is_file()
    assert [path.name for path in (manifest.parent / "runs").iterdir()] == [folder.name]
