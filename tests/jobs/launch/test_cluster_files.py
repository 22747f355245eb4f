"""The files of `expert launch`: complete, parsed by their readers, refused if incomplete."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from expert.core.errors import EXIT_USAGE
from expert.jobs.launch.cluster import LaunchError, job_file
from expert.manifest.reader import read_manifest
from tests.jobs.runs import write_expert

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
    with pytest.raises(LaunchError) as refused:
        job(tmp_path, on, **asked)
    assert refused.value.exit_code == EXIT_USAGE
    assert len(str(refused.value).splitlines()) == problems + 1


def fake_program(folder: Path, name: str, does: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
