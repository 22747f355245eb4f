"""The job behind `expert validate`: judges an expert's answers and decides the quality gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import DecodingSettings, resolve_decoding
from expert.answer.writer import Answer
from expert.core.rundir import weights_hash
from expert.jobs.validate.held_out import Run, refuse_rows_baseline_trained_on, trained_cases
from expert.jobs.validate.models import (
    LocalModels,
    ModelsOnCards,
    ValidatedModel,
    models_on_cards,
)
from expert.jobs.validate.requirements import (
    CannotValidate,
    JudgeChoice,
    Requirements,
    choose_judge,
)
from expert.jobs.validate.saved_verdict import validation_file
from expert.jobs.validate.test_sets import (
    TestSet,
    data_folder,
    find_test_set,
    with_rendered_answers,
)
from expert.jobs.validate.validation import (
    CheckpointResult,
    Judged,
    Validation,
    few_cases,
    notes_on,
)
from expert.judging.answers import normalised, unfenced
from expert.judging.domain import is_strict
from expert.judging.gate import (
    MAX_REGRESSION,
    MIN_NEW_CASES,
    Gate,
    GateRequirements,
    ModelResult,
    evaluate_gate,
)
from expert.judging.judge_command import Scored, score_all
from expert.judging.judge_pool import judge_all
from expert.judging.oracles.oracle import Judgement, wrong
from expert.judging.oracles.text import OPEN_KIND
from expert.judging.score import Comparison, compare
from expert.run.stored.choose_checkpoint import BASE, Choice, choose, states
from expert.run.stored.load import base_warning, read_plan
from expert.run.stored.locate import find_expert

if TYPE_CHECKING:
    from expert.data.records import Example
    from expert.judging.cases import Case
    from expert.run.stored.load import Trained
    from expert.training.evaluation import EvalResult

__all__ = ["CannotValidate", "Validation", "find_expert", "validate"]

ALL = "all"

Tell = Callable[[str, int, int], None]
"""Called with the current task, progress and total; the total is 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What every model of a validation is asked, and how."""

    test: TestSet
    judge_choice: JudgeChoice
    strict: bool
    decoding: DecodingSettings
    models: LocalModels | ModelsOnCards
    tell: Tell
    seed: int = 0
    learnt: frozenset[str] = frozenset()
    """Ids of the cases that the run was trained on."""
    found: list[str] = field(default_factory=list)
    """Notes made meanwhile."""

    def losses(self, model: ValidatedModel, rows: Sequence[Example]) -> EvalResult:
        what = f"{model.name}: loss on held-out rows"
        return model.losses(
            rows,
            tell=lambda done, of: self.tell(what, done, of),
            note=self.found.append,
        )


def validate(
    expert: str | Path | None = None,
    *,
    test_set: str | Path | None = None,
    baseline: str | Path | None = None,
    min_accuracy: float | None = None,
    max_regression: float = MAX_REGRESSION,
    min_improvement: float | None = None,
    min_token_accuracy: float | None = None,
    judge_command: str | None = None,
    judge_seconds: float | None = None,
    min_score: float | None = None,
    checkpoint: str | None = None,
    checkpoints: str | None = None,
    domain: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "auto",
    gpus: str | None = None,
    tell: Tell = lambda what, done, of: None,
) -> Validation:
    """Judge an expert by rows it was not trained on, and write validation.json into its run folder.

    `expert`: a run folder, a folder of runs, or a manifest's folder, whose newest run is used.
    `baseline`: "base" for the same base untrained, or another run. `checkpoints`: "all".
    `min_accuracy`: 0.95 by default; it does not apply to rows without answers. Open text is
    compared with its base by loss and token accuracy: `min_improvement`, as a share of the base's
    loss, and `min_token_accuracy` require more. `judge_command`: a program that scores the answers
    (see expert.judging.judge_command); `min_score` is the required mean. `gpus`: "all", a number of
    cards, or a list such as "0,2"; a process on each does a share.
    """
    _refuse_wrong(checkpoints, limit)
    asked = Requirements(
        min_accuracy=min_accuracy,
        max_regression=max_regression,
        min_improvement=min_improvement,
        min_token_accuracy=min_token_accuracy,
        judge_command=judge_command,
        judge_seconds=judge_seconds,
        min_score=min_score,
    )
    loading = _models(gpus, device)
    began, run = time.monotonic(), _run_at(expert)
    _refuse_read_only(run.folder.path)
    other = _run_at(baseline) if baseline is not None and str(baseline) != BASE else None
    against = (other, _choice(other)) if other is not None else None  # before anything is loaded
    chosen = _choice(run, checkpoint)
    weights = weights_hash(chosen.path)
    remark = base_warning(run.folder, run.plan)
    test = _rows(run, test_set, limit, other, tell)
    judge_choice = choose_judge(run.folder, run.plan, test, domain, asked)
    with loading as models:
        pairs = zip(test.cases, test.examples, strict=True)
        learnt, unknown = trained_cases(pairs, run, make=test.drawn)
        task = _task(run, test, judge_choice, models=models, tell=tell, seed=seed, learnt=learnt)
        result = _evaluate_checkpoint(run, chosen, task)
        every = [choose(run.folder, name) for name in states(run.folder)] if checkpoints else []
        compared = tuple(
            result if each.path == chosen.path else _evaluate_checkpoint(run, each, task)
            for each in every
        )
        before = None
        if against is not None:
            before = _evaluate_checkpoint(*against, task)
        elif baseline is not None:
            before = _evaluate(_base(run, task), str(run.folder.path), task)
        base = _base_rows(run, task, before) if judge_choice.compares_with_base else None
    file, kept = validation_file(run.folder, chosen, test)
    done = Validation(
        folder=run.folder.path,
        expert=run.plan.expert,
        model=run.plan.model.name,
        domain=judge_choice.domain,
        test_set=test.name,
        weights=weights,
        result=result,
        baseline=before,
        comparison=_compared(result, before),
        base=base,
        gate=_gate(asked.demands(), result, before, base),
        because=judge_choice.because,
        judge=judge_choice.judge.command if judge_choice.judge is not None else "",
        checkpoints=compared,
        settings=_settings(asked.demands(), task, limit),
        partial=test.partial,
        file=file,
        notes=tuple(filter(None, (*_notes(task, result), *task.found, remark, unknown, kept))),
        seconds=time.monotonic() - began,
    )
    run.folder.write_json(file.name, done.as_dict())
    return done


def _refuse_wrong(checkpoints: str | None, limit: int | None) -> None:
    if checkpoints not in (None, ALL):
        raise CannotValidate(
            f"--checkpoints {checkpoints}: is not known  (write --checkpoints all)"
        )
    if limit is not None and limit < 1:
        raise CannotValidate(f"limit: got {limit}, expected a whole number of at least 1")


def _refuse_read_only(run: Path) -> None:
    if not os.access(run, os.W_OK):
        raise CannotValidate(
            f"{run}: is read-only, and the verdict is written there  (copy the run to another "
            "folder, and name that)"
        )


def evaluate_model(run: Run, trained: Trained, test: TestSet, *, tell: Tell) -> CheckpointResult:
    """The results of a loaded model on rows of its run: no gate, nothing written."""
    judge_choice = choose_judge(run.folder, run.plan, test, None, Requirements())
    models = LocalModels(trained=trained)
    task = _task(run, test, judge_choice, models=models, tell=tell)
    return _evaluate(models.loaded(), str(run.folder.path), task)


def _compared(result: CheckpointResult, before: CheckpointResult | None) -> Comparison | None:
    if before is None:
        return None
    rows = {each.case.id: each.row for each in result.cases}
    return compare(result.verdicts(), before.verdicts(), rows)


def _gate(
    demands: GateRequirements,
    result: CheckpointResult,
    before: CheckpointResult | None,
    base: EvalResult | None,
) -> Gate:
    rows = None
    if base is not None:
        rows = ModelResult(loss=base.loss, token_accuracy=base.token_accuracy)
    theirs = before.standing if before is not None else None
    return evaluate_gate(demands, result.standing, theirs, base=rows)


def _models(gpus: str | None, device: str) -> AbstractContextManager[LocalModels | ModelsOnCards]:
    """Where models are loaded: here, or in a process for each card, started when entered. Missing
    cards are refused immediately."""
    from expert.jobs.launch.cards import choose_cards
    from expert.planning.machine.machine import describe_machine

    if gpus is None:
        return nullcontext(LocalModels(device))
    cards = choose_cards(gpus, describe_machine(), device=device, env=os.environ)
    return models_on_cards(cards.environment_per_card(os.environ), device)


def _run_at(expert: str | Path | None) -> Run:
    folder, beside = find_expert(Path(expert) if expert is not None else None)
    plan = read_plan(folder)
    return Run(folder, plan, data_folder(folder, plan, beside))


def _choice(run: Run, named: str | None = None) -> Choice:
    return choose(run.folder, named or run.plan.watch.packaging_checkpoint)


def _rows(
    run: Run, named: str | Path | None, limit: int | None, other: Run | None, tell: Tell
) -> TestSet:
    """The rows to judge by, which the baseline was not trained on either."""
    tell("reading the test set", 0, 0)
    test = find_test_set(run, named=Path(named) if named is not None else None).limited(limit)
    if other is not None and test.drawn:
        tell("reading which rows the baseline was trained on", 0, 0)
        refuse_rows_baseline_trained_on(test.examples, test.name, run, other)
    return test


def _task(run: Run, test: TestSet, judge_choice: JudgeChoice, **more: Any) -> _Task:
    how, _ = resolve_decoding(run.plan, {})  # its note is about characters
    return _Task(
        test=test,
        judge_choice=judge_choice,
        strict=is_strict(run.plan.decoding),
        decoding=how,
        **more,
    )


def _notes(task: _Task, result: CheckpointResult) -> list[str]:
    known = notes_on(task.test.every_case, task.judge_choice.domain, left_out=task.test.left_out)
    return [*known, "" if result.is_scored else few_cases(result.standing.score)]


def _settings(demands: GateRequirements, task: _Task, limit: int | None) -> dict[str, Any]:
    """Everything besides the expert and the rows that decides the outcome, for validation.json."""
    return {
        **task.judge_choice.settings(demands),
        "decoding": asdict(task.decoding),
        "seed": task.seed,
        "limit": limit,
        "strict": task.strict,
        "device": task.models.device,
    }


def _evaluate_checkpoint(run: Run, choice: Choice, task: _Task) -> CheckpointResult:
    task.tell(f"loading {run.plan.model.name} and {choice.name}", 0, 0)
    return _evaluate(task.models.load(run, choice), str(run.folder.path), task)


def _base(run: Run, task: _Task) -> ValidatedModel:
    task.tell(f"loading {run.plan.model.name} alone", 0, 0)
    return task.models.load(run, None)


def _evaluate(model: ValidatedModel, run: str, task: _Task) -> CheckpointResult:
    """Loss on the rows, answers to the cases, and their judgements."""
    name, step = model.name, model.step
    if task.test.every_case and model.template is None:
        raise CannotValidate(
            f"{run}: the character model only continues text, and the rows are "
            f"conversations ({task.test.name})  (name a text file with --test-set FILE)"
        )
    rows = task.losses(model, task.test.examples)
    new_rows = _new_rows(model, task)
    began = time.monotonic()
    answers = _answers(model, task)
    seconds = time.monotonic() - began
    cases = with_rendered_answers(task.test.asked(), model.template) if model.template else []
    model.unload()  # judging takes memory of its own
    said = [_judged_text(*pair) for pair in zip(cases, answers, strict=True)]
    scored = _scored(cases, said, name, task)
    judgements = [each.judgement for each in scored] or judge_all(
        cases,
        said,
        domain=task.judge_choice.domain,
        strict=task.strict,
        tell=lambda done, of: task.tell(f"{name}: judging", done, of),
        notice=task.found.append,
    )
    scores = [each.score for each in scored] or [None] * len(cases)
    return CheckpointResult(
        name=name,
        run=run,
        step=step,
        rows=rows,
        cases=tuple(
            replace(_judged(case, answer, found), learnt=case.id in task.learnt, score=score)
            for case, answer, found, score in zip(cases, answers, judgements, scores, strict=True)
        ),
        new_rows=new_rows,
        tokens=sum(answer.tokens for answer in answers),
        seconds=seconds,
    )


def _scored(cases: list[Case], answers: list[str], name: str, task: _Task) -> list[Scored]:
    """The scores of the judge command; empty if there is none."""
    if task.judge_choice.judge is None:
        return []
    task.tell(f"{name}: {task.judge_choice.judge.command}", 0, 0)
    found, faults = score_all(task.judge_choice.judge, cases, answers)
    task.found.extend(f"{name}: {fault}" for fault in faults)
    return found


def _new_rows(model: ValidatedModel, task: _Task) -> EvalResult | None:
    """Loss on the rows not trained on, if the loss decides and some of the rows were trained on."""
    pairs = zip(task.test.examples, task.test.cases, strict=True)
    new = [row for row, own in pairs if not any(case.id in task.learnt for case in own)]
    enough = len(new) >= min(MIN_NEW_CASES, len(task.test.examples))
    if (
        not task.judge_choice.compares_with_base
        or not enough
        or len(new) == len(task.test.examples)
    ):
        return None
    return task.losses(model, new)


def _base_rows(run: Run, task: _Task, before: CheckpointResult | None) -> EvalResult:
    """Loss of the base on the rows used for the comparison; it generates nothing."""
    if before is not None and before.name == BASE:
        return before.new_rows or before.rows
    base = _base(run, task)
    return _new_rows(base, task) or task.losses(base, task.test.examples)


def _answers(model: ValidatedModel, task: _Task) -> list[Answer]:
    if not task.test.every_case:
        return []
    name = model.name
    return model.answers(
        [replace(example, turns=example.turns[:-1]) for _, example in task.test.asked()],
        task.decoding,
        task.seed,
        tell=lambda done, of: task.tell(f"{name}: answering", done, of),
        note=task.found.append,
    )


def _judged_text(case: Case, answer: Answer) -> str:
    """The text to judge: if tool calls are expected, with the marks around them."""
    return answer.marked if case.check.get("marks") else answer.text


def _judged(case: Case, answer: Answer, judgement: Judgement) -> Judged:
    if answer.refused and judgement.kind == OPEN_KIND:
        judgement = replace(judgement, reason=answer.refused)
    elif answer.refused:
        judgement = wrong("run", answer.refused)
    elif judgement.passed is False and not answer.ended:
        cut = f"{judgement.reason}; the answer was cut at {answer.tokens} tokens"
        judgement = wrong(judgement.kind, cut)
    said = _judged_text(case, answer)
    return Judged(
        case=case,
        answer=said,
        judgement=judgement,
        exact=said == case.expected.strip(),
        normalised=normalised(unfenced(said)) == normalised(case.expected),
    )
