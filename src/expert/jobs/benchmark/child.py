"""The process that measures one setting with a short run, and the parent's end of it.

Each setting has its own process, forked from a server that has imported everything (otherwise 9 s
of CPU time each): nothing is left over for the next setting, and a crash ends only one.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Generator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.process import describe_exit, last_line
from expert.core.secrets import redacted
from expert.jobs.benchmark.measured import Event
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

ENOUGH_STEPS = 10_000_000
"""More than any setting needs: the parent ends the run when it has seen enough."""
PRELOADED_MODULES = (
    *("torch", "transformers.modeling_utils", "expert.data.feed.loader", "expert.model.load"),
    *("expert.run.session.execute", "expert.telemetry.gpu", "expert.training.loop"),
)
NO_TRACKER_WARNING = ("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
"""A killed process leaves semaphores, which Python's tracker cleans up and would report."""


class MeasurementFailed(Exception):
    """A setting that cannot be measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process runs."""

    name: str
    plan: RunPlan
    read: ReadManifest
    runs: Path
    """Where its run folder goes."""
    eval_every: int
    """Steps between evaluations of the held-out rows."""
    held_out: int
    """Rows that the loss is evaluated on."""
    allow_remote_code: bool = False


def events_of(
    job: Job, *, log: Path, limit: float, target: Any = None
) -> Generator[Event, None, None]:
    """Run the job in a process and yield the events of its run; closing this kills the process.

    Raises MeasurementFailed if the run fails, or is silent for `limit` seconds. `target`: the
    function that the process runs, with the job, its end of a pipe, a log file and the environment.
    """
    context: Any = multiprocessing.get_context("forkserver")
    os.environ.setdefault(*NO_TRACKER_WARNING)
    # Importing peft imports bitsandbytes, which initialises CUDA, and no fork survives that; then
    # each process imports peft itself, in two seconds.
    cuda = job.plan.kernels.device == "cuda" and find_spec("bitsandbytes")
    context.set_forkserver_preload([*PRELOADED_MODULES, *(() if cuda else ("peft",))])
    # For the same reason torch asks NVML and not CUDA whether there is a card.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    connection, theirs = context.Pipe()
    process = context.Process(
        target=target or run_setting, args=(job, theirs, str(log), dict(os.environ))
    )
    process.start()
    theirs.close()
    try:
        while True:
            if not connection.poll(limit):
                raise MeasurementFailed(f"no answer for {limit:.0f} s")
            event: Event = connection.recv()
            if event["event"] == "setting_failed":
                raise MeasurementFailed(event["error"])
            yield event
    except (EOFError, OSError):
        process.join(limit)
        ended = describe_exit(process.exitcode) if process.exitcode is not None else "ended"
        words = last_line(log) or "it printed nothing"
        raise MeasurementFailed(f"its process {ended}: {words}") from None
    finally:  # also on Ctrl-C: nothing may be left behind
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # before it had its own group
        process.join()
        connection.close()


def run_setting(job: Job, connection: Connection, log: str, environ: dict[str, str]) -> None:
    """In the process: run, and send every event to the parent; never returns."""
    os.setsid()  # the parent ends it with everything it has started
    os.environ.update(environ | {"TOKENIZERS_PARALLELISM": "false"})
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except FileNotFoundError:  # the benchmark was stopped while this process was starting
        os._exit(1)
    for stream in (1, 2):
        os.dup2(handle, stream)
    logging.disable(logging.WARNING)
    try:
        _run(job, connection)
    except BrokenPipeError:  # the parent has gone
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - whatever it was, it ends this setting and no other
        sys.stderr.write(redacted(traceback.format_exc()))
        text = (str(error).strip().splitlines() or [""])[0].partition("  (")[0]
        known = isinstance(error, ExpertError)
        text = text if known else f"{type(error).__name__}: {text}"
        connection.send({"event": "setting_failed", "error": text})
    os._exit(0)


def _run(job: Job, connection: Connection) -> None:
    from expert.core.rundir import RunFolder
    from expert.planning.machine.machine import describe_machine
    from expert.run.build import environment
    from expert.run.open import open_planned
    from expert.run.session.short_run import SETTLING, short_run

    connection.send({"event": "opening"})
    opened = open_planned(job.plan, job.read, describe_machine(job.read.folder))
    opened = _with_few_held_out(opened, job.held_out)
    held_out = opened.data.validation
    connection.send(
        {
            "event": "opened",
            "environment": environment(opened.machine),
            "held_out": held_out.index.examples if held_out is not None else 0,
        }
    )
    values = {
        "watch.evaluation_strategy": "steps",
        "watch.eval_steps": job.eval_every,
        "watch.early_stopping_patience": None,
        # A learning rate that does not depend on the number of steps.
        "optim.scheduler": "constant",
        "optim.scheduler_options": {},
        "optim.warmup_ratio": None,
        "optim.warmup_steps": SETTLING,
        "stability.on_loss_spike": "ignore",
    }
    short_run(
        opened,
        updates=ENOUGH_STEPS,
        values=values,
        folder=RunFolder.create(job.runs, job.name),
        on_event=connection.send,
        allow_remote_code=job.allow_remote_code,
    )


def _with_few_held_out(opened: Opened, most: int) -> Opened:
    """With the first validation rows alone: the same for all settings, packed as planned."""
    import numpy as np

    from expert.data.pack.pack import pack_best_fit, pack_none

    split, plan = opened.data.validation, opened.plan
    if split is None:
        return opened
    whole = split.index
    if plan.model.name == CHAR_GPT:  # blocks of one document, not rows
        count = min(most, whole.bins)
        pieces = slice(int(whole.bin_offsets[count]))
        index = replace(
            whole,
            examples=count,
            bin_offsets=whole.bin_offsets[: count + 1],
            piece_document=whole.piece_document[pieces],
            piece_start=whole.piece_start[pieces],
            piece_stop=whole.piece_stop[pieces],
        )
    else:
        documents = np.unique(whole.piece_document)[:most]
        lengths = split.open().lengths[documents]
        length, soft, overlong = plan.data.max_seq_length, whole.soft_tokens, plan.data.overlong
        if plan.is_padded:
            index = pack_none(lengths, length, overlong=overlong, soft_tokens=soft)
        else:
            index = pack_best_fit(lengths, length, 0, overlong=overlong, soft_tokens=soft)
        index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
    few = replace(opened.data, validation=replace(split, index=index), test=None)
    return replace(opened, run_data=few)
