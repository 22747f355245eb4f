"""Ranks of one machine, started by torch elastic: real processes that fail, and are stopped; the
cards they use, and job files of clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from expert.core.errors import (
    EXIT_NO_SPACE,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    ExpertError,
)
from expert.jobs.launch import ranks
from expert.jobs.launch.cards import Cards, choose_cards
from expert.jobs.launch.cluster import job_file
from expert.jobs.launch.each_gpu import train_each
from expert.jobs.launch.ranks import (
    COMMAND_VARIABLE,
    Ended,
    Stop,
    documented_exit_code,
    given_command,
    run_ranks,
    train_on_ranks,
    with_resume,
)
from expert.manifest.reader import read_manifest
from expert.parallel.launch import WorldError
from expert.run.stored.resume_command import without_options
from tests.cli.running import ROOT
from tests.jobs.runs import until, write_expert
from tests.parallel.test_launch import TORCHRUN
from tests.planning.fake_nvml import UUIDS, FakeNvml, describe

# torch leaves the log files of its processes open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RANK = """
import os, signal, sys, time
from pathlib import Path
from expert.core.world import record_failure
from expert.parallel.launch import stop_with_parent
stop_with_parent()
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
what = words.get(os.environ["RANK"], words.get("all", ""))
name, _, value = what.partition(":")
if name == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    Path(value, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)
elif name == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif name == "follow":
    while not Path(value).exists():  # the other one fails first
        time.sleep(0.05)
    record_failure("lost the other", exit_code=4, of_another=True)
    sys.exit(4)
elif name == "fail":
    code, _, mark = value.partition(":")
    record_failure("trouble here", exit_code=int(code))
    if mark:
        Path(mark).touch()
        time.sleep(0.3)  # another one ends before it
    sys.exit(int(code))
elif name == "once" and not Path(value).exists():
    Path(value).touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


def ended(folder: Path, *what: str) -> Ended:
    return run_ranks([sys.executable, "-c", RANK, *what], 2, folder, Stop())


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        pytest.param((), EXIT_OK, "", marks=pytest.mark.slow),  # whole runs of ranks do so, too
        (("1=kill",), EXIT_RUN_FAILED, "rank 1 was killed by SIGKILL: "),
        (
            ("1=fail:75:MARK", "0=follow:MARK"),
            EXIT_NO_SPACE,
            "rank 1 ended with code 75: trouble here",
        ),
        pytest.param(
            ("1=fail:9",),
            *(EXIT_RUN_FAILED, "rank 1 ended with code 9: trouble here"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_exit_code_and_the_message_are_those_of_the_rank_that_failed_first(
    what, code, message, tmp_path
):
    mark = str(tmp_path / "mark")
    found = ended(tmp_path, *(word.replace("MARK", mark) for word in what))
    assert found.exit_code == code
    assert found.message.startswith(message)


def restarted(monkeypatch, *what: str) -> tuple[Ended, list[str]]:
    """How ranks end that may be started again twice, and what the user is told."""
    told: list[str] = []
    monkeypatch.setattr(ranks, "PROGRAM", (sys.executable, "-c", RANK))
    for name in ("EXPERT_LAUNCH_FOLDER", COMMAND_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    cards = Cards(visible=(), ranks=2, threads=1)
    return train_on_ranks(["x", *what], cards, max_restarts=2, tell=told.append), told


def test_all_ranks_start_again_after_a_crash_but_not_after_a_wrong_manifest(tmp_path, monkeypatch):
    found, told = restarted(monkeypatch, f"1=once:{tmp_path / 'mark'}")
    assert found.exit_code == EXIT_OK
    assert [text.partition(":")[0] for text in told] == [
        "rank 1 was killed by SIGKILL",
        "starting all ranks again (1 of 2)",
    ]
    found, told = restarted(monkeypatch, f"1=fail:{EXIT_USAGE}")
    assert (found.exit_code, len(told)) == (EXIT_USAGE, 1)


def started(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher in its own process, and the process ids of its ranks, which wait for a signal."""
    program = (
        "import sys; from pathlib import Path; from expert.jobs.launch.ranks import *; "
        "sys.exit(run_ranks(sys.argv[2:], 2, Path(sys.argv[1]), Stop()).exit_code)"
    )
    words = [sys.executable, "-c", program, str(folder), sys.executable, "-c", RANK]
    process = subprocess.Popen([*words, f"all=wait:{folder}"])
    files = [folder / str(rank) for rank in range(2)]
    until(lambda: all(file.is_file() and file.read_text() for file in files) or None, 60)
    return process, [int(file.read_text()) for file in files]


def are_gone(pids: list[int]) -> bool | None:
    return not any(Path(f"/proc/{pid}").is_dir() for pid in pids) or None


def test_a_signal_to_the_launcher_reaches_every_rank_and_is_its_exit_code(tmp_path):
    process, pids = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_TERMINATED
    assert are_gone(pids)


def test_ranks_do_not_outlive_a_launcher_that_was_killed_not_even_a_stopped_one(tmp_path):
    process, pids = started(tmp_path)
    os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait(60)
    until(lambda: are_gone(pids), 30)


def test_documented_exit_codes_are_kept_and_signals_have_one():
    codes = (0, 2, 75, 143, -15, -2, -9, 57)
    assert [documented_exit_code(code) for code in codes] == [0, 2, 75, 143, 143, 130, 4, 4]


# --- one run for each GPU ------------------------------------------------------------------------

RUN = """
import json, os, sys
file = sys.argv[2]
print(json.dumps({"folder": file, "place": os.environ["PLACE"]}))
sys.stderr.write("all is well\\nno rows\\n")
sys.exit(2 if "bad" in file else 0)
"""


def test_each_manifest_is_trained_on_a_free_place_and_a_failure_stops_no_other(monkeypatch):
    from expert.jobs.launch import each_gpu

    monkeypatch.setattr(each_gpu, "PROGRAM", (sys.executable, "-c", RUN))
    told: list[str] = []
    files = [Path(name) for name in ("a.json", "bad.json", "b.json")]
    places = [{"PLACE": "0"}, {"PLACE": "1"}]
    runs, code = train_each(files, ["--epochs", "1"], places, tell=told.append)
    assert code == EXIT_USAGE
    assert [run.code for run in runs] == [0, 2, 0]
    assert runs[1].text == "ended with code 2: no rows"
    assert [run.result["folder"] for run in runs] == [str(file) for file in files]
    assert {run.result["place"] for run in runs} == {"0", "1"}
    assert len(told) == 6


# --- which cards --gpus means --------------------------------------------------------------------


def chosen(asked: str, *, cards: int = 3, visible: str | None = None, device: str = "auto", **env):
    return choose_cards(asked, describe(FakeNvml(cards), visible), device=device, env=env)


@pytest.mark.parametrize(
    ("asked", "visible", "places"),
    [
        ("all", None, (0, 1, 2)),
        ("2", None, (0, 1)),
        ("0,2", None, (0, 2)),
        ("2,0", None, (2, 0)),
        ("1,", None, (1,)),
        (" ALL ", "2,0", (2, 0)),
        ("1,", "2,0", (0,)),
    ],
)
def test_cards_are_counted_among_the_visible_ones_and_named_by_uuid(asked, visible, places):
    found = chosen(asked, visible=visible)
    assert found.visible == tuple(UUIDS[place] for place in places)
    assert found.ranks == len(places)
    assert found.environment({})["CUDA_VISIBLE_DEVICES"] == ",".join(found.visible)
    own = [each["CUDA_VISIBLE_DEVICES"] for each in found.environment_per_card({})]
    assert own == list(found.visible)


@pytest.mark.parametrize(
    ("asked", "more", "problems"),
    [
        ("4", {}, 1),
        ("0", {}, 1),
        ("3,1,1,7", {}, 3),
        ("two", {}, 1),
        ("", {}, 1),
        ("2", {"cards": 0}, 1),
        ("all", {"device": "cpu"}, 1),
        ("0,1", {"device": "cpu"}, 1),
        ("9", TORCHRUN, 2),
    ],
)
def test_cards_that_are_not_there_are_refused_with_all_reasons(asked, more, problems):
    with pytest.raises(WorldError) as refused:
        chosen(asked, **more)
    assert len(str(refused.value).splitlines()) == problems + 1, refused.value


def test_on_a_cpu_cores_are_divided_unless_a_number_of_threads_is_set():
    found = chosen("2", cards=0, device="cpu")
    assert (found.visible, found.ranks) == ((), 2)
    shared = Cards(visible=(), ranks=2, threads=3)
    assert shared.environment({}) == {"OMP_NUM_THREADS": "3"}
    assert shared.environment({"MKL_NUM_THREADS": "1"}) == {}
    assert shared.environment_per_card({}) == [{"OMP_NUM_THREADS": "3"}] * 2


def test_a_rank_runs_the_command_that_was_given_and_resumes_what_was_saved(tmp_path: Path):
    words = ["train", "m.json", "--gpus", "2", "--max-restarts=3", "--epochs", "2", "--resume"]
    words = without_options(words, ("--gpus", "--max-restarts"))
    assert words == ["train", "m.json", "--epochs", "2", "--resume"]
    assert with_resume(words, None) == words
    assert with_resume(words, tmp_path) == words  # it never began
    (tmp_path / "plan.json").write_text("{}")
    resumed = ["train", "m.json", "--epochs", "2", "--resume", str(tmp_path)]
    assert with_resume(words, tmp_path) == resumed
    assert with_resume(["train", "m.json", "--epochs", "2", "--resume", "x"], tmp_path) == resumed
    assert given_command({COMMAND_VARIABLE: '["expert", "train"]'}) == ["expert", "train"]


# --- the files of `expert launch` ----------------------------------------------------------------


KUBERNETES = {"image": "me/expert:1", "claim": "data"}
SKYPILOT = {"accelerator": "H100", "bucket": "s3://mine", "setup": ("pip install expert",)}


def job(folder: Path, on: Any, *, config: dict[str, Any] | None = None, **asked: Any) -> str:
    read = read_manifest(write_expert(folder, "tiny", config or {}))
    return job_file(read, on, **{"nodes": 2, "gpus": 4, **asked})[1]


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_slurm_script_starts_torchrun_once_on_each_machine(tmp_path):
    setup = ("module load cuda", 'export MODE="a b"')
    made = job(tmp_path / "my expert", "slurm", setup=setup)
    asked = directives(made)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "4")
    assert asked["signal"] == "B:USR1@120"
    assert "requeue" in asked
    assert "\n".join(setup) in made
    (command,) = [line for line in made.splitlines() if " train " in line]
    assert "torch.distributed.run --nnodes 2 --nproc-per-node 4" in command
    assert '--node-rank "$SLURM_NODEID" --master-addr "$first" --master-port "$port"' in command
    assert '--output "$runs" --resume if-any' in command
    on_cpu = job(tmp_path, "slurm", config={"device": "cpu"})
    assert "gpus-per-node" not in directives(on_cpu)
    for name, plain in (("My Expert_v2 (SQL)", "my-expert-v2-sql"), ("x" * 99, "x" * 40)):
        assert directives(job(tmp_path, "slurm", name=name))["job-name"] == plain


@pytest.mark.parametrize(
    ("code", "crashes", "asked", "ended"),
    [(0, 0, "", 0), (2, 0, "", 2), (75, 0, "", 75), (4, 0, "requeue 7", 0), (4, 3, "", 4)],
)
def test_a_slurm_job_is_requeued_after_a_crash_but_not_if_it_would_fail_again(
    code, crashes, asked, ended, tmp_path
):
    programs = tmp_path / "bin"
    fake_program(programs, "srun", f'echo "$@" > {tmp_path}/started\nexit {code}')
    requeue = f"[ $1 = requeue ] && echo $1 $2 > {tmp_path}/asked; echo host"
    fake_program(programs, "scontrol", requeue)
    made = job(tmp_path / "my expert", "slurm", shared=str(tmp_path / "a b"))
    run = tmp_path / "a b" / "runs" / "demo-7"
    run.mkdir(parents=True)
    (run / "crashes").write_text("4\n" * crashes)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host"}
    done = subprocess.run(["bash"], input=made, text=True, env=env, check=False)
    assert done.returncode == ended
    assert "train --manifest" in (tmp_path / "started").read_text()
    assert (tmp_path / "asked").is_file() is bool(asked)


def test_kubernetes_has_a_pod_for_each_machine_and_a_name_for_the_first(tmp_path):
    made = job(tmp_path, "kubernetes", **KUBERNETES, overrides=("epochs=2",))
    service, started = yaml.safe_load_all(made)
    spec = started["spec"]
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == "demo"
    assert service["spec"]["selector"] == {"job-name": started["metadata"]["name"]}
    assert pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    words = container["command"][-1].split()
    assert words[words.index("--node-rank") + 1] == '"$JOB_COMPLETION_INDEX"'
    assert words[words.index("--master-addr") + 1] == "demo-0.demo"
    assert words[words.index("--manifest") + 1] == "/shared/demo/manifest.json"
    assert words[-2:] == ["--set", "epochs=2"]


def test_one_machine_needs_no_torchrun_so_that_its_exit_code_is_seen(tmp_path):
    for on, more in (("kubernetes", KUBERNETES), ("skypilot", SKYPILOT)):
        text = job(tmp_path, on, nodes=1, **more)
        assert "torch.distributed" not in text
        assert "--gpus 4" in text


def test_skypilot_keeps_what_it_saves_in_the_bucket(tmp_path):
    (task,) = yaml.safe_load_all(job(tmp_path, "skypilot", **SKYPILOT))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["file_mounts"]["/shared"]["source"] == "s3://mine"
    assert task["workdir"] == str(tmp_path)
    words = task["run"].split()
    assert words[words.index("--output") + 1] == '"/shared/runs/$SKYPILOT_TASK_ID"'
    assert words[words.index("--node-rank") + 1] == '"$SKYPILOT_NODE_RANK"'
    checked = subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("on", "asked", "problems"),
    [
        ("kubernetes", {}, 2),
        ("skypilot", {}, 3),
        ("skypilot", {"claim": "y", **SKYPILOT}, 1),
        ("slurm", {"shared": "here"}, 1),
        ("kubernetes", {"image": "a\nb: c", "claim": "so on"}, 2),
        ("skypilot", {**SKYPILOT, "bucket": "mine"}, 1),
    ],
)
def test_what_is_missing_or_does_not_belong_there_is_refused_all_at_once(
    tmp_path, on, asked, problems
):
    with pytest.raises(ExpertError) as refused:
        job(tmp_path, on, **asked)
    assert refused.value.exit_code == EXIT_USAGE
    assert len(str(refused.value).splitlines()) == problems + 1


def fake_program(folder: Path, name: str, does: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
