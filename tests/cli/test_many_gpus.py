"""`expert train --gpus`, `--each-gpu` and `expert launch` as a person uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert.core.errors import EXIT_OK, EXIT_TERMINATED, EXIT_USAGE
from expert.core.publish import publishing
from expert.manifest.reader import read_manifest
from expert.run.stored.locate import newest_resumable
from tests.cli.running import ROOT
from tests.jobs.runs import base_model, events_of, plan_of, run_with_steps, until, write_expert

PATIENCE_SECONDS = 240.0


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_expert(tmp_path / "expert", base_model(), {})


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["a.json", "b.json", "--max-restarts", "2"], 2),
        (["--each-gpu"], 1),
        (["--max-restarts", "1", "a.json"], 1),
    ],
)
def test_options_that_do_not_go_together_are_refused_all_at_once(run, words, lines):
    ran = run("train", *words)
    assert ran.code == EXIT_USAGE
    assert len(ran.err.splitlines()) == lines


def test_an_incomplete_launch_environment_and_missing_gpus_are_refused(run, manifest, monkeypatch):
    ran = run("train", str(manifest), "--gpus", "2", "--device", "cpu", "--gpus", "0,x")
    assert (ran.code, len(ran.err.splitlines())) == (EXIT_USAGE, 2)
    monkeypatch.setenv("RANK", "1")
    ran = run("train", str(manifest), "--device", "cpu")
    assert ran.code == EXIT_USAGE
    assert "the variables of torchrun do not describe a world" in ran.err
    assert len(ran.err.splitlines()) == 4  # three variables are missing


def test_unused_gpus_are_mentioned(run):
    from expert.cli.show.display import make_console
    from expert.cli.show.options import hint_unused_gpus

    for cards, gpus, device, said in (
        *((2, None, "cuda", True), (2, "all", "cuda", False)),
        *((2, None, "cpu", False), (1, None, "cuda", False)),
    ):
        plan = SimpleNamespace(kernels=SimpleNamespace(device=device))
        machine = SimpleNamespace(gpus=[None] * cards)
        opened: Any = SimpleNamespace(machine=machine, plan=plan)
        hint_unused_gpus(make_console(), gpus, opened)
        assert ("add --gpus all" in run.capsys.readouterr().out) is said


def test_resume_if_any_takes_the_newest_run_that_has_saved_something(manifest):
    read = read_manifest(manifest)
    assert newest_resumable(read) is None
    for number in (1, 2, 3):
        folder = manifest.parent / "runs" / f"demo-2026010{number}-000000"
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        if number < 3:
            with publishing(folder / "checkpoints" / "step-000001") as made:
                (made / "state.json").write_text("{}")
    assert Path(newest_resumable(read) or "").name == "demo-20260102-000000"


def test_launch_writes_the_file_and_prints_how_to_submit_it(run, manifest):
    ran = run("launch", "--on", "slurm", str(manifest), "--gpus", "2")
    file = manifest.parent / "demo.sbatch"
    assert ran.code == EXIT_OK
    assert ran.out.splitlines()[-1].endswith(f"sbatch {file}")
    printed = run("launch", "--on", "slurm", str(manifest), "--gpus", "2", "--to", "-")
    assert printed.out == file.read_text()
    assert run("launch", "--on", "slurm").code == EXIT_USAGE
    named = ("--image", "x", "--claim", "y")
    ran = run("launch", "--on", "kubernetes", str(manifest), *named)
    assert ran.out.splitlines()[-1].startswith("next: kubectl apply -f ")
    assert (manifest.parent / "demo.kubernetes.yaml").is_file()


# --- real runs of two ranks ----------------------------------------------------------------------


def started(manifest: Path, *words: str, **more: Any) -> subprocess.Popen[str]:
    places = [*more.pop("path", ()), ROOT / "src"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    program = [sys.executable, "-m", "expert", "train", str(manifest), "--device", "cpu", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, env=env, text=True, stdout=pipe, stderr=pipe, **more)


def run_of(manifest: Path, steps: int) -> Path:
    """The run, once it has made that many steps."""
    return until(lambda: run_with_steps(manifest.parent / "runs", steps), PATIENCE_SECONDS)


def pid_of_rank(rank: int, manifest: Path) -> int:
    for folder in Path("/proc").iterdir():
        try:
            env = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in env and str(manifest).encode() in words:
            return int(folder.name)
    raise AssertionError("no such rank")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_and_the_run_resumes_with_max_restarts(manifest, rank):
    words = ("--gpus", "2", "--epochs", "12", "--max-restarts", "1", "--json")
    process = started(manifest, *words)
    run_of(manifest, 14)
    os.kill(pid_of_rank(rank, manifest), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_OK, err
    first, again = [line for line in err.splitlines() if "rank" in line and "its log" not in line]
    assert first.startswith(f"rank {rank} ")
    assert again == "starting all ranks again (1 of 1)"
    folder = Path(json.loads(out)["folder"])
    assert [folder] == list((manifest.parent / "runs").iterdir())
    assert (folder / "ranks" / "rank-1.log").is_file()
    assert plan_of(folder)["parallel"]["ranks"] == 2
    assert len(events_of(folder, "resumed")) == 1
    assert len(events_of(folder, "finished")) == 1


@pytest.mark.slow
def test_sigterm_saves_once_and_ends_all_ranks(manifest):
    process = started(manifest, "--gpus", "2", "--epochs", "12")
    folder = run_of(manifest, 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_TERMINATED, err
    (stopped,) = events_of(folder, "stopped")
    assert events_of(folder, "saved")[-1]["step"] == stopped["step"]
    assert "--gpus 2" in out.splitlines()[-1]  # how to resume, as it was started


@pytest.mark.slow
def test_each_gpu_trains_every_manifest_and_shows_a_table(manifest, tmp_path):
    broken = write_expert(tmp_path / "other", base_model(), {"epochs": -1})
    words = ("--each-gpu", str(broken), "--gpus", "2", "--set", "training.config.max_steps=2")
    process = started(manifest, *words)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_USAGE, err
    assert str(broken) in out
    assert (manifest.parent / "runs").is_dir()
