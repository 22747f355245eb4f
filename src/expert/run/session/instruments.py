"""What observes a run: when things are due, how fast it is, and what its device does."""

from __future__ import annotations

import time
from typing import Any

import torch

from expert.data.feed.run_data import RunData
from expert.manifest.schema.kinds import ON_POLICY
from expert.model import blocks
from expert.model.fused.experts import busiest_experts
from expert.planning.run_plan import RunPlan
from expert.run.build import Built
from expert.telemetry import cpu
from expert.telemetry.gpu import GpuSampler, allocator_stats
from expert.telemetry.meter import Meter
from expert.telemetry.timeline import Timeline
from expert.training.loop import LoopPlan
from expert.training.recorder import DelayedValues, Emit, MoreFields, RecompileCounter, Recorder
from expert.training.schedule import schedule_of, with_rollbacks
from expert.training.spikes import SpikeWatch
from expert.training.state import TrainState
from expert.training.stopping import BestSoFar

ENDLESS = 2**62
"""Step count for a run without a known end."""


class Instruments:
    """What observes a run from start to end."""

    def __init__(self, plan: RunPlan, *, device: torch.device, emit: Emit) -> None:
        peak = plan.length.peak_flops
        self.device, self.emit = device, emit
        self.gpu = GpuSampler(device.index or 0) if device.type == "cuda" else None
        self.recompiling = RecompileCounter(blocks.compiled_graphs)
        self.meter = Meter(
            # Of all ranks together, like the token counts.
            peak_flops=peak * plan.parallel.ranks if peak is not None else None,
            total_steps=plan.length.total_steps,
        )

    def recorder(self, plan: RunPlan, state: TrainState, built: Built | None = None) -> Recorder:
        """A recorder for the next steps, starting from `state`."""
        return Recorder(
            self.emit,
            device=self.device,
            meter=self.meter,
            timeline=built.timeline if built is not None else Timeline(self.device),
            spikes=SpikeWatch(state=state.losses or None),
            log_every=plan.watch.logging_steps,
            flops_per_token=plan.length.flops_per_token,
            loss_scaling=plan.kernels.loss_scaling,
            compiles=plan.kernels.compile,
            answers=plan.objective.method == ON_POLICY,
            more=self._more_fields(built, workers=plan.loader.workers),
            recompiling=self.recompiling,
            skips=state.skips,
        )

    def _more_fields(self, built: Built | None, *, workers: int) -> MoreFields:
        """Fields of a step event about the device, and about the experts of a mixture: numbers
        only, as text would be searched for secrets.
        Compiling steps are excluded, as they are from the rates: the card is idle then."""
        gpu, meter, sampled_at = self.gpu, self.meter, time.monotonic()
        sampler, late = cpu.CpuSampler(), DelayedValues(self.device)  # a line later on a card

        def fields(step: int) -> dict[str, Any]:
            nonlocal sampled_at
            # Workers are processes of their own, which would be mistaken for other programs.
            facts = {} if workers else sampler.step_fields()
            if built is not None and (ratio := busiest_experts(built.loaded.module)) is not None:
                late.add(step, [ratio])
                for _, (value,) in late.take():
                    facts["experts/busiest"] = value
            if gpu is None:
                return {**facts, "cpu_peak_memory_bytes": cpu.peak_memory_bytes()}
            since, sampled_at = sampled_at, time.monotonic()
            steady = since if meter.steady_since is None else meter.steady_since
            of_gpu = gpu.step_fields(max(since, steady), steady_since=steady)
            return {**of_gpu, **allocator_stats(self.device), **facts}

        return fields


def loop_plan(plan: RunPlan, data: RunData, state: TrainState) -> LoopPlan:
    """When to evaluate, save and stop, starting from `state`."""
    watch, total = plan.watch, plan.length.total_steps
    # The epochs of a stream end with its rows.
    per_epoch = None if data.stream is not None else plan.length.steps_per_epoch
    schedule = schedule_of(plan.optim, ENDLESS if total is None else total)

    def between(strategy: str, steps: int | None, epochs: int) -> tuple[int, int]:
        """The interval in steps, or in epochs if the steps of an epoch are unknown."""
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
        schedule=with_rollbacks(schedule, state.schedule),
        max_norm=plan.optim.max_grad_norm,
        seed=plan.optim.seed,
        total_steps=total,
        steps_per_epoch=per_epoch,
        eval_every=eval_every,
        eval_epochs=eval_epochs,
        save_every=save_every,
        save_epochs=save_epochs,
        save_best=watch.load_best,
        stability=plan.stability,
    )


def best_so_far(plan: RunPlan, state: TrainState) -> BestSoFar:
    watch = plan.watch
    return BestSoFar(
        watch.metric,
        greater_is_better=watch.greater_is_better,
        threshold=watch.early_stopping_threshold,
        patience=watch.early_stopping_patience,
        state=state.best,
    )
