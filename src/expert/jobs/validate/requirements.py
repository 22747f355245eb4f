"""How the answers of a validation are judged, why, and what the gate requires of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from expert.core.errors import ExpertError
from expert.core.stored_json import read_object
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.test_sets import TestSet
from expert.judging.domain import OPEN, TEXT, domain_of, is_strict, kind_of_answers
from expert.judging.gate import GateRequirements
from expert.judging.judge_command import JudgeCommand, JudgeError
from expert.judging.oracles.oracle import oracle_for
from expert.manifest.schema.manifest import CHAR_GPT

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
