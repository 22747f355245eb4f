"""How the answers of a validation are judged, why, and what the gate requires of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.stored_json import read_object
from expert.judging.domain import OPEN, TEXT, domain_of, kind_of_answers
from expert.judging.gate import GateRequirements
from expert.judging.judge_command import JudgeCommand, JudgeError
from expert.judging.oracles.oracle import oracle_for
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from expert.jobs.validate.held_out import Run
    from expert.jobs.validate.test_sets import TestSet

OF_OPEN_TEXT = ("min_improvement", "min_token_accuracy")


class CannotValidate(ExpertError):
    """A validation that makes no sense."""


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

    def settings(self) -> dict[str, Any]:
        """The requirements for validation.json: those that do not apply are None."""
        found = asdict(self.demands)
        if not self.has_judged_answers:
            found["min_accuracy"] = None
        if not self.compares_with_base:
            found |= dict.fromkeys(OF_OPEN_TEXT)
        if self.judge is None:
            found["min_score"] = None
        return found


def check_requirements(asked: Mapping[str, Any]) -> JudgeCommand | None:
    """The judge command of the user's requirements, where None is not given; raises for all that no
    result can meet or miss, such as 95 for 95 %."""
    problems = [
        f"{name}: got {value!r}, expected a number from 0 to 1"
        for name, value in asked.items()
        if name in GateRequirements.__annotations__ and value is not None and not 0 <= value <= 1
    ]
    if problems:
        raise CannotValidate("\n".join(problems))
    own = {"min_score": asked.get("min_score"), "seconds": asked.get("judge_seconds")}
    given = {name: value for name, value in own.items() if value is not None}
    if asked.get("judge_command"):
        judge = JudgeCommand(command=asked["judge_command"], **given)
        judge.parts()
        return judge
    if given:
        raise JudgeError(
            "--min-score, --judge-seconds: are for the scores of a judge program  (name it with "
            "--judge-command)"
        )
    return None


def choose_judge(
    run: Run, test: TestSet, domain: str | None, asked: Mapping[str, Any]
) -> JudgeChoice:
    """Choose the judge: as requested, else as the cases say, else the manifest, else by the
    expected answers themselves. `asked`: the user's requirements."""
    judge = check_requirements(asked)
    whole = test.part_of or test  # a part is judged as the whole would be
    cases = whole.every_case
    undecided = [case.expected for case in cases if not case.domain]
    tags = read_object(run.folder.manifest).get("capabilities")
    written = domain_of(tags if isinstance(tags, list) else (), run.plan.decoding)
    if domain:
        name, because = domain, f"--domain {domain}"
    elif whole.domain:
        name, because = whole.domain, f"{whole.name} names its domain"
    elif written:
        name, because = written, "the manifest names it (decoding or capabilities)"
    elif undecided:
        name, because = kind_of_answers(undecided)
    else:
        name = TEXT
        because = "every case names its own" if cases else "there is no answer to judge"
    kinds = {case.domain or name for case in cases}
    for each in {name, *kinds}:
        oracle_for(each)  # an unknown one is reported before anything is loaded
    loss_asked = any(asked.get(key) is not None for key in OF_OPEN_TEXT)
    given = {
        key: value
        for key, value in asked.items()
        if key in GateRequirements.__annotations__ and value is not None
    }
    choice = JudgeChoice(
        domain=name,
        because=f"scored by --judge-command {judge.command}" if judge is not None else because,
        judge=judge,
        has_judged_answers=bool(kinds - {OPEN}) and judge is None,
        compares_with_base=(OPEN in kinds and judge is None) or (not cases and loss_asked),
        demands=GateRequirements(**given),
    )
    _refuse_unfitting(asked, choice, test, run.plan.model.name)
    return choice


def _refuse_unfitting(
    asked: Mapping[str, Any], choice: JudgeChoice, test: TestSet, model: str
) -> None:
    """Raise if a requirement does not apply to these answers."""
    has_cases, name = bool((test.part_of or test).every_case), test.name
    accuracy = asked.get("min_accuracy")
    if not has_cases and (accuracy or choice.judge is not None):
        flag = f"--min-accuracy {accuracy:g}" if accuracy else "--judge-command"
        raise CannotValidate(
            f"{flag}: {name}: the rows have no answers to judge  (leave it out and compare the "
            "loss with --baseline, or name rows with answers with --test-set FILE)"
        )
    if has_cases and accuracy and not choice.has_judged_answers:
        other = "--min-score" if choice.judge is not None else "--min-improvement"
        raise CannotValidate(
            f"--min-accuracy {accuracy:g}: {name}: no accuracy is measured: {choice.because}  "
            f"({other} sets the requirement; --domain text compares answers with the expected "
            "text)"
        )
    for key in OF_OPEN_TEXT:
        flag, value = "--" + key.replace("_", "-"), asked.get(key)
        if value is not None and not choice.compares_with_base:
            raise CannotValidate(
                f"{flag} {value:g}: {name}: is for open text, but the answers are judged "
                f"differently: {choice.because}  (leave it out, or judge them as open text with "
                "--domain open)"
            )
        if value is not None and model == CHAR_GPT:
            raise CannotValidate(
                f"{flag} {value:g}: the character model is trained from scratch, there is no base "
                "to compare with  (leave it out, or name a run with --baseline RUN)"
            )
