"""The job behind `expert validate`: answers of an expert judged, and the gate it has to pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.judged import weights_of
from expert.jobs.validate.requirements import CannotValidate, JudgeChoice, Requirements, way_of
from expert.jobs.validate.saved_verdict import place_for
from expert.jobs.validate.validation import Judged, Reached, Validation
from expert.judging.gate import ENOUGH_NEW_CASES, MAX_REGRESSION, Demands, ModelResult, gate_of
from expert.judging.score import Score, compare
from expert.run.stored.locate import find_expert

if TYPE_CHECKING:
    import torch

    from expert.core.rundir import RunFolder
    from expert.data.records import Example
    from expert.jobs.sample.decoding import DecodingSettings
    from expert.jobs.validate.answering import GivenAnswer
    from expert.jobs.validate.test_sets import TestSet
    from expert.judging.cases import Case
    from expert.judging.judge_command import Scored
    from expert.judging.oracles.oracle import Judgement
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.choose_checkpoint import Choice
    from expert.run.stored.load import Trained
    from expert.training.evaluation import EvalResult

__all__ = ["CannotValidate", "Validation", "find_expert", "validate"]

ALL = "all"

Tell = Callable[[str, int, int], None]
"""Told of what is being done, how far it is, and of how much; of 0 where that is not known."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is validated, by which rows, and against what."""

    test_set: Path | None
    baseline: str | Path | None
    checkpoint: str | None
    every_checkpoint: bool
    domain: str | None
    limit: int | None
    seed: int
    device: str
    tell: Tell


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What every model of a validation is asked, and how."""

    test: TestSet
    cases: tuple[Case, ...]
    learnt: frozenset[str]
    """Ids of the cases that the run was trained on."""
    way: JudgeChoice
    strict: bool
    decoding: DecodingSettings
    seed: int
    device: torch.device
    tell: Tell
    found: list[str] = field(default_factory=list)
    """What was noticed while they were asked."""

    def losses(self, trained: Trained, rows: Sequence[Example]) -> EvalResult:
        """Loss and token accuracy of a model on rows."""
        from expert.jobs.validate.row_losses import row_losses

        what = f"{trained.choice.name}: loss on held-out rows"
        return row_losses(
            trained,
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
    tell: Tell = lambda what, done, of: None,
) -> Validation:
    """Judge an expert by rows it was not trained on, and write validation.json into its run folder.

    `expert`: a run folder, a folder of runs, or the folder of a manifest, whose newest run is
    taken. `baseline`: "base" for the same base untrained, or another run. `checkpoints`: "all".
    `min_accuracy`: 0.95 where it is not named; rows without answers have none, and no gate on it.
    Open text is compared with its base by loss and token accuracy: `min_improvement`, as a share of
    the base's loss, and `min_token_accuracy` ask for more. `judge_command`: a program that scores
    the answers (see expert.judging.judge_command); `min_score` is the mean that is asked for.
    """
    if checkpoints not in (None, ALL):
        raise CannotValidate(
            f"--checkpoints {checkpoints}: is not known  (write --checkpoints all)"
        )
    asked = Requirements(
        min_accuracy=min_accuracy,
        max_regression=max_regression,
        min_improvement=min_improvement,
        min_token_accuracy=min_token_accuracy,
        judge_command=judge_command,
        judge_seconds=judge_seconds,
        min_score=min_score,
    )
    request = _Request(
        test_set=Path(test_set) if test_set is not None else None,
        baseline=baseline,
        checkpoint=checkpoint,
        every_checkpoint=checkpoints == ALL,
        domain=domain,
        limit=limit,
        seed=seed,
        device=device,
        tell=tell,
    )
    folder, beside = find_expert(Path(expert) if expert is not None else None)
    return _validated(folder, beside, request, asked)


def _validated(
    folder: RunFolder, beside: Path | None, request: _Request, asked: Requirements
) -> Validation:
    """The validation of a run, written into its folder."""
    from expert.jobs.sample.decoding import settle_decoding
    from expert.judging.domain import is_strict
    from expert.run.stored.choose_checkpoint import choose
    from expert.run.stored.load import base_remark, pick_device, read_plan

    began, baseline, tell = time.monotonic(), request.baseline, request.tell
    plan = read_plan(folder)
    _look_for_baseline(baseline)
    chosen = choose(folder, request.checkpoint or plan.watch.packaging_checkpoint)
    weights = weights_of(chosen.path)
    remark = base_remark(folder, plan)
    limit = request.limit
    test = _rows(
        folder, plan, beside, named=request.test_set, limit=limit, baseline=baseline, tell=tell
    )
    how, _ = settle_decoding(plan, {})  # it speaks of characters that are drawn; here none are
    way = way_of(folder, plan, test, request.domain, asked)
    learnt, untold = _learnt(folder, plan, beside, test)
    task = _Task(
        test=test,
        cases=tuple(case for own in test.cases for case in own),
        learnt=learnt,
        way=way,
        strict=is_strict(plan.decoding),
        decoding=how,
        seed=request.seed,
        device=pick_device(request.device),
        tell=tell,
    )
    reached = _reach(folder, plan, chosen, task)
    others = (
        _reach_all(folder, plan, task, {chosen.path: reached}) if request.every_checkpoint else ()
    )
    before = _baseline(folder, plan, str(baseline), task) if baseline is not None else None
    theirs = before.standing if before is not None else None
    base = _base_rows(plan, task, before) if way.to_base else None
    demands = asked.demands()
    file, kept = place_for(folder, chosen, test)
    done = Validation(
        folder=folder.path,
        expert=plan.expert,
        model=plan.model.name,
        domain=way.domain,
        test_set=test.name,
        weights=weights,
        reached=reached,
        baseline=before,
        comparison=compare(reached.verdicts(), before.verdicts(), reached.rows_of_cases())
        if before is not None
        else None,
        base=base,
        gate=gate_of(demands, reached.standing, theirs, base=_as_standing(base)),
        because=way.because,
        judge=way.judge.command if way.judge is not None else "",
        checkpoints=others,
        settings=_settings(demands, task, limit),
        partial=test.partial,
        file=file,
        notes=tuple(filter(None, (*_notes(task, reached), *task.found, remark, untold, kept))),
        seconds=time.monotonic() - began,
    )
    folder.write_json(file.name, done.as_dict())
    return done


def _rows(
    folder: RunFolder,
    plan: RunPlan,
    beside: Path | None,
    *,
    named: Path | None,
    limit: int | None,
    baseline: str | Path | None,
    tell: Tell,
) -> TestSet:
    """The rows to judge by, which the baseline was not trained on either."""
    from expert.jobs.validate.test_sets import find_test_set

    tell("reading the test set", 0, 0)
    test = find_test_set(folder, plan, beside=beside, named=named).limited(limit)
    if baseline is not None and test.drawn:
        tell("reading which rows the baseline was trained on", 0, 0)
        _refuse_what_the_baseline_learnt(folder, plan, beside, str(baseline), test)
    return test


def _notes(task: _Task, reached: Reached) -> list[str]:
    from expert.jobs.validate.validation import few_cases, notes_on

    known = notes_on(task.cases, task.way.domain, left_out=task.test.left_out)
    return [*known, "" if reached.is_scored else few_cases(reached.standing.score)]


def _settings(demands: Demands, task: _Task, limit: int | None) -> dict[str, Any]:
    """All that decides the outcome besides the expert and the rows, as validation.json has it."""
    return {
        **task.way.settings(demands),
        "decoding": asdict(task.decoding),
        "seed": task.seed,
        "limit": limit,
        "strict": task.strict,
        "device": str(task.device),
    }


def _reach_all(
    folder: RunFolder, plan: RunPlan, task: _Task, known: dict[Path, Reached]
) -> tuple[Reached, ...]:
    """What every state of the run reaches; `known`: of some it was found out before."""
    from expert.run.stored.choose_checkpoint import choose, states

    return tuple(
        known.get(choice.path) or _reach(folder, plan, choice, task)
        for choice in (choose(folder, name) for name in states(folder))
    )


def _reach(folder: RunFolder, plan: RunPlan, choice: Choice, task: _Task) -> Reached:
    """Ask a state of a run."""
    from expert.run.stored.load import load_trained

    task.tell(f"loading {plan.model.name} and {choice.name}", 0, 0)
    return _ask(load_trained(folder, plan, choice, device=task.device), str(folder.path), task)


def _baseline(folder: RunFolder, plan: RunPlan, named: str, task: _Task) -> Reached:
    """Ask the untrained base of the run, or another run."""
    from expert.run.stored.choose_checkpoint import BASE, choose
    from expert.run.stored.load import load_base, read_plan

    if named == BASE:
        task.tell(f"loading {plan.model.name} alone", 0, 0)
        return _ask(load_base(plan, device=task.device), str(folder.path), task)
    other, _ = find_expert(Path(named))
    theirs = read_plan(other)
    return _reach(other, theirs, choose(other, theirs.watch.packaging_checkpoint), task)


def _look_for_baseline(named: str | Path | None) -> None:
    """Raise where the baseline is not a run with a finished state, before anything is loaded."""
    from expert.run.stored.choose_checkpoint import BASE, choose
    from expert.run.stored.load import read_plan

    if named is not None and str(named) != BASE:
        other, _ = find_expert(Path(named))
        choose(other, read_plan(other).watch.packaging_checkpoint)


def _refuse_what_the_baseline_learnt(
    folder: RunFolder, plan: RunPlan, beside: Path | None, named: str, test: TestSet
) -> None:
    """Rows that a run held out are to be new to a run beside it as well."""
    from expert.jobs.validate.held_out import Run, refuse_rows_of_the_baseline
    from expert.jobs.validate.test_sets import data_folder
    from expert.run.stored.choose_checkpoint import BASE
    from expert.run.stored.load import read_plan

    if named == BASE:
        return
    other, beside_other = find_expert(Path(named))
    runs = [
        Run(run, its, data_folder(run, its, near))
        for run, its, near in ((folder, plan, beside), (other, read_plan(other), beside_other))
    ]
    refuse_rows_of_the_baseline(test.examples, test.name, *runs)


def _learnt(
    folder: RunFolder, plan: RunPlan, beside: Path | None, test: TestSet
) -> tuple[frozenset[str], str]:
    """Cases the run was trained on; where that is unknown, a note that says why."""
    from expert.jobs.validate.held_out import Run, learnt_cases
    from expert.jobs.validate.test_sets import data_folder

    found, untold = learnt_cases(
        list(zip(test.cases, test.examples, strict=True)),
        Run(folder, plan, data_folder(folder, plan, beside)),
        make=test.drawn,
    )
    return found, f"unknown whether the run was trained on these cases: {untold}" if untold else ""


def _ask(trained: Trained, run: str, task: _Task) -> Reached:
    """Loss on the rows, answers to the cases, and what becomes of them."""
    from expert.jobs.validate.test_sets import as_written
    from expert.judging.court import judge_all

    name = trained.choice.name
    if task.cases and trained.template is None:
        raise CannotValidate(
            f"{run}: the character model only continues text, and the rows are "
            f"conversations ({task.test.name})  (name a text file with --test-set FILE)"
        )
    rows = task.losses(trained, task.test.examples)
    new_rows = _new_rows(trained, task)
    began = time.monotonic()
    answers = _answers(trained, task)
    seconds, step = time.monotonic() - began, trained.choice.step
    cases = as_written(task.test.asked(), trained.template) if trained.template else []
    del trained
    gc.collect()
    said = [_said(*pair) for pair in zip(cases, answers, strict=True)]
    scored = _scored(cases, said, name, task)
    judgements = [each.judgement for each in scored] or judge_all(
        cases,
        said,
        domain=task.way.domain,
        strict=task.strict,
        tell=lambda done, of: task.tell(f"{name}: judging", done, of),
        notice=task.found.append,
    )
    scores = [each.score for each in scored] or [None] * len(cases)
    return Reached(
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
    """What the judge command says; nothing where there is none."""
    from expert.judging.judge_command import score_all

    if task.way.judge is None:
        return []
    task.tell(f"{name}: {task.way.judge.command}", 0, 0)
    found, faults = score_all(task.way.judge, cases, answers)
    task.found.extend(f"{name}: {fault}" for fault in faults)
    return found


def _new_rows(trained: Trained, task: _Task) -> EvalResult | None:
    """Loss on the rows not trained on, where the loss decides and some of them were."""
    pairs = zip(task.test.examples, task.test.cases, strict=True)
    new = [row for row, own in pairs if not any(case.id in task.learnt for case in own)]
    enough = len(new) >= min(ENOUGH_NEW_CASES, len(task.test.examples))
    if not task.way.to_base or not enough or len(new) == len(task.test.examples):
        return None
    return task.losses(trained, new)


def _base_rows(plan: RunPlan, task: _Task, before: Reached | None) -> EvalResult:
    """Loss of the base on the rows used for the comparison; it is asked nothing."""
    from expert.run.stored.choose_checkpoint import BASE
    from expert.run.stored.load import load_base

    if before is not None and before.name == BASE:
        return before.new_rows or before.rows
    task.tell(f"loading {plan.model.name} alone", 0, 0)
    base = load_base(plan, device=task.device)
    return _new_rows(base, task) or task.losses(base, task.test.examples)


def _as_standing(rows: EvalResult | None) -> ModelResult | None:
    if rows is None:
        return None
    none = Score(passed=0, failed=0, without_oracle=0)
    return ModelResult(score=none, loss=rows.loss, token_accuracy=rows.token_accuracy)


def _answers(trained: Trained, task: _Task) -> list[GivenAnswer]:
    from expert.jobs.validate.answering import answer_all

    if not task.cases:
        return []
    name = trained.choice.name
    return answer_all(
        trained,
        [replace(example, turns=example.turns[:-1]) for _, example in task.test.asked()],
        task.decoding,
        seed=task.seed,
        tell=lambda done, of: task.tell(f"{name}: answering", done, of),
        note=task.found.append,
    )


def _said(case: Case, answer: GivenAnswer) -> str:
    """What is judged: of an answer that is to call tools, with the marks of its calls."""
    return answer.marked if case.check.get("marks") else answer.text


def _judged(case: Case, answer: GivenAnswer, judgement: Judgement) -> Judged:
    from expert.judging.answers import normalised, unfenced
    from expert.judging.oracles.open_text import OPEN_KIND
    from expert.judging.oracles.oracle import wrong

    if answer.refused and judgement.kind == OPEN_KIND:
        judgement = replace(judgement, reason=answer.refused)
    elif answer.refused:
        judgement = wrong("run", answer.refused)
    elif judgement.passed is False and not answer.ended:
        cut = f"{judgement.reason}; the answer was cut at {answer.tokens} tokens"
        judgement = wrong(judgement.kind, cut)
    said = _said(case, answer)
    return Judged(
        case=case,
        answer=said,
        judgement=judgement,
        exact=said == case.expected.strip(),
        normalised=normalised(unfenced(said)) == normalised(case.expected),
    )
