"""The job behind `expert benchmark`: what each setting gains on the user's own model and data.

Every setting is one short run of the training loop in its own process (child.py); it is kept for
the settings after it if it is faster and the loss agrees. The baseline runs first and again last:
what changed between is drift of the machine.
"""

from __future__ import annotations

import datetime
import shutil
import statistics
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.errors import ManifestError
from expert.core.files import write_text_atomically
from expert.core.interrupts import Interrupted
from expert.insight.ladder.ladder import (
    FILE,
    KEPT_STATUSES,
    Ladder,
    Measured,
    SettingResult,
    Status,
    doubts_of,
    loss_difference,
    verdict,
)
from expert.jobs.benchmark.child import Job, MeasurementFailed, events_of
from expert.jobs.benchmark.measured import Event, first_timed_step, measured_of
from expert.jobs.benchmark.request import (
    BenchmarkRequest,
    CannotBenchmark,
    NothingMeasured,
    Watcher,
    pace_of,
)
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.benchmark_settings import (
    BASELINE,
    DEFAULT_MICRO_BATCH,
    SETTINGS,
    THE_REST,
    Setting,
    SettingContext,
    as_overrides,
    changes,
    cost_of,
    find_setting,
    together,
    tolerance,
    why_unchanged,
)
from expert.planning.machine.machine import describe_machine
from expert.planning.machine.target import choose_target
from expert.planning.measurements import (
    DECIDED_BY_BENCHMARK,
    MeasuredRate,
    forget_rates,
    measurements_file,
    remember_rate,
)
from expert.planning.models.resolve import basename
from expert.planning.plan import choose_model
from expert.run.open import open_run, prepare

if TYPE_CHECKING:
    from expert.data.pack.pack_index import PackIndex
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

HELD_OUT_SHARE = 0.1
"""Of the training rows, if the manifest holds none out."""
ROWS_PER_STEP_TOLERANCE = 0.02
"""Tolerance for the rows of a step relative to the other settings."""
FIRST_EVALUATION = 5
"""Steps after which the first setting evaluates its loss, and again: fewer hardly show a
difference. The last of them is where all later settings evaluate theirs."""
MIN_TIMED_STEPS = 3
MAX_OVERRUN = 1.5
"""Times the announced time: no setting is started by itself if the benchmark would end later."""
REST_IN_SETTINGS = 2
"""Settings' worth of time for all remaining ones together: most are faster, but they compile."""


def benchmark(
    request: BenchmarkRequest, *, folder: Path | None = None, watcher: Watcher | None = None
) -> Ladder:
    """Run the benchmark; runs and result go to `folder`, or to a temporary one.

    If interrupted, the watcher receives what was measured so far.
    """
    bench = Benchmark(request, watcher or Watcher())
    place = folder or Path(tempfile.mkdtemp(prefix="expert-benchmark-"))
    try:
        ladder = bench.run(place)
    except Interrupted as end:
        if (done := bench.partial_result) is not None:
            note = f"interrupted by {end.by} after '{done.rungs[-1].name}': later settings were not"
            notes = [*done.notes, f"{note} measured"]
            bench.watcher.benchmark_interrupted(done.model_copy(update={"notes": notes}))
        raise
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if not any(setting.measured for setting in ladder.rungs):
        last = next((setting for setting in ladder.rungs if setting.status == "failed"), None)
        raise NothingMeasured(
            f"no setting could be measured: {last.because if last else 'none was tried'}"
        )
    if request.remember and not request.only:
        bench.remember(ladder)
    return ladder


class Benchmark:
    """One benchmark: its rows, the settings kept so far, and its results."""

    def __init__(self, request: BenchmarkRequest, watcher: Watcher) -> None:
        self.request, self.watcher = request, watcher
        self.pace = pace_of(quick=request.quick, minutes=request.minutes)
        self.wanted = _full_names(request.only)  # an unknown name is refused before preparing
        first = request.read(())
        if first.manifest.training.dataset.streaming:
            raise CannotBenchmark(
                "training.dataset.streaming: a stream has no rows that every setting could see "
                "again  (--set training.dataset.streaming=false)"
            )
        self.machine = describe_machine(first.folder)
        self.full_plan = self._plan(first)
        """The plan without a benchmark: every choice left to it."""
        self.notes: list[str] = []
        self._prepare_rows(first)
        # The settings kept so far: keys of training.config, their plan, and their result.
        self.values = BASELINE.values(self.ground)
        self.plan: RunPlan | None = None
        self.result: SettingResult | None = None
        self.applied: Setting | None = None
        """The last setting that was applied without being measured."""
        self.gains: dict[str, float] = {}
        """Speedups of kept settings, by plan path."""
        self.results: list[SettingResult] = []
        self.left_out: list[Setting] = []
        """Settings that there was no time for."""
        self.steps: int | None = None
        """Steps after which the loss is evaluated; the first measured setting decides."""
        self.held_out = (0, 0)
        """Rows and tokens that the loss was evaluated on."""
        self.environment: Mapping[str, Any] = {}
        self.drift: float | None = None
        self.partial_result: Ladder | None = None
        """What was measured so far, if anything."""
        self.started_at = time.monotonic()
        self.place = Path()

    # --- rows and plans ------------------------------------------------------------------------

    def _prepare_rows(self, first: ReadManifest) -> None:
        """Prepare the rows, hold some out, and determine how many make up a step: the same number
        in every setting."""
        from expert.data.pack.pack import bins_per_step

        characters = self.full_plan.model.name == CHAR_GPT
        overrides: tuple[str, ...] = ()
        packed: tuple[str, ...] = ("training.config.tokenize=ahead",)
        packed += () if characters else ("training.config.packing=true",)
        model, tell = self.request.model, self.watcher.preparing
        prepared = prepare(self.request.read(packed), model=model, tell=tell)
        if prepared.validation is None:
            overrides = (f"training.dataset.validation_split={HELD_OUT_SHARE}",)
            prepared = prepare(self.request.read((*overrides, *packed)), model=model, tell=tell)
            text = f"the manifest has no validation rows: {HELD_OUT_SHARE:.0%} of the rows were"
            self.notes.append(f"{text} held out")
        index: PackIndex = prepared.train.index
        written = self.full_plan.batch.examples_per_update
        per_sequence, sequences = index.examples / max(1, index.bins), bins_per_step(index, written)
        self.examples = written if characters else max(1, round(sequences * per_sequence))
        if self.examples != written:
            self.notes.append(
                f"a step has {self.examples} rows, not the {written} of the manifest: as many as "
                f"{sequences} packed sequences hold on average"
            )
        config, dataset = first.manifest.training.config, first.manifest.training.dataset
        # The manifest's micro-batch size: what people run before they tune anything.
        asked = (config.micro_batch_size, config.batch_size)
        default = self.examples if characters else DEFAULT_MICRO_BATCH
        micro_batch = next((size for size in asked if size != "auto"), default)
        not_late = ""
        if characters:
            not_late = "a corpus of characters needs no tokenizer"
        elif dataset.tasks:
            not_late = "the rows of several tasks are mixed by their prepared tokens"
        elif self.full_plan.data.overlong == "split":
            not_late = "rows are split, and into how many parts is known only with their tokens"
        self.training_rows = index.examples
        self.overrides = (
            *overrides,
            *as_overrides({"batch_size": self.examples, "gradient_accumulation_steps": 1}),
        )
        self.ground = SettingContext(
            on_gpu=self.full_plan.kernels.device == "cuda",
            characters=characters,
            rows_at_once=min(micro_batch, self.examples),
            rows_per_sequence=per_sequence,
            sequences_per_update=sequences,
            packed=False,
            not_late=not_late,
        )

    def _plan(self, read: ReadManifest) -> RunPlan:
        return open_run(
            read,
            data="unread",
            model=self.request.model,
            vram=self.request.vram,
            machine=self.machine,
            use_measurements=False,
        ).plan

    def _planned(self, values: Mapping[str, Any]) -> tuple[ReadManifest, RunPlan]:
        read = self.request.read((*self.overrides, *as_overrides(values)))
        return read, self._plan(read)

    def _ground_of(self, values: Mapping[str, Any]) -> SettingContext:
        return replace(self.ground, packed=values.get("packing") is True)

    # --- measuring -----------------------------------------------------------------------------

    def run(self, place: Path) -> Ladder:
        """Measure every setting from the baseline on, and the baseline again; writes the results
        to `place` after each."""
        self.started_at, self.place = time.monotonic(), place
        (place / "logs").mkdir(parents=True, exist_ok=True)
        for later, setting in zip(range(len(SETTINGS), -1, -1), (BASELINE, *SETTINGS), strict=True):
            self._add(self._try_setting(setting, later))
        if self.left_out:
            rest = together(self.left_out, self.values, self._ground_of)
            self._add(self._measure(rest, {**self.values, **rest.settings}, later=0))
        self._measure_drift()
        return self._write()

    def _add(self, result: SettingResult | None) -> None:
        if result is not None:
            self.results.append(result)
            self.watcher.setting_finished(result)
            self._write()

    def _try_setting(self, setting: Setting, later: int) -> SettingResult | None:
        """Measure a setting if it changes something; None if it was not requested."""
        wanted, here = self.wanted, self.plan
        ground = self._ground_of(self.values)
        values = {**self.values, **setting.values(ground)}
        reason, plan = "" if setting is BASELINE else setting.needs(ground), None
        if self.left_out and not reason:
            return self._no_time(setting)
        with suppress(ManifestError):  # measuring shows why it fails
            plan = self._planned(values)[1] if not reason else None
        if here is not None and plan is not None:
            reason = why_unchanged(setting, here, plan)
            if reason:  # it changes nothing here, but a later choice may depend on it
                self.values = values
        if reason:
            asked = not wanted or setting.name in wanted
            return self._result(setting, "not here", reason) if asked else None
        if wanted and setting.name not in wanted and plan is not None:
            self.values, self.plan, self.result, self.applied = values, plan, None, setting
            return None
        if wanted and self.result is None and self.applied is not None:
            self._add(self._measure(self.applied, self.values, later=later))  # to compare with
        # The last setting is always measured, and so are those requested by name.
        took = [result.seconds for result in self.results if result.seconds]
        more = statistics.median(took) * (2 + min(later, REST_IN_SETTINGS)) if took else 0.0
        too_late = self._elapsed + more > MAX_OVERRUN * self.pace.total_seconds
        if later and not wanted and too_late:
            return self._no_time(setting)
        return self._measure(setting, values, later=later)

    def _no_time(self, setting: Setting) -> SettingResult:
        self.left_out.append(setting)
        words = f"in '{THE_REST}', as {self._elapsed:.0f} s had passed  (--minutes N for more)"
        return self._result(setting, "no time", words)

    def _measure(self, setting: Setting, values: dict[str, Any], *, later: int) -> SettingResult:
        """Measure a setting against the last kept one, and keep it if it is worth it."""
        try:
            read, plan = self._planned(values)
        except ManifestError as error:
            what = f"cannot be combined with the kept settings: {error.problems[0].what}"
            return self._result(setting, "failed", what)
        number = len([r for r in self.results if r.measured or r.status == "failed"]) + 1
        began, left = self._elapsed, max(0.0, self.pace.total_seconds - self._elapsed)
        self.watcher.setting_started(
            setting.name, setting.adds, number, number + later, max(began / number, left)
        )
        try:
            here = self._run(self._job(setting.name, read, plan), share=left / (later + 2))
        except MeasurementFailed as lost:
            if self.result is None:  # nothing could be measured yet: it may not be at fault
                self.values, self.plan = values, plan
            return self._result(setting, "failed", str(lost), plan, seconds=self._elapsed - began)
        self.steps = self.steps or here.updates_learnt
        below, before = self.result, self.plan
        facts: dict[str, Any] = {"measured": here, "seconds": self._elapsed - began}
        status: Status = "kept"
        because = ""
        if below is not None and below.measured is not None and before is not None:
            allowed, reason = tolerance(before, plan)
            status, because = verdict(
                below.measured, here, below.name, tolerance=allowed, cost=cost_of(before, plan)
            )
            facts |= {
                "below": below.name,
                "gain": here.tokens_per_second / below.measured.tokens_per_second,
                "loss_difference": loss_difference(here.loss, below.measured.loss),
                "tolerance": allowed,
                "tolerance_because": reason,
            }
        base = next((r.measured for r in self.results if r.name == BASELINE.name), None)
        if setting is BASELINE or base is not None:
            rate = here.tokens_per_second
            facts["cumulative"] = rate / base.tokens_per_second if base is not None else 1.0
        result = self._result(setting, status, because, plan, **facts)
        if status in KEPT_STATUSES:
            if result.gain is not None:
                self.gains |= dict.fromkeys(result.changes, result.gain)
            self.values, self.plan, self.result = values, plan, result
        return result

    def _measure_drift(self) -> None:
        """Run the baseline again: what it gained or lost since the start is the machine's doing."""
        base = next((result for result in self.results if result.name == BASELINE.name), None)
        if base is None or base.measured is None or base is self.results[-1]:
            return
        number = len([result for result in self.results if result.measured]) + 1
        left = max(0.0, self.pace.total_seconds - self._elapsed)
        self.watcher.setting_started("baseline again", "to see drift", number, number, base.seconds)
        with suppress(MeasurementFailed):
            job = self._job("baseline again", *self._planned(BASELINE.values(self.ground)))
            again = self._run(job, share=left)
            self.drift = again.tokens_per_second / base.measured.tokens_per_second - 1

    def _job(self, name: str, read: ReadManifest, plan: RunPlan) -> Job:
        return Job(
            name=name.replace(" ", "-").replace("+", "and"),
            plan=plan,
            read=read,
            runs=self.place / "runs",
            eval_every=self.steps or min(FIRST_EVALUATION, self.pace.max_train_steps),
            held_out=self.pace.held_out,
            allow_remote_code=self.request.allow_remote_code,
        )

    def _run(self, job: Job, *, share: float) -> Measured:
        """Run a setting until its loss is known and it was timed for long enough."""
        events: list[Event] = []
        ends, first = time.monotonic() + share, first_timed_step(job.plan)
        with closing(self._events(job)) as coming:
            for event in coming:
                events.append(event)
                kind = event["event"]
                if kind == "opened":
                    self.environment = self.environment or event["environment"]
                    self.held_out = (event["held_out"], self.held_out[1])
                elif kind in DOING:
                    self.watcher.setting_progress(DOING[kind], event.get("step") or 0)
                elif kind in ("failed", "not_finite"):
                    why = event.get("error") or "the loss or a gradient is not finite"
                    raise MeasurementFailed(f"step {event.get('step')}: {why}")
                elif kind == "fell_back" and not all(
                    change["path"].startswith("batch.") for change in event["changes"]
                ):  # another setting than the one to measure
                    raise MeasurementFailed(str(event["reason"]))
                if self._is_enough(events, first, over=time.monotonic() > ends):
                    break
        evaluated = [event for event in events if event["event"] == "eval"]
        at = [event for event in evaluated if event["step"] <= self.pace.max_train_steps]
        judged = at[-1] if self.steps is None and at else evaluated[0] if evaluated else None
        if judged is not None:
            self.held_out = (self.held_out[0], judged["tokens"])
        return measured_of(
            job.plan,
            events,
            judged,
            first,
            window=self.pace.window_seconds,
            rows=self.training_rows,
        )

    def _events(self, job: Job) -> Generator[Event, None, None]:
        log = self.place / "logs" / f"{job.name}.txt"
        return events_of(job, log=log, limit=self.pace.limit_seconds)

    def _is_enough(self, events: list[Event], first: int, *, over: bool) -> bool:
        """Whether the loss is known, and the time is over or steps were timed for long enough."""
        timed = [event for event in events if event["event"] == "step" and event["step"] > first]
        if len(timed) < MIN_TIMED_STEPS or not any(event["event"] == "eval" for event in events):
            return False
        enough = sum(event["seconds"] for event in timed) >= self.pace.timed_seconds
        return over or (enough and timed[-1]["step"] >= (self.steps or self.pace.max_train_steps))

    # --- results -------------------------------------------------------------------------------

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.started_at

    def _result(
        self,
        setting: Setting,
        status: Status,
        because: str,
        plan: RunPlan | None = None,
        **more: Any,
    ) -> SettingResult:
        before = self.plan
        return SettingResult(
            name=setting.name,
            adds=setting.adds,
            status=status,
            because=because,
            changes=changes(before, plan) if before is not None and plan is not None else {},
            settings=setting.values(self.ground),
            **{"seconds": 0.0, **more},
        )

    def _write(self) -> Ladder:
        plan = self.full_plan
        rows, tokens = self.held_out
        ladder = Ladder(
            name=plan.expert,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=self.request.command,
            version=__version__,
            card=plan.target,
            device=plan.kernels.device,
            model=plan.model.name,
            parameters=plan.model.parameters,
            adapter=plan.adapter.type,
            quantization=plan.model.quantization,
            dataset=str(plan.data.dataset.get("path") or "several tasks"),
            training_rows=self.training_rows,
            max_seq_length=plan.data.max_seq_length,
            examples_per_update=self.examples,
            held_out_rows=rows,
            held_out_tokens=tokens,
            quick=self.request.quick,
            seconds=self._elapsed,
            environment=dict(self.environment),
            notes=[*self.notes, *self._notes_on_rows()],
            rungs=self.results,
            drift=self.drift,
        )
        ladder = ladder.model_copy(update={"doubts": doubts_of(ladder)})
        write_text_atomically(self.place / FILE, ladder.as_text())
        if any(setting.measured for setting in ladder.rungs):
            self.partial_result = ladder
        return ladder

    def _notes_on_rows(self) -> list[str]:
        """Which settings were measured together, or had other rows in a step."""
        said: dict[str, list[str]] = {}
        for result in self.results:
            rows = result.measured.examples_per_update if result.measured else self.examples
            # The average number of rows in packed sequences is rarely a whole number.
            if abs(rows - self.examples) > max(0.5, ROWS_PER_STEP_TOLERANCE * self.examples):
                words = f"{rows:.1f} rows a step, not {self.examples}"
                said.setdefault(words, []).append(result.name)
        rest = [f"{one.name}: {one.adds}" for one in self.results if one.name == THE_REST]
        return [*rest, *(f"{', '.join(names)}: {words}" for words, names in said.items())]

    def remember(self, ladder: Ladder) -> None:
        """Store the best settings for later plans if they can be trusted, and report whether they
        were."""
        won, plan, paths = self.result, self.plan, tried_paths(ladder)
        if ladder.doubts:
            self.watcher.not_remembered("; ".join(ladder.doubts))
            return
        if not paths:
            words = f"no setting was measured by itself, only '{THE_REST}'"
            self.watcher.not_remembered(f"{words}  (--minutes N for more time)")
            return
        assert won is not None, "the first setting that was measured is kept"
        assert won.measured is not None
        assert plan is not None
        settings = {path: attrgetter(path)(plan) for path in paths}
        if "batch.micro_batch" in settings:
            settings["batch.micro_batch"] = won.measured.micro_batch
        target = choose_target(
            self.machine, vram=self.request.vram, device=self.full_plan.kernels.device
        )
        threads = self.environment.get("threads") if ladder.device == "cpu" else None
        rate = MeasuredRate(
            card=target.card.slug if target.card else target.name,  # as plans look it up
            model=basename(plan.model.name).lower(),
            parameters=plan.model.parameters,
            adapter=plan.adapter.type,
            quantization=plan.model.quantization,
            tokens_per_second=won.measured.tokens_per_second,
            measured_on=ladder.date[:10],
            command=ladder.command,
            max_seq_length=plan.data.max_seq_length,
            packing=plan.data.packing,
            settings=settings,
            gains={path: self.gains[path] for path in settings if path in self.gains},
            threads=threads,
        )
        file = measurements_file()
        try:
            remember_rate(file, rate)
        except OSError as error:  # the result matters more than remembering it
            self.watcher.not_remembered(f"{error.filename}: {error.strerror}")
        else:
            self.watcher.remembered(file)


DOING = {
    "opening": "opening the data",
    "started": "loading the model",
    "step": "training",
    "eval": "training",
}
"""What a setting is doing after an event."""


def _full_names(names: tuple[str, ...]) -> list[str]:
    """The full names of these settings; the error for an unknown one lists all."""
    found = []
    for name in names:
        setting = find_setting(name)
        if setting is None:
            known = ", ".join(setting.name for setting in (BASELINE, *SETTINGS))
            raise CannotBenchmark(f"--only {name}: no such setting  (settings: {known})")
        found.append(setting.name)
    return found


def tried_paths(ladder: Ladder) -> list[str]:
    """Plan values that were measured both ways, among those that later plans may reuse."""
    tried = {
        setting.name for setting in ladder.rungs if setting.status not in ("not here", "no time")
    }
    about = [
        path for setting in (BASELINE, *SETTINGS) if setting.name in tried for path in setting.about
    ]
    return [path for path in DECIDED_BY_BENCHMARK if path in about]


def forget(request: BenchmarkRequest | None) -> tuple[Path, int]:
    """Forget stored benchmarks of a manifest's model, or all; returns the file and the count."""
    file, model = measurements_file(), None
    if request is not None:
        model = basename(choose_model(request.read(()).manifest, request.model).name).lower()
    return file, forget_rates(file, model)
