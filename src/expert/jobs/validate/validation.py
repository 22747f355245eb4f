"""The result of a validation, and its form in validation.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.install import pip_install
from expert.core.text import counted
from expert.judging.answers import unusable_answers
from expert.judging.gate import MIN_NEW_CASES, Gate, ModelResult, Scores, gate_score
from expert.judging.judge_command import JUDGE
from expert.judging.oracles.oracle import Judgement, missing_packages
from expert.judging.oracles.text import OPEN_KIND
from expert.judging.score import Comparison, Score, score_of

if TYPE_CHECKING:
    from expert.judging.cases import Case
    from expert.training.objectives.objective import EvalResult

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One case: prompt, expected answer, answer and judgement."""

    case: Case
    answer: str
    judgement: Judgement
    learnt: bool = False
    """Prompt and answer are among the rows the run was trained on."""

    @property
    def is_open(self) -> bool:
        """Open text, which does not count for accuracy."""
        return self.judgement.kind == OPEN_KIND

    @property
    def row(self) -> str:
        """Its row; a case without one is its own row."""
        return self.case.row or self.case.id


@dataclass(frozen=True, kw_only=True)
class CheckpointResult:
    """Results of one state of a model on the test set."""

    name: str
    """final, best, step-000400, or base."""
    run: str
    """Its run folder."""
    step: int | None
    rows: EvalResult
    cases: tuple[Judged, ...]
    new_rows: EvalResult | None = None
    """On the rows not trained on, if some were trained on and enough others are left."""
    voted: tuple[Judged, ...] | None = None
    """The cases with the answers that most of several agree with, if there was a vote."""

    @property
    def score(self) -> Score:
        return _score(self.cases)

    @property
    def new_score(self) -> Score:
        """Of the cases not trained on."""
        return _score([each for each in self.cases if not each.learnt])

    @property
    def standing(self) -> ModelResult:
        rows, opened = self.new_rows or self.rows, [each for each in self.cases if each.is_open]
        texts = [(each.case.prompt, each.case.expected, each.answer) for each in opened]
        return ModelResult(
            score=gate_score(self.score, self.new_score),
            loss=rows.loss,
            token_accuracy=rows.token_accuracy,
            scores=self.scores if self.is_scored else None,
            row_losses=rows.row_losses,
            unusable=unusable_answers(texts),
        )

    @property
    def is_scored(self) -> bool:
        """Whether a judge command scored the answers."""
        return any(each.judgement.kind == JUDGE for each in self.cases)

    @property
    def scores(self) -> Scores:
        """Scores of a judge command, on the cases not trained on if enough are left."""
        new = [each for each in self.cases if not each.learnt]
        asked = new if len(new) >= min(MIN_NEW_CASES, len(self.cases)) else self.cases
        known = [each.judgement.score for each in asked if each.judgement.score is not None]
        mean = sum(known) / len(known) if known else None
        rows = len({each.row for each in asked if each.judgement.score is not None})
        return Scores(mean=mean, scored=len(known), cases=len(asked), rows=rows)

    def verdicts(self) -> dict[str, bool | None]:
        return {each.case.id: each.judgement.passed for each in self.cases}

    def by_task(self) -> dict[str, Score]:
        """The score of every task, if cases name one."""
        tasks = dict.fromkeys(each.case.task for each in self.cases if each.case.task)
        return {task: _score([e for e in self.cases if e.case.task == task]) for task in tasks}


def _score(cases: Sequence[Judged]) -> Score:
    held = [each for each in cases if not each.is_open]
    return score_of([each.judgement.passed for each in held], [each.row for each in held])


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The whole result; `as_dict` is the content of validation.json."""

    folder: Path
    expert: str
    model: str
    domain: str
    test_set: str
    weights: str
    """sha256 of the judged weights: resuming a run changes them."""
    result: CheckpointResult
    baseline: CheckpointResult | None
    comparison: Comparison | None
    base: EvalResult | None
    """The base on the same rows, if open text is compared with it."""
    gate: Gate
    because: str
    """Why the answers are judged this way."""
    judge: str
    """The judge command; "": there is none."""
    checkpoints: tuple[CheckpointResult, ...]
    """All states of the run, if they were compared; else empty."""
    settings: Mapping[str, Any]
    partial: Mapping[str, Any] | None
    """If only some of the cases were judged: the name and size of the whole set."""
    file: Path
    """Where it was written."""
    notes: tuple[str, ...]
    seconds: float

    @property
    def best(self) -> CheckpointResult | None:
        """The state with the best scores or the most correct answers; ties go to the lower loss."""

        def worth(each: CheckpointResult) -> tuple[float, float, float]:
            return each.scores.mean or 0.0, each.score.accuracy or 0.0, -each.rows.loss

        return max(self.checkpoints, key=worth, default=None)

    @property
    def learnt(self) -> dict[str, Any] | None:
        """How many cases the run was trained on, and its accuracy without them; None: none."""
        count = sum(each.learnt for each in self.result.cases)
        new = self.result.new_score
        if not count:
            return None
        return {
            "cases": count,
            "others": new.cases,
            "accuracy_of_others": new.accuracy,
            "left_out_at_the_gate": self.result.standing.score == new,
        }

    def trained_remark(self) -> str:
        """The same in words; "" if there are none."""
        learnt, new = self.learnt, self.result.new_score
        if learnt is None:
            return ""
        text = f"{learnt['cases']} of {len(self.result.cases)} cases were also in the training rows"
        if self.result.new_rows and self.base is not None and not self.result.score.cases:
            return f"{text}: the loss is judged without them"
        counts = "too few for the gate, which counts all cases"
        if learnt["left_out_at_the_gate"]:
            counts = "which the gate counts"
        without = "unknown" if new.accuracy is None else f"{new.accuracy:.1%}"
        return f"{text}; accuracy without them {without} ({new.passed} of {new.judged}), {counts}"

    def as_dict(self) -> dict[str, Any]:
        compared = asdict(self.comparison) if self.comparison else None
        return {
            "version": VERSION,
            "expert": self.expert,
            "model": self.model,
            "domain": self.domain,
            "test_set": self.test_set,
            "weights": self.weights,
            **result_facts(self.result),
            "gate": {"passed": self.gate.passed, "reasons": list(self.gate.reasons)},
            "asked": {
                "for": list(self.gate.asked),
                "because": self.because,
                "judge_command": self.judge or None,
            },
            "base": loss_facts(self.base) if self.base is not None else None,
            "learnt": self.learnt,
            "partial": dict(self.partial) if self.partial else None,
            "baseline": result_facts(self.baseline) if self.baseline else None,
            "comparison": compared,
            "wins": list(compared["wins"]) if compared else [],
            "losses": list(compared["losses"]) if compared else [],
            "checkpoints": [result_facts(each, cases=False) for each in self.checkpoints],
            "best_checkpoint": self.best.name if self.best else None,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def loss_facts(rows: EvalResult) -> dict[str, Any]:
    """Loss and token accuracy of a model on the rows, for JSON."""
    perplexity = rows.perplexity
    return {
        "loss": rows.loss if math.isfinite(rows.loss) else None,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "token_accuracy": rows.token_accuracy,
        "tokens": rows.targets,
        "examples": rows.examples,
    }


def result_facts(result: CheckpointResult, *, cases: bool = True) -> dict[str, Any]:
    """Results of a state, for JSON."""
    score, rows = result.score, result.rows
    facts: dict[str, Any] = {
        "run": result.run,
        "checkpoint": result.name,
        "step": result.step,
        "rows": loss_facts(rows),
        "new_rows": loss_facts(result.new_rows) if result.new_rows else None,
        "mean_score": result.scores.mean,
        "open": sum(each.is_open for each in result.cases),
        "accuracy": score.accuracy,
        "interval": list(score.interval) if score.interval else None,
        "passed": score.passed,
        "failed": score.failed,
        "without_oracle": score.without_oracle,
        "tasks": {
            task: {"accuracy": own.accuracy, "passed": own.passed, "cases": own.cases}
            for task, own in result.by_task().items()
        },
    }
    if result.voted is not None:
        voted = replace(result, cases=result.voted, voted=None)
        facts["voted"] = result_facts(voted, cases=cases)
    if cases:
        facts["cases"] = [
            {
                "id": each.case.id,
                "row": each.row,
                "turn": each.case.turn or None,
                "task": each.case.task,
                "prompt": each.case.prompt,
                "expected": each.case.expected,
                "answer": each.answer,
                "passed": each.judgement.passed,
                "reason": each.judgement.reason,
                "kind": each.judgement.kind,
                "score": each.judgement.score,
                "learnt": each.learnt,
            }
            for each in result.cases
        ]
    return facts


def notes_on(cases: Sequence[Case], domain: str, *, left_out: int = 0) -> list[str]:
    """What the cases lack, what is not installed, and what that leaves out."""
    notes = []
    if left_out:
        rows = counted(left_out, "row")
        notes.append(f"{rows} more held out and not asked: the answer starts after max_seq_length")
    if not cases:
        plain = "the rows are plain text: there is a loss, and no answer to judge"
        return [*notes, f"{plain}, so no accuracy is required"]
    if len({case.row for case in cases}) < len(cases):
        notes.append(
            "every answer of a conversation is a case; those of one are correlated, so intervals "
            "and p count each row once"
        )
    domains = {case.domain or domain for case in cases}
    for each in sorted(domains):
        if missing := missing_packages(each):
            names, how = ", ".join(missing).replace("_", "-"), pip_install("validate")
            notes.append(f"{each}: {names} not installed: cases have no oracle  ({how})")
    return notes
