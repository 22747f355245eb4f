"""The job behind `expert plan` and `expert.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.planning.machine import Machine
    from expert.planning.run_plan import RunPlan


def plan(
    manifest: str | Path | ReadManifest,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    use_measurements: bool = True,
) -> RunPlan:
    """Settle a manifest for a card: the one named, so much memory, or this machine's own."""
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.planning.machine import describe_machine
    from expert.planning.plan import make_plan
    from expert.planning.target import choose_target

    read = manifest
    if not isinstance(read, ReadManifest):
        read = read_manifest(read, overrides=overrides)
    elif overrides:
        raise ValueError("overrides belong to read_manifest when a manifest has been read already")
    here = machine or describe_machine(read.folder)
    device = read.manifest.training.config.device
    target = choose_target(here, gpu=gpu, vram=vram, device=device)
    return make_plan(
        read.manifest,
        target,
        folder=read.folder,
        model=model,
        use_measurements=use_measurements,
    )
