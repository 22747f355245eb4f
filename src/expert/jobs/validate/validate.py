"""The job behind `expert validate`: judges an expert's answers and decides the quality gate."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import DecodingSettings, resolve_decoding
from expert.answer.writer import Answer
from expert.core.errors import ExpertError
from expert.core.publish import weights_hash
from expert.core.stored_json import read_object
from expert.jobs.validate.held_out import Run, refuse_rows_baseline_trained_on, trained_cases
from expert.jobs.validate.row_losses import row_losses
from expert.jobs.validate.saved_verdict import validation_file
from expert.jobs.validate.test_sets import (
    TestSet,
    data_folder,
    find_test_set,
    with_rendered_answers,
)
from expert.jobs.validate.validation import CheckpointResult, Judged, Validation, notes_on
from expert.jobs.validate.vote import TEMPERATURE
from expert.jobs.validate.vote import vote as vote_on
from expert.judging.domain import OPEN, TEXT, domain_of, is_strict, kind_of_answers
from expert.judging.gate import (
    MAX_REGRESSION,
    MIN_NEW_CASES,
    GateRequirements,
    ModelResult,
    evaluate_gate,
)
from expert.judging.judge_command import JudgeCommand, score_all
from expert.judging.judge_pool import JudgeProcess, judge_all
from expert.judging.oracles.oracle import Judgement, oracle_for, wrong
from expert.judging.oracles.text import OPEN_KIND
from expert.judging.score import compare
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.stored.choose_checkpoint import BASE, Choice, choose, states
from expert.run.stored.load import (
    Trained,
    base_warning,
    load_base,
    load_trained,
    pick_device,
    read_plan,
)
from expert.run.stored.locate import find_expert

if TYPE_CHECKING:
    import torch

    from expert.judging.cases import Case
    from expert.training.objectives.objective import EvalResult

ALL = "all"

Tell = Callable[[str, int, int], None]
"""Called with the current task, progress and total; the total is 0 if unknown."""
Note = Callable[[str], None]
"""Called with a remark for the user."""


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
    vote: int | None = None,
    seed: int = 0,
    device: str = "auto",
    tell: Tell = lambda what, done, of: None,
    **requirements: Any,
) -> Validation:
    """Judge an expert by rows it was not trained on, and write validation.json into its run folder.

    `expert`: a run folder, a folder of runs, or a manifest's folder, whose newest run is used.
    `baseline`: "base" for the same base untrained, or another run. `checkpoints`: "all". `vote`:
    also take the answer that most of so many sampled ones agree with; the gate looks at the first.

    `requirements`: `min_accuracy`, 0.95 by default; it does not apply to rows without answers. Open
    text is compared with its base by loss and token accuracy: `min_improvement`, as a share of the
    base's loss, and `min_token_accuracy` require more. `judge_command`: a program that scores the
    answers (see expert.judging.judge_command) within `judge_seconds`; `min_score` is the required
    mean.
    """
    # What can be refused is refused before anything is loaded.
    asked = {"max_regression": max_regression, **requirements}
    if checkpoints not in (None, ALL):
        raise ExpertError(f"--checkpoints {checkpoints}: is not known  (write --checkpoints all)")
    if limit is not None and limit < 1:
        raise ExpertError(f"limit: got {limit}, expected a whole number of at least 1")
    check_requirements(asked)
    began, run, computes_on = time.monotonic(), _run_at(expert), pick_device(device)
    if not os.access(run.folder.path, os.W_OK):
        raise ExpertError(
            f"{run.folder.path}: is read-only, and the verdict is written there  (copy the run to "
            "another folder, and name that)"
        )
    other, others_choice = None, None
    if baseline is not None and str(baseline) != BASE:
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
    decoding, about_decoding = resolve_decoding(run.plan, {})
    pairs = zip(test.cases, test.examples, strict=True)
    learnt, unknown_rows = trained_cases(pairs, run, make=test.drawn)
    notes = notes_on(test.every_case, judging.domain, left_out=test.left_out)
    notes += [note for note in about_decoding if "grammar" in note]  # others are about characters
    examination = Examination(
        test=test,
        judging=judging,
        decoding=decoding,
        learnt=learnt,
        seed=seed,
        limit=limit,
        votes=vote or 0,
        device=computes_on,
        tell=tell,
        notes=notes,
        began=began,
    )
    against = (other or run, others_choice) if baseline is not None else None
    remarks, every = (remark, unknown_rows), checkpoints == ALL
    done = examination.validated(run, chosen, against, weights, every=every, remarks=remarks)
    run.folder.write_json(done.file.name, done.as_dict())
    return done


# --- how answers are judged, why, and what the gate requires of them -----------------------------

OF_OPEN_TEXT = ("min_improvement", "min_token_accuracy")


@dataclass(frozen=True, kw_only=True)
class JudgeChoice:
    """The judge, why it was chosen, and what the gate requires."""

    domain: str
    """Of the cases that do not name their own."""
    because: str
    judge: JudgeCommand | None
    has_judged_answers: bool
    """Some answers are judged by an oracle or by the expected text."""
    compares_with_base: bool
    """The loss on the rows is compared with the base's."""
    demands: GateRequirements
    strict: bool
    """A Markdown fence around an answer makes it wrong."""

    def settings(self) -> dict[str, Any]:
        """The requirements for validation.json: those that do not apply are None."""
        found = asdict(self.demands)
        if not self.has_judged_answers:
            found["min_accuracy"] = None
        if not self.compares_with_base:
            found |= dict.fromkeys(OF_OPEN_TEXT)
        if self.judge is None:
            found["min_score"] = None
        return {**found, "strict": self.strict}


def check_requirements(asked: Mapping[str, Any]) -> JudgeCommand | None:
    """The judge command of the user's requirements, where None is not given; raises for all that no
    result can meet or miss, such as 95 for 95 %."""
    known = {*GateRequirements.__annotations__, "judge_command", "judge_seconds"}
    if unknown := [name for name in asked if name not in known]:
        raise TypeError(f"validate() has no argument {unknown[0]}")
    problems = [
        f"{name}: got {value!r}, expected a number from 0 to 1"
        for name, value in asked.items()
        if name in GateRequirements.__annotations__ and value is not None and not 0 <= value <= 1
    ]
    if problems:
        raise ExpertError("\n".join(problems))
    own = {"min_score": asked.get("min_score"), "seconds": asked.get("judge_seconds")}
    given = {name: value for name, value in own.items() if value is not None}
    if asked.get("judge_command"):
        judge = JudgeCommand(command=asked["judge_command"], **given)
        judge.check()
        return judge
    if given:
        raise ExpertError(
            "--min-score, --judge-seconds: are for the scores of a judge program  (name it with "
            "--judge-command)"
        )
    return None


def choose_judge(
    run: Run, test: TestSet, domain: str | None, asked: Mapping[str, Any]
) -> JudgeChoice:
    """Choose the judge: as requested, else as the cases say, else the manifest, else by the
    expected answers themselves. `asked`: the user's requirements; ExpertError for one that does
    not apply to these answers."""
    judge = check_requirements(asked)
    whole = test.part_of or test  # a part is judged as the whole would be
    cases = whole.every_case
    tags = read_object(run.folder.manifest).get("capabilities")
    written = domain_of(tags if isinstance(tags, list) else (), run.plan.decoding)
    name, because = TEXT, "every case names its own" if cases else "there is no answer to judge"
    if domain:
        name, because = domain, f"--domain {domain}"
    elif whole.domain:
        name, because = whole.domain, f"{whole.name} names its domain"
    elif written:
        name, because = written, "the manifest names it (decoding or capabilities)"
    elif undecided := [case.expected for case in cases if not case.domain]:
        name, because = kind_of_answers(undecided)
    kinds = {case.domain or name for case in cases}
    for each in {name, *kinds}:
        oracle_for(each)  # an unknown one is reported before anything is loaded
    given = {key: value for key, value in asked.items() if value is not None}
    of_open_text = [key for key in OF_OPEN_TEXT if key in given]
    choice = JudgeChoice(
        domain=name,
        because=f"scored by --judge-command {judge.command}" if judge is not None else because,
        judge=judge,
        has_judged_answers=bool(kinds - {OPEN}) and judge is None,
        compares_with_base=(OPEN in kinds and judge is None) or bool(not cases and of_open_text),
        demands=GateRequirements(
            **{key: given[key] for key in GateRequirements.__annotations__ if key in given}
        ),
        strict=is_strict(run.plan.decoding),
    )
    option, why = "", choice.because if cases else "the rows have no answers to judge"
    if not cases and judge is not None:
        option, fix = "--judge-command", "leave it out, or name rows with answers with --test-set"
    elif given.get("min_accuracy") and not choice.has_judged_answers:
        option, fix = "--min-accuracy", "require --min-score of a judge command, or "
        fix += "--min-improvement of open text, or compare with --baseline"
        why = f"no accuracy is measured: {why}"
    elif of_open_text and (not choice.compares_with_base or run.plan.model.name == CHAR_GPT):
        option = " and ".join(f"--{key.replace('_', '-')}" for key in of_open_text)
        fix = "leave it out, or judge the answers as open text with --domain open"
        why = f"is for open text, compared with its base: {why}"
        if run.plan.model.name == CHAR_GPT:
            why = "the character model is trained from scratch, there is no base to compare with"
    if option:
        raise ExpertError(f"{option}: {test.name}: {why}  ({fix})")
    return choice


# --- answers and their judgements ----------------------------------------------------------------


def _run_at(expert: str | Path | None) -> Run:
    folder, beside = find_expert(Path(expert) if expert is not None else None, "finished")
    plan = read_plan(folder)
    return Run(folder, plan, data_folder(folder, plan, beside))


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Rows, and how models answer them and are judged: the same for all that are compared."""

    test: TestSet
    judging: JudgeChoice
    decoding: DecodingSettings
    learnt: frozenset[str]
    """Ids of the cases that were trained on."""
    seed: int
    limit: int | None
    votes: int
    """Answers to each case, of which one is taken by vote; 0: no vote."""
    device: torch.device
    tell: Tell
    notes: list[str]
    """Remarks for the user; more come while models answer."""
    began: float

    def validated(
        self,
        run: Run,
        chosen: Choice,
        against: tuple[Run, Choice | None] | None,
        weights: str,
        *,
        every: bool,
        remarks: Sequence[str],
    ) -> Validation:
        """The verdict on a run's `weights`. `against`: the baseline; `every`: compare all states
        of the run."""
        judging, test = self.judging, self.test
        result = self.result_of(run, chosen)
        others = [choose(run.folder, name) for name in states(run.folder)] if every else []
        compared = [
            result if each.path == chosen.path else self.result_of(run, each) for each in others
        ]
        before = self.result_of(*against) if against is not None else None
        base = self._losses_of_base(run, before) if judging.compares_with_base else None
        of_base = None
        if base is not None:
            of_base = ModelResult(
                loss=base.loss, token_accuracy=base.token_accuracy, row_losses=base.row_losses
            )
        rows = {each.case.id: each.row for each in result.cases}
        file, kept = validation_file(run.folder, chosen, test)
        return Validation(
            folder=run.folder.path,
            expert=run.plan.expert,
            model=run.plan.model.name,
            domain=judging.domain,
            test_set=test.name,
            weights=weights,
            result=result,
            baseline=before,
            comparison=compare(result.verdicts(), before.verdicts(), rows) if before else None,
            base=base,
            gate=evaluate_gate(
                judging.demands, result.standing, before.standing if before else None, base=of_base
            ),
            because=judging.because,
            judge=judging.judge.command if judging.judge is not None else "",
            checkpoints=tuple(compared),
            # Everything besides the expert and the rows that decides the outcome.
            settings={
                **judging.settings(),
                "decoding": asdict(self.decoding),
                "seed": self.seed,
                "limit": self.limit,
                **({"vote": self.votes} if self.votes else {}),
                "device": str(self.device),
            },
            partial=test.partial,
            file=file,
            notes=tuple(filter(None, (*self.notes, *remarks, kept))),
            seconds=time.monotonic() - self.began,
        )

    def result_of(self, run: Run, choice: Choice | None) -> CheckpointResult:
        """What a state of a run, or its base, achieves."""
        from expert.answer.engine import answer_all

        trained = self._load(run, choice)
        name, step, template = trained.choice.name, trained.choice.step, trained.template
        if self.test.every_case and template is None:
            raise ExpertError(
                f"{run.folder.path}: the character model only continues text, and the rows are "
                f"conversations ({self.test.name})  (name a text file with --test-set FILE)"
            )
        rows, new_rows = self._losses(trained)
        asked, answers, several = self.test.asked(), list[Answer](), list[Answer]()
        questions = [replace(example, turns=example.turns[:-1]) for _, example in asked]
        how: dict[str, Any] = {"seed": self.seed, "note": self.notes.append}
        if asked:
            told = partial(self.tell, f"{name}: answering")
            answers = answer_all(trained, questions, self.decoding, tell=told, **how)
        if self.votes and choice is not None:
            drawn = replace(self.decoding, temperature=self.decoding.temperature or TEMPERATURE)
            told = partial(self.tell, f"{name}: answering to vote")
            again = [question for question in questions for _ in range(self.votes)]
            several = answer_all(trained, again, drawn, tell=told, **how)
        cases = with_rendered_answers(asked, template) if template else []
        del trained  # judging, and the next model, take memory of their own
        gc.collect()
        voted = None
        if several:
            groups = [several[at : at + self.votes] for at in range(0, len(several), self.votes)]
            judging, told = self.judging, partial(self.tell, f"{name}: voting")
            domain = TEXT if judging.judge is not None else judging.domain
            chosen = vote_on(cases, groups, domain=domain, strict=judging.strict, tell=told)
            voted = self._judged(f"{name} by vote", list(zip(cases, chosen, strict=True)))
        return CheckpointResult(
            name=name,
            run=str(run.folder.path),
            step=step,
            rows=rows,
            new_rows=new_rows,
            cases=self._judged(name, list(zip(cases, answers, strict=True))),
            voted=voted,
        )

    def _load(self, run: Run, choice: Choice | None) -> Trained:
        name = f"and {choice.name}" if choice is not None else "alone"
        self.tell(f"loading {run.plan.model.name} {name}", 0, 0)
        if choice is None:
            return load_base(run.plan, device=self.device)
        return load_trained(run.folder, run.plan, choice, device=self.device)

    def _losses_of_base(self, run: Run, before: CheckpointResult | None) -> EvalResult:
        if before is not None and before.name == BASE:
            return before.new_rows or before.rows
        rows, new_rows = self._losses(self._load(run, None))  # it generates nothing
        return new_rows or rows

    def _losses(self, trained: Trained) -> tuple[EvalResult, EvalResult | None]:
        """Loss on all rows, and on those not trained on, if the loss decides and some of the rows
        were trained on."""
        test, single = self.test, self.judging.compares_with_base  # by the difference of each row
        told = partial(self.tell, f"{trained.choice.name}: loss on held-out rows")
        losses = partial(row_losses, trained, one_by_one=single, tell=told, note=self.notes.append)
        pairs = zip(test.examples, test.cases, strict=True)
        new = [row for row, own in pairs if not any(case.id in self.learnt for case in own)]
        enough = min(MIN_NEW_CASES, len(test.examples)) <= len(new) < len(test.examples)
        return losses(test.examples), losses(new) if single and enough else None

    def _judged(self, name: str, answers: Sequence[tuple[Case, Answer]]) -> tuple[Judged, ...]:
        """The answers of the model of this name, judged."""

        def note(text: str) -> None:
            self.notes.append(f"{name}: {text}" if self.judging.judge is not None else text)

        tell = partial(self.tell, f"{name}: judging")
        return judge_answers(answers, self.judging, learnt=self.learnt, tell=tell, note=note)


def judge_answers(
    answers: Sequence[tuple[Case, Answer]],
    judging: JudgeChoice,
    *,
    learnt: frozenset[str] = frozenset(),
    processes: Sequence[JudgeProcess] = (),
    tell: Callable[[int, int], None] = lambda done, of: None,
    note: Note = lambda text: None,
) -> tuple[Judged, ...]:
    """Judge answers in the sandbox, or by the user's program; `learnt`: ids of cases that were
    trained on. `processes`: as in `judge_all`."""
    cases = [case for case, _ in answers]
    # If tool calls are expected, with the marks around them.
    texts = [each.marked if case.check.get("marks") else each.text for case, each in answers]
    if judging.judge is not None:
        tell(0, 0)
        judgements, faults = score_all(judging.judge, cases, texts, processes)
        for fault in faults:
            note(fault)
    else:
        how: dict[str, Any] = {"domain": judging.domain, "strict": judging.strict}
        judgements = judge_all(cases, texts, **how, processes=processes, tell=tell, notice=note)
    return tuple(
        Judged(
            case=case,
            answer=text,
            judgement=_with_end(judgement, answer),
            learnt=case.id in learnt,
        )
        for (case, answer), text, judgement in zip(answers, texts, judgements, strict=True)
    )


def _with_end(judgement: Judgement, answer: Answer) -> Judgement:
    """The judgement of an answer that was refused or cut."""
    if answer.refused and judgement.kind == OPEN_KIND:
        return replace(judgement, reason=answer.refused)
    if answer.refused:
        return wrong("run", answer.refused)
    if judgement.passed is False and not answer.ended:
        cut = f"{judgement.reason}; the answer was cut at {answer.tokens} tokens"
        return replace(judgement, reason=cut)
    return judgement
