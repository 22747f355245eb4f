"""A run on a cluster: its options, what is missing, and the command that starts it there."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError
from expert.core.text import counted

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest

SchedulerName = Literal["slurm", "kubernetes", "skypilot"]


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A scheduler's options, and how to submit to it."""

    options: tuple[str, ...]
    """Options that not all schedulers have."""
    needed: Mapping[str, str]
    """Required options, and what they are."""
    ending: str
    """File name suffix."""
    submitted_by: tuple[str, ...]
    install: str
    """How to get the submitting program."""


SCHEDULERS: dict[SchedulerName, Scheduler] = {
    "slurm": Scheduler(
        options=("time", "partition", "account", "qos"),
        needed={},
        ending=".sbatch",
        submitted_by=("sbatch",),
        install="sbatch belongs to Slurm: run this on a login node of the cluster",
    ),
    "kubernetes": Scheduler(
        options=("namespace", "claim", "image"),
        needed={
            "image": "a container image that has expert installed",
            "claim": "a PersistentVolumeClaim that all machines can mount (ReadWriteMany)",
        },
        ending=".kubernetes.yaml",
        submitted_by=("kubectl", "apply", "-f"),
        install="install kubectl: https://kubernetes.io/docs/tasks/tools",
    ),
    "skypilot": Scheduler(
        options=("image", "accelerator", "bucket", "infra", "spot"),
        needed={
            "accelerator": "a GPU as SkyPilot calls it, such as H100  (sky show-gpus)",
            "bucket": "a bucket for prepared data and runs, such as s3://my-bucket",
        },
        ending=".skypilot.yaml",
        submitted_by=("sky", "jobs", "launch", "--yes", "--detach-run"),
        install="pip install skypilot, then: sky check",
    ),
}
PORT = 29500
"""Port of rank 0 for the rendezvous."""
_DURATION = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_PLAIN = re.compile(r"[\w.,+:/@-]+")
"""Valid names for schedulers; other characters would break the line."""
NAME_LENGTH = 40
"""Kubernetes allows 63, including what it adds."""


class LaunchError(ExpertError):
    """A job cannot be written; lists all problems."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """Everything in a job file. Paths are those on the cluster's machines."""

    on: SchedulerName
    name: str
    nodes: int
    gpus: int
    """Per machine; also the number of ranks."""
    on_cpu: bool
    folder: str
    """Of the expert: its manifest and the files it names."""
    manifest: str
    shared: str
    """A folder that every machine has at this path."""
    source: Path
    """The manifest on this machine."""
    python: str
    overrides: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    cpus: int = 8
    """Per rank."""
    memory: str | None = None
    warning: int = 120
    """Seconds to save before preemption."""
    restarts: int = 3
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    namespace: str | None = None
    claim: str | None = None
    image: str | None = None
    accelerator: str | None = None
    bucket: str | None = None
    infra: str | None = None
    spot: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def train_words(self, output: str) -> list[str]:
        """`expert train …` that starts the run, or resumes it if the job is started again."""
        words = ["train", "--manifest", self.manifest, "--output", output, "--resume", "if-any"]
        return [*words, *(word for override in self.overrides for word in ("--set", override))]


def make_job(read: ReadManifest, on: SchedulerName, **options: Any) -> ClusterJob:
    """The job with defaults for options that are not set; raises with everything that is missing or
    not supported."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()  # 0 is a value: --restarts 0
    }
    special = dict.fromkeys(name for scheduler in SCHEDULERS.values() for name in scheduler.options)
    problems = [
        f"--{name} is for {' and '.join(s for s in SCHEDULERS if name in SCHEDULERS[s].options)}  "
        "(leave it out)"
        for name in special
        if name in given and name not in SCHEDULERS[on].options
    ]
    on_cpu = read.manifest.training.config.device == "cpu"
    problems += [
        f"--{name} is needed: {what}"
        for name, what in SCHEDULERS[on].needed.items()
        if name not in given and not (on_cpu and name == "accelerator")
    ]
    if on == "skypilot" and not given.get("setup") and "image" not in given:
        problems.append("--setup is needed: the line that installs expert there, or --image")
    if "time" in given and not _DURATION.fullmatch(given["time"]):
        problems.append(f"--time {given['time']}: expected D-HH:MM:SS, HH:MM:SS or minutes")
    problems += [
        f"--{name} {given[name]!r}: expected a name without spaces"
        for name in (*special, "memory")
        if isinstance(given.get(name), str) and not _PLAIN.fullmatch(given[name])
    ]
    name = job_name(given.get("name") or read.manifest.name)
    source = Path(read.source).absolute()
    shared = given.pop("shared", None) or (str(source.parent) if on == "slurm" else "/shared")
    if not shared.startswith("/"):
        problems.append(f"--shared {shared}: expected an absolute path, the same on every machine")
    bucket = given.get("bucket", "s3://")
    if not re.match(r"[a-z0-9]+://", bucket):
        problems.append(f"--bucket {bucket}: expected an address such as s3://my-bucket")
    if problems:
        head = f"expert launch --on {on}: {counted(len(problems), 'problem')}"
        raise LaunchError("\n".join([head, *(f"  - {problem}" for problem in problems)]))
    folders = {"slurm": str(source.parent), "kubernetes": f"{shared}/{name}"}
    folder = given.pop("folder", None) or folders.get(on, "$HOME/sky_workdir")
    here = sys.executable if on == "slurm" else "python"
    given = {**given, "name": name, "python": given.get("python") or here}
    return ClusterJob(
        on=on,
        folder=folder,
        manifest=f"{folder}/{source.name}",
        shared=shared,
        source=source,
        on_cpu=on_cpu,
        **given,
    )


def job_name(text: str) -> str:
    """A name that every scheduler accepts."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_LENGTH].strip("-") or "expert"


def start_line(job: ClusterJob, words: Sequence[str], *, node: str, address: str) -> str:
    """The line that starts the ranks of one machine. A single machine does without torchrun, so
    that the exit code is that of the rank that failed."""
    start = [job.python, "-P", "-m", "expert", *words, "--gpus", str(job.gpus)]
    if job.nodes > 1:
        start = [
            *(job.python, "-m", "torch.distributed.run"),
            *("--nnodes", str(job.nodes), "--nproc-per-node", str(job.gpus)),
            *("--node-rank", node, "--master-addr", address, "--master-port", str(PORT)),
            *("-m", "expert", *words),
        ]
    return f"exec {shell_words(start)}"


def shell_words(words: Sequence[str]) -> str:
    """Quote words for a shell, but keep its variables."""
    return " ".join(
        f'"{word}"' if re.fullmatch(r"[\w$./{}:=-]*\$[\w$./{}:=-]*", word) else shlex.quote(word)
        for word in words
    )


def yaml_text(documents: Sequence[Mapping[str, Any]], head: Sequence[str]) -> str:
    """YAML documents after a comment, with multi-line strings as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, as_block)
    body = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + body
