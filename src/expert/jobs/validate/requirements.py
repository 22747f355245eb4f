"""How the answers of a validation are judged, why, and which requirements apply."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.stored_json import read_object
from expert.judging.domain import OPEN, TEXT, domain_of, kind_of_answers
from expert.judging.gate import MAX_REGRESSION, MIN_ACCURACY, GateRequirements
from expert.judging.judge_command import MIN_SCORE, SECONDS, JudgeCommand, JudgeError
from expert.judging.oracles.oracle import oracle_for
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.jobs.validate.test_sets import TestSet
    from expert.planning.run_plan import RunPlan


SHARES = ("min_accuracy", "max_regression", "min_improvement", "min_token_accuracy", "min_score")


class CannotValidate(ExpertError):
    """A validation that makes no sense."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The user's requirements; None: not given."""

    min_accuracy: float | None = None
    max_regression: float = MAX_REGRESSION
    min_improvement: float | None = None
    min_token_accuracy: float | None = None
    judge_command: str | None = None
    judge_seconds: float | None = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Raise all that no result can meet or miss, such as 95 for 95 %."""
        problems = [
            f"{name}: got {value!r}, expected a number from 0 to 1"
            for name, value in asdict(self).items()
            if name in SHARES and value is not None and not 0 <= value <= 1
        ]
        if problems:
            raise CannotValidate("\n".join(problems))

    def judge(self) -> JudgeCommand | None:
        """The judge command; JudgeError if it cannot be run, or if only its options are given."""
        if self.judge_command is None:
            for flag, value in (
                ("--min-score", self.min_score),
                ("--judge-seconds", self.judge_seconds),
            ):
                if value is not None:
                    raise JudgeError(
                        f"{flag} {value:g}: is for the scores of a judge program  (name it with "
                        "--judge-command)"
                    )
            return None
        found = JudgeCommand(
            command=self.judge_command,
            seconds=SECONDS if self.judge_seconds is None else self.judge_seconds,
            min_score=MIN_SCORE if self.min_score is None else self.min_score,
        )
        found.parts()
        return found

    def demands(self) -> GateRequirements:
        return GateRequirements(
            min_accuracy=MIN_ACCURACY if self.min_accuracy is None else self.min_accuracy,
            max_regression=self.max_regression,
            min_improvement=self.min_improvement or 0.0,
            min_token_accuracy=self.min_token_accuracy,
            min_score=MIN_SCORE if self.min_score is None else self.min_score,
        )


@dataclass(frozen=True, kw_only=True)
class JudgeChoice:
    """The judge, and why it was chosen."""

    domain: str
    """Of the cases that do not name their own."""
    because: str
    judge: JudgeCommand | None
    has_cases: bool
    has_judged_answers: bool
    """Some answers are judged by an oracle or by the expected text."""
    compares_with_base: bool
    """The loss on the rows is compared with the base's."""

    def settings(self, demands: GateRequirements) -> dict[str, Any]:
        """The requirements for validation.json: those that do not apply are None."""
        found = asdict(demands)
        if not self.has_judged_answers:
            found["min_accuracy"] = None
        if not self.compares_with_base:
            found |= {"min_improvement": None, "min_token_accuracy": None}
        if self.judge is None:
            found["min_score"] = None
        return found


def choose_judge(
    folder: RunFolder, plan: RunPlan, test: TestSet, domain: str | None, asked: Requirements
) -> JudgeChoice:
    """Choose the judge: as requested, else as the cases say, else the manifest, else by the
    expected answers themselves."""
    whole = test.part_of or test  # a part is judged as the whole would be
    cases = whole.every_case
    judge = asked.judge()
    name, because = _decided(folder, plan, whole, domain)
    for each in {name, *(case.domain for case in cases if case.domain)}:
        oracle_for(each)  # an unknown one is reported before anything is loaded
    kinds = {case.domain or name for case in cases}
    is_open = OPEN in kinds and judge is None
    loss_asked = asked.min_improvement is not None or asked.min_token_accuracy is not None
    judge_choice = JudgeChoice(
        domain=name,
        because=f"scored by --judge-command {judge.command}" if judge is not None else because,
        judge=judge,
        has_cases=bool(cases),
        has_judged_answers=bool(kinds - {OPEN}) and judge is None,
        compares_with_base=is_open or (not cases and loss_asked),
    )
    _refuse_unfitting_requirements(asked, judge_choice, plan, test.name)
    return judge_choice


def _decided(
    folder: RunFolder, plan: RunPlan, test: TestSet, domain: str | None
) -> tuple[str, str]:
    if domain:
        return domain, f"--domain {domain}"
    if test.domain:
        return test.domain, f"{test.name} names its domain"
    tags = read_object(folder.manifest).get("capabilities")
    named = [str(tag) for tag in tags] if isinstance(tags, list) else []
    written = domain_of(named, plan.decoding)
    if written:
        return written, "the manifest names it (decoding or capabilities)"
    undecided = [case.expected for case in test.every_case if not case.domain]
    if not undecided:
        return (
            TEXT,
            "every case names its own" if test.every_case else "there is no answer to judge",
        )
    return kind_of_answers(undecided)


def _refuse_unfitting_requirements(
    asked: Requirements, judge_choice: JudgeChoice, plan: RunPlan, name: str
) -> None:
    """Raise if a requirement does not apply to these answers."""
    if not judge_choice.has_cases:
        if asked.min_accuracy:
            raise CannotValidate(
                f"--min-accuracy {asked.min_accuracy:g}: {name}: the rows have no answers to "
                "judge  (leave it out and compare the loss with --baseline, or name rows with "
                "answers with --test-set FILE)"
            )
        if judge_choice.judge is not None:
            raise CannotValidate(
                f"--judge-command: {name}: the rows have no answers to score  (name rows "
                "with answers with --test-set FILE)"
            )
    elif asked.min_accuracy and not judge_choice.has_judged_answers:
        other = "--min-score" if judge_choice.judge is not None else "--min-improvement"
        raise CannotValidate(
            f"--min-accuracy {asked.min_accuracy:g}: {name}: no accuracy is measured: "
            f"{judge_choice.because}  ({other} sets the requirement; --domain text compares "
            "answers with the expected text)"
        )
    for flag, value in (
        ("--min-improvement", asked.min_improvement),
        ("--min-token-accuracy", asked.min_token_accuracy),
    ):
        if value is None:
            continue
        if not judge_choice.compares_with_base:
            raise CannotValidate(
                f"{flag} {value:g}: {name}: is for open text, but the answers are judged "
                f"differently: {judge_choice.because}  (leave it out, or judge them as open text "
                "with --domain open)"
            )
        if plan.model.name == CHAR_GPT:
            raise CannotValidate(
                f"{flag} {value:g}: the character model is trained from scratch, there is no base "
                "to compare with  (leave it out, or name a run with --baseline RUN)"
            )
