"""One rung of a benchmark, measured: a real run through the product's own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.jobs.benchmark.rung_numbers import numbers_of
from expert.jobs.benchmark.rung_windows import FIRST_UPDATES, Gate, Order, window_facts
from expert.run.session.session import copied, model_of, open_session, release_memory
from expert.run.session.short_run import WITHOUT_PAUSES

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan
    from expert.run.session.session import Session
    from expert.telemetry.gpu import GpuSampler

FEWEST_LEARNT = 2
"""Where one update alone takes longer than all of them should."""
LEAST_LEARNT = 5
"""Fewer would hardly show a difference, where there is time for more."""
SLOW_SECONDS = 1.0
"""Updates that take longer are few: each of them is long enough to be timed alone."""
WARM_UP = 3
"""Updates of a feed that begins: they are not measured."""
ENOUGH_UPDATES = 10_000_000
"""More than any windows need: the feed of a rung that stands ready has no end."""
LOOK_SECONDS = 1.0
"""For free cores: the threads that the first rung settles count for all, and a fifth of a second
misses much."""
SECONDS_BETWEEN_EVENTS = 0.1
"""Looking at the card and writing a line takes a fraction of a millisecond, so not at each update
of a fast run."""

Say = Callable[[dict[str, Any]], None]
"""Sends a fact to whoever has the rung measured."""
Hear = Callable[[], Order | None]
"""Waits for the next order; None where nobody is there any more."""
UNTIL_RECORDED = 6
"""Updates: the passes are recorded at the third batch of a shape, the optimizer's step when its
gradients have stayed where they are for two."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a climb and its rungs may take for what."""

    total_seconds: float
    """Of the whole climb, as it is announced."""
    learn_seconds: float
    most_learnt: int
    window_seconds: float
    """Updates that take longer are a window each."""
    least_pairs: int
    """Windows of a rung, each beside one of the rung it is held against."""
    most_pairs: int
    """As many where fewer leave it open whether there is a difference."""
    held_out: int
    limit_seconds: float
    """After so long without a word a rung is given up."""


QUICK = Pace(
    total_seconds=120.0,
    learn_seconds=3.0,
    most_learnt=10,
    window_seconds=1.0,
    least_pairs=3,
    most_pairs=6,
    held_out=64,
    limit_seconds=150.0,
)
THOROUGH = Pace(
    total_seconds=600.0,
    learn_seconds=12.0,
    most_learnt=30,
    window_seconds=3.0,
    least_pairs=5,
    most_pairs=10,
    held_out=256,
    limit_seconds=600.0,
)
THOROUGH_FROM_MINUTES = 5.0
"""With less time windows are short and pairs are few, as with --quick."""


def pace_of(*, quick: bool, minutes: float | None) -> Pace:
    """The pace for the time that was asked for."""
    if minutes is None:
        return QUICK if quick else THOROUGH
    pace = QUICK if minutes < THOROUGH_FROM_MINUTES else THOROUGH
    return replace(pace, total_seconds=60 * minutes)


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
    only_rate: bool = False
    """Measured before: only its speed is wanted, so that little is learnt and nothing judged."""
    stays: bool = True
    """There is room for the model that is judged beside the one that trains: both stay, and windows
    can be timed afterwards. Else the one goes before the other is built, and nothing is left."""
    beside: bool = False
    """Another rung is on the device, standing still."""
    threads: int | None = None
    """Of a CPU, as the first rung has settled them; None: it is this one that does."""
    allow_remote_code: bool = False


class RungFailed(ExpertError):
    """A rung that could not be measured."""


def measure(work: Work, say: Say, hear: Hear) -> None:
    """Train, look at the held-out rows, and time as many windows as are asked for."""
    from expert.core.rundir import RunFolder
    from expert.manifest.reader import ReadManifest
    from expert.manifest.schema.manifest import Manifest
    from expert.planning.machine.machine import describe_machine
    from expert.planning.run_plan import RunPlan
    from expert.run.open import open_planned
    from expert.run.session.session import Start
    from expert.run.session.start import announce

    manifest = Manifest.model_validate(work.manifest)
    read = ReadManifest(manifest, work.name, Path(work.folder))
    say({"doing": "opening the data", "done": 0, "of": 0})
    plan = for_measuring(RunPlan.model_validate(work.plan), beside=work.beside)
    ready = open_planned(plan, read, describe_machine(read.folder))
    events: list[dict[str, Any]] = []

    def heard(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step":
            say({"doing": "training", "done": event["step"], "of": 0})

    folder = RunFolder.create(Path(work.runs), work.name)
    opened = open_session(
        folder=folder,
        plan=ready.plan,
        data=ready.data,
        manifest=manifest,
        sinks=(heard,),
        start=Start(machine=ready.machine, allow_remote_code=work.allow_remote_code),
        keep=False,
    )
    with folder.locked(), opened as run:
        announce(run, threads=work.threads, look_seconds=LOOK_SECONDS)
        say({"doing": "loading the model", "done": 0, "of": 0})
        _measured(run, work, events, say, hear)


def _measured(run: Session, work: Work, events: list[dict[str, Any]], say: Say, hear: Hear) -> None:
    """Learn, judge, and stand ready; or judge at the end, where there is no room for that."""
    from expert.jobs.benchmark.rung_loss import judged
    from expert.model.switches import set_switches
    from expert.telemetry.cpu import cores_seen

    pace = Pace(**work.pace)
    learnt = _learn(run, events, pace, work.learnt)
    weights = None if work.only_rate else copied(model_of(run).tensors())
    if run.plan.kernels.cuda_graphs:  # what is judged is copied; what is timed is to be recorded
        _train_to(run, run.state.done + UNTIL_RECORDED)

    def look() -> dict[str, Any]:
        if weights is None:
            return {}
        say({"doing": "looking at the held-out rows", "done": 0, "of": 0})
        found = judged(
            run, weights, precision=work.judged_in, own_way=work.own_way, most=pace.held_out
        )
        set_switches(run.plan.kernels)  # what follows is timed as the rung trains
        return found

    found = look() if work.stays else {}
    release_memory(run.device)
    seconds = _seconds_per_update(events)
    _log_every(run, max(1, round(SECONDS_BETWEEN_EVENTS / seconds)))
    threads = next((e for e in events if e["event"] == "threads"), {})
    told = {key: threads.get(key) for key in ("threads", "lowered")}
    told |= {"seconds_per_update": seconds, "updates_learnt": learnt, "cores": len(cores_seen())}
    say({"begun": told})

    def seen() -> dict[str, Any]:
        measured = numbers_of(run, events, gate.windows, learnt)
        return {"seen": {"updates_learnt": learnt, **measured, **found}}

    def next_order() -> Order | None:
        order = hear()
        while work.stays and order is not None and order.do == "tell":
            say(seen())
            order = hear()
        return order

    gate = Gate(
        next_order,
        lambda window: say({"window": window_facts(window)}),
        device=run.device,
        meter=lambda: run.instruments.meter,
        use=lambda: _use_of(run.instruments.gpu),
        fresh=0 if seconds > SLOW_SECONDS else WARM_UP,
    )
    _stand_ready(run, gate)
    if gate.last is not None and gate.last.do == "tell":
        run.now.built = None
        release_memory(run.device)
        found |= look()
        say(seen())


def _use_of(gpu: GpuSampler | None) -> float | None:
    """Of the card in percent, at this moment."""
    seen = gpu.sample() if gpu is not None else None
    return seen.utilization_percent if seen is not None else None


def for_measuring(plan: RunPlan, *, beside: bool = False) -> RunPlan:
    """The plan without what is no part of a step, and with a rate that is the same in all rungs
    however many updates each of them makes."""
    from expert.planning.decisions import Remark

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
    made = plan.with_values(values, "a benchmark measures steps alone", "preset")
    if not beside:
        return made
    # Or the memory of the other rung would be taken for this one's when plans are calibrated.
    shared = Remark(kind="warning", path="memory.budget_bytes", text="another rung is on the card")
    return made.model_copy(update={"remarks": [*made.remarks, shared]})


def _learn(run: Session, events: list[dict[str, Any]], pace: Pace, learnt: int | None) -> int:
    """Train so many updates, or as many as there is time for; how many they were."""
    if learnt is None:
        _train_to(run, FEWEST_LEARNT)
        # The quicker of the two: the first one loads kernels as well.
        if min(_times(events)) > pace.learn_seconds:
            learnt = FEWEST_LEARNT
        else:
            _train_to(run, FIRST_UPDATES)
            seconds = _seconds_per_update(events)
            least = FIRST_UPDATES if seconds > SLOW_SECONDS else LEAST_LEARNT
            learnt = max(least, min(pace.most_learnt, int(pace.learn_seconds / seconds)))
    _train_to(run, learnt)
    return learnt


def _stand_ready(run: Session, gate: Gate) -> None:
    """Train as the gate lets it, until it is told something else."""
    from expert.run.session.execute import attempt

    values = {"length.total_steps": run.state.done + ENOUGH_UPDATES}
    run.now.plan = run.plan.with_values(values, "a benchmark measures steps alone", "preset")
    while not gate.left:
        ending = attempt(run, through=gate)
        if ending.trouble is not None:
            raise RungFailed(f"step {run.state.done}: the loss or a gradient is not finite")
        if ending.exit_code is not None:
            raise RungFailed("stopped by a signal")


def _train_to(run: Session, total: int) -> None:
    """Train up to so many updates; fewer rows at once are the only change that is allowed."""
    from expert.run.session.execute import attempt
    from expert.run.session.failures import failure_of, nothing_left
    from expert.run.session.recover import change_over
    from expert.training.recovery import changes, plan_after
    from expert.training.step import StepInterrupted

    values = {"length.total_steps": total}
    run.now.plan = run.plan.with_values(values, "a benchmark measures steps alone", "preset")
    while run.state.done < total:
        failure, torn, ending = None, False, None
        try:
            ending = attempt(run)
        except Exception as error:
            failure = failure_of(error, run.now.doing, run.plan)
            torn = isinstance(error, StepInterrupted)
            if failure is None:
                raise
        if failure is not None:
            after = plan_after(run.plan, failure)
            changed = changes(run.plan, after) if after is not None else []
            if after is None or not all(each.path.startswith("batch.") for each in changed):
                raise RungFailed(nothing_left(failure).partition("  (")[0])
            change_over(run, after, failure, interrupted=torn)
            continue
        assert ending is not None
        if ending.trouble is not None:
            raise RungFailed(f"step {run.state.done}: the loss or a gradient is not finite")
        if ending.exit_code is not None:
            raise RungFailed("stopped by a signal")


def _log_every(run: Session, every: int) -> None:
    values = {"watch.logging_steps": every}
    now = run.now
    now.plan = now.plan.with_values(values, "a benchmark measures steps alone", "preset")
    timeline = now.built.timeline if now.built is not None else None
    now.recorder = run.instruments.recorder(now.plan, now.state, timeline)


def _seconds_per_update(events: list[dict[str, Any]]) -> float:
    """Of the last two lines the slower: a host that runs ahead of its device has launched the
    second update before the first is done, and knows only from the third on how long they take."""
    return max(1e-4, *_times(events))


def _times(events: list[dict[str, Any]]) -> list[float]:
    """Seconds an update took, by each of the last two lines."""
    steps = [event for event in events if event["event"] == "step"][-2:]
    return [float(event["seconds"]) / max(1, event.get("updates") or 1) for event in steps]
