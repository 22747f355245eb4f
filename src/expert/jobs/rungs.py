"""One rung of a benchmark, measured: a real run through the product's own loop."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.jobs.rehearsing import WITHOUT_PAUSES, Rehearsal, copied

if TYPE_CHECKING:
    from expert.jobs.checkpoints import Groups
    from expert.jobs.feeding import RunData
    from expert.jobs.preparing import PreparedSplit
    from expert.planning.run_plan import RunPlan
    from expert.training.evaluation import EvalSums

FIRST_UPDATES = 3
"""Enough to compile, to fill caches, and to know how long an update takes."""
LEAST_LEARNT = 5
"""Fewer would hardly show a difference, where there is time for more."""
SLOW_SECONDS = 2.0
"""Updates that take longer are few: each of them is long enough to be timed alone."""
WARM_UP = 3
"""Updates of a feed that begins: they are not measured."""
SECONDS_BETWEEN_EVENTS = 0.25
"""Looking at the card and writing a line takes a fraction of a millisecond, so not at each update
of a fast run."""

Tell = Callable[[str, int, int], None]
"""Told of what is being done: in words, how far, and of how much."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a rung may take for what."""

    learn_seconds: float
    most_learnt: int
    windows: int
    measure_seconds: float
    least_measured: int
    held_out: int
    limit_seconds: float


QUICK = Pace(
    learn_seconds=8.0,
    most_learnt=10,
    windows=3,
    measure_seconds=2.0,
    least_measured=6,
    held_out=64,
    limit_seconds=150.0,
)
THOROUGH = Pace(
    learn_seconds=15.0,
    most_learnt=30,
    windows=5,
    measure_seconds=15.0,
    least_measured=10,
    held_out=256,
    limit_seconds=600.0,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rung is measured by; it travels as JSON."""

    name: str
    plan: dict[str, Any]
    manifest: dict[str, Any]
    folder: str
    """The folder of the manifest."""
    runs: str
    """Where the run folder goes."""
    pace: dict[str, Any]
    learnt: int | None
    """Updates before the held-out rows are looked at; None: as many as there is time for."""
    judged_in: str
    """Precision of that look, the same for all rungs."""
    own_way: bool = False
    """Whether to look at them as this rung trains, too."""
    allow_remote_code: bool = False


class RungFailed(ExpertError):
    """A rung that could not be measured."""


class MeasuredRun(Rehearsal):
    """A run that gives its model's memory back before it is judged."""

    def let_go(self) -> None:
        """Give the model's memory back."""
        self._built = None
        self._let_go()


def measure(work: Work, tell: Tell) -> dict[str, Any]:
    """Train, look at the held-out rows, and time; what was seen, by name."""
    from expert.core.rundir import RunFolder
    from expert.jobs.training import open_data
    from expert.manifest.reader import ReadManifest
    from expert.manifest.schema import Manifest
    from expert.planning.run_plan import RunPlan

    pace = Pace(**work.pace)
    manifest = Manifest.model_validate(work.manifest)
    read = ReadManifest(manifest, work.name, Path(work.folder))
    tell("opening the data", 0, 0)
    plan = for_measuring(RunPlan.model_validate(work.plan))
    plan, data, _ = open_data(plan, read, lambda *_: None)
    events: list[dict[str, Any]] = []

    def heard(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step":
            tell("training", event["step"], run.plan.length.total_steps or 0)

    run = MeasuredRun(
        folder=RunFolder.create(Path(work.runs), work.name),
        plan=plan,
        data=data,
        manifest=manifest,
        sinks=(heard,),
        allow_remote_code=work.allow_remote_code,
    )
    with run.folder.locked(), run:
        run.announce()
        tell("loading the model", 0, 0)
        seen = _trained(run, events, pace, work.learnt)
        tell("looking at the held-out rows", 0, 0)
        seen |= _judged(run, seen.pop("weights"), work, pace.held_out)
    return seen


def for_measuring(plan: RunPlan) -> RunPlan:
    """The plan without what is no part of a step, and with a rate that is the same in all rungs
    however many updates each of them makes."""
    values = {
        **WITHOUT_PAUSES,
        "watch.early_stopping_patience": None,
        "optim.scheduler": "constant",
        "optim.scheduler_options": {},
        "optim.warmup_ratio": None,
        "optim.warmup_steps": WARM_UP,
        "stability.on_loss_spike": "ignore",
        "length.max_steps": None,
    }
    return plan.with_values(values, "a benchmark measures steps alone", "preset")


def _trained(
    run: MeasuredRun, events: list[dict[str, Any]], pace: Pace, learnt: int | None
) -> dict[str, Any]:
    """Learn so many updates, keep the weights, and go on with the clock in hand."""
    _train_to(run, FIRST_UPDATES)
    seconds = _seconds_per_update(events)
    slow = seconds > SLOW_SECONDS
    if learnt is None:
        least = FIRST_UPDATES if slow else LEAST_LEARNT
        learnt = max(least, min(pace.most_learnt, int(pace.learn_seconds / seconds)))
    _train_to(run, learnt)
    weights = copied(run.built.tensors())
    seconds = _seconds_per_update(events)
    every = max(1, round(SECONDS_BETWEEN_EVENTS / seconds))
    least = pace.windows if slow else pace.least_measured
    wanted = max(least, math.ceil(pace.measure_seconds / seconds))
    per_window = max(1, math.ceil(wanted / (pace.windows * every)))
    begin = math.ceil((learnt + (1 if slow else WARM_UP)) / every) * every
    end = begin + pace.windows * per_window * every
    _log_every(run, every)
    # One more: the line of an update is written when the next one has been launched.
    _train_to(run, end + every)
    steps = [e for e in events if e["event"] == "step" and begin < e["step"] <= end]
    if len(steps) < pace.windows:
        raise RungFailed(f"only {len(steps)} lines were written while measuring")
    return {
        "weights": weights,
        "updates_learnt": learnt,
        "updates_before": begin,
        "updates_measured": end - begin,
        **_numbers(run, events, steps, pace.windows),
    }


def _train_to(run: MeasuredRun, total: int) -> None:
    """Train up to so many updates; fewer rows at once are the only change that is allowed."""
    from expert.jobs.healing import change_over, failure_of, nothing_left
    from expert.training.recovery import changes, plan_after
    from expert.training.step import UpdateTorn

    values = {"length.total_steps": total}
    run.plan = run.plan.with_values(values, "a benchmark measures steps alone", "preset")
    while run.state.done < total:
        failure, torn, ending = None, False, None
        try:
            ending = run.attempt()
        except Exception as error:
            failure = failure_of(error, run.doing, run.plan)
            torn = isinstance(error, UpdateTorn)
            if failure is None:
                raise
        if failure is not None:
            after = plan_after(run.plan, failure)
            changed = changes(run.plan, after) if after is not None else []
            if after is None or not all(each.path.startswith("batch.") for each in changed):
                raise RungFailed(nothing_left(failure).partition("  (")[0])
            change_over(run, after, failure, torn=torn)
            continue
        assert ending is not None
        if ending.trouble is not None:
            raise RungFailed(f"step {run.state.done}: the loss or a gradient is not finite")
        if ending.exit_code is not None:
            raise RungFailed("stopped by a signal")


def _log_every(run: MeasuredRun, every: int) -> None:
    from expert.jobs.parts import recorder_of

    values = {"watch.logging_steps": every}
    run.plan = run.plan.with_values(values, "a benchmark measures steps alone", "preset")
    run.recorder = recorder_of(run)


def _seconds_per_update(events: list[dict[str, Any]]) -> float:
    """Of the last two lines the slower: a host that runs ahead of its device has launched the
    second update before the first is done, and knows only from the third on how long they take."""
    steps = [event for event in events if event["event"] == "step"][-2:]
    slower = max(event["seconds"] / max(1, event.get("updates") or 1) for event in steps)
    return max(1e-4, float(slower))


def _numbers(
    run: MeasuredRun, events: list[dict[str, Any]], steps: list[dict[str, Any]], windows: int
) -> dict[str, Any]:
    """What the step lines say, window by window."""
    size = len(steps) // windows
    parts = [steps[i * size : (i + 1) * size] for i in range(windows)]

    def total(key: str, part: list[dict[str, Any]] = steps) -> float:
        return float(sum(event.get(key) or 0 for event in part))

    rates = [total("tokens", part) / total("seconds", part) for part in parts]
    samples = statistics.median(total("examples", p) / total("seconds", p) for p in parts)
    used = [e["gpu_utilization"] for e in steps if e.get("gpu_utilization") is not None]
    plan, train, order = run.plan, run.data.train, run.data.order
    assert train is not None
    assert order is not None
    speed = statistics.median(rates)
    mfu, because = _mfu(plan, speed)
    return {
        "tokens_per_second": speed,
        "windows": rates,
        "samples_per_second": samples,
        "seconds_per_update": statistics.median(
            total("seconds", p) / total("updates", p) for p in parts
        ),
        "seconds_per_epoch": train.index.examples / samples,
        "gpu_utilization": statistics.fmean(used) if used else None,
        "peak_memory_bytes": _peak_memory(steps[-1]),
        "mfu": mfu,
        "mfu_because": because,
        "padding": _share(steps, "padding"),
        "data_wait": total("time_data_wait") / total("seconds"),
        "examples_per_update": train.index.examples * order.bins_per_update / order.count,
        "compile_seconds": next((e["seconds"] for e in events if e["event"] == "compiled"), None),
        "micro_batch": plan.batch.micro_batch,
        "accumulation": plan.batch.accumulation or 1,
        "fallbacks": [str(e.get("reason", "")) for e in events if e["event"] == "fell_back"],
        "training_rows": train.index.examples,
    }


def _share(steps: list[dict[str, Any]], key: str) -> float | None:
    known = [event for event in steps if event.get(key) is not None]
    weight = sum(event.get("updates") or 1 for event in known)
    total = float(sum(e[key] * (e.get("updates") or 1) for e in known))
    return total / weight if weight else None


def _mfu(plan: RunPlan, tokens_per_second: float) -> tuple[float | None, str]:
    why = {decision.path: decision.because for decision in plan.decisions}
    for path, value in (
        ("length.peak_flops", plan.length.peak_flops),
        ("length.flops_per_token", plan.length.flops_per_token),
    ):
        if value is None:
            return None, why.get(path, "unknown")
    assert plan.length.peak_flops is not None
    assert plan.length.flops_per_token is not None
    return tokens_per_second * plan.length.flops_per_token / plan.length.peak_flops, ""


def _peak_memory(step: dict[str, Any]) -> int | None:
    """Of the card as the allocator holds it; on a CPU of the process, where the system tells."""
    if step.get("peak_reserved_bytes") is not None:
        return int(step["peak_reserved_bytes"])
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# --- the held-out rows ---------------------------------------------------------------------------


def _judged(run: MeasuredRun, weights: Groups, work: Work, most: int) -> dict[str, Any]:
    """Loss of the weights on held-out rows, computed in the same way whatever rung made them:
    rows alone, SDPA, nothing compiled. Where it is asked for, also as the rung trains."""
    own = run.plan.with_values(
        {
            "kernels.compile": False,  # that it computes the same is a rung of its own
            "kernels.loss_scaling": False,
            "kernels.checkpointing": "none",
        },
        "only looked at",
        "preset",
    )
    plan = own.with_values(
        {
            "data.packing": "none",
            "kernels.attention": "sdpa",
            "kernels.fused_loss": True,
            "kernels.precision": work.judged_in,
        },
        "all rungs are judged in one way",
        "preset",
    )
    if run.data.validation is None:
        return {"loss": None, "held_out_rows": 0, "held_out_tokens": 0}
    run.let_go()
    sums = _looked_at(plan, run, weights, most)
    seen = {
        "loss": sums.loss_sum.item() / max(1, sums.targets),
        "held_out_rows": sums.examples,
        "held_out_tokens": sums.targets,
    }
    if work.own_way:
        other = _looked_at(own, run, weights, most)
        seen["own_loss"] = other.loss_sum.item() / max(1, other.targets)
    return seen


def _looked_at(plan: RunPlan, run: MeasuredRun, weights: Groups, most: int) -> EvalSums:
    """The held-out rows under a plan, with a model that is gone again afterwards."""
    from itertools import islice

    from expert.jobs.building import build
    from expert.jobs.feeding import split_batches
    from expert.training.evaluation import evaluate

    split, rows, batches_of = _held_out(plan, run.data, most)
    built = build(plan, run.data.encoder, device=run.device)
    built.load(weights)
    built.loaded.module.eval()
    with split_batches(plan, split, rows=rows, device=run.device) as batches:
        sums = evaluate(built.engine, islice(batches, batches_of))
    assert sums is not None
    return sums


def _held_out(plan: RunPlan, data: RunData, most: int) -> tuple[PreparedSplit, int, int]:
    """The first of the validation rows as the plan lays them out, how many go at once, and how
    many batches that are."""
    import numpy as np

    from expert.data.pack import pack_best_fit, pack_none
    from expert.jobs.feeding import is_padded

    split = data.validation
    assert split is not None
    rows = max(1, min(8, plan.batch.eval_batch, most))
    if split.index.rule == "blocks":
        return split, rows, math.ceil(most / rows)
    documents = np.unique(split.index.piece_document)[:most]
    lengths = split.open().lengths[documents]
    soft, overlong = split.index.soft_tokens, plan.data.overlong
    length = plan.data.max_seq_length
    if is_padded(plan):
        index = pack_none(lengths, length, overlong=overlong, soft_tokens=soft)
    else:
        index = pack_best_fit(lengths, length, 0, overlong=overlong, soft_tokens=soft)
    index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
    return replace(split, index=index), rows, math.ceil(index.bins / rows)
