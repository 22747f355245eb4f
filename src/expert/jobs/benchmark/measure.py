"""Measures one setting after the other: what is kept, and what it is compared with."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.errors import ExpertError, ManifestError
from expert.core.files import write_text_atomically
from expert.insight.ladder.ladder import (
    FILE,
    KEPT_STATUSES,
    Ladder,
    Measured,
    SettingResult,
    crowded,
    doubts_of,
)
from expert.insight.ladder.pairs import Paired, spread_of
from expert.jobs.benchmark.compare import Timed, Timing
from expert.jobs.benchmark.pace import TRAINING_SHARE, Clock, pace_of
from expert.jobs.benchmark.processes import Job, MeasurementFailed, Progress, SettingProcess
from expert.jobs.benchmark.result import KeptSettings, judged, notes_on, result_of
from expert.jobs.benchmark.rows import ReadWith, prepare_rows
from expert.planning.benchmark_settings import (
    BASELINE,
    SETTINGS,
    THE_REST,
    Setting,
    SettingContext,
    as_overrides,
    find_setting,
    together,
    why_not_comparable,
    why_unchanged,
)
from expert.planning.machine.machine import describe_machine
from expert.planning.machine.threads import choose_threads
from expert.run.open import open_run
from expert.run.smollm2 import provide_model

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

COUNTS = ("training_rows", "held_out_rows", "held_out_tokens")
"""The same for all settings."""
NAMES = tuple(setting.name for setting in (BASELINE, *SETTINGS))

Starter = Callable[..., SettingProcess]


class CannotBenchmark(ExpertError):
    """A benchmark that cannot start."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    read: ReadWith
    command: str
    model: str | None = None
    vram: str | None = None
    quick: bool = False
    minutes: float | None = None
    """Approximate time limit; None: two with `quick`, else ten."""
    only: tuple[str, ...] = ()
    """Names of settings; others are applied without being measured. Empty: all are measured."""
    remember: bool = True
    allow_remote_code: bool = False


class Watcher:
    """Follows a benchmark; this one shows nothing."""

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Rows are being tokenised."""

    def setting_started(self, setting: Setting, number: int, of: int, left: float) -> None:
        """A setting starts, `number` of `of`; about `left` seconds remain for all."""

    def comparing_with_baseline(self, name: str, left: float) -> None:
        """The best setting is compared with the baseline directly."""

    def crowded(self, words: str) -> None:
        """Other processes use the cores while settings are timed."""

    def setting_progress(self, doing: str, done: int, of: int) -> None:
        """What the setting is doing, and how far it is."""

    def setting_finished(self, result: SettingResult) -> None:
        """A setting was measured, or skipped."""

    def benchmark_interrupted(self, ladder: Ladder) -> None:
        """Interrupted; this is what was measured so far."""

    def remembered(self, file: Path) -> None:
        """The best setting is remembered for later plans."""

    def not_remembered(self, because: str) -> None:
        """The best setting could not be remembered."""


def wanted_settings(names: tuple[str, ...]) -> list[str]:
    """The full names of these settings; the error for an unknown one lists all."""
    found = []
    for name in names:
        setting = find_setting(name)
        if setting is None:
            known = ", ".join(NAMES)
            raise CannotBenchmark(f"--only {name}: no such setting  (settings: {known})")
        found.append(setting.name)
    return found


class Benchmark:
    """One benchmark: its inputs and its state."""

    def __init__(self, request: BenchmarkRequest, watcher: Watcher) -> None:
        self.request, self.watcher = request, watcher
        self.pace = pace_of(quick=request.quick, minutes=request.minutes)
        wanted = wanted_settings(request.only)  # an unknown name is refused before preparing
        first = request.read(())
        if first.manifest.training.dataset.streaming:
            raise CannotBenchmark(
                "training.dataset.streaming: a stream has no rows that every setting could see "
                "again  (--set training.dataset.streaming=false)"
            )
        provide_model(first, request.model)
        self.machine = describe_machine(first.folder)
        self.full_plan = self._plan(first)
        """The plan without a benchmark: every choice left to it."""
        self.rows = prepare_rows(
            request.read, self.full_plan, model=request.model, tell=watcher.preparing
        )
        self.kept_settings = KeptSettings(
            ground=self.rows.ground, values=BASELINE.values(self.rows.ground)
        )
        self.expected = self._expected()
        """Names of the settings that change something here and are likely to be measured."""
        below = [
            self.expected[place - 1]
            for place, name in enumerate(self.expected)
            if place and name in wanted
        ]
        self.to_measure = {*wanted, *below} if wanted else set(NAMES)
        """Settings to measure: all, or the requested ones and the one below each."""
        self.clock = Clock(self.pace.total_seconds)
        self.place = Path()
        """Where runs, logs and the result go."""
        self.results: list[SettingResult] = []
        self.left_out: list[Setting] = []
        """Settings that there was no time for."""
        self.counts: dict[str, int] = {}
        self.environment: Mapping[str, Any] = {}
        self.steps: int | None = None
        self.threads: int | None = None
        """CPU threads: fixed by the first setting, the same for all."""
        self.lowered = self.warned = False
        self.baseline: Timed | None = None
        self.against_baseline: Paired | None = None
        self.processes: list[SettingProcess] = []
        self.partial_result: Ladder | None = None
        """What was measured so far, if anything."""

    # --- planning ------------------------------------------------------------------------------

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
        read = self.request.read((*self.rows.overrides, *as_overrides(values)))
        return read, self._plan(read)

    def _ground_of(self, values: Mapping[str, Any]) -> SettingContext:
        return replace(self.rows.ground, packed=values.get("packing") is True)

    def _expected(self) -> list[str]:
        """Settings that change something here if every one of them is kept."""
        found, values = [BASELINE.name], self.kept_settings.values
        before = self._planned(values)[1]
        for setting in SETTINGS:
            ground = self._ground_of(values)
            if setting.needs(ground):
                continue
            more = {**values, **setting.values(ground)}
            try:
                plan = self._planned(more)[1]
            except ManifestError:  # it will fail, and the next one builds on the one before
                continue
            if not why_unchanged(setting, before, plan):
                values, before = more, plan
                found.append(setting.name)
        return found

    def _to_come(self, setting: Setting) -> list[str]:
        """This setting and later ones that are likely to be measured."""
        after = NAMES[NAMES.index(setting.name) + 1 :] if setting.name in NAMES else ()
        return [setting.name, *(n for n in after if n in self.expected and n in self.to_measure)]

    # --- measuring -----------------------------------------------------------------------------

    def run(self, place: Path, start: Starter) -> Ladder:
        """Measure every setting from the baseline on, and the best against the baseline; writes the
        results to `place` after each."""
        self.clock, self.place = Clock(self.pace.total_seconds), place
        (place / "logs").mkdir(parents=True, exist_ok=True)
        timing = self._timing(start)
        try:
            for setting in (BASELINE, *SETTINGS):
                self._keep(self._try_setting(setting, timing))
            if self.left_out:
                rest = together(self.left_out, self.kept_settings.values, self._ground_of)
                values = {**self.kept_settings.values, **rest.settings}
                self._keep(self._measure(rest, values, timing))
            self._against_baseline(timing)
        finally:
            for process in self.processes:
                process.stop()
        return self._write()

    def _keep(self, result: SettingResult | None) -> None:
        if result is not None:
            self.results.append(result)
            self.watcher.setting_finished(result)
            self._write()

    def _write(self) -> Ladder:
        ladder = self._ladder()
        write_text_atomically(self.place / FILE, ladder.as_text())
        if any(setting.measured for setting in ladder.rungs):
            self.partial_result = ladder
        return ladder

    def _ladder(self) -> Ladder:
        full_plan, counts = self.full_plan, self.counts
        ladder = Ladder(
            name=full_plan.expert,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=self.request.command,
            version=__version__,
            card=full_plan.target,
            device=full_plan.kernels.device,
            model=full_plan.model.name,
            parameters=full_plan.model.parameters,
            adapter=full_plan.adapter.type,
            quantization=full_plan.model.quantization,
            dataset=str(full_plan.data.dataset.get("path") or "several tasks"),
            training_rows=counts.get("training_rows", 0),
            max_seq_length=full_plan.data.max_seq_length,
            examples_per_update=self.rows.examples,
            held_out_rows=counts.get("held_out_rows", 0),
            held_out_tokens=counts.get("held_out_tokens", 0),
            quick=self.request.quick,
            seconds=self.clock.elapsed,
            environment=dict(self.environment),
            notes=[*self.rows.notes, *notes_on(self.results, self.rows.examples)],
            rungs=self.results,
            against_baseline=self.against_baseline,
        )
        return ladder.model_copy(update={"doubts": doubts_of(ladder)})

    def _try_setting(self, setting: Setting, timing: Timing) -> SettingResult | None:
        """Measure a setting if it changes something; None if it was not requested."""
        here = self.kept_settings
        if self.left_out and setting.name in self._to_come(BASELINE):
            return self._no_time(setting)
        ground = self._ground_of(here.values)
        values = {**here.values, **setting.values(ground)}
        reason, plan = setting.needs(ground) if setting is not BASELINE else "", None
        with suppress(ManifestError):  # measuring shows why it fails
            plan = self._planned(values)[1] if not reason else None
        if here.plan is not None and plan is not None:
            reason = why_unchanged(setting, here.plan, plan)
            # It changes nothing here, but a later choice may depend on it.
            self.kept_settings = replace(here, values=values) if reason else here
        if reason:
            asked = setting.name in self.to_measure
            return result_of(self.kept_settings, setting, "not here", reason) if asked else None
        if plan is not None and setting.name not in self.to_measure:
            if here.timed is not None:
                here.timed.close()
            self.kept_settings = replace(here, values=values, plan=plan, result=None, timed=None)
            return None
        # The last one is always measured, and so are settings requested by name.
        to_come = len(self._to_come(setting)) - 1
        if to_come > 0 and not self.request.only and self.clock.is_used_up(to_come):
            return self._no_time(setting)
        return self._measure(setting, values, timing)

    def _no_time(self, setting: Setting) -> SettingResult:
        self.left_out.append(setting)
        words = f"in '{THE_REST}', as {self.clock.elapsed:.0f} s had passed"
        more = (
            "without --quick there is more time" if self.request.quick else "--minutes N for more"
        )
        hint = f"  ({more})" if len(self.left_out) == 1 else ""
        return result_of(self.kept_settings, setting, "no time", f"{words}{hint}")

    def _measure(self, setting: Setting, values: dict[str, Any], timing: Timing) -> SettingResult:
        """Measure the setting against the kept ones, and keep it if it is worth it."""
        here, to_come = self.kept_settings, len(self._to_come(setting))
        try:
            read, plan = self._planned(values)
        except ManifestError as error:
            what = f"cannot be combined with the kept settings: {error.problems[0].what}"
            return result_of(here, setting, "failed", what)
        number = len([r for r in self.results if r.measured or r.status == "failed"]) + 1
        self.watcher.setting_started(
            setting, number, number + to_come - 1, self.clock.left(to_come + 1)
        )
        share = self.clock.start_setting(to_come + 1)
        new = Timed(self._job(setting, read, plan, share))
        try:
            paired = timing.compare(here.timed, new)
            if self._fewer_threads(new):
                new.close()
                self.clock.start_setting(to_come + 1)  # or it would seem to take twice as long
                new = Timed(replace(new.job, threads=self.threads))
                paired = timing.compare(here.timed, new)
        except MeasurementFailed as lost:
            new.close()
            if here.result is None:
                # Nothing before it could be measured, so this setting may not be at fault.
                self.kept_settings = replace(
                    here, values=values, plan=plan, result=None, timed=None
                )
            seconds = self.clock.end_setting()
            return result_of(here, setting, "failed", str(lost), plan, seconds)
        measured = self._measured(new)
        result = judged(here, setting, plan, measured, paired, self.clock.end_setting())
        if setting is BASELINE:
            self.baseline = new
        if result.status not in KEPT_STATUSES:
            if new is not self.baseline:
                new.close()
            return result
        if here.timed is not None:
            here.timed.close()
        gains = dict(here.gains)
        if result.gain is not None and result.status == "kept":
            gains |= dict.fromkeys(setting.about, result.gain)
        self.steps = measured.updates_learnt
        self.kept_settings = replace(
            here, values=values, plan=plan, result=result, gains=gains, timed=new
        )
        return result

    def _job(self, setting: Setting, read: ReadManifest, plan: RunPlan, share: float) -> Job:
        before = self.kept_settings.plan
        seconds = min(self.pace.train_seconds, TRAINING_SHARE * share)
        return Job(
            name=setting.name.replace(" ", "-").replace("+", "and"),
            plan=plan,
            read=read,
            runs=self.place / "runs",
            pace=replace(self.pace, train_seconds=seconds),
            steps=self.steps,
            eval_precision=self.full_plan.kernels.precision,
            own_loss_too=before is not None and why_not_comparable(before, plan) != "",
            threads=self.threads,
            allow_remote_code=self.request.allow_remote_code,
        )

    def _timing(self, start: Starter) -> Timing:
        progress: Progress = self.watcher.setting_progress

        def started(job: Job) -> SettingProcess:
            process = start(job, log=self.place / "logs" / f"{job.name}.txt", progress=progress)
            self.processes.append(process)
            self.environment = self.environment or process.ready.environment
            return process

        return Timing(start=started, pace=self.pace, clock=self.clock, progress=progress)

    def _fewer_threads(self, new: Timed) -> bool:
        """Whether the first setting showed that other processes use the cores; then all settings
        use fewer threads. The check before the start may miss it, and threads that wait for each
        other on crowded cores lose more than any setting gains: with two threads on two such cores,
        windows of one setting ranged from 104 to 635 tokens a second."""
        assert new.found is not None
        threads, cores = new.found["threads"], new.found["cores"]
        if self.threads is not None or threads is None:
            return False
        chosen = choose_threads(
            own=threads,
            granted=cores or threads,
            cores=cores or threads,
            busy=new.found["others"] or 0.0,
            environ=os.environ,
        )
        self.lowered = bool(new.found["lowered"]) or chosen.lowered
        self.threads = chosen.count
        return chosen.lowered

    def _measured(self, new: Timed) -> Measured:
        """The results with what all settings share; warns once about other processes."""
        assert new.found is not None
        found = {"loss": None, **new.found, "lowered": self.lowered}
        counts = {key: int(found.pop(key)) for key in COUNTS if key in found}
        self.counts = self.counts or counts
        measured = Measured(**found, spread=spread_of(found["windows"]))
        words = crowded(measured)
        if words and not self.warned:
            self.warned = True
            self.watcher.crowded(words)
        return measured

    def _against_baseline(self, timing: Timing) -> None:
        """Compare the best with the baseline directly: a product of gains multiplies errors."""
        best, base, result = self.kept_settings.timed, self.baseline, self.kept_settings.result
        if best is None or base is None or best is base or result is None:
            return
        if result.below == BASELINE.name and result.paired is not None:
            self.against_baseline = result.paired
            return
        self.watcher.comparing_with_baseline(result.name, self.clock.left(1))
        self.clock.start_setting(1)
        try:
            self.against_baseline = timing.compare(base, best, again=True)
        except MeasurementFailed:
            return
        if self.against_baseline is not None:
            better = result.model_copy(update={"cumulative": self.against_baseline.gain})
            self.results = [better if one is result else one for one in self.results]
            self.kept_settings = replace(self.kept_settings, result=better)
