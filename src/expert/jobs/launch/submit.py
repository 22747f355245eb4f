"""Writes the file that starts a run on a cluster, and submits it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from expert.core.errors import EXIT_RUN_FAILED
from expert.core.files import write_text_atomically
from expert.jobs.launch import kubernetes, skypilot, slurm
from expert.jobs.launch.cluster import SCHEDULERS, ClusterJob, LaunchError, SchedulerName


class SubmitFailed(LaunchError):
    """The scheduler refused the job."""

    exit_code = EXIT_RUN_FAILED


def text_of(job: ClusterJob) -> str:
    texts = {"slurm": slurm.script, "kubernetes": kubernetes.text, "skypilot": skypilot.text}
    return texts[job.on](job)


def write_job(job: ClusterJob, to: Path | None) -> Path:
    """Write the file; by default next to the manifest."""
    file = to or job.source.parent / f"{job.name}{SCHEDULERS[job.on].ending}"
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    write_text_atomically(file, text_of(job))
    return file


def submit_command(job: ClusterJob, file: Path) -> list[str]:
    more = ["--name", job.name] if job.on == "skypilot" else []
    return [*SCHEDULERS[job.on].submitted_by, *more, str(file)]


def submit(job: ClusterJob, file: Path) -> str:
    """Submit the file; returns the scheduler's answer."""
    require_program(job.on)
    command = submit_command(job, file)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = "\n".join(part.strip() for part in (done.stdout, done.stderr) if part.strip())
    if done.returncode:
        raise SubmitFailed(
            f"{shlex.join(command)} ended with code {done.returncode}: {answer}\n"
            f"  {file} is written: fix that, then submit it again"
        )
    return answer


def require_program(on: SchedulerName) -> None:
    """Raise if the submitting program is not installed, before anything is written."""
    program, install = SCHEDULERS[on].submitted_by[0], SCHEDULERS[on].install
    if shutil.which(program) is None:
        raise LaunchError(f"--submit: {program} is not installed here  ({install})")
