"""`expert improve`: rounds in which an expert learns from its own judged answers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_sheet, write_json
from expert.cli.show.progress import RunProgress
from expert.cli.validate import (
    CaseLimit,
    Judge,
    JudgeProgram,
    JudgeSeconds,
    MinAccuracy,
    MinScore,
    TestSetFile,
    ValidatingView,
)
from expert.core.errors import EXIT_GATE_FAILED, EXIT_OK
from expert.core.text import duration, shell_quoted

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.improve.improve import Improvement, Standing
    from expert.manifest.reader import ReadManifest
    from expert.run.session.result import RunResult

IMPROVE_EPILOG = (
    "Exit codes: 0 the gate passes; 5 it does not yet; 2 wrong command line or rows; 4 a run "
    "failed; 130 stopped by Ctrl-C: the same command with --resume continues."
)


class LearnsBy(StrEnum):
    rft = "rft"
    dpo = "dpo"
    grpo = "grpo"


Way = Annotated[
    LearnsBy,
    typer.Option(
        help="rft: train the base on right answers; dpo: continue the run with pairs of a right "
        "and a wrong answer; grpo: continue it with what it answers in every step."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds at most.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="Start no round after this time.")]
Answers = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Answers to each prompt; default: 4, grpo 8."),
]
Prompts = Annotated[int, typer.Option(min=1, help="Training prompts to answer in a round.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.01, max=2, help="Randomness of the answers; default: 0.8, grpo 1."),
]
TopP = Annotated[float, typer.Option(min=0.001, max=1, help="Tokens with this probability mass.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the answers.")]
Output = Annotated[
    Path | None, options.output_option("Folder for improvements; default: improved/ beside runs/.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what the same command began.")]


def improve(
    run: options.RunFolder = None,
    expert: options.ExpertPlace = None,
    method: Way = LearnsBy.rft,
    rounds: Rounds = 3,
    minutes: Minutes = None,
    answers: Answers = None,
    prompts: Prompts = 4000,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    test_set: TestSetFile = None,
    min_accuracy: MinAccuracy = None,
    judge_command: JudgeProgram = None,
    judge_seconds: JudgeSeconds = None,
    min_score: MinScore = None,
    domain: Judge = None,
    limit: CaseLimit = None,
    seed: Seed = 0,
    overrides: options.Overrides = None,
    output: Output = None,
    resume: Resume = False,
    device: options.ComputeDevice = options.Device.auto,
    as_json: Annotated[bool, options.json_option("Print the contents of improve.json.")] = False,
) -> None:
    """Let an expert learn from its own answers, which its judge has judged."""
    asked: dict[str, Any] = {
        key: value.value if isinstance(value, StrEnum) else value
        for key, value in locals().items()
        if key not in ("run", "expert", "as_json", "overrides")
    }
    from expert.jobs.improve.improve import improve as improve_job

    run = options.chosen_run(run, expert, prefer="finished")
    console = make_console(error=as_json, needed=False)
    with ValidatingView(console) as view:
        done = improve_job(
            run,
            **asked,
            overrides=tuple(overrides or ()),
            tell=view,
            say=lambda text: show(console, text, "dim"),
            train=_training(console, view),
        )
    if as_json:
        write_json(done.as_dict(), needed=False)
    else:
        _show_improvement(done, make_console(needed=False))
    if done.exit_code != EXIT_OK:
        raise typer.Exit(done.exit_code)
    if not done.best.gate:
        raise typer.Exit(EXIT_GATE_FAILED)


def _training(console: Console, view: ValidatingView) -> Any:
    """Trains with the display of `expert train`."""

    def train(
        read: ReadManifest, resume: str | None, begin: Callable[[Path], None], answers: Any
    ) -> RunResult:
        from expert.cli.train import show_stopping
        from expert.jobs.train import train as train_job

        view.pause()
        with RunProgress(console, live=True) as shown:
            return train_job(
                read,
                resume=resume,
                begin=begin,
                answers=answers,
                sinks=(shown,),
                acknowledge=show_stopping,
                progress=shown.progress,
                evaluating=shown.evaluating,
            )

    return train


def _show_improvement(done: Improvement, console: Console) -> None:
    """The verdict, a line for each round, and the best run."""
    assert done.before is not None
    rows = [["start", "", "", *_standing(done.before), "", ""]]
    for number, each in enumerate(done.rounds, 1):
        facts, change = each.facts, each.difference or {}
        p = "" if change.get("p") is None else f", {change['p']:.2g}"
        won = f"{change['won']} / {change['lost']}{p}" if change else ""
        right = "" if facts.get("right") is None else f"{facts['right']:.1%}"
        shown = _standing(each.standing) if each.standing else ["", ""]
        took = duration(each.seconds) if each.seconds else ""
        rows.append([f"round {number}", right, str(each.rows or ""), *shown, won, took])
    columns = ("", "right answers", "rows", "accuracy", "95 % interval", "won / lost, p", "time")
    show_sheet(Sheet(columns, [rows]), console)
    for text in dict.fromkeys(
        (*done.notes, *(text for each in done.rounds for text in each.doubts))
    ):
        show(console, f"⚠ {text}", "yellow")
    if done.overlap:
        text = f"{done.overlap} training prompts are, or nearly are, in the test set: not answered"
        show(console, text, "dim")
    if done.best.gate:
        show(console, "✓ the gate passes", "bold green")
    elif done.ended and done.best.gate is None:
        show(console, f"? not enough rows to tell whether the gate passes: {done.ended}", "yellow")
    elif done.ended:
        show(console, f"✗ the gate fails: {done.ended}", "bold red")
    else:
        show(console, "stopped; the same command with --resume continues", "bold")
    show(console, f"best: {done.best.run}", "bold")
    best, test = (shell_quoted(path) for path in (Path(done.best.run), done.folder / "test.jsonl"))
    show(console, f"next: expert validate {best} --test-set {test}")
    show(console, f"      expert export {best} --to FOLDER")
    show(console, f"wrote {done.folder}", "dim")


def _standing(standing: Standing) -> list[str]:
    if standing.accuracy is None:
        return ["–", "–"]
    ends = standing.interval
    return [f"{standing.accuracy:.1%}", f"{ends[0]:.1%} to {ends[1]:.1%}" if ends else "–"]
