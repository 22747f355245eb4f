"""Which run is meant: a run folder, a folder of runs, or the folder of an expert."""

from __future__ import annotations

from pathlib import Path

from expert.core.events import read_events
from expert.core.rundir import RunFolder, RunFolderError, latest_run, named_manifest
from expert.jobs.watching import find_run, newest_run


def find_trained(place: Path | None) -> RunFolder:
    """The run folder named, the newest in a folder of runs, or the newest of an expert."""
    return find_expert(place)[0]


def find_expert(place: Path | None) -> tuple[RunFolder, Path | None]:
    """The run that is meant, and the folder of its manifest where that was named."""
    from expert.manifest.document import manifest_in
    from expert.manifest.reader import read_manifest

    if place is None or _is_run(RunFolder(place)):
        return find_run(place), None
    file = place if place.is_file() else manifest_in(place)
    if file is None:
        return find_run(place), None
    read = read_manifest(file)
    parent = read.folder / (read.manifest.training.config.output_dir or "runs")
    run = latest_run(parent, read.manifest.name) or latest_run(read.folder, read.manifest.name)
    if run is None and place.is_dir():  # `--output .` puts runs beside the manifest
        other = newest_run(place)
        if other is not None:  # of another expert: this manifest does not describe it
            return other, None
    if run is None:
        raise RunFolderError(
            f"{file}: there is no run of {read.manifest.name} under {parent}  (train it with "
            f"expert train --manifest {file})"
        )
    return run, read.folder


def manifest_of(folder: RunFolder) -> str:
    """The manifest a run was trained from, as a command takes it; FILE where it is gone."""
    try:
        started = [e for e in read_events(folder.events) if e.get("event") == "started"]
    except OSError:
        started = []
    return named_manifest(started[-1] if started else {})


def _is_run(folder: RunFolder) -> bool:
    """Whether a run was begun there, however damaged it is: it has a manifest.json of its own."""
    return folder.was_started or folder.events.is_file()
