"""Parts of a run that follow from its plan and from where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.planning.run_plan import RunPlan
    from expert.run.session import Session
    from expert.telemetry.ahead import Ahead
    from expert.telemetry.meter import Meter
    from expert.training.loop import LoopPlan
    from expert.training.pressure import Pressure
    from expert.training.recorder import Recorder
    from expert.training.state import TrainState
    from expert.training.stopping import BestSoFar

ENDLESS = 2**62
"""Updates of a run whose end nobody knows."""


def loop_plan(plan: RunPlan, data: RunData, state: TrainState) -> LoopPlan:
    """When what happens in the run."""
    from expert.training.loop import LoopPlan
    from expert.training.schedule import schedule_of, with_rollbacks
    from expert.training.spikes import Stability

    watch, stability, total = plan.watch, plan.stability, plan.length.total_steps
    # The epochs of a stream end when its rows do.
    per_epoch = None if data.stream is not None else plan.length.steps_per_epoch
    schedule = schedule_of(plan.optim, ENDLESS if total is None else total)
    schedule = with_rollbacks(schedule, state.schedule)

    def between(strategy: str, steps: int | None, epochs: int) -> tuple[int, int]:
        """Updates, or where those cannot be told epochs, from one of a kind to the next."""
        if strategy == "steps":
            return steps or 0, 0
        if strategy == "no":
            return 0, 0
        return (epochs * per_epoch, 0) if per_epoch else (0, epochs)

    strategy = watch.evaluation_strategy if data.validation is not None else "no"
    eval_every, eval_epochs = between(strategy, watch.eval_steps, watch.eval_every_epochs)
    save_every, save_epochs = between(
        watch.save_strategy, watch.save_steps, watch.save_every_epochs
    )
    return LoopPlan(
        schedule=schedule,
        max_norm=plan.optim.max_grad_norm,
        seed=plan.optim.seed,
        total_steps=total,
        steps_per_epoch=per_epoch,
        eval_every=eval_every,
        eval_epochs=eval_epochs,
        save_every=save_every,
        save_epochs=save_epochs,
        save_best=watch.load_best,
        stability=Stability(
            on_not_finite=stability.on_not_finite,
            max_skips=stability.max_skipped_updates,
            on_spike=stability.on_loss_spike,
            max_rollbacks=stability.max_rollbacks,
        ),
    )


def best_so_far(plan: RunPlan, state: TrainState) -> BestSoFar:
    """What follows the metric of the plan, from where the run stands."""
    from expert.training.stopping import BestSoFar

    watch = plan.watch
    return BestSoFar(
        watch.metric,
        greater_is_better=watch.greater_is_better,
        threshold=watch.early_stopping_threshold,
        patience=watch.early_stopping_patience,
        state=state.best,
    )


def meter_of(plan: RunPlan, data: RunData) -> Meter:
    """What measures the speed of the run."""
    from expert.telemetry.meter import Meter, Peak

    reasons = {decision.path: decision.because for decision in plan.decisions}
    because = reasons.get("length.peak_flops", "unknown")
    peak = Peak(flops=plan.length.peak_flops, because=because)
    return Meter(peak=peak, total_steps=plan.length.total_steps, ahead=ahead_of(plan, data))


def ahead_of(plan: RunPlan, data: RunData) -> Ahead | None:
    """The evaluations that the run has before it; None where nobody knows its end."""
    from expert.telemetry.ahead import EVALUATION_SHARE, Ahead
    from expert.training.state import TrainState

    total = plan.length.total_steps
    if total is None:
        return None
    loop = loop_plan(plan, data, TrainState())
    evaluates = bool(loop.eval_every or loop.eval_epochs)
    update = _places_of_update(plan, data)

    def cost(split: PreparedSplit | None) -> float:
        return 0.0 if split is None or not update else _places(plan, split) / update

    return Ahead(
        total_steps=total,
        every=loop.eval_every,
        at_end=evaluates,
        validation=EVALUATION_SHARE * cost(data.validation if evaluates else None),
        test=EVALUATION_SHARE * cost(data.test),
    )


def _places_of_update(plan: RunPlan, data: RunData) -> float:
    if data.train is not None and data.order is not None:
        return _places(plan, data.train) / max(1, data.order.steps_per_epoch)
    return float(plan.batch.sequences_per_update or 0) * plan.data.max_seq_length


def _places(plan: RunPlan, split: PreparedSplit) -> int:
    """What goes through the model when a split does; rows that go alone are hardly padded, as
    those of one length go together."""
    from expert.data.pack.packing import is_padded

    index = split.index
    return int(index.bin_lengths().sum()) if is_padded(plan) else index.bins * index.length


def recorder_of(session: Session) -> Recorder:
    """A recorder for what is built now; the meter of the run goes on."""
    from expert.telemetry.timeline import Timeline
    from expert.training.recorder import Recorder
    from expert.training.spikes import SpikeWatch

    plan, state = session.plan, session.state
    before: Recorder | None = getattr(session, "recorder", None)
    meter = before.meter if before is not None else meter_of(plan, session.data)
    return Recorder(
        session.emit,
        device=session.device,
        meter=meter,
        timeline=session.timeline or Timeline(session.device),
        spikes=SpikeWatch(state=state.losses or None),
        log_every=plan.watch.logging_steps,
        flops_per_token=plan.length.flops_per_token,
        loss_scaling=plan.kernels.loss_scaling,
        compiles=plan.kernels.compile,
        more=_device_fields(session, meter),
        pressure=session.pressure,
        skips=state.skips,
    )


def _device_fields(session: Session, meter: Meter) -> Callable[[], dict[str, Any]]:
    """What a step event says of the card or the cores: numbers, no text, which would be searched
    for secrets. Updates that compile are left out, as they are of its rates: the card stands
    still meanwhile."""
    from expert.telemetry.cpu import peak_memory_bytes
    from expert.telemetry.gpu import allocator_facts

    gpu, looked_at, cores = session.gpu, time.monotonic(), _core_fields(session)
    if gpu is None:

        def host_fields() -> dict[str, Any]:
            return {**cores(), "cpu_peak_memory_bytes": peak_memory_bytes()}

        return host_fields

    def fields() -> dict[str, Any]:
        nonlocal looked_at
        since, looked_at = looked_at, time.monotonic()
        facts = {
            **gpu.step_fields(max(since, meter.settled_at or since)),
            **allocator_facts(session.device),
            **cores(),
        }
        return {name: value for name, value in facts.items() if name != "because"}

    return fields


def _core_fields(session: Session) -> Callable[[], dict[str, Any]]:
    """What others take of the cores; who they are is an event of its own, as it is text."""
    from expert.telemetry.cpu import CpuSampler, Neighbours

    if session.plan.loader.workers:
        return dict  # workers are processes of their own, and would be taken for somebody else's
    sampler, neighbours = CpuSampler(), Neighbours()

    def fields() -> dict[str, Any]:
        facts = sampler.step_fields()
        named = neighbours.named(facts.get("cpu_others"))
        if named:
            session.emit("neighbours", step=session.state.done, processes=named)
        return facts

    return fields


def pressure_of(plan: RunPlan) -> Pressure:
    """What looks for signs that another plan would be better."""
    from expert.model.blocks import CompileWatch
    from expert.telemetry.cpu import cores_seen
    from expert.training.pressure import DataWait, Pressure, Recompiling, Spilling

    return Pressure(
        data=DataWait(workers=plan.loader.workers, cores=len(cores_seen())),
        spilling=Spilling(),
        recompiling=Recompiling(CompileWatch().recompiles),
    )


def tracker_of(
    plan: RunPlan, folder: RunFolder, tell: Callable[[str], None]
) -> tuple[Any | None, str]:
    """TensorBoard's files where they are wanted, and why there are none."""
    if "tensorboard" not in plan.watch.trackers:
        return None, ""
    from expert.telemetry.tensorboard import TensorBoardSink, TrackerUnavailable

    try:
        return TensorBoardSink(folder.tensorboard, tell=tell), ""
    except TrackerUnavailable as error:
        return None, str(error)
