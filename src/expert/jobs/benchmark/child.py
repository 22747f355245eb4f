"""The process that measures one setting with a real run through the training loop.

It trains a few steps, evaluates their loss on the held-out rows, and then times windows of steps on
request. Between two windows it waits inside the loop, where the next step's batches are requested:
model, optimizer and feed stay as they are and use neither a core nor the card, so that another
setting can be timed meanwhile.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.core.secrets import redacted
from expert.jobs.benchmark.numbers import judged, measured_fields
from expert.jobs.benchmark.processes import Job, Ready, Window
from expert.planning.decisions import Remark
from expert.planning.machine.machine import describe_machine
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.run.build import environment
from expert.run.open import open_planned
from expert.run.session.execute import StepWrapper, attempt
from expert.run.session.failures import exhausted_message, failure_of
from expert.run.session.recover import switch_plan
from expert.run.session.session import (
    Session,
    Start,
    copied,
    model_of,
    open_session,
    release_memory,
)
from expert.run.session.short_run import WITHOUT_PAUSES
from expert.run.session.start import announce
from expert.telemetry.cpu import available_cores, busy_seconds, own_seconds
from expert.training.recovery import changes, plan_after

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

    from expert.planning.run_plan import RunPlan
    from expert.telemetry.gpu import GpuSampler
    from expert.telemetry.meter import Meter

MIN_STEPS = 2
"""Trained if a single step takes longer than the whole budget."""
FIRST_STEPS = 3
"""Enough to compile, to fill caches, and to measure the time of a step."""
MIN_FAST_STEPS = 5
"""Fewer would hardly show a difference in the loss; used if time allows."""
SLOW_SECONDS = 1.0
"""Of slower steps few are needed: each is long enough to be timed alone."""
WARM_UP = 3
"""Untimed steps of a feed that has just started."""
CAPTURE_STEPS = 6
"""Steps: CUDA graphs are captured at the third batch, the optimizer's once its gradients have kept
their addresses for two."""
CAPTURE_STEPS_PER_WIDTH = 8
"""More of them for each width that is captured when it first comes: most come within 30 steps."""
ENOUGH_STEPS = 10_000_000
"""More than any windows need: the feed of a timed setting does not end."""
SECONDS_BETWEEN_EVENTS = 0.1
"""Sampling the card and writing a line takes a fraction of a millisecond: too long for fast
steps."""
NVML_WINDOW_SECONDS = 1.0
"""Seconds: NVML's utilization covers the last sixth of a second to one second."""
LOOK_SECONDS = 1.0
"""How long to watch for free cores: the first setting fixes the threads for all, and a fifth of a
second misses much."""
BECAUSE = "a benchmark measures steps alone"

Send = Callable[[dict[str, Any]], None]
"""Sends a message to the parent."""
Receive = Callable[[], dict[str, int] | None]
"""Waits for the parent's next order: a window of `steps` after `skip` untimed ones, or empty for
the results. None if the parent wants no more."""


class SettingFailed(ExpertError):
    """A setting that cannot be trained."""


def main(job: Job, connection: Connection, log: str, environ: dict[str, str]) -> None:
    """Measure, and send the results or why there are none; never returns."""
    if hasattr(os, "setsid"):
        os.setsid()  # the parent ends it with everything it has started
    os.environ.update(environ | {"TOKENIZERS_PARALLELISM": "false"})
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except FileNotFoundError:  # the benchmark was stopped while this process was starting
        os._exit(1)
    for stream in (1, 2):
        os.dup2(handle, stream)
    gc.freeze()  # or every collection scans all modules imported before the fork
    logging.disable(logging.WARNING)
    limit = int(job.pace.limit_seconds) + 60

    def send(fact: dict[str, Any]) -> None:
        _alarm(limit)
        connection.send(fact)

    def receive() -> dict[str, int] | None:
        _alarm(0)  # no limit while waiting, but the parent must be alive
        try:
            order: dict[str, int] = connection.recv()
        except EOFError:
            return None
        _alarm(limit)
        return order

    try:
        _alarm(limit)
        import torch

        # CUDA was initialised before this process was forked.
        if getattr(torch.cuda, "_is_in_bad_fork", lambda: False)():
            send({"spawn": True})
        else:
            measure(job, send, receive)
    except BrokenPipeError:  # the parent has gone
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - whatever it was, it ends this setting and no other
        sys.stderr.write(redacted(traceback.format_exc()))
        words = str(error).strip().splitlines()
        text = words[0] if words else ""
        known = isinstance(error, ExpertError)
        send({"failed": text if known else f"{type(error).__name__}: {text}"})
    os._exit(0)


def _alarm(seconds: int) -> None:
    """End this process after this time: the parent is gone, or it would have ended it before."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def measure(job: Job, send: Send, receive: Receive) -> None:
    """Train, evaluate the loss on the held-out rows, and time windows on request."""
    send({"doing": "opening the data", "done": 0, "of": 0})
    plan = for_measuring(job.plan, beside=job.beside)
    ready = open_planned(plan, job.read, describe_machine(job.read.folder))
    folder = RunFolder.create(job.runs, job.name)
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step":
            send({"doing": "training", "done": event["step"], "of": 0})

    opened = open_session(
        folder=folder,
        plan=ready.plan,
        data=ready.data,
        manifest=job.read.manifest,
        sinks=(on_event,),
        start=Start(machine=ready.machine, allow_remote_code=job.allow_remote_code),
        keep=False,
    )
    with folder.locked(), opened as run:
        announce(run, threads=job.threads, look_seconds=LOOK_SECONDS)
        send({"doing": "loading the model", "done": 0, "of": 0})
        _measured(run, job, events, send, receive)


def _measured(
    run: Session, job: Job, events: list[dict[str, Any]], send: Send, receive: Receive
) -> None:
    from expert.model.switches import set_switches

    steps = _train_first_steps(run, events, job)
    weights = None if job.speed_only else copied(model_of(run).tensors())
    if run.plan.kernels.cuda_graphs:  # timed steps must run from captured graphs
        widths = CAPTURED_WIDTHS if run.plan.data.flat else 0
        _train_to(run, run.state.done + CAPTURE_STEPS + CAPTURE_STEPS_PER_WIDTH * widths)

    def judge() -> dict[str, Any]:
        if weights is None:
            return {}
        send({"doing": "judging the loss on held-out rows", "done": 0, "of": 0})
        found = judged(run, weights, job)
        set_switches(run.plan.kernels)  # the windows are timed with the setting's own switches
        return found

    found = judge() if job.keeps_running else {}
    release_memory(run.device)
    ready = _ready(events, steps)
    _log_every(run, max(1, round(SECONDS_BETWEEN_EVENTS / ready.step_seconds)))
    send({"ready": ready})
    windows = Windows(
        receive,
        send,
        finished=lambda: measured_fields(run, events, windows.timed, steps) | found,
        keeps_running=job.keeps_running,
        device=run.device,
        meter=lambda: run.instruments.meter,
        gpu=run.instruments.gpu,
        fresh=0 if ready.step_seconds > SLOW_SECONDS else WARM_UP,
    )
    run.plan = _with(run.plan, **{"length.total_steps": run.state.done + ENOUGH_STEPS})
    while not windows.over:
        _train_checked(run, windows)
    if windows.ends_with_loss:
        numbers = measured_fields(run, events, windows.timed, steps)
        run.built = None
        release_memory(run.device)
        send({"measured": numbers | judge()})


def _ready(events: list[dict[str, Any]], steps: int) -> Ready:
    threads = next((e for e in events if e["event"] == "threads"), {})
    return Ready(
        step_seconds=_step_seconds(events),
        steps=steps,
        threads=threads.get("threads"),
        lowered=threads.get("lowered"),
        cores=len(available_cores()),
        environment=environment(),
    )


def for_measuring(plan: RunPlan, *, beside: bool) -> RunPlan:
    """The plan without evaluation, saving and so on, and with a learning rate that does not depend
    on the number of steps."""
    bare = plan.with_values(
        {
            **WITHOUT_PAUSES,
            "watch.early_stopping_patience": None,
            "optim.scheduler": "constant",
            "optim.scheduler_options": {},
            "optim.warmup_ratio": None,
            "optim.warmup_steps": WARM_UP,
            "stability.on_loss_spike": "ignore",
            "length.max_steps": None,
        },
        BECAUSE,
        "preset",
    )
    if not beside:
        return bare
    # Or calibrating plans would count the other setting's memory as this one's.
    shared = Remark(
        kind="warning", path="memory.budget_bytes", text="another setting is on the card"
    )
    return bare.model_copy(update={"remarks": [*bare.remarks, shared]})


# --- training ------------------------------------------------------------------------------------


def _train_first_steps(run: Session, events: list[dict[str, Any]], job: Job) -> int:
    """Train the given number of steps, or as many as there is time for; returns how many."""
    steps, seconds = job.steps, job.pace.train_seconds
    if steps is None:
        _train_to(run, MIN_STEPS)
        # The faster of the two: the first one also loads kernels.
        if min(_step_times(events)) > seconds:
            return MIN_STEPS
        _train_to(run, FIRST_STEPS)
        each = _step_seconds(events)
        least = FIRST_STEPS if each > SLOW_SECONDS else MIN_FAST_STEPS
        steps = max(least, min(job.pace.max_train_steps, int(seconds / each)))
    _train_to(run, steps)
    return steps


def _train_to(run: Session, total: int) -> None:
    """Train up to `total` steps; a smaller micro-batch is the only fallback allowed."""
    from expert.training.step import StepInterrupted

    run.plan = _with(run.plan, **{"length.total_steps": total})
    while run.state.done < total:
        failure, interrupted = None, False
        try:
            _train_checked(run)
        except Exception as error:
            failure = failure_of(error, run.doing, run.plan)
            interrupted = isinstance(error, StepInterrupted)
            if failure is None:
                raise
        if failure is not None:
            after = plan_after(run.plan, failure)
            changed = changes(run.plan, after) if after is not None else []
            if after is None or not all(each.path.startswith("batch.") for each in changed):
                raise SettingFailed(exhausted_message(failure).partition("  (")[0])
            switch_plan(run, after, failure, interrupted=interrupted)


def _train_checked(run: Session, through: StepWrapper = iter) -> None:
    """Train until the end of the plan or of the steps; raise if something else ends it."""
    ending = attempt(run, through=through)
    if ending.trouble is not None:
        raise SettingFailed(f"step {run.state.done}: the loss or a gradient is not finite")
    if ending.exit_code is not None:
        raise SettingFailed("stopped by a signal")


def _with(plan: RunPlan, **values: Any) -> RunPlan:
    return plan.with_values(values, BECAUSE, "preset")


def _log_every(run: Session, every: int) -> None:
    run.plan = _with(run.plan, **{"watch.logging_steps": every})
    timeline = run.built.timeline if run.built is not None else None
    run.recorder = run.instruments.recorder(run.plan, run.state, timeline)


def _step_seconds(events: list[dict[str, Any]]) -> float:
    """The slower of the last two lines: a host that runs ahead of its device has launched the
    second step before the first is done, and sees real step times only from the third on."""
    return max(1e-4, *_step_times(events))


def _step_times(events: list[dict[str, Any]]) -> list[float]:
    """Seconds per step in each of the last two log lines."""
    lines = [event for event in events if event["event"] == "step"][-2:]
    return [float(event["seconds"]) / max(1, event.get("updates") or 1) for event in lines]


# --- timing --------------------------------------------------------------------------------------


class Windows:
    """Passes steps to the training loop while a window is timed, and waits in between."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        finished: Callable[[], dict[str, Any]],
        device: torch.device,
        meter: Callable[[], Meter],
        gpu: GpuSampler | None = None,
        keeps_running: bool = True,
        fresh: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fresh`: steps of a feed that has just started, which are never timed."""
        self._hear, self._say, self._finished = receive, send, finished
        self._device, self._meter, self._gpu, self._clock = device, meter, gpu, clock
        self._stays, self._fresh = keeps_running, fresh
        self._order: dict[str, int] | None = None
        self.timed: list[Window] = []
        self.over = self.ends_with_loss = False

    def __call__(self, steps: Iterable[Any]) -> Iterator[Any]:
        """The steps of one feed; a window that a feed could not finish starts over."""
        coming, fresh = iter(steps), self._fresh
        while (order := self._order or self._next_order()) is not None:
            self._order = order
            for _ in range(max(order["skip"], fresh)):
                if (fed := next(coming, None)) is None:
                    return
                yield fed
            fresh = 0
            start, taken = self._snapshot(), []
            for _ in range(order["steps"]):
                if (fed := next(coming, None)) is None:
                    return
                taken.append((fed.step.done, fed.counts.real_tokens, fed.counts.examples))
                yield fed
            self.timed.append(self._window(start, self._snapshot(), taken))
            self._order = None
            self._say({"window": self.timed[-1]})

    def _next_order(self) -> dict[str, int] | None:
        """Wait for a window to time; None if there will be none."""
        while True:
            with self._meter().paused():
                order = self._hear()
            if order:
                return order
            if order is not None and self._stays:
                self._say({"measured": self._finished()})
                continue
            self.over, self.ends_with_loss = True, order is not None
            return None

    def _snapshot(self) -> tuple[float, float, float]:
        """Once the device is idle: the time, and CPU seconds of all processes and of this one."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return (self._clock(), *_cpu_seconds())

    def _window(
        self,
        start: tuple[float, float, float],
        end: tuple[float, float, float],
        taken: list[tuple[int, int, int]],
    ) -> Window:
        seconds, busy, own = (after - before for before, after in zip(start, end, strict=True))
        sample = self._gpu.sample() if self._gpu and seconds >= NVML_WINDOW_SECONDS else None
        return Window(
            first=taken[0][0],
            steps=len(taken),
            tokens=sum(tokens for _, tokens, _ in taken),
            examples=sum(examples for _, _, examples in taken),
            seconds=seconds,
            others=max(0.0, (busy - own) / seconds) if seconds > 0 else 0.0,
            gpu_percent=sample.utilization_percent if sample is not None else None,
        )


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds of all processes, and of this one including its batch workers."""
    import psutil

    own = own_seconds()
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:  # it has just ended and is counted with its parent
            continue
        own += used.user + used.system
    return busy_seconds(), own
