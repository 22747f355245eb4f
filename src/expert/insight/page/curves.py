"""Curves: loss, evaluations, rates, the GPU, and where the time went."""

from __future__ import annotations

from expert.core.text import span
from expert.insight.page.facts import RunFacts
from expert.insight.page.figures import Figure, Series, has_values, make_figure, spans_magnitudes
from expert.insight.page.render import PageSection, make_section
from expert.insight.step.anatomy import PHASE_NAMES, finite

PHASES = {"data_wait": 2, "answers": 7, "copy": 6, "forward": 1, "backward": 4, "communication": 5,
          "optimizer": 3, "compute": 1, "other": 7}  # fmt: skip
RUN_PARTS = {"loading": 6, "compiling": 5, "training": 1, "evaluating": 3, "saving": 4, "rest": 7}
"""Parts of a step and of a run, with their colours."""
MEMORY = (
    ("card", "gpu_memory_bytes", 7),
    ("this process", "gpu_process_memory_bytes", 6),
    ("reserved, peak", "peak_reserved_bytes", 1),
    ("allocated, peak", "peak_allocated_bytes", 3),
)
Part = tuple[str, float, str, int]
"""Name, seconds, seconds in words and colour."""


def learning_sections(run: RunFacts) -> list[PageSection]:
    """What drives the loss."""
    limit = finite(run.record.planned("optim.max_grad_norm"))
    clipped = f"Clipped at {limit:g}." if limit else ""
    right = ("token accuracy", run.eval_points("token_accuracy"), 2)
    norm = ("gradient norm", run.points("grad_norm"), 5)
    rate = ("learning rate", run.points("rate"), 4)
    preferred = [
        ("training", run.points("rewards/accuracies"), 1),
        ("validation", run.eval_points("rewards/accuracies"), 2),
    ]
    margin = [
        ("training", run.points("rewards/margins"), 1),
        ("validation", run.eval_points("rewards/margins"), 2),
    ]
    logps = [
        ("preferred answers", run.points("logps/chosen"), 3),
        ("rejected answers", run.points("logps/rejected"), 2),
    ]
    rewards = [
        ("mean reward", run.points("rewards/mean"), 1),
        ("groups with a difference", run.points("rewards/mixed"), 4),
    ]
    tokens = ("tokens", run.points("rewards/tokens"), 3)
    figures = [
        *make_figure("rewards", "Rewards of the model's own answers", *rewards, unit="percent"),
        *make_figure("answer-length", "Length of its answers", tokens),
        *make_figure(
            "preferred", "Pairs with the larger reward preferred", *preferred, unit="percent"
        ),
        *make_figure("margin", "Margin between the rewards", *margin),
        *make_figure("logps", "Log-probability of an answer", *logps),
        *make_figure("accuracy", "Validation token accuracy", right, unit="percent", look="dots"),
        *make_figure("rate", "Learning rate", rate, from_zero=True),
        *make_figure("gradient-norm", "Gradient norm", norm, log=True, note=clipped),
    ]
    return [make_section("learning", "Learning", figures, "", layout="curves")] if figures else []


def loss_figures(run: RunFacts) -> list[Figure]:
    """The loss as it was logged and smoothed, and that of the evaluations."""
    raw, evals = run.points("loss"), run.eval_points("loss")
    if not has_values(raw):
        return []
    series, note = [Series(name="loss", points=raw, colour=1)], ""
    if run.smooth_loss != raw:
        series = [
            Series(name="logged loss", points=raw, colour=1, look="faint"),
            Series(name="training, smoothed", points=run.smooth_loss, colour=1),
        ]
        note = "Faint: the log lines, each the mean since the one before. The smoothed line is the "
        note += "mean of the newest of them, as in the terminal."
    if has_values(evals):
        series.append(Series(name="validation", points=evals, colour=2, look="dots"))
    log = spans_magnitudes([point for line in series for point in line.points])
    return [Figure(name="loss", title="Loss", series=tuple(series), log=log, note=note, wide=True)]


def speed_sections(run: RunFacts) -> list[PageSection]:
    """Throughput and GPU use along the run, then where a step and the run spent their time."""
    rate = ("tokens per second", run.points("tokens_per_second"), 1)
    shares = [(x, None if y is None else 0.01 * y) for x, y in run.points("gpu_utilization")]
    used = [("GPU utilization", shares, 3), ("MFU", run.points("mfu"), 4)]
    use = " and ".join(name for name, points, _ in used if has_values(points))
    about = "Utilization is the share of time in which any kernel ran." if run.on_gpu else ""
    memory = [(name, run.points(key), colour) for name, key, colour in MEMORY]
    power = ("power", run.points("power_watts"), 2)
    figures = [
        *make_figure("throughput", "Tokens per second", rate, unit="si", from_zero=True),
        *make_figure("utilisation", use, *used, unit="percent", from_zero=True, note=about),
        *make_figure("memory", "GPU memory", *memory, unit="bytes", from_zero=True),
        *make_figure("power", "Power", power, unit="watts", from_zero=True),
    ]
    no_gpu = "This run had no GPU, so there is no utilization, memory or power to draw."
    sections, average = [], run.anatomy.step
    step = (
        _parts({**average.phases, "copy": average.exposed_copy}, PHASES)
        if average is not None
        else []
    )
    if figures:
        note = "" if run.on_gpu else no_gpu
        sections.append(make_section("speed", "Speed", figures, note, layout="curves"))
    spent = run.anatomy.run
    whole = _parts({name: getattr(spent, name) for name in RUN_PARTS}, RUN_PARTS)
    if step or whole:
        took = span(spent.total)
        title = "Where the time went"
        sections.append(make_section("time", title, step, _about_step(run), whole, took))
    return sections


def _parts(spent: dict[str, float], colours: dict[str, int]) -> list[Part]:
    names = {**PHASE_NAMES, "rest": "other"}
    return [
        (names.get(key, key), spent[key], span(spent[key]), colour)
        for key, colour in colours.items()
        if spent.get(key, 0.0) > 0
    ]


def _about_step(run: RunFacts) -> str:
    step = run.anatomy.step
    if step is None:
        return ""
    notes = [f"{span(step.wall)} per step, the median of {step.updates:,}."]
    if step.copies_beside and step.of("copy"):
        notes.append(f"Copies took {span(step.of('copy'))}, overlapped with computing.")
    if step.feed is not None:
        notes.append(f"Making the batches took {span(step.feed)} in the background.")
    if not step.settled:
        notes.append("The run was too short to settle: these are its first steps.")
    return " ".join(notes)
