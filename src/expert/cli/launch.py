"""`expert launch`: the file that starts a run on a cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from expert.cli.plan import show_warnings
from expert.cli.show import options
from expert.cli.show.display import make_console, show, write_line


class ClusterKind(StrEnum):
    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"


Name = Annotated[str | None, typer.Option(help="Name of the job; default: the expert's.")]
To = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File to write, - to print; default: next to the manifest."),
]
Shared = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that every machine sees under this path, for runs and prepared data; "
        "default: that of the manifest (Slurm), /shared.",
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        help="Where the manifest's folder is on the machines; default: as here (Slurm), "
        "SHARED/NAME (Kubernetes); SkyPilot copies it.",
    ),
]
Python = Annotated[
    str | None, typer.Option(help="Python of the machines; default: this one (Slurm), python.")
]
Setup = Annotated[
    list[str] | None, typer.Option(metavar="LINE", help="Shell line to run first; repeatable.")
]
Memory = Annotated[
    str | None, typer.Option(help="Main memory of each machine, such as 64G or 64Gi.")
]
WarningSeconds = Annotated[
    int, typer.Option(min=20, help="Seconds to save a checkpoint before it is killed.")
]
Image = Annotated[
    str | None, typer.Option(help="Kubernetes, SkyPilot: image with expert installed.")
]
Claim = Annotated[
    str | None, typer.Option(help="Kubernetes: PersistentVolumeClaim, mounted at SHARED.")
]
Accelerator = Annotated[str | None, typer.Option(help="SkyPilot: name of the GPU, such as H100.")]
Bucket = Annotated[
    str | None, typer.Option(help="SkyPilot: bucket, mounted at SHARED, such as s3://mine.")
]
Infra = Annotated[str | None, typer.Option(help="SkyPilot: where, such as aws/us-east-1.")]
_NOT_JOB_OPTIONS = ("on", "file", "manifest", "to")


def launch(
    on: Annotated[ClusterKind, typer.Option(help="The scheduler of the cluster.")],
    file: options.ManifestFile = None,
    manifest: Annotated[Path | None, options.manifest_option("The manifest to train")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each machine; a rank on each.")] = 1,
    name: Name = None,
    to: To = None,
    shared: Shared = None,
    folder: Folder = None,
    python: Python = None,
    setup: Setup = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores of each rank.")] = 8,
    memory: Memory = None,
    warning: WarningSeconds = 120,
    restarts: Annotated[int, typer.Option(min=0, help="Restarts after a crash.")] = 3,
    time: Annotated[str | None, typer.Option(help="Slurm: limit, HH:MM:SS.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: where to queue.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: who is charged.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm: quality of service.")] = None,
    image: Image = None,
    claim: Claim = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes: of the job.")] = None,
    accelerator: Accelerator = None,
    bucket: Bucket = None,
    infra: Infra = None,
    spot: Annotated[bool, typer.Option("--spot", help="SkyPilot: preemptible machines.")] = False,
    overrides: options.Overrides = None,
) -> None:
    """Write the file that starts a run on a cluster, and print the command that submits it.

    The job starts `expert train --resume if-any` on every machine: started again after preemption,
    it resumes from its newest checkpoint.
    """
    asked = {name: value for name, value in locals().items() if name not in _NOT_JOB_OPTIONS}
    from expert.jobs.launch import cluster

    chosen = options.one_manifest(file, manifest)
    if chosen is None:
        raise options.UsageError("nothing to train  (expert launch --on slurm --manifest FILE)")
    changes = tuple(overrides or ())
    read = options.read_requested_manifest(chosen, None, changes)
    asked |= {"setup": tuple(setup or ()), "overrides": changes}
    job = cluster.make_job(read, on.value, **asked)
    if to == "-":
        write_line(job.text)
        return
    console = make_console()
    show_warnings(read, console)
    written = cluster.write_job(job, Path(to) if to else None)
    show(console, f"✓ {written}: {job.ranks} ranks, {gpus} on each of {nodes} machines")
    show(console, f"next: {cluster.submit_command(job, written)}")
