"""The start of a run: files in its folder, first events, and CPU threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from expert.core.events import read_events
from expert.core.publish import remove_leftovers
from expert.core.rundir import RunFolder, unwritable
from expert.core.stored_json import read_object_or_empty
from expert.data.tokens.prepare import RECIPE
from expert.model.attention import own_kernels_failure
from expert.model.loss import loss_kernel_failure
from expert.model.switches import list_switches
from expert.planning.machine.host import THREAD_VARIABLES, cores_available
from expert.planning.run_plan import RunPlan
from expert.run.build import environment
from expert.run.open import Opened
from expert.run.session.session import Session
from expert.run.stored.locate import plan_to_store
from expert.telemetry.cpu import available_cores


def announce(session: Session) -> None:
    """Write manifest, plan and environment, remove leftovers of dead writers, and report the
    start."""
    plan, device, emit = session.plan, session.device, session.emit
    if session.group.world.is_first:
        folder, opened = session.folder, session.opened
        for place in (folder.path, folder.checkpoints):
            if place.is_dir():
                remove_leftovers(place, alone=True)
        try:
            folder.write_json("manifest.json", opened.read.manifest.model_dump(mode="json"))
            folder.write_json("plan.json", plan_to_store(plan))
            folder.write_json("environment.json", environment(opened.machine))
            characters = getattr(session.data.encoder, "characters", None)
            if characters is not None:  # needed to read checkpoints of a character model
                known = {"type": "characters", "characters": characters}
                folder.write_json("vocabulary.json", known)
        except OSError as error:
            raise unwritable(folder.path, error) from error
    facts = started_facts(session.folder, plan, session.opened)
    emit("started", step=session.state.done, **facts)
    if device.type == "cpu":
        _settle_threads(session)
    waiting, session.early_warnings = session.early_warnings or [], None
    for text in waiting:
        emit("warning", text=text)
    emit("kernels", lines=[str(line) for line in list_switches(plan, device)])
    troubles = {
        "the loss runs": loss_kernel_failure(device) if plan.kernels.fused_loss else "",
        "attention runs": own_kernels_failure(device) if plan.kernels.attention == "flash" else "",
    }
    for what, trouble in troubles.items():
        if trouble:
            text = f"{what} without its Triton kernel: {trouble}"
            emit("warning", step=session.state.done, text=text)


def started_facts(folder: RunFolder, plan: RunPlan, opened: Opened) -> dict[str, Any]:
    """The fields of the "started" event. Options that matter are recorded, so that the resume
    command can repeat them."""
    source, cuda = Path(opened.read.source), plan.kernels.device == "cuda"
    named = {"manifest": str(source.resolve())} if source.is_file() else {}
    limited = {"vram": opened.vram} if opened.vram and cuda else {}
    many = {"ranks": plan.parallel.ranks, "engine": plan.parallel.engine}
    # If max_steps ends a run before its epochs do: how many epochs that is, unknown for a stream.
    length, cut_short = plan.length, dict[str, Any]()
    if length.epochs_reached is not None:
        cut_short = {"ends_by": "max_steps", "epochs_to_come": length.epochs_reached}
    elif length.steps_per_epoch is None and length.max_steps and length.total_steps:
        cut_short = {"ends_by": "max_steps"} if length.total_steps == length.max_steps else {}
    return {
        **named,
        **limited,
        **(many if plan.parallel.ranks > 1 else {}),
        "expert": plan.expert,
        "model": plan.model.name,
        "device": plan.target,
        "total_steps": plan.length.total_steps,
        "epochs": plan.length.epochs,
        **cut_short,
        "run": str(folder.path),
        "logging_steps": plan.watch.logging_steps,
        "trainable_parameters": plan.adapter.trainable_parameters,
        "tokens_per_epoch": plan.length.tokens_per_epoch,
        "pid": os.getpid(),
    }


def report_data(session: Session) -> None:
    """Report for every prepared folder whether it was reused and why; then all warnings about the
    plan and the rows."""
    data, emit = session.data, session.emit
    for split in data.splits():
        for prepared in split.folders:
            emit(
                "data",
                split=split.name,
                folder=str(prepared.folder.absolute()),
                hit=prepared.hit,
                because=prepared.because,
                key=prepared.key,
                # The hash of the rows it was made from, independent of the tokenizer.
                rows=read_object_or_empty(prepared.folder / RECIPE).get("data"),
                index=split.index_file.name,
                bad_rows=prepared.statistics.bad_rows,
            )
    for text in data.columns:
        emit("columns", text=text)
    for text in dict.fromkeys((*session.plan.warnings, *data.doubts)):
        emit("warning", text=text)


def choose_threads(own: int, *, granted: int, recorded: Mapping[str, Any]) -> tuple[int, str]:
    """The number of CPU threads, and why: torch's `own` within the `granted` cores.

    Splitting sums differently rounds differently. So the number depends on the machine and not on
    how busy it is: the same command gives the same losses, and a resumed run keeps its number
    (`recorded`: its "threads" event, or empty).
    """
    asked = next((name for name in THREAD_VARIABLES if os.environ.get(name)), None)
    before = recorded.get("threads")
    if asked is not None:
        return own, f"{asked} is set"
    if isinstance(before, int) and 1 <= before <= granted:
        return before, "as the run began"
    if granted < own:
        return max(1, granted), f"this process may use {granted} cores"
    return own, "torch's own number"


def _settle_threads(session: Session) -> None:
    """Use the chosen number of CPU threads, report it, and restore torch's number later."""
    own, recorded = torch.get_num_threads(), dict[str, Any]()
    if session.state.done:
        events = [e for e in read_events(session.folder.events) if e.get("event") == "threads"]
        recorded = events[-1] if events else {}
    granted = cores_available(Path("/")).value or own
    threads, because = choose_threads(own, granted=granted, recorded=recorded)
    if session.plan.kernels.deterministic:
        threads, because = own, "deterministic: the same parts are added every time"
    if threads != own:
        torch.set_num_threads(threads)
        session.closing.callback(torch.set_num_threads, own)
    cores = len(available_cores())
    facts = {"threads": threads, "cores": cores, "because": because, "own": own}
    session.emit("threads", step=session.state.done, **facts)
