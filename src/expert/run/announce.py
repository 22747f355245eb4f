"""What a run leaves in its folder before it begins, and the first thing it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.data.feed.run_data import RunData
    from expert.manifest.schema.manifest import Manifest
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import LengthPlan, RunPlan


def write_down(
    folder: RunFolder,
    plan: RunPlan,
    manifest: Manifest,
    data: RunData,
    machine: Machine | None = None,
) -> None:
    """What was asked, what was decided and on what; leftovers of writers that died are removed."""
    from expert.core.publish import sweep
    from expert.core.rundir import RunFolderError
    from expert.run.build import environment
    from expert.run.locate import as_recorded

    for place in (folder.path, folder.checkpoints):
        if place.is_dir():
            sweep(place, alone=True)
    try:
        folder.write_json("manifest.json", manifest.model_dump(mode="json"))
        folder.write_json("plan.json", as_recorded(plan))
        folder.write_json("environment.json", environment(machine))
        characters = getattr(data.encoder, "characters", None)
        if characters is not None:  # checkpoints of a character model are read with it
            known = {"type": "characters", "characters": characters}
            folder.write_json("vocabulary.json", known)
    except OSError as error:
        raise RunFolderError(
            f"{folder.path}: cannot be written: {error.strerror}  (mend that, or name "
            "another folder in training.config.output_dir)"
        ) from error


def started_facts(
    folder: RunFolder,
    plan: RunPlan,
    source: str = "",
    asked: tuple[str | None, bool] = (None, False),
) -> dict[str, Any]:
    """The fields of the event "started"; `source` is the manifest's file, where there is one.

    `asked`, --vram and --allow-remote-code: kept where they mean anything, so that the command that
    goes on can ask for them again."""
    vram, allow_remote_code = asked
    named = {"manifest": str(Path(source).resolve())} if source and Path(source).is_file() else {}
    limited = {"vram": vram} if vram and plan.kernels.device == "cuda" else {}
    allowed = {"allow_remote_code": True} if allow_remote_code else {}
    return {
        **named,
        **limited,
        **allowed,
        "expert": plan.expert,
        "model": plan.model.name,
        "device": plan.target,
        "total_steps": plan.length.total_steps,
        "epochs": plan.length.epochs,
        **_cut_short(plan.length),
        "run": str(folder.path),
        "logging_steps": plan.watch.logging_steps,
        "trainable_parameters": plan.adapter.trainable_parameters,
        "tokens_per_epoch": plan.length.tokens_per_epoch,
        "pid": os.getpid(),
    }


def _cut_short(length: LengthPlan) -> dict[str, Any]:
    """Where max_steps ends a run before its epochs do: how many epochs that makes; in a stream
    nobody knows."""
    total, each = length.total_steps, length.steps_per_epoch
    if not length.max_steps or total is None or total < length.max_steps:
        return {}
    if each is None:
        return {"ends_by": "max_steps"}
    if total >= length.epochs * each:
        return {}
    return {"ends_by": "max_steps", "epochs_to_come": total / each}
