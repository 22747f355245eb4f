"""`expert validate`: whether an expert is good enough, measured on held-out rows."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show import options
from expert.cli.show.display import (
    Line,
    Sheet,
    make_console,
    show,
    show_lines,
    show_sheet,
    write_json,
)
from expert.cli.show.progress import SECONDS_BETWEEN_LINES
from expert.core.errors import EXIT_GATE_FAILED, EXIT_GATE_UNDECIDED, ExpertError
from expert.core.text import counted, loss, visible
from expert.judging.domain import JUDGES

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.validate.validation import CheckpointResult, Validation
    from expert.training.objectives.objective import EvalResult

SHOWN = 3
"""Examples of wrong answers."""
SHOWN_CHARACTERS = 160
Domain = StrEnum("Domain", list(JUDGES))  # type: ignore[misc] # the choices of --domain


class CheckpointChoice(StrEnum):
    all = "all"


def _share(what: str) -> Any:
    return typer.Option(min=0, max=1, help=what)


TestSetFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Cases (test_cases.json) or rows; default: the rows that the manifest holds out.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="RUN|base", help="Compare with this run, or with the base model."),
]
MinAccuracy = Annotated[float | None, _share("Share of correct answers required; default: 0.95.")]
MinImprovement = Annotated[
    float | None,
    _share("Open text: required drop of the loss below the base's, as a share; default: 0.05."),
]
MinTokenAccuracy = Annotated[
    float | None, _share("Open text: required share of correct tokens; default: the base's.")
]
JudgeProgram = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Your program that scores answers: it reads JSON lines with id, prompt, expected and "
        "answer, and writes JSON lines with id, score (0 to 1) and reason. Or a Python file with a "
        "function judge(prompt, expected, answer), which is run in a sandbox.",
    ),
]
JudgeSeconds = Annotated[
    float | None,
    typer.Option(min=1, help="Time limit of --judge-command for all cases; default: 600."),
]
MinScore = Annotated[float | None, _share("Mean score of --judge-command required; default: 0.5.")]
MaxRegression = Annotated[float, _share("How much worse than the baseline it may be, as a share.")]
Compared = Annotated[
    CheckpointChoice | None,
    typer.Option(help="Compare all checkpoints of the run and name the best."),
]
Judge = Annotated[
    Domain | None,
    typer.Option(
        help="The judge; default: as the manifest says, else by the answers: text (exact match) "
        "if they are short, open (loss against the base) if not."
    ),
]
Vote = Annotated[
    int | None,
    typer.Option(
        min=2, max=64, help="Also sample so many answers and score the one most agree with."
    ),
]
CaseLimit = Annotated[int | None, typer.Option(min=1, help="Use this many cases, evenly spread.")]


def validate(
    run: options.RunFolder = None,
    expert: options.ExpertPlace = None,
    test_set: TestSetFile = None,
    baseline: Baseline = None,
    min_accuracy: MinAccuracy = None,
    max_regression: MaxRegression = 0.05,
    min_improvement: MinImprovement = None,
    min_token_accuracy: MinTokenAccuracy = None,
    judge_command: JudgeProgram = None,
    judge_seconds: JudgeSeconds = None,
    min_score: MinScore = None,
    checkpoint: options.Checkpoint = None,
    checkpoints: Compared = None,
    domain: Judge = None,
    limit: CaseLimit = None,
    vote: Vote = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled answers.")] = 0,
    device: options.ComputeDevice = options.Device.auto,
    as_json: Annotated[bool, options.json_option("Print the contents of validation.json.")] = False,
) -> None:
    """Score answers to held-out rows and decide the quality gate."""
    asked: dict[str, Any] = {
        key: value.value if isinstance(value, StrEnum) else value
        for key, value in locals().items()
        if key not in ("run", "expert", "as_json")
    }
    from expert.jobs.validate.validate import validate as validate_job
    from expert.parallel.launch import world_from_environment

    if world_from_environment().size > 1:  # each process would do all the work
        raise ExpertError(
            "torchrun has started expert validate several times  (start it once: it uses one card)"
        )
    run = options.chosen_run(run, expert, prefer="finished")
    console = make_console(error=as_json, needed=False)
    with ValidatingView(console) as view:
        done = validate_job(run, **asked, tell=view)
    if as_json:
        write_json(done.as_dict(), needed=False)
    else:
        _show_validation(done, make_console(needed=False))
    if done.gate.passed is False:
        raise typer.Exit(EXIT_GATE_FAILED)
    if done.gate.undecided:
        raise typer.Exit(EXIT_GATE_UNDECIDED)


class ValidatingView:
    """A bar with the time left in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich import progress as rich

        self._console, self._clock = console, clock
        self._now, self._printed = "", 0.0
        columns = (
            *(rich.TextColumn("[bold]{task.description}"), rich.BarColumn()),
            *(rich.MofNCompleteColumn(), rich.TimeRemainingColumn()),
        )
        self._bar = rich.Progress(*columns, console=console, transient=True, get_time=clock)

    def __enter__(self) -> ValidatingView:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def pause(self) -> None:
        """Make room for another display; the next report shows the bar again."""
        if self._console.is_terminal:
            self._bar.stop()
        self._now = ""

    def __call__(self, what: str, done: int, of: int) -> None:
        """Report progress; `of` is 0 if the total is unknown."""
        is_new, self._now = what != self._now, what
        if is_new and self._console.is_terminal:
            self._bar.start()
        if self._console.is_terminal:
            for task in self._bar.task_ids if is_new else ():
                self._bar.remove_task(task)
            task = self._bar.add_task(what) if is_new else self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=of or None)
        elif is_new or (of > done and self._clock() - self._printed >= SECONDS_BETWEEN_LINES):
            self._printed = self._clock()
            show(self._console, f"{what} …" if is_new else f"{what}: {done} of {of}", "dim")


# --- what was found ------------------------------------------------------------------------------


def _show_validation(done: Validation, console: Console) -> None:
    """The table, examples, whether the gate passes, and what to do if it fails."""
    show_sheet(score_sheet(done), console)
    if done.checkpoints and (best := done.best) is not None:
        rows = [
            (
                f"{each.name}{' ← best' if each is best else ''}",
                loss(each.rows.loss),
                _percent(each.score.accuracy),
                _interval(each.score.interval),
                f"{each.score.passed} of {each.score.judged}",
            )
            for each in done.checkpoints
        ]
        columns = ("checkpoint", "loss", "accuracy", "95 % interval", "correct")
        show_sheet(Sheet(columns, [rows]), console)
        by = "correct answers" if best.score.cases else "loss"
        by = "score" if best.scores.mean is not None else by
        show(console, f"best by {by}: {best.name}", "bold")
    show_lines(console, [*_example_lines(done), *gate_lines(done)])
    for number, text in enumerate(_next_steps(done)):
        show(console, f"{'      ' if number else 'next: '}{text}")


def _next_steps(done: Validation) -> list[str]:
    """What to do if the gate did not pass: about learning first."""
    from expert.core.rundir import RunFolder
    from expert.insight.advice import learning_advice
    from expert.jobs.diagnose.diagnose import diagnose_run
    from expert.run.stored.choose_checkpoint import states

    if done.gate.undecided:
        return ["score more held-out rows (--test-set FILE), or require less"]
    folder, steps = RunFolder(done.folder), []
    if done.gate.passed is False and folder.events.is_file():
        steps = learning_advice(diagnose_run(done.folder), done.as_dict())
        if not done.checkpoints and len(states(folder)) > 1:
            again = shlex.join(["expert", *sys.argv[1:], "--checkpoints", "all"])
            steps.append(f"{again} finds the best checkpoint")
    return steps


def score_sheet(done: Validation) -> Sheet:
    """The scores, next to the baseline if there is one; tasks below."""
    sides: dict[str, CheckpointResult] = {done.result.name: done.result}
    if done.result.voted is not None:
        name = f"vote of {done.settings['vote']}"
        sides[name] = replace(done.result, cases=done.result.voted, voted=None)
    if done.baseline is not None:
        other = done.baseline
        name = other.name if other.run == str(done.folder) else f"{other.name} of {other.run}"
        sides[f"baseline: {name}"] = other
    facts = {name: _facts(side) for name, side in sides.items()}
    if done.base is not None and (done.baseline is None or done.baseline.name != "base"):
        facts["base"] = _loss_facts(done.base)
    rows = [
        [name, *(each.get(name, "–") for each in facts.values())]
        for name in facts[done.result.name]
    ]
    tasks = []
    for task in done.result.by_task() if done.result.score.cases else ():
        scores = [sides[name].by_task().get(task) if name in sides else None for name in facts]
        shown = [f"{_percent(each.accuracy)} of {each.judged}" if each else "–" for each in scores]
        tasks.append([f"  {task}", *shown])
    # `16 cases, judged as json`; if rows have several answers each, `16 cases of 4 rows`.
    judged = done.result.cases
    count = len({each.row for each in judged})
    of = f" of {counted(count, 'row')}" if count != len(judged) else ""
    domains = dict.fromkeys(each.case.domain or done.domain for each in judged)
    ways = " and ".join(JUDGES[name].title or name for name in domains)
    words = f"{counted(len(judged), 'case')}{of}, "
    words += f"scored by {done.judge}" if done.judge else f"judged as {ways}"
    if not judged:
        words = f"no answers, {counted(done.result.rows.targets, 'token')}"
    title = f"{done.expert} on {done.model}: {words} ({done.test_set})"
    return Sheet(("", *facts), [rows, tasks], title=title)


def gate_lines(done: Validation) -> list[Line]:
    """Notes, the verdict with its reasons, and where the result is."""
    lines = [(f"note: {note}", "dim") for note in done.notes]
    remark = done.trained_remark()
    lines += [(f"⚠ {remark}", "yellow")] if remark else []
    if done.gate.asked and done.result.cases:
        lines.append((f"judged this way because: {done.because}", "dim"))
        lines.append((f"required: {'; '.join(done.gate.asked)}", "dim"))
    if done.gate.undecided:
        lines.append(("? not enough to tell whether the gate passes", "bold yellow"))
        lines += [(f"  - {reason}", "") for reason in done.gate.reasons]
    elif done.gate.passed is None:
        lines.append(("no gate: there are no answers to judge", "bold"))
    elif done.gate.passed:
        by = "" if done.result.cases else " by the loss: there are no answers to judge"
        if done.base is not None and not done.result.score.cases and done.result.cases:
            by = " by loss and token accuracy against the base"
        lines.append((f"✓ the gate passes{by}", "bold green"))
    else:
        lines.append(("✗ the gate fails", "bold red"))
        lines += [(f"  - {reason}", "") for reason in done.gate.reasons]
    return [*lines, (f"wrote {done.file}", "dim")]


def _facts(side: CheckpointResult) -> dict[str, str]:
    known, score = _loss_facts(side.rows), side.score
    if not side.cases:
        return known
    counts = " / ".join(map(str, (score.passed, score.failed, score.without_oracle)))
    if side.is_scored:
        mean = "–" if side.scores.mean is None else f"{side.scores.mean:.3g}"
        known = {
            "mean score": f"{mean} of {side.scores.scored}",
            "enough / too low / no score": counts,
            **known,
        }
    elif score.cases:
        known = {
            "accuracy": _percent(score.accuracy),
            "95 % interval": _interval(score.interval),
            "correct / wrong / not judged": counts,
            **known,
        }
    return known


def _loss_facts(rows: EvalResult) -> dict[str, str]:
    return {
        "loss": loss(rows.loss),
        "perplexity": f"{rows.perplexity:.4g}",
        "token accuracy": _percent(rows.token_accuracy),
    }


def _example_lines(done: Validation) -> list[Line]:
    """Some wrong answers, first those that the baseline got right; without any, open answers."""
    compared, cases = done.comparison, done.result.cases
    shown, what = [each for each in cases if each.judgement.passed is False], "wrong answer"
    if not shown:
        shown, what = [each for each in cases if each.is_open], "open answer"
    lines: list[Line] = []
    if compared is not None and compared.difference is not None:
        lost = set(compared.losses)
        shown.sort(key=lambda each: each.case.id not in lost)
        text = f"{len(compared.wins)} won, {len(lost)} lost, p = {compared.p_value or 0.0:.2g}"
        lines.append((f"against the baseline {compared.difference:+.1%}: {text}", "bold"))
    if shown:
        lines.append((f"{counted(len(shown), what)}:", "yellow" if what == "wrong answer" else ""))
    for each in shown[:SHOWN]:
        lines.append((f"  {each.case.id}: {_short(each.case.prompt)}", ""))
        lines.append((f"    expected {_short(each.case.expected)}", "dim"))
        lines.append((f"    answered {_short(each.answer) or 'nothing'}", "dim"))
        if each.judgement.reason:
            lines.append((f"    {_short(each.judgement.reason)}", "dim"))
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"


def _short(text: str) -> str:
    line = visible(" ".join(text.split()), keep="")
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"
