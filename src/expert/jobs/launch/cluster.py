"""`expert launch`: the file that starts a run on a cluster, from a template that calls torchrun."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError
from expert.core.files import read_text, write_text_atomically
from expert.core.text import counted

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest

SchedulerName = Literal["slurm", "kubernetes", "skypilot"]
SUBMIT: dict[SchedulerName, str] = {
    "slurm": "sbatch",
    "kubernetes": "kubectl apply -f",
    "skypilot": "sky jobs launch --yes --detach-run --name {name}",
}
"""The command that submits a file."""
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
    **dict.fromkeys(("time", "partition", "account", "qos"), ("slurm",)),
    **dict.fromkeys(("namespace", "claim"), ("kubernetes",)),
    **dict.fromkeys(("accelerator", "bucket", "infra", "spot"), ("skypilot",)),
    "image": ("kubernetes", "skypilot"),
}
"""Options that not all schedulers have."""
PORT = 29500
"""Of the first machine, which is the job's own."""
_PLAIN = re.compile(r"[\w.,+:/@-]+")
"""Valid values for schedulers; other characters would break the line."""


class LaunchError(ExpertError):
    """A job cannot be written; lists all problems."""


@dataclass(frozen=True)
class ClusterJob:
    """The file of a job, and what it starts."""

    on: SchedulerName
    name: str
    ranks: int
    text: str
    source: Path
    """The manifest on this machine."""


def make_job(read: ReadManifest, on: SchedulerName, **options: Any) -> ClusterJob:
    """The job file with defaults for options that are not set; raises with everything that is
    missing or not supported."""
    import jinja2

    on_cpu = read.manifest.training.config.device == "cpu"
    source = Path(read.source).absolute()
    defaults = {"nodes": 1, "gpus": 1, "cpus": 8, "warning": 120, "restarts": 3}
    given = {name: value for name, value in options.items() if value not in (None, False, ())}
    given |= {name: options.get(name, value) for name, value in defaults.items()}
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
    if on == "skypilot" and not given.get("setup") and "image" not in given:
        problems.append("--setup is needed: the line that installs expert there, or --image")
    problems += [
        f"--{name} {given[name]!r}: expected a name without spaces"
        for name in (*OWN, "memory")
        if isinstance(given.get(name), str) and not _PLAIN.fullmatch(given[name])
    ]
    shared = given.get("shared") or (str(source.parent) if on == "slurm" else "/shared")
    if not shared.startswith("/"):
        problems.append(f"--shared {shared}: expected an absolute path, the same on every machine")
    if not re.match(r"[a-z0-9]+://", bucket := given.get("bucket", "s3://")):
        problems.append(f"--bucket {bucket}: expected an address such as s3://my-bucket")
    if problems:
        head = f"expert launch --on {on}: {counted(len(problems), 'problem')}"
        raise LaunchError("\n".join([head, *(f"  - {problem}" for problem in problems)]))

    name = job_name(given.get("name") or read.manifest.name)
    folders = {"slurm": str(source.parent), "kubernetes": f"{shared}/{name}"}
    folder = given.get("folder") or folders.get(on, "$HOME/sky_workdir")
    # Where a job that is started again finds its run.
    runs = {"slurm": "$runs", "kubernetes": f"{shared}/runs/{name}"}.get(
        on, f"{shared}/runs/$SKYPILOT_TASK_ID"
    )
    words = ["train", "--manifest", f"{folder}/{source.name}", "--output", runs]
    words += ["--resume", "if-any"]
    overrides = list(given.get("overrides", ()))
    if on == "skypilot":
        overrides.append(f"training.config.pretokenized_cache={shared}/cache/{name}")
    words += [word for override in overrides for word in ("--set", override)]
    start = _start_line(on, name, words, given)
    lines = ["set -e", *(given.get("setup", ()) if on == "kubernetes" else ())]
    if on == "skypilot" and given["nodes"] > 1:
        lines.append('first=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")')
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"json": json.dumps, "quoted": shlex.quote}
    template = read_text(Path(__file__).parent / "templates" / f"{on}.jinja")
    namespace = given.get("namespace")
    text = environment.from_string(template).render(
        **given
        | {
            "name": name,
            "shared": shlex.quote(shared) if on == "slurm" else shared,
            "folder": folder,
            "ranks": given["nodes"] * given["gpus"],
            "on_cpu": on_cpu,
            "start": start,
            "script": "\n".join([*lines, start, ""]),
            "workdir": str(source.parent),
            "port": PORT,
            "spot": bool(given.get("spot")),
            "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
            "scheduler_options": [
                (option, given[option])
                for option in ("time", "partition", "account", "qos")
                if option in given
            ],
        }
    )
    return ClusterJob(on, name, given["nodes"] * given["gpus"], text, source)


def _start_line(on: SchedulerName, name: str, words: Sequence[str], given: dict[str, Any]) -> str:
    """The line that starts the ranks of one machine."""
    python = given.get("python") or (sys.executable if on == "slurm" else "python")
    start = [python, "-P", "-m", "expert", *words, "--gpus", str(given["gpus"])]
    if given["nodes"] > 1:
        node, address, port = {
            "slurm": ("$SLURM_NODEID", "$first", "$port"),
            "kubernetes": ("$JOB_COMPLETION_INDEX", f"{name}-0.{name}", str(PORT)),
            "skypilot": ("$SKYPILOT_NODE_RANK", "$first", str(PORT)),
        }[on]
        start = [
            *(python, "-m", "torch.distributed.run"),
            *("--nnodes", str(given["nodes"]), "--nproc-per-node", str(given["gpus"])),
            *("--node-rank", node, "--master-addr", address, "--master-port", port),
            *("-m", "expert", *words),
        ]
    # Quoted for a shell, but its variables are kept.
    return "exec " + " ".join(
        f'"{word}"' if re.fullmatch(r"[\w$./{}:=-]*\$[\w$./{}:=-]*", word) else shlex.quote(word)
        for word in start
    )


def job_name(text: str) -> str:
    """A name that every scheduler accepts: Kubernetes allows 63 characters, including its own."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "expert"


def write_job(job: ClusterJob, to: Path | None) -> Path:
    """Write the file; by default next to the manifest."""
    file = to or job.source.parent / f"{job.name}{SUFFIXES[job.on]}"
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    write_text_atomically(file, job.text)
    return file


def submit_command(job: ClusterJob, file: Path) -> str:
    return f"{SUBMIT[job.on].format(name=job.name)} {shlex.quote(str(file))}"
