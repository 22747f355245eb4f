"""Several runs on the same axes, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any

from expert.core.text import count, duration, gib, loss
from expert.insight.event_text import planned_value
from expert.insight.page.facts import RunFacts
from expert.insight.page.figures import make_figure
from expert.insight.page.render import PageSection, make_section
from expert.insight.page.validation import Validated
from expert.insight.record import RunRecord, mapping
from expert.insight.step.anatomy import finite

COLOURS = 6
NOT_SETTINGS = ("expert", "target", "memory.", "disk.")
"""Beginnings of keys of a plan that follow from the machine."""


def _of_step(name: str) -> Callable[[RunFacts], float | None]:
    """The median of the log lines."""
    return lambda run: getattr(run.anatomy.step, name, None)


MEASURES: dict[str, tuple[Callable[[RunFacts], float | None], Callable[[float], str]]] = {
    "loss": (lambda run: run.last_loss[1] if run.last_loss else None, loss),
    "validation loss, best": (
        lambda run: finite(run.best_eval["loss"]) if run.best_eval else None,
        loss,
    ),
    "tokens per second": (_of_step("tokens_per_second"), "{:,.0f}".format),
    "GPU utilization": (_of_step("gpu_utilization"), "{:.0%}".format),
    "MFU": (_of_step("mfu"), "{:.1%}".format),
    "peak memory": (lambda run: run.memory_peak, gib),
    "duration, without pauses": (lambda run: run.seconds, duration),
    "of it in steps": (lambda run: run.anatomy.run.training or None, duration),
    "steps": (lambda run: run.updates, "{:,.0f}".format),
    "tokens": (lambda run: run.tokens, lambda n: count(round(n))),
}


def comparison_section(runs: Sequence[RunFacts]) -> PageSection:
    names: list[str] = []  # the folder names; equal ones are numbered
    for run in runs:
        again = sum(other.name == run.name for other in runs[: len(names)])
        names.append(f"{run.name} ({again + 1})" if again else run.name)
    columns = ["", names[0]]
    for label in names[1:]:
        columns += [label, f"ratio {len(columns) // 2}" if len(names) > 2 else "ratio"]
    doubts = not_comparable([run.record for run in runs], names)
    plans = [dict(flattened(run.record.plan)) for run in runs]
    different = [
        (
            path,
            *(
                f"{value:.4g}" if isinstance(value, float) else planned_value(path, value)
                for value in (plan.get(path) for plan in plans)
            ),
        )
        for path in dict.fromkeys(path for plan in plans for path in plan)
        if any(plan.get(path) != plans[0].get(path) for plan in plans[1:])
        and not path.startswith(NOT_SETTINGS)
        and not any(str(plan.get(path)).startswith("/") for plan in plans)  # a folder
    ]
    figures = [
        figure
        for name, title, curves, how in (
            ("loss", "Loss", [run.smooth_loss for run in runs], {"log": True}),
            ("evals", "Validation loss", [run.eval_points("loss") for run in runs],
             {"log": True, "look": "dots"}),
            ("speed", "Tokens per second", [run.points("tokens_per_second") for run in runs],
             {"unit": "si", "from_zero": True}),
        )
        for figure in make_figure(
            f"{name}-by-step", f"{title} by step",
            *((label, points, 1 + n % COLOURS)  # one curve per run, each in its colour
              for n, (label, points) in enumerate(zip(names, curves, strict=True))),
            **how,
        )
    ]  # fmt: skip
    numbers = list(_numbers(runs))
    title = "Comparison"
    return make_section("comparison", title, doubts, columns, numbers, figures, names, different)


def _numbers(runs: Sequence[RunFacts]) -> Iterator[list[str]]:
    """One number per row; after every run but the first its ratio to the first."""
    judged = [Validated(run.record.verdict or {}) for run in runs]
    accuracy = ["–" if one.accuracy is None else f"{one.accuracy:.1%}" for one in judged]
    gates = [{True: "passes", False: "fails", None: "–"}[one.gate] for one in judged]
    for name, words in (("correct answers", accuracy), ("gate", gates),
                        ("verdict", [run.verdict.kind for run in runs]),
                        ("state", [run.state for run in runs])):  # fmt: skip
        yield [name, words[0], *(cell for word in words[1:] for cell in (word, ""))]
    for name, (measure, write) in MEASURES.items():
        values = [measure(run) for run in runs]
        if all(value is None for value in values):
            continue
        cells = [name, write(values[0]) if values[0] is not None else "–"]
        for value in values[1:]:
            ratio = value / values[0] if values[0] and value is not None else None
            cells.append(write(value) if value is not None else "–")
            cells.append(f"{ratio:.2f}×" if ratio is not None else "–")
        yield cells


def flattened(plan: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Every value of a plan by its path, without the reasons."""
    found: list[tuple[str, Any]] = []
    for key, value in plan.items():
        path = f"{above}.{key}" if above else str(key)
        if path in ("decisions", "remarks"):
            continue
        if isinstance(value, dict) and value and path.count(".") < 3:
            found.extend(flattened(value, path))
        else:
            found.append((path, value))
    return found


def not_comparable(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Why these runs should not be compared, in sentences; empty if they can be."""

    def differ(values: Sequence[object]) -> bool:
        return any(value != values[0] for value in values[1:])

    specs = [mapping(run.planned("data.dataset")) for run in runs]
    paths = [str(spec.get("path") or ", ".join(mapping(spec.get("tasks")))) for spec in specs]
    files = [PureWindowsPath(path).name or "unknown data" for path in paths]
    counts = [run.planned("length.rows") for run in runs]
    hashes = [
        sorted(
            {str(e["rows"]) for e in run.of("data") if e.get("rows") and e.get("split") == "train"}
        )
        for run in runs
    ]
    held_out = [
        str(spec.get("validation_path") or run.planned("data.validation") or "")
        for spec, run in zip(specs, runs, strict=True)
    ]
    said = []
    if differ(hashes) if all(hashes) else differ(list(zip(files, counts, strict=True))):
        each = "; ".join(f"{name}: {file}" for name, file in zip(names, files, strict=True))
        said.append(
            f"These runs were trained on different data ({each}): their losses are those of "
            "different rows, and do not show which run is better."
        )
    elif differ(held_out):
        said.append(
            "These runs were validated on different rows: their validation losses cannot be "
            "compared."
        )
    if differ([str(run.planned("model.name") or "") for run in runs]):
        said.append(
            "These runs have different base models: their tokens may differ, "
            "so losses per token and tokens a second cannot be compared."
        )
    return said
