"""The job behind `expert benchmark`: what each setting gains on the user's own model and data.

Every setting is one short run of `expert train` in its own process; it is kept for the settings
after it unless it is slower or its loss disagrees. The baseline runs first and again last: what
changed between is drift of the machine.
"""

from __future__ import annotations

import datetime
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from expert import __version__
from expert.core.errors import EXIT_RUN_FAILED, ExpertError, ManifestError
from expert.core.files import write_text_atomically
from expert.core.interrupts import Interrupted
from expert.core.links import refuse_links
from expert.core.rundir import RunFolder
from expert.core.stored_json import read_object_or_empty
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
from expert.insight.ladder.table import as_markdown, result_line
from expert.insight.page.contents import ladder_page
from expert.insight.page.render import page_html
from expert.jobs.benchmark.measured import (
    Event,
    MeasurementFailed,
    environment_of,
    events_of,
    first_timed_step,
    measured_of,
)
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.benchmark_settings import (
    BASELINE,
    COMPILE,
    DEFAULT_MICRO_BATCH,
    NAMES,
    PACKING,
    PRE_TOKENISED,
    SETTINGS,
    Setting,
    as_overrides,
    baseline,
    changes,
    find_setting,
    tolerance,
    why_unchanged,
)
from expert.planning.machine.machine import describe_machine
from expert.planning.run_plan import RunPlan
from expert.run.open import open_run, prepare
from expert.run.session.short_run import SETTLING
from expert.run.stored.load import read_plan
from expert.run.stored.locate import runs_folder

MIN_TIMED_STEPS = 3
MAX_OVERRUN = 1.5
"""Times the announced time: no setting is started if the benchmark would end later."""
WINDOW_SECONDS = 0.5
"""A rate is taken over as many steps as last this long."""
LONGEST_SETTING_SECONDS = 900.0
THOROUGH_FROM_MINUTES = 5.0
"""With less time, settings are timed briefly."""
BRIEF, THOROUGH = (5.0, 10), (20.0, 30)
"""Seconds for which steps are timed, and the steps that the loss is taken over."""
# Nothing to do between steps, and a learning rate that does not depend on their number.
_SHORT_RUN: dict[str, Any] = {
    "evaluation_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "early_stopping_patience": None,
    "trackers": [],
    "logging_steps": 1,
    "lr_scheduler": "constant",
    "lr_scheduler_kwargs": {},
    "warmup_ratio": None,
    "warmup_steps": SETTLING,
    "on_loss_spike": "ignore",
}

KEYS_OF_SPEED = {
    "kernels.compile": "torch_compile",
    "kernels.fused_blocks": "fused_blocks",
    "kernels.cuda_graphs": "use_cuda_graphs",
    "kernels.attention": "attention",
    "kernels.checkpointing": "gradient_checkpointing",
    "batch.micro_batch": "micro_batch_size",
    "optim.optimizer": "optim",
}
"""Plan values that only affect speed, and their keys in training.config."""

Show = Callable[[str, str], None]
"""Shows a line in a style: "" or the name of a colour."""


class CannotBenchmark(ExpertError):
    """A benchmark that cannot start."""


class NothingMeasured(ExpertError):
    """A benchmark in which no setting could be measured."""

    exit_code = EXIT_RUN_FAILED


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    read: Callable[[tuple[str, ...]], ReadManifest]
    """Reads the manifest with further overrides."""
    arguments: tuple[str, ...]
    """The same manifest and options for `expert train`."""
    command: str
    model: str | None = None
    vram: str | None = None
    minutes: float
    """Approximate time limit."""
    only: tuple[str, ...] = ()
    """Names of settings; others are applied without being measured. Empty: all are measured."""


def benchmark(
    request: BenchmarkRequest,
    *,
    to: Path | None = None,
    show: Show = lambda text, style: None,
    preparing: Callable[[str, int, int], None] = lambda name, rows, tokens: None,
) -> tuple[Ladder, list[Path]]:
    """Run the benchmark and write its result to `to`, or to a new folder beside the runs; returns
    it with the written files. If interrupted, what was measured so far is written."""
    if to is not None:
        _check_result_file(to)
    bench = Benchmark(request, show, preparing)
    place = Path(tempfile.mkdtemp(prefix="expert-benchmark-")) if to else new_folder(request)
    file = to or place / FILE
    try:
        bench.run(place)
    except Interrupted as end:
        if bench.has_measured:
            last = bench.results[-1].name
            bench.notes.append(f"interrupted by {end.by} after '{last}': the rest was not measured")
            kept = write_result(bench.ladder(), file)
            end.left = f"measurements so far are in {', '.join(map(str, kept))}"
        raise
    finally:
        if to is not None or not bench.has_measured:
            shutil.rmtree(place, ignore_errors=True)
    ladder = bench.ladder()
    if not bench.has_measured:
        failed = [result.because for result in ladder.rungs if result.status == "failed"]
        raise NothingMeasured(
            f"no setting could be measured: {failed[-1] if failed else 'none applies'}"
        )
    files = write_result(ladder, file)
    if not request.only:
        bench.show_winner(ladder)
    return ladder, files


class Benchmark:
    """One benchmark: its rows, the settings kept so far, and its results."""

    def __init__(
        self, request: BenchmarkRequest, show: Show, preparing: Callable[[str, int, int], None]
    ) -> None:
        self.request, self.show = request, show
        self.total_seconds = 60 * request.minutes
        thorough = request.minutes >= THOROUGH_FROM_MINUTES
        self.timed_seconds, self.max_loss_steps = THOROUGH if thorough else BRIEF
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
        self._prepare_rows(first, preparing)
        # The settings kept so far: keys of training.config, their plan, and their result.
        self.values: dict[str, Any] = {}
        self.plan: RunPlan | None = None
        self.result: SettingResult | None = None
        self.applied: Setting | None = None
        """The last setting that was applied without being measured."""
        self.base_rate: float | None = None
        """Speedups of kept settings, by plan path."""
        self.results: list[SettingResult] = []
        self.loss_steps: int | None = None
        """Steps that the loss is taken over; the first measured setting decides."""
        self.environment: Mapping[str, Any] = {}
        self.drift: float | None = None
        self.started_at = time.monotonic()
        self.place = Path()

    # --- rows and plans ------------------------------------------------------------------------

    def _prepare_rows(self, first: ReadManifest, preparing: Callable[..., None]) -> None:
        """Prepare the rows, and determine how many make up a step: the same number in every
        setting."""
        from expert.data.pack.pack import bins_per_step

        characters = self.full_plan.model.name == CHAR_GPT
        packed: dict[str, Any] = {"tokenize": "ahead"} | ({} if characters else {"packing": True})
        read = self.request.read(as_overrides(packed))
        index = prepare(read, model=self.request.model, tell=preparing).train.index
        self.training_rows = index.examples
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
        default = self.examples if characters else DEFAULT_MICRO_BATCH
        asked = (config.micro_batch_size, config.batch_size, default)
        micro_batch = min(next(size for size in asked if size != "auto"), self.examples)
        # As many packed sequences as hold the rows of the earlier micro-batch.
        self.packed_micro_batch = max(1, min(sequences, round(micro_batch / per_sequence)))
        self.not_late = ""
        """Why rows cannot be tokenised on the fly, or ""."""
        if characters:
            self.not_late = "a corpus of characters needs no tokenizer"
        elif dataset.tasks:
            self.not_late = "the rows of several tasks are mixed by their prepared tokens"
        elif self.full_plan.data.overlong == "split":
            self.not_late = "rows are split, and their parts are known only with their tokens"
        self.baseline = baseline(
            on_gpu=self.full_plan.kernels.device == "cuda",
            micro_batch=micro_batch,
            tokenize="ahead" if self.not_late else "late",
        )
        self.overrides = as_overrides(
            {"batch_size": self.examples, "gradient_accumulation_steps": 1}
        )

    def _plan(self, read: ReadManifest) -> RunPlan:
        return open_run(
            read,
            data="unread",
            model=self.request.model,
            vram=self.request.vram,
            machine=self.machine,
        ).plan

    def _planned(self, values: Mapping[str, Any]) -> RunPlan:
        return self._plan(self.request.read((*self.overrides, *as_overrides(values))))

    def _obstacle(self, setting: Setting) -> str:
        """Why a setting cannot be tried here, or ""."""
        characters = self.full_plan.model.name == CHAR_GPT
        if setting.name == PRE_TOKENISED:
            return self.not_late
        if setting.name == PACKING and characters:
            return "a corpus of characters is cut into blocks"
        if setting.name == COMPILE and self.full_plan.kernels.device == "cpu":
            return "compiling is not worth it on a CPU"
        if setting.name == COMPILE and not (characters or self.values["packing"]):
            return "widths of padded rows vary: each would be compiled again"
        return ""

    # --- measuring -----------------------------------------------------------------------------

    def run(self, place: Path) -> None:
        """Measure every setting from the baseline on, and the baseline again."""
        self.started_at, self.place = time.monotonic(), place
        (place / "logs").mkdir(parents=True, exist_ok=True)
        for later, setting in zip(
            range(len(SETTINGS), -1, -1), (self.baseline, *SETTINGS), strict=True
        ):
            self._add(self._try_setting(setting, later))
        self._measure_drift()

    def _add(self, result: SettingResult | None) -> None:
        if result is not None:
            self.results.append(result)
            style = {"kept": "green", "no difference": "green", "not here": "dim"}
            self.show(result_line(result), style.get(result.status, "yellow"))

    def _try_setting(self, setting: Setting, later: int) -> SettingResult | None:
        """Measure a setting if it changes something; None if it was not requested."""
        wanted, here = self.wanted, self.plan
        values = {**self.values, **setting.values}
        if setting.name == PACKING:
            values["micro_batch_size"] = self.packed_micro_batch
        reason, plan = self._obstacle(setting), None
        with suppress(ManifestError):  # measuring shows why it fails
            plan = self._planned(values) if not reason else None
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
            self._add(self._measure(self.applied, self.values, later))  # to compare with
        took = [result.seconds for result in self.results if result.seconds]
        needs = 2 * statistics.median(took) if took else 0.0  # for it and the baseline again
        if not wanted and self._elapsed + needs > MAX_OVERRUN * self.total_seconds:
            words = f"{self._elapsed:.0f} s had passed  (--minutes N for more)"
            return self._result(setting, "no time", words)
        return self._measure(setting, values, later)

    def _measure(self, setting: Setting, values: dict[str, Any], later: int) -> SettingResult:
        """Measure a setting against the last kept one, and keep it if it is worth it."""
        try:
            plan = self._planned(values)
        except ManifestError as error:
            what = f"cannot be combined with the kept settings: {error.problems[0].what}"
            return self._result(setting, "failed", what)
        began, left = self._elapsed, max(0.0, self.total_seconds - self._elapsed)
        self.show(f"{setting.name}: {setting.adds}  (about {left / 60:.1f} min left)", "")
        try:
            here = self._run(setting.name, values, plan, share=left / (later + 2))
        except MeasurementFailed as lost:
            if self.result is None:  # nothing could be measured yet: it may not be at fault
                self.values, self.plan = values, plan
            return self._result(setting, "failed", str(lost), plan, seconds=self._elapsed - began)
        self.loss_steps = self.loss_steps or here.updates_learnt
        below, before = self.result, self.plan
        facts: dict[str, Any] = {"measured": here, "seconds": self._elapsed - began}
        status: Status = "kept"
        because = ""
        if below is not None and below.measured is not None and before is not None:
            allowed, reason = tolerance(before, plan)
            status, because = verdict(below.measured, here, below.name, tolerance=allowed)
            facts |= {
                "below": below.name,
                "gain": here.tokens_per_second / below.measured.tokens_per_second,
                "loss_difference": loss_difference(here.loss, below.measured.loss),
                "tolerance": allowed,
                "tolerance_because": reason,
            }
        if setting.name == BASELINE:
            self.base_rate = here.tokens_per_second
        if self.base_rate is not None:
            facts["cumulative"] = here.tokens_per_second / self.base_rate
        result = self._result(setting, status, because, plan, **facts)
        if status in KEPT_STATUSES:
            self.values, self.plan, self.result = values, plan, result
        return result

    def _measure_drift(self) -> None:
        """Run the baseline again: what it gained or lost since the start is the machine's doing."""
        values = dict(self.baseline.values)
        if self.base_rate is None or self.results[-1].name == BASELINE:
            return
        self.show(f"{BASELINE} again: to see drift", "")
        left = max(0.0, self.total_seconds - self._elapsed)
        with suppress(MeasurementFailed):
            again = self._run("baseline again", values, self._planned(values), share=left)
            self.drift = again.tokens_per_second / self.base_rate - 1

    def _run(
        self, name: str, values: Mapping[str, Any], plan: RunPlan, *, share: float
    ) -> Measured:
        """Train with these settings until the loss is known and steps were timed long enough."""
        folder = self.place / "runs" / name.replace(" ", "-").replace("+", "and")
        fixed = as_overrides({**values, **_SHORT_RUN, "output_dir": str(folder.absolute())})
        arguments = [*self.request.arguments]
        for override in (*self.overrides, *fixed):
            arguments += ["--set", override]
        log = self.place / "logs" / f"{folder.name}.txt"
        env = environment_of(self.place / "home", plan)
        events: list[Event] = []
        ends, first = time.monotonic() + share, first_timed_step(plan)
        with closing(
            events_of(arguments, folder, log=log, env=env, limit=LONGEST_SETTING_SECONDS)
        ) as coming:
            for event in coming:
                events.append(event)
                kind = event["event"]
                if kind in ("failed", "not_finite"):
                    why = event.get("error") or "the loss or a gradient is not finite"
                    raise MeasurementFailed(f"step {event.get('step')}: {why}")
                if kind == "fell_back" and not all(
                    change["path"].startswith("batch.") for change in event["changes"]
                ):  # another setting than the one to measure
                    raise MeasurementFailed(str(event["reason"]))
                if kind == "step" and event["step"] == 1:
                    plan, first = self._run_plan(folder, plan)
                if self._is_enough(events, first, over=time.monotonic() > ends):
                    break
        for kind in ("checkpoints", "final"):  # of a run that came to its end
            for weights in folder.glob(f"*/{kind}"):
                shutil.rmtree(weights, ignore_errors=True)
        steps = self.loss_steps or self.max_loss_steps
        return measured_of(
            plan, events, first, window=WINDOW_SECONDS, rows=self.training_rows, loss_steps=steps
        )

    def _run_plan(self, runs: Path, planned: RunPlan) -> tuple[RunPlan, int]:
        """The plan of the run itself, which has counted its rows, and its first timed step."""
        for run in runs.glob("*/plan.json"):
            planned = read_plan(RunFolder(run.parent))
            environment = read_object_or_empty(run.with_name("environment.json"))
            self.environment = self.environment or environment
        return planned, first_timed_step(planned)

    def _is_enough(self, events: Sequence[Event], first: int, *, over: bool) -> bool:
        """Whether the loss is known, and the time is over or steps were timed for long enough."""
        timed = [event for event in events if event["event"] == "step" and event["step"] > first]
        if len(timed) < MIN_TIMED_STEPS or timed[-1]["step"] < (self.loss_steps or 0):
            return False
        enough = sum(event["seconds"] for event in timed) >= self.timed_seconds
        return over or (enough and timed[-1]["step"] >= self.max_loss_steps)

    # --- results -------------------------------------------------------------------------------

    @property
    def has_measured(self) -> bool:
        return any(result.measured for result in self.results)

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
            settings=dict(setting.values),
            **{"seconds": 0.0, **more},
        )

    def ladder(self) -> Ladder:
        """The result as far as it was measured."""
        plan = self.full_plan
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
            seconds=self._elapsed,
            environment=dict(self.environment),
            notes=self.notes,
            rungs=self.results,
            drift=self.drift,
        )
        return ladder.model_copy(update={"doubts": doubts_of(ladder)})

    def show_winner(self, ladder: Ladder) -> None:
        """Name what was faster than what the plan chooses, as keys for the manifest."""
        won, plan = self.result, self.plan
        assert won is not None, "the first setting that was measured is kept"
        assert won.measured is not None
        assert plan is not None
        if ladder.doubts:
            self.show(f"! do not rely on the winner: {'; '.join(ladder.doubts)}", "yellow")
            return
        best = {path: attrgetter(path)(plan) for path in tried_paths(ladder)}
        if "batch.micro_batch" in best:
            best["batch.micro_batch"] = won.measured.micro_batch
        better = [
            f"--set {KEYS_OF_SPEED[path]}={str(value).lower()}"
            for path, value in best.items()
            if value != attrgetter(path)(self.full_plan)
        ]
        words = f"faster than what the plan chooses: {' '.join(better)}"
        self.show(words if better else "the plan chooses the winner already", "")


def _full_names(names: tuple[str, ...]) -> list[str]:
    """The full names of these settings; the error for an unknown one lists all."""
    for name in names:
        if find_setting(name) is None:
            known = ", ".join(NAMES)
            raise CannotBenchmark(f"--only {name}: no such setting  (settings: {known})")
    return [str(find_setting(name)) for name in names]


def tried_paths(ladder: Ladder) -> list[str]:
    """Plan values that were measured both ways and that only affect speed."""
    passed = {one.name for one in ladder.rungs if one.status in ("not here", "no time")}
    about = [path for one in SETTINGS if one.name not in passed for path in one.about]
    return [path for path in KEYS_OF_SPEED if path in about]


# --- files ---------------------------------------------------------------------------------------


def new_folder(request: BenchmarkRequest) -> Path:
    """A new folder below the output folder, unique for each of two concurrent starts."""
    read = request.read(())
    runs = runs_folder(read)
    place = runs / "benchmarks"
    refuse_links(place, below=runs)
    return RunFolder.create(place, read.manifest.name).path


def _check_result_file(file: Path) -> None:
    """Refuse, before anything is measured, a file the result could not be written to."""
    if file.is_dir():
        raise CannotBenchmark(f"--to {file}: is a folder  (--to {file / FILE})")
    if file.suffix in (".md", ".html"):
        raise CannotBenchmark(
            f"--to {file}: the result is JSON, and {file.suffix} is written next to it  (--to "
            f"{file.with_suffix('.json')})"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise CannotBenchmark(f"--to {file}: the folder cannot be written to  (name another one)")


def write_result(ladder: Ladder, file: Path) -> list[Path]:
    """Write the result as JSON, and next to it as Markdown and HTML."""
    texts = {
        file: ladder.as_text(),
        file.with_suffix(".md"): as_markdown(ladder),
        file.with_suffix(".html"): page_html(ladder_page(ladder)),
    }
    for path, text in texts.items():
        write_text_atomically(path, text)
    return list(texts)
