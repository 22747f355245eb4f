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
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from expert import __version__
from expert.core.errors import EXIT_RUN_FAILED, ExpertError, ManifestError
from expert.core.events import follow
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links
from expert.core.process import Child, describe_exit
from expert.core.rundir import RunFolder
from expert.core.stored_json import read_object_or_empty
from expert.insight.ladder import (
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
from expert.insight.page.contents import ladder_page
from expert.insight.page.render import page_html
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.manifest import CHAR_GPT
from expert.parallel.launch import FOLLOWED
from expert.planning.benchmark_settings import (
    BASELINE,
    COMPILE,
    DEFAULT_MICRO_BATCH,
    PACKING,
    PRE_TOKENISED,
    SETTINGS,
    Setting,
    as_overrides,
    baseline,
    changes,
    tolerance,
    why_unchanged,
)
from expert.planning.machine.machine import describe_machine
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.planning.run_plan import RunPlan
from expert.run.open import open_run, prepare
from expert.run.session.short_run import SETTLING
from expert.run.stored.load import read_plan
from expert.run.stored.locate import runs_folder

Event = dict[str, Any]
POLL_SECONDS = 0.1
WINDOW_SECONDS = 0.5
"""A rate is taken over as many steps as last this long."""
CAPTURE_STEPS = 6
"""Steps: CUDA graphs are captured at the third batch, the optimizer's once its gradients have kept
their addresses for two."""
CAPTURE_STEPS_PER_WIDTH = 8
"""More of them for each width that is captured when it first comes: most come within 30 steps."""
MIN_TIMED_STEPS = 3
MAX_OVERRUN = 1.5
"""Times the announced time: no setting is started if the benchmark would end later."""
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


class MeasurementFailed(ExpertError):
    """A setting that cannot be measured; the message says why."""

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
    """Names of settings that are measured after the baseline. Empty: all."""


def benchmark(
    request: BenchmarkRequest,
    *,
    to: Path | None = None,
    show: Show = lambda text, style: None,
    preparing: Callable[[str, int, int], None] = lambda name, rows, tokens: None,
) -> tuple[Ladder, list[Path]]:
    """Run the benchmark and write its result to `to`, or to a new folder beside the runs; returns
    it with the written files."""
    if to is not None:  # refused before anything is measured
        if to.suffix != ".json":
            raise ExpertError(f"--to {to}: name a .json file; .md and .html are written next to it")
        to.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(to.parent, os.W_OK):
            raise ExpertError(f"--to {to}: the folder cannot be written to  (name another one)")
    bench = Benchmark(request, show, preparing)
    place = Path(tempfile.mkdtemp(prefix="expert-benchmark-")) if to else new_folder(request)
    has_measured = False
    try:
        bench.run(place)
    finally:
        has_measured = any(result.measured for result in bench.results)
        if to is not None or not has_measured:
            shutil.rmtree(place, ignore_errors=True)
    if not has_measured:
        failed = [result.because for result in bench.results if result.status == "failed"]
        why = failed[-1] if failed else "none applies"
        raise MeasurementFailed(f"no setting could be measured: {why}")
    ladder = bench.ladder()
    file = to or place / FILE
    page = file.with_suffix(".html")
    write_text_atomically(file, ladder.as_text())
    write_text_atomically(page, page_html(ladder_page(ladder)))
    if not request.only:
        bench.show_winner(ladder)
    return ladder, [file, page]


class Benchmark:
    """One benchmark: its rows, the settings kept so far, and its results."""

    def __init__(
        self, request: BenchmarkRequest, show: Show, preparing: Callable[[str, int, int], None]
    ) -> None:
        self.request, self.show = request, show
        self.total_seconds = 60 * request.minutes
        thorough = request.minutes >= THOROUGH_FROM_MINUTES
        self.timed_seconds, self.max_loss_steps = THOROUGH if thorough else BRIEF
        names = [name.lower() for name in request.only]
        known = {setting.name.lower(): setting for setting in SETTINGS}
        for name, written in zip(names, request.only, strict=True):
            if name not in (*known, BASELINE):
                listed = ", ".join(setting.name for setting in SETTINGS)
                raise ExpertError(f"--only {written}: no such setting  (settings: {listed})")
        self.settings = [one for name, one in known.items() if name in (names or known)]
        first = request.read(())
        self.machine = describe_machine(first.folder)
        self.full_plan = self._plan(first)
        """The plan without a benchmark: every choice left to it."""
        self.is_of_characters = self.full_plan.model.name == CHAR_GPT
        self.notes: list[str] = []
        self._prepare_rows(first, preparing)
        # The settings kept so far: keys of training.config, their plan, and their measurement.
        self.values: dict[str, Any] = {}
        self.plan: RunPlan | None = None
        self.measured: Measured | None = None
        self.base_rate: float | None = None
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

        characters = self.is_of_characters
        packed: dict[str, Any] = {"tokenize": "ahead"} | ({} if characters else {"packing": True})
        read = self.request.read(as_overrides(packed))
        index = prepare(read, model=self.request.model, tell=preparing).train.index
        self.training_rows = index.examples
        written = self.full_plan.batch.examples_per_update
        per_sequence, sequences = index.examples / max(1, index.bins), bins_per_step(index, written)
        self.examples = written if characters else max(1, round(sequences * per_sequence))
        if self.examples != written:
            what = f"a step has {self.examples} rows, not the {written} of the manifest"
            self.notes.append(f"{what}: as many as {sequences} packed sequences hold on average")
        config, dataset = first.manifest.training.config, first.manifest.training.dataset
        # The manifest's micro-batch size: what people run before they tune anything.
        default = self.examples if characters else DEFAULT_MICRO_BATCH
        asked = (config.micro_batch_size, config.batch_size, default)
        micro_batch = min(next(size for size in asked if size != "auto"), self.examples)
        # As many packed sequences as hold the rows of the earlier micro-batch.
        self.packed_micro_batch = max(1, min(sequences, round(micro_batch / per_sequence)))
        self.must_be_prepared = bool(
            characters or dataset.tasks or self.full_plan.data.overlong == "split"
        )
        self.baseline = baseline(
            on_gpu=self.full_plan.kernels.device == "cuda",
            micro_batch=micro_batch,
            tokenize="ahead" if self.must_be_prepared else "late",
        )
        of_step = {"batch_size": self.examples, "gradient_accumulation_steps": 1}
        self.overrides = as_overrides(of_step)

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
        if setting.name == PRE_TOKENISED and self.must_be_prepared:
            return "rows of this kind are always prepared"
        if setting.name == PACKING and self.is_of_characters:
            return "a corpus of characters is cut into blocks"
        if setting.name == COMPILE and self.full_plan.kernels.device == "cpu":
            return "compiling is not worth it on a CPU"
        if setting.name == COMPILE and not (self.is_of_characters or self.values["packing"]):
            return "widths of padded rows vary: each would be compiled again"
        return ""

    # --- measuring -----------------------------------------------------------------------------

    def run(self, place: Path) -> None:
        """Measure every setting from the baseline on, and the baseline again."""
        self.started_at, self.place = time.monotonic(), place
        (place / "logs").mkdir(parents=True, exist_ok=True)
        for later, setting in zip(
            range(len(self.settings), -1, -1), (self.baseline, *self.settings), strict=True
        ):
            began = self._elapsed
            result = self._try_setting(setting, later)
            spent = self._elapsed - began if result.status not in ("not here", "no time") else 0.0
            result = result.model_copy(update={"seconds": spent})
            self.results.append(result)
            style = {"kept": "green", "no difference": "green", "not here": "dim"}
            self.show(f"  {_in_words(result)}", style.get(result.status, "yellow"))
        if self.base_rate is None or len(self.results) == 1:
            return
        self.show(f"{BASELINE} again: to see drift", "")
        values = dict(self.baseline.values)
        left = max(0.0, self.total_seconds - self._elapsed)
        with suppress(MeasurementFailed):
            again = self._run("baseline again", values, self._planned(values), share=left)
            self.drift = again.tokens_per_second / self.base_rate - 1

    def _try_setting(self, setting: Setting, later: int) -> SettingResult:
        """Measure a setting against the last kept one if it changes something, and keep it if it is
        worth it; `later`: how many settings come after it."""
        before, below = self.plan, self.measured

        def result(status: Status, because: str, **facts: Any) -> SettingResult:
            return SettingResult(
                name=setting.name, adds=setting.adds, status=status, because=because, **facts
            )

        values = {**self.values, **setting.values}
        if setting.name == PACKING:
            values["micro_batch_size"] = self.packed_micro_batch
        if reason := self._obstacle(setting):
            return result("not here", reason)
        try:
            plan = self._planned(values)
        except ManifestError as error:
            what = f"cannot be combined with the kept settings: {error.problems[0].what}"
            return result("failed", what)
        if before is not None and (reason := why_unchanged(setting, before, plan)):
            self.values = values  # it changes nothing here, but a later choice may depend on it
            return result("not here", reason)
        took = [each.seconds for each in self.results if each.seconds]
        needs = 2 * statistics.median(took) if took else 0.0  # for it and the baseline again
        if not self.request.only and self._elapsed + needs > MAX_OVERRUN * self.total_seconds:
            return result("no time", f"{self._elapsed:.0f} s had passed  (--minutes N for more)")

        left = max(0.0, self.total_seconds - self._elapsed)
        self.show(f"{setting.name}: {setting.adds}  (about {left / 60:.1f} min left)", "")
        facts: dict[str, Any] = {"changes": changes(before, plan) if before is not None else {}}
        try:
            here = self._run(setting.name, values, plan, share=left / (later + 2))
        except MeasurementFailed as lost:
            if below is None:  # nothing could be measured yet: it may not be at fault
                self.values, self.plan = values, plan
            return result("failed", str(lost), **facts)
        self.loss_steps = self.loss_steps or here.updates_learnt
        facts["measured"] = here
        status: Status = "kept"
        because = ""
        if below is not None and before is not None:
            allowed = tolerance(before, plan)
            status, because = verdict(below, here, tolerance=allowed)
            facts |= {
                "gain": here.tokens_per_second / below.tokens_per_second,
                "loss_difference": loss_difference(here.loss, below.loss),
                "tolerance": allowed,
            }
        if setting.name == BASELINE:
            self.base_rate = here.tokens_per_second
        if self.base_rate is not None:
            facts["cumulative"] = here.tokens_per_second / self.base_rate
        if status in KEPT_STATUSES:
            self.values, self.plan, self.measured = values, plan, here
        return result(status, because, **facts)

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
        # No benchmark of this machine affects its plan, and it ends with this process.
        env = {"EXPERT_HOME": str(self.place / "home"), FOLLOWED: str(os.getpid())}
        if plan.model.place == "models folder":  # which may be that of the usual home
            env["EXPERT_MODELS"] = str(Path(plan.model.location).absolute().parent)
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
                if kind == "step" and event["step"] == 1:  # its own plan has counted the rows
                    for run in folder.glob("*/plan.json"):
                        plan = read_plan(RunFolder(run.parent))
                        environment = read_object_or_empty(run.with_name("environment.json"))
                        self.environment = self.environment or environment
                    first = first_timed_step(plan)
                if self._is_enough(events, first, over=time.monotonic() > ends):
                    break
        for kind in ("checkpoints", "final"):  # of a run that came to its end
            for weights in folder.glob(f"*/{kind}"):
                shutil.rmtree(weights, ignore_errors=True)
        steps = self.loss_steps or self.max_loss_steps
        return measured_of(plan, events, first, rows=self.training_rows, loss_steps=steps)

    def _is_enough(self, events: Sequence[Event], first: int, *, over: bool) -> bool:
        """Whether the loss is known, and the time is over or steps were timed for long enough."""
        timed = [event for event in events if event["event"] == "step" and event["step"] > first]
        if len(timed) < MIN_TIMED_STEPS or timed[-1]["step"] < (self.loss_steps or 0):
            return False
        enough = sum(event["seconds"] for event in timed) >= self.timed_seconds
        return over or (enough and timed[-1]["step"] >= self.max_loss_steps)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.started_at

    # --- results -------------------------------------------------------------------------------

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
            adapter=plan.adapter.type,
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
        won, plan = self.measured, self.plan
        assert won is not None, "the first setting that was measured is kept"
        assert plan is not None
        if ladder.doubts:
            self.show(f"! do not rely on the winner: {'; '.join(ladder.doubts)}", "yellow")
            return
        # Plan values that were measured both ways and that only affect speed.
        passed = {one.name for one in ladder.rungs if one.status in ("not here", "no time")}
        about = {path for one in SETTINGS if one.name not in passed for path in one.about}
        best = {path: attrgetter(path)(plan) for path in KEYS_OF_SPEED if path in about}
        if "batch.micro_batch" in best:
            best["batch.micro_batch"] = won.micro_batch
        better = [
            f"--set {KEYS_OF_SPEED[path]}={str(value).lower()}"
            for path, value in best.items()
            if value != attrgetter(path)(self.full_plan)
        ]
        words = f"faster than what the plan chooses: {' '.join(better)}"
        self.show(words if better else "the plan chooses the winner already", "")


def _in_words(result: SettingResult) -> str:
    """A setting as it is shown when it was measured."""
    seen = result.measured
    if seen is None:
        return f"{result.name}: {result.outcome}"
    parts = [f"{seen.tokens_per_second:,.0f} tokens/s"]
    if result.gain is not None:
        parts.append(f"{result.gain:.2f}x")
        parts += [f"in all {result.cumulative:.2f}x"] if result.cumulative is not None else []
    parts += [f"loss {seen.loss:.4f}"] if seen.loss is not None else []
    parts += [result.outcome] if result.because else []
    return f"{result.name}: {', '.join(parts)}"


def new_folder(request: BenchmarkRequest) -> Path:
    """A new folder below the output folder, unique for each of two concurrent starts."""
    read = request.read(())
    runs = runs_folder(read)
    place = runs / "benchmarks"
    refuse_links(place, below=runs)
    return RunFolder.create(place, read.manifest.name).path


# --- one setting: a process of its own, and what the events of its run show ---------------------


def events_of(
    arguments: Sequence[str], runs: Path, *, log: Path, env: Mapping[str, str], limit: float
) -> Generator[Event, None, None]:
    """Run `expert train` in a process that writes below `runs`, and yield the events of its run;
    closing this kills it. Raises MeasurementFailed if it fails or takes longer than `limit`."""
    child = Child([sys.executable, "-m", "expert", "train", *arguments], log=log, env=env)
    ends_at = time.monotonic() + limit

    def is_over() -> bool:
        return child.has_ended or time.monotonic() > ends_at

    try:
        while (file := next(runs.glob("*/events.jsonl"), None)) is None and not is_over():
            time.sleep(POLL_SECONDS)
        if file is not None:
            yield from follow(file, is_over, POLL_SECONDS)
        if not child.has_ended:
            raise MeasurementFailed(f"not finished after {limit:.0f} s")
        code = child.wait()
        if code or file is None:
            words = child.stderr_tail() or "it printed nothing"
            raise MeasurementFailed(f"its process {describe_exit(code)}: {words}")
    finally:  # also on Ctrl-C: nothing may be left behind
        child.stop()


def first_timed_step(plan: RunPlan) -> int:
    """Steps before the first timed one: they compile, fill caches and capture graphs."""
    if not plan.kernels.cuda_graphs:
        return SETTLING
    return CAPTURE_STEPS + CAPTURE_STEPS_PER_WIDTH * (CAPTURED_WIDTHS if plan.data.flat else 0)


def measured_of(
    plan: RunPlan, events: Sequence[Event], first: int, *, rows: int, loss_steps: int
) -> Measured:
    """What the events of a run show: rates over windows of steps after the `first` ones, and the
    training loss of the `loss_steps` first steps."""
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if event["step"] > first]
    if not timed:
        raise MeasurementFailed("the run ended before a step could be timed")

    def mean(key: str) -> float | None:
        known = [event[key] for event in timed if event.get(key) is not None]
        return statistics.fmean(known) if known else None

    rates, tokens, seconds = [], 0, 0.0
    for event in timed:
        tokens, seconds = tokens + event["tokens"], seconds + event["seconds"]
        if seconds >= WINDOW_SECONDS:
            rates.append(tokens / seconds)
            tokens, seconds = 0, 0.0
    if not rates:  # too fast for a whole window
        rates = [tokens / seconds]
    low, middle, high = (
        statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    )
    samples = sum(e["examples"] for e in timed) / sum(e["seconds"] for e in timed)
    changed = [change for e in events if e["event"] == "fell_back" for change in e["changes"]]
    sizes = [each["value"] for each in changed if each["path"] == "batch.micro_batch"]
    peaks = [e["peak_reserved_bytes"] for e in steps if e.get("peak_reserved_bytes")]
    peaks = peaks or [e["cpu_peak_memory_bytes"] for e in steps if e.get("cpu_peak_memory_bytes")]
    learnt = [event for event in steps if event["step"] <= loss_steps]
    targets = sum(int(event["targets"]) for event in learnt)
    losses = sum(float(event["loss"]) * int(event["targets"]) for event in learnt)
    return Measured(
        tokens_per_second=middle,
        spread=high - low,
        samples_per_second=samples,
        seconds_per_epoch=rows / samples,
        gpu_utilization=mean("gpu_utilization"),
        peak_memory_bytes=max(peaks, default=None),
        mfu=mean("mfu"),
        updates_learnt=learnt[-1]["step"],
        loss=losses / targets if targets else None,
        micro_batch=int(sizes[-1]) if sizes else plan.batch.micro_batch,
    )
