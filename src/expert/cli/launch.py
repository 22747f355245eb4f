"""`expert launch`: the file that starts a run on a cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from expert.cli.plan import show_warnings
from expert.cli.show import options
from expert.cli.show.display import make_console, show, write_line
from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.text import shell_quoted


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
_NOT_OF_THE_JOB = ("on", "file", "manifest", "to")


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
    image: Image = None,
    claim: Claim = None,
    accelerator: Accelerator = None,
    bucket: Bucket = None,
    overrides: options.Overrides = None,
) -> None:
    """Write the file that starts a run on a cluster, and print the command that submits it.

    The job starts `expert train --resume if-any` on every machine: started again after preemption,
    it resumes from its newest checkpoint. What only the scheduler needs, such as a time limit, is
    an option of the command that submits it.
    """
    asked = {key: value for key, value in locals().items() if key not in _NOT_OF_THE_JOB}
    from expert.jobs.launch.cluster import SUBMIT, SUFFIXES, job_file

    chosen = options.one_manifest(file, manifest)
    if chosen is None:
        raise ExpertError("nothing to train  (expert launch --on slurm --manifest FILE)")
    changes = tuple(overrides or ())
    read = options.read_requested_manifest(chosen, None, changes)
    name, text = job_file(read, on.value, **asked | {"overrides": changes})
    if to == "-":
        write_line(text)
        return
    console = make_console()
    show_warnings(read, console)
    default = Path(read.source).absolute().parent / f"{name}{SUFFIXES[on.value]}"
    written = Path(to) if to else default
    if written.is_relative_to(Path.cwd()):
        written = written.relative_to(Path.cwd())
    write_text_atomically(written, text)
    show(console, f"✓ {written}: {nodes * gpus} ranks, {gpus} on each of {nodes} machines")
    show(console, f"next: {SUBMIT[on.value].format(name=name)} {shell_quoted(written)}")
