"""`expert launch`: the file that starts a run on a cluster, from a template that calls torchrun."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError
from expert.core.files import read_text
from expert.core.text import counted

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest

SchedulerName = Literal["slurm", "kubernetes", "skypilot"]
SUBMIT: dict[SchedulerName, str] = {
    "slurm": "sbatch",
    "kubernetes": "kubectl apply -f",
    "skypilot": "sky jobs launch --yes --detach-run --name {name}",
}
"""The command that submits a file; the scheduler's own options, such as a time limit, go there."""
SUFFIXES = {"slurm": ".sbatch", "kubernetes": ".kubernetes.yaml", "skypilot": ".skypilot.yaml"}
NEEDED: dict[SchedulerName, dict[str, str]] = {
    "slurm": {},
    "kubernetes": {
        "image": "a container image that has expert installed",
        "claim": "a PersistentVolumeClaim that all machines can mount (ReadWriteMany)",
    },
    "skypilot": {
        "accelerator": "a GPU as SkyPilot calls it, such as H100  (sky show-gpus)",
        "bucket": "a bucket for prepared data and runs, such as s3://my-bucket",
    },
}
OWN = {
    "claim": ("kubernetes",),
    "accelerator": ("skypilot",),
    "bucket": ("skypilot",),
    "image": ("kubernetes", "skypilot"),
}
"""Options that not all schedulers have."""
PORT = 29500
"""Of the first machine, which is the job's own."""
CORES_PER_RANK = 8
WARNING_SECONDS = 120
"""Time to save a checkpoint before a time limit or a preemption."""
RESTARTS = 3
"""After a crash; a preemption does not count."""
_PLAIN = re.compile(r"[\w.,+:/@-]+")
"""Valid values for schedulers; other characters would break the line."""


def job_file(
    read: ReadManifest, on: SchedulerName, *, nodes: int, gpus: int, **options: Any
) -> tuple[str, str]:
    """The name of the job and its file; raises with everything that is missing or not supported."""
    import jinja2

    on_cpu = read.manifest.training.config.device == "cpu"
    source = Path(read.source).absolute()
    given = {name: value for name, value in options.items() if value not in (None, ())}
    shared = given.get("shared") or (str(source.parent) if on == "slurm" else "/shared")
    problems = [
        f"--{name} is for {' and '.join(schedulers)}  (leave it out)"
        for name, schedulers in OWN.items()
        if name in given and on not in schedulers
    ]
    problems += [
        f"--{name} is needed: {what}"
        for name, what in NEEDED[on].items()
        if name not in given and not (on_cpu and name == "accelerator")
    ]
    if on == "skypilot" and "setup" not in given and "image" not in given:
        problems.append("--setup is needed: the line that installs expert there, or --image")
    problems += [
        f"--{name} {given[name]!r}: expected a name without spaces"
        for name in OWN
        if name in given and not _PLAIN.fullmatch(given[name])
    ]
    if not shared.startswith("/"):
        problems.append(f"--shared {shared}: expected an absolute path, the same on every machine")
    if not re.match(r"[a-z0-9]+://", bucket := given.get("bucket", "s3://")):
        problems.append(f"--bucket {bucket}: expected an address such as s3://my-bucket")
    if problems:
        head = f"expert launch --on {on}: {counted(len(problems), 'problem')}"
        raise ExpertError("\n".join([head, *(f"  - {problem}" for problem in problems)]))

    # Every scheduler accepts this: Kubernetes allows 63 characters, including its own.
    plain = re.sub(r"[^a-z0-9]+", "-", str(given.get("name") or read.manifest.name).lower())
    name = plain.strip("-")[:40].strip("-") or "expert"
    # Where the manifest is, where a job that is started again finds its run, and how a machine
    # knows its number, the first machine and its port.
    folder, runs, node, first, port = {
        "slurm": (str(source.parent), "$runs", "$SLURM_NODEID", "$first", "$port"),
        "kubernetes": (f"{shared}/{name}", f"{shared}/runs/{name}", "$JOB_COMPLETION_INDEX",
                       f"{name}-0.{name}", str(PORT)),
        "skypilot": ("$HOME/sky_workdir", f"{shared}/runs/$SKYPILOT_TASK_ID",
                     "$SKYPILOT_NODE_RANK", "$first", str(PORT)),
    }[on]  # fmt: skip
    folder = given.get("folder") or folder
    words = ["train", "--manifest", f"{folder}/{source.name}", "--output", runs]
    words += ["--resume", "if-any"]
    overrides = list(given.get("overrides", ()))
    if on == "skypilot":
        overrides.append(f"training.config.pretokenized_cache={shared}/cache/{name}")
    words += [word for override in overrides for word in ("--set", override)]
    python = given.get("python") or (sys.executable if on == "slurm" else "python")
    start = [python, "-P", "-m", "expert", *words, "--gpus", str(gpus)]
    if nodes > 1:
        start = [
            *(python, "-m", "torch.distributed.run"),
            *("--nnodes", str(nodes), "--nproc-per-node", str(gpus)),
            *("--node-rank", node, "--master-addr", first, "--master-port", port),
            *("-m", "expert", *words),
        ]
    line = "exec " + " ".join(  # quoted for a shell, but its variables are kept
        f'"{word}"' if re.fullmatch(r"[\w$./{}:=-]*\$[\w$./{}:=-]*", word) else shlex.quote(word)
        for word in start
    )
    before = list(given.get("setup", ())) if on == "kubernetes" else []
    if on == "skypilot" and nodes > 1:
        before.append('first=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")')
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"json": json.dumps, "quoted": shlex.quote}
    template = read_text(Path(__file__).parent / "templates" / f"{on}.jinja")
    return name, environment.from_string(template).render(
        **given
        | {
            "name": name,
            "nodes": nodes,
            "gpus": gpus,
            "cores": CORES_PER_RANK * gpus,
            "warning": WARNING_SECONDS,
            "restarts": RESTARTS,
            "shared": shlex.quote(shared) if on == "slurm" else shared,
            "folder": folder,
            "on_cpu": on_cpu,
            "start": line,
            "script": "\n".join(["set -e", *before, line, ""]),
            "workdir": str(source.parent),
            "port": PORT,
        }
    )
