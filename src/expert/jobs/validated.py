"""What a validation found, and how validation.json tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.judging.gate import Gate, Standing
from expert.judging.score import Comparison, Score, score_of

if TYPE_CHECKING:
    from expert.judging.cases import Case
    from expert.judging.oracle import Judgement
    from expert.training.evaluation import EvalResult

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One case: what was asked, wanted and said, and what became of it."""

    case: Case
    answer: str
    judgement: Judgement
    exact: bool
    """The answer is the expected one, letter by letter."""
    normalised: bool
    """The same but for white space and a Markdown fence."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What one state of a model reached on the test set."""

    name: str
    """final, best, step-000400, or base."""
    run: str
    """The run folder it is of."""
    step: int | None
    rows: EvalResult
    cases: tuple[Judged, ...]
    tokens: int
    """Of all answers together."""
    seconds: float
    """For generating them."""

    @property
    def score(self) -> Score:
        return score_of([each.judgement.passed for each in self.cases])

    @property
    def standing(self) -> Standing:
        return Standing(score=self.score, loss=self.rows.loss)

    def verdicts(self) -> dict[str, bool | None]:
        return {each.case.id: each.judgement.passed for each in self.cases}

    def by_task(self) -> dict[str, Score]:
        """The score of every task, where cases name one."""
        tasks = dict.fromkeys(each.case.task for each in self.cases)
        return {
            task: score_of([e.judgement.passed for e in self.cases if e.case.task == task])
            for task in tasks
            if task
        }


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Everything that was found; `as_dict` is what validation.json holds."""

    folder: Path
    expert: str
    model: str
    domain: str
    test_set: str
    reached: Reached
    baseline: Reached | None
    comparison: Comparison | None
    gate: Gate
    checkpoints: tuple[Reached, ...]
    """All states of the run, where they were compared; without them none."""
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    seconds: float

    @property
    def best(self) -> Reached | None:
        """The state with the most right answers, and of two the one with the lower loss."""
        if not self.checkpoints:
            return None
        return max(self.checkpoints, key=lambda each: (each.score.accuracy or 0.0, -each.rows.loss))

    def as_dict(self) -> dict[str, Any]:
        compared = asdict(self.comparison) if self.comparison else {}
        return {
            "version": VERSION,
            "expert": self.expert,
            "model": self.model,
            "domain": self.domain,
            "test_set": self.test_set,
            **facts_of(self.reached),
            "gate": {"passed": self.gate.passed, "reasons": list(self.gate.reasons)},
            "baseline": facts_of(self.baseline) if self.baseline else None,
            "comparison": compared or None,
            "wins": list(compared.get("wins", ())),
            "losses": list(compared.get("losses", ())),
            "checkpoints": [facts_of(each, cases=False) for each in self.checkpoints],
            "best_checkpoint": self.best.name if self.best else None,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def facts_of(reached: Reached, *, cases: bool = True) -> dict[str, Any]:
    """What a state reached, as JSON has it."""
    score, rows = reached.score, reached.rows
    perplexity = rows.perplexity
    facts: dict[str, Any] = {
        "run": reached.run,
        "checkpoint": reached.name,
        "step": reached.step,
        "rows": {
            "loss": rows.loss if math.isfinite(rows.loss) else None,
            "perplexity": perplexity if math.isfinite(perplexity) else None,
            "token_accuracy": rows.token_accuracy,
            "tokens": rows.targets,
            "examples": rows.examples,
        },
        "accuracy": score.accuracy,
        "interval": list(score.interval) if score.interval else None,
        "passed": score.passed,
        "failed": score.failed,
        "without_oracle": score.without_oracle,
        "exact": sum(each.exact for each in reached.cases),
        "normalised": sum(each.normalised for each in reached.cases),
        "tasks": {
            task: {"accuracy": own.accuracy, "passed": own.passed, "cases": own.cases}
            for task, own in reached.by_task().items()
        },
        "generated_tokens": reached.tokens,
        "generation_seconds": reached.seconds,
    }
    if cases:
        facts["cases"] = [
            {
                "id": each.case.id,
                "task": each.case.task,
                "prompt": each.case.prompt,
                "expected": each.case.expected,
                "answer": each.answer,
                "passed": each.judgement.passed,
                "reason": each.judgement.reason,
                "kind": each.judgement.kind,
                "exact": each.exact,
            }
            for each in reached.cases
        ]
    return facts
