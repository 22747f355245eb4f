"""The job behind `expert benchmark`: what each setting gains on the user's own model and data.

Every setting is a real run through the training loop, in its own process; it is kept for the
settings after it if it is faster and the loss agrees.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.files import write_text_atomically
from expert.core.interrupts import Interrupted
from expert.core.links import refuse_links
from expert.core.rundir import RunFolder
from expert.insight.ladder.table import as_markdown
from expert.insight.page.contents import ladder_page
from expert.insight.page.render import page_html
from expert.jobs.benchmark.child import main
from expert.jobs.benchmark.measure import Benchmark, BenchmarkRequest, CannotBenchmark, Watcher
from expert.jobs.benchmark.processes import SettingProcess
from expert.planning.benchmark_settings import BASELINE, SETTINGS, THE_REST
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
from expert.run.stored.locate import runs_folder

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder

__all__ = ["BenchmarkRequest", "CannotBenchmark", "NothingMeasured", "Watcher", "benchmark"]


class NothingMeasured(ExpertError):
    """A benchmark in which no setting could be measured."""

    exit_code = EXIT_RUN_FAILED


def benchmark(
    request: BenchmarkRequest, *, folder: Path | None = None, watcher: Watcher | None = None
) -> Ladder:
    """Run the benchmark; runs and result go to `folder`, or to a temporary one.

    If interrupted, the watcher receives what was measured so far.
    """
    bench = Benchmark(request, watcher or Watcher())
    place = folder or Path(tempfile.mkdtemp(prefix="expert-benchmark-"))
    try:
        ladder = bench.run(place, partial(SettingProcess, target=main))
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
        _keep(bench, ladder)
    return ladder


def _keep(bench: Benchmark, ladder: Ladder) -> None:
    """Remember the best settings if they can be trusted, and report whether they were."""
    if ladder.doubts:
        bench.watcher.not_remembered("; ".join(ladder.doubts))
        return
    if not tried_paths(ladder):
        words = f"no setting was measured by itself, only '{THE_REST}'"
        bench.watcher.not_remembered(f"{words}  (--minutes N for more time)")
        return
    try:
        kept = remember(bench, ladder)
    except OSError as error:  # the result matters more than remembering it
        bench.watcher.not_remembered(f"{error.filename}: {error.strerror}")
    else:
        bench.watcher.remembered(kept)


def new_folder(request: BenchmarkRequest) -> Path:
    """A new folder below the output folder, unique for each of two concurrent starts."""
    read = request.read(())
    runs = runs_folder(read)
    place = runs / "benchmarks"
    refuse_links(place, below=runs, instead="results go elsewhere with --output FOLDER")
    return RunFolder.create(place, read.manifest.name).path


def check_result_file(file: Path) -> None:
    """Refuse, before anything is measured, a file the result could not be written to."""
    if file.is_dir():
        raise CannotBenchmark(f"--to {file}: is a folder  (--to {file / 'ladder.json'})")
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


def remember(bench: Benchmark, ladder: Ladder) -> Path:
    """Store the best settings for later plans, and return the file."""
    won, plan = bench.kept_settings.result, bench.kept_settings.plan
    assert won is not None, "the first setting that was measured is kept"
    assert won.measured is not None
    assert plan is not None
    settings = {path: attrgetter(path)(plan) for path in tried_paths(ladder)}
    if "batch.micro_batch" in settings:
        settings["batch.micro_batch"] = won.measured.micro_batch
    gains, device = bench.kept_settings.gains, bench.full_plan.kernels.device
    target = choose_target(bench.machine, vram=bench.request.vram, device=device)
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
        gains={path: gains[path] for path in settings if path in gains},
        threads=won.measured.threads,
    )
    remember_rate(measurements_file(), rate)
    return measurements_file()


def forget(request: BenchmarkRequest | None) -> tuple[Path, int]:
    """Forget stored benchmarks of a manifest's model, or all; returns the file and the count."""
    file, model = measurements_file(), None
    if request is not None:
        model = basename(choose_model(request.read(()).manifest, request.model).name).lower()
    return file, forget_rates(file, model)


def tried_paths(ladder: Ladder) -> list[str]:
    """Plan values that were measured both ways, among those that later plans may reuse."""
    tried = {
        setting.name for setting in ladder.rungs if setting.status not in ("not here", "no time")
    }
    about = [
        path for setting in (BASELINE, *SETTINGS) if setting.name in tried for path in setting.about
    ]
    return [path for path in DECIDED_BY_BENCHMARK if path in about]
