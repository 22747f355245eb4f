"""`expert validate`: whether an expert is good enough, by rows it has not learnt."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.options import Device, WhereToCompute, checkpoint_option, json_option
from expert.core.errors import EXIT_GATE_FAILED

if TYPE_CHECKING:
    from expert.jobs.validate.validation import Validation


class Domain(StrEnum):
    """Who judges the answers."""

    json = "json"
    sql = "sql"
    cypher = "cypher"
    typescript = "typescript"
    calls = "calls"
    text = "text"
    open = "open"


class Checkpoints(StrEnum):
    """Which states of a run are compared."""

    all = "all"


ExpertPlace = Annotated[
    Path | None,
    typer.Option(
        "--expert",
        metavar="DIR|RUN",
        help="A run folder, a folder of runs, or an expert's folder: its newest run; "
        "by default in runs/.",
        show_default=False,
    ),
]
TestSetFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Cases (test_cases.json) or rows; by default those that the manifest holds out.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="RUN|base", help="Compare with this run, or with the base alone."),
]
MinAccuracy = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Share of right answers that the gate asks for; 0.95 by default."
    ),
]
MinImprovement = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Open text: how far the loss is to be below the base's, as a share of it; by default "
        "below it at all.",
    ),
]
MinTokenAccuracy = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Open text: share of tokens to be right; by default the base's."
    ),
]
JudgeProgram = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="A program of yours that scores the answers: JSON lines with id, prompt, expected and "
        "answer on its standard input; id, score (0 to 1) and reason on its output.",
    ),
]
JudgeSeconds = Annotated[
    float | None,
    typer.Option(min=1, help="Time for --judge-command, all cases together; 600 by default."),
]
MinScore = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Mean score of --judge-command to reach; 0.5 by default."),
]
MaxRegression = Annotated[
    float, typer.Option(min=0, max=1, help="How much worse than the baseline, as a share of it.")
]
Compared = Annotated[
    Checkpoints | None, typer.Option(help="Compare all states of the run; the best is named.")
]
Judge = Annotated[
    Domain | None,
    typer.Option(
        help="Who judges; by default as the manifest says, else by the answers: text (exact match) "
        "where they are short, open (loss against the base) where they are not."
    ),
]
CaseLimit = Annotated[int | None, typer.Option(min=1, help="So many cases, spread over all.")]


def validate(
    run: Annotated[Path | None, typer.Argument(help="The expert, as with --expert.")] = None,
    expert: ExpertPlace = None,
    test_set: TestSetFile = None,
    baseline: Baseline = None,
    min_accuracy: MinAccuracy = None,
    max_regression: MaxRegression = 0.05,
    min_improvement: MinImprovement = None,
    min_token_accuracy: MinTokenAccuracy = None,
    judge_command: JudgeProgram = None,
    judge_seconds: JudgeSeconds = None,
    min_score: MinScore = None,
    checkpoint: Annotated[str | None, checkpoint_option("training.packaging_checkpoint")] = None,
    checkpoints: Compared = None,
    domain: Judge = None,
    limit: CaseLimit = None,
    seed: Annotated[int, typer.Option(min=0, help="Of answers that are drawn.")] = 0,
    device: WhereToCompute = Device.auto,
    as_json: Annotated[
        bool, json_option("What validation.json holds, on standard output.")
    ] = False,
) -> None:
    """Judge an expert's answers with parsers and databases, open text by its loss against the base;
    exit code 5 when the gate fails."""
    from expert.cli.display import make_console, write_line
    from expert.cli.run_view import say
    from expert.cli.validate_view import ValidatingView, show_validation
    from expert.jobs.validate.validate import validate as validate_job

    if run is not None and expert is not None:
        raise typer.BadParameter(f"{run} and --expert {expert}: name one expert")
    with ValidatingView(make_console(error=as_json)) as view:
        done = validate_job(
            run or expert,
            test_set=test_set,
            baseline=baseline,
            min_accuracy=min_accuracy,
            max_regression=max_regression,
            min_improvement=min_improvement,
            min_token_accuracy=min_token_accuracy,
            judge_command=judge_command,
            judge_seconds=judge_seconds,
            min_score=min_score,
            checkpoint=checkpoint,
            checkpoints=checkpoints.value if checkpoints else None,
            domain=domain.value if domain else None,
            limit=limit,
            seed=seed,
            device=device.value,
            tell=view,
        )
    if as_json:
        import json

        write_line(json.dumps(done.as_dict(), indent=2, ensure_ascii=False))
    else:
        console = make_console()
        show_validation(done, console)
        for line in _next(done):
            say(console, line)
    if done.gate.passed is False:
        raise typer.Exit(EXIT_GATE_FAILED)


def _next(done: Validation) -> list[str]:
    """What helps further where the gate is not passed; the command that was given, whole, where it
    is to be given again."""
    import shlex

    from expert.cli.validate_view import next_lines
    from expert.core.rundir import RunFolder
    from expert.run.choose_checkpoint import states

    if done.gate.passed is not False:
        return []
    is_open = not done.checkpoints and len(states(RunFolder(done.folder))) > 1
    again = shlex.join(["expert", *sys.argv[1:], "--checkpoints", "all"]) if is_open else ""
    return next_lines(done.folder, done.reached.standing.score, again, judge=bool(done.judge))
