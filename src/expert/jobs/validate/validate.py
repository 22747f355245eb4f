"""The job behind `expert validate`: judges an expert's answers and decides the quality gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import DecodingSettings, resolve_decoding
from expert.answer.writer import Answer
from expert.core.rundir import weights_hash
from expert.jobs.launch.cards import choose_cards
from expert.jobs.validate.held_out import Run, refuse_rows_baseline_trained_on, trained_cases
from expert.jobs.validate.models import ValidatedModel, models_on_cards
from expert.jobs.validate.requirements import (
    CannotValidate,
    JudgeChoice,
    check_requirements,
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
    notes_on,
)
from expert.judging.answers import normalised, unfenced
from expert.judging.domain import is_strict
from expert.judging.gate import MAX_REGRESSION, MIN_NEW_CASES, ModelResult, evaluate_gate
from expert.judging.judge_command import score_all
from expert.judging.judge_pool import judge_all
from expert.judging.oracles.oracle import Judgement, wrong
from expert.judging.oracles.text import OPEN_KIND
from expert.judging.score import compare
from expert.planning.machine.machine import describe_machine
from expert.run.stored.choose_checkpoint import BASE, Choice, choose, states
from expert.run.stored.load import base_warning, read_plan
from expert.run.stored.locate import find_expert

if TYPE_CHECKING:
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
    judging: JudgeChoice
    strict: bool
    decoding: DecodingSettings
    model: ValidatedModel
    tell: Tell
    seed: int = 0
    learnt: frozenset[str] = frozenset()
    """Ids of the cases that the run was trained on."""
    notes: list[str] = field(default_factory=list)
    """Made meanwhile."""

    def load(self, run: Run, choice: Choice | None) -> None:
        """Load a state of a run, or its base."""
        name = f"and {choice.name}" if choice is not None else "alone"
        self.tell(f"loading {run.plan.model.name} {name}", 0, 0)
        self.model.load(run, choice)

    def losses(self) -> tuple[EvalResult, EvalResult | None]:
        """Loss on all rows, and on those not trained on, if the loss decides and some of the rows
        were trained on."""
        rows = self.test.examples
        pairs = zip(rows, self.test.cases, strict=True)
        new = [row for row, own in pairs if not any(case.id in self.learnt for case in own)]
        enough = min(MIN_NEW_CASES, len(rows)) <= len(new) < len(rows)
        tell, note = self.telling("loss on held-out rows"), self.notes.append
        single = self.judging.compares_with_base  # by the difference of each row
        every = self.model.losses(rows, one_by_one=single, tell=tell, note=note)
        if not (single and enough):
            return every, None
        return every, self.model.losses(new, one_by_one=single, tell=tell, note=note)

    def telling(self, what: str) -> Callable[[int, int], None]:
        """Report the progress of a part of the work on the present model."""
        name = self.model.name
        return lambda done, of: self.tell(f"{name}: {what}", done, of)


def validate(
    expert: str | Path | None = None,
    *,
    test_set: str | Path | None = None,
    baseline: str | Path | None = None,
    max_regression: float = MAX_REGRESSION,
    checkpoint: str | None = None,
    checkpoints: str | None = None,
    domain: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "auto",
    gpus: str | None = None,
    tell: Tell = lambda what, done, of: None,
    **requirements: Any,
) -> Validation:
    """Judge an expert by rows it was not trained on, and write validation.json into its run folder.

    `expert`: a run folder, a folder of runs, or a manifest's folder, whose newest run is used.
    `baseline`: "base" for the same base untrained, or another run. `checkpoints`: "all". `gpus`:
    "all", a number of cards, or a list such as "0,2"; a process on each does a share.

    `requirements`: `min_accuracy`, 0.95 by default; it does not apply to rows without answers. Open
    text is compared with its base by loss and token accuracy: `min_improvement`, as a share of the
    base's loss, and `min_token_accuracy` require more. `judge_command`: a program that scores the
    answers (see expert.judging.judge_command) within `judge_seconds`; `min_score` is the required
    mean.
    """
    asked = {"max_regression": max_regression, **requirements}
    unknown = [name for name in requirements if name not in REQUIREMENTS]
    if unknown:
        raise TypeError(f"validate() has no argument {unknown[0]}")
    if checkpoints not in (None, ALL):
        raise CannotValidate(
            f"--checkpoints {checkpoints}: is not known  (write --checkpoints all)"
        )
    if limit is not None and limit < 1:
        raise CannotValidate(f"limit: got {limit}, expected a whole number of at least 1")
    check_requirements(asked)
    opening: AbstractContextManager[ValidatedModel]
    if gpus is None:
        opening = nullcontext(ValidatedModel(device))
    else:  # a process for each card; missing cards are refused immediately
        cards = choose_cards(gpus, describe_machine(), device=device, env=os.environ)
        opening = models_on_cards(cards.environment_per_card(os.environ), device)
    began, run = time.monotonic(), _run_at(expert)
    if not os.access(run.folder.path, os.W_OK):
        raise CannotValidate(
            f"{run.folder.path}: is read-only, and the verdict is written there  (copy the run to "
            "another folder, and name that)"
        )
    other, others_choice = None, None
    if baseline is not None and str(baseline) != BASE:  # found before anything is loaded
        other = _run_at(baseline)
        others_choice = choose(other.folder, other.plan.watch.packaging_checkpoint)
    chosen = choose(run.folder, checkpoint or run.plan.watch.packaging_checkpoint)
    weights, remark = weights_hash(chosen.path), base_warning(run.folder, run.plan)
    tell("reading the test set", 0, 0)
    named = Path(test_set) if test_set is not None else None
    test = find_test_set(run, named=named).limited(limit)
    if other is not None and test.drawn:
        tell("reading which rows the baseline was trained on", 0, 0)
        refuse_rows_baseline_trained_on(test.examples, test.name, run, other)
    judging = choose_judge(run, test, domain, asked)
    with opening as model:
        pairs = zip(test.cases, test.examples, strict=True)
        learnt, unknown_rows = trained_cases(pairs, run, make=test.drawn)
        task = _task(run, test, judging, model=model, tell=tell, seed=seed, learnt=learnt)
        result = _evaluate_checkpoint(run, chosen, task)
        every = [choose(run.folder, name) for name in states(run.folder)] if checkpoints else []
        compared = tuple(
            result if each.path == chosen.path else _evaluate_checkpoint(run, each, task)
            for each in every
        )
        before = None
        if baseline is not None:
            before = _evaluate_checkpoint(other or run, others_choice, task)
        base = before if before is not None and before.name == BASE else None
        losses = (base.rows, base.new_rows) if base is not None else None
        if judging.compares_with_base and losses is None:
            task.load(run, None)  # for its loss: it generates nothing
            losses = task.losses()
        base_rows = losses[1] or losses[0] if losses and judging.compares_with_base else None
    file, kept = validation_file(run.folder, chosen, test)
    notes = notes_on(test.every_case, judging.domain, left_out=test.left_out)
    rows = {each.case.id: each.row for each in result.cases}
    of_base = None
    if base_rows is not None:
        of_base = ModelResult(
            loss=base_rows.loss,
            token_accuracy=base_rows.token_accuracy,
            row_losses=base_rows.row_losses,
        )
    done = Validation(
        folder=run.folder.path,
        expert=run.plan.expert,
        model=run.plan.model.name,
        domain=judging.domain,
        test_set=test.name,
        weights=weights,
        result=result,
        baseline=before,
        comparison=compare(result.verdicts(), before.verdicts(), rows) if before else None,
        base=base_rows,
        gate=evaluate_gate(
            judging.demands, result.standing, before.standing if before else None, base=of_base
        ),
        because=judging.because,
        judge=judging.judge.command if judging.judge is not None else "",
        checkpoints=compared,
        # Everything besides the expert and the rows that decides the outcome.
        settings={
            **judging.settings(),
            "decoding": asdict(task.decoding),
            "seed": seed,
            "limit": limit,
            "strict": task.strict,
            "device": model.device,
        },
        partial=test.partial,
        file=file,
        notes=tuple(filter(None, (*notes, *task.notes, remark, unknown_rows, kept))),
        seconds=time.monotonic() - began,
    )
    run.folder.write_json(file.name, done.as_dict())
    return done


REQUIREMENTS = (
    *("min_accuracy", "min_improvement", "min_token_accuracy"),
    *("judge_command", "judge_seconds", "min_score"),
)


def evaluate_model(run: Run, trained: Trained, test: TestSet, *, tell: Tell) -> CheckpointResult:
    """The results of a loaded model on rows of its run: no gate, nothing written."""
    model = ValidatedModel(trained=trained)
    task = _task(run, test, choose_judge(run, test, None, {}), model=model, tell=tell)
    return _evaluate(str(run.folder.path), task)


def _run_at(expert: str | Path | None) -> Run:
    folder, beside = find_expert(Path(expert) if expert is not None else None, "finished")
    plan = read_plan(folder)
    return Run(folder, plan, data_folder(folder, plan, beside))


def _task(run: Run, test: TestSet, judging: JudgeChoice, **more: Any) -> _Task:
    how, notes = resolve_decoding(run.plan, {})
    notes = [note for note in notes if "grammar" in note]  # others are about characters
    strict = is_strict(run.plan.decoding)
    return _Task(test=test, judging=judging, strict=strict, decoding=how, notes=notes, **more)


def _evaluate_checkpoint(run: Run, choice: Choice | None, task: _Task) -> CheckpointResult:
    task.load(run, choice)
    return _evaluate(str(run.folder.path), task)


def _evaluate(run: str, task: _Task) -> CheckpointResult:
    """Loss on the rows, answers to the cases, and their judgements."""
    model, name, judge = task.model, task.model.name, task.judging.judge
    if task.test.every_case and model.template is None:
        raise CannotValidate(
            f"{run}: the character model only continues text, and the rows are "
            f"conversations ({task.test.name})  (name a text file with --test-set FILE)"
        )
    rows, new_rows = task.losses()
    began, asked, answers = time.monotonic(), task.test.asked(), []
    if asked:
        answers = model.answers(
            [replace(example, turns=example.turns[:-1]) for _, example in asked],
            task.decoding,
            task.seed,
            tell=task.telling("answering"),
            note=task.notes.append,
        )
    seconds = time.monotonic() - began
    cases = with_rendered_answers(asked, model.template) if model.template else []
    model.unload()  # judging takes memory of its own
    said = [_judged_text(*pair) for pair in zip(cases, answers, strict=True)]
    if judge is not None:
        task.tell(f"{name}: {judge.command}", 0, 0)
        judgements, faults = score_all(judge, cases, said)
        task.notes.extend(f"{name}: {fault}" for fault in faults)
    else:
        judgements = judge_all(
            cases,
            said,
            domain=task.judging.domain,
            strict=task.strict,
            tell=task.telling("judging"),
            notice=task.notes.append,
        )
    return CheckpointResult(
        name=name,
        run=run,
        step=model.step,
        rows=rows,
        cases=tuple(
            _judged(case, answer, judgement, learnt=case.id in task.learnt)
            for case, answer, judgement in zip(cases, answers, judgements, strict=True)
        ),
        new_rows=new_rows,
        tokens=sum(answer.tokens for answer in answers),
        seconds=seconds,
    )


def _judged_text(case: Case, answer: Answer) -> str:
    """The text to judge: if tool calls are expected, with the marks around them."""
    return answer.marked if case.check.get("marks") else answer.text


def _judged(case: Case, answer: Answer, judgement: Judgement, *, learnt: bool) -> Judged:
    if answer.refused and judgement.kind == OPEN_KIND:
        judgement = replace(judgement, reason=answer.refused)
    elif answer.refused:
        judgement = wrong("run", answer.refused)
    elif judgement.passed is False and not answer.ended:
        cut = f"{judgement.reason}; the answer was cut at {answer.tokens} tokens"
        judgement = replace(judgement, reason=cut)
    said = _judged_text(case, answer)
    return Judged(
        case=case,
        answer=said,
        judgement=judgement,
        exact=said == case.expected.strip(),
        normalised=normalised(unfenced(said)) == normalised(case.expected),
        learnt=learnt,
    )
