"""The validation of a finished expert, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expert.core.text import counted, loss
from expert.insight.page.figures import Tone
from expert.insight.record import listed, mapping
from expert.insight.step.anatomy import finite

SHOWN_CASES = 20
"""Of each kind; validation.json has all."""
_TEXTS = ("id", "prompt", "expected", "answer", "baseline answer", "reason")
Case = Mapping[str, Any]


Example = tuple[Tone, list[tuple[str, str]]]
"""A case as it is shown: prompt, expected and answer, by name."""


class Validated:
    """The numbers in validation.json; None where one is missing or has the wrong type."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        gate, rows = mapping(facts.get("gate")), mapping(facts.get("rows"))
        passed = gate.get("passed")
        self.facts = facts
        self.gate = passed if isinstance(passed, bool) else None
        self.reasons = "; ".join(str(reason) for reason in listed(gate.get("reasons")))
        self.undecided = self.gate is None and bool(self.reasons)
        asked = mapping(facts.get("asked"))
        self.required = "; ".join(str(each) for each in listed(asked.get("for")))
        self.required += f" ({asked['because']})" if self.required and asked.get("because") else ""
        baseline = mapping(facts.get("baseline"))
        others = [mapping(case) for case in listed(baseline.get("cases"))]
        answers = {str(case.get("id")): case.get("answer") for case in others}
        self.cases: list[Case] = [
            {**case, "baseline answer": answers.get(str(case.get("id")))}
            for case in map(mapping, listed(facts.get("cases")))
        ]
        tasks = {name: mapping(one) for name, one in mapping(facts.get("tasks")).items()}
        self.tasks = [
            (name, f"{one.get('passed')} of {one.get('cases')}", f"{share:.1%}")
            for name, one in tasks.items()
            if (share := finite(one.get("accuracy"))) is not None
        ]
        self.is_plain_text = facts.get("cases") == []
        self.accuracy = finite(facts.get("accuracy"))
        self.mean_score = finite(facts.get("mean_score"))
        self.baseline = finite(baseline.get("accuracy"))
        self.base_loss = finite(mapping(facts.get("base")).get("loss"))
        new = mapping(facts.get("new_rows")) or rows
        self.new_loss = finite(new.get("loss"))
        self.token_accuracy = finite(new.get("token_accuracy"))
        self.loss, self.tokens = finite(rows.get("loss")), finite(rows.get("tokens"))
        ends = [finite(end) for end in listed(facts.get("interval"))]
        known = len(ends) == 2 and None not in ends
        self.interval = f"{ends[0] or 0.0:.1%} to {ends[1] or 0.0:.1%}" if known else ""

    @property
    def word(self) -> str:
        """The verdict; "" if there is none."""
        if self.undecided:
            return "not enough to tell"
        return {True: "gate passes", False: "gate fails", None: ""}[self.gate]

    @property
    def is_open_text(self) -> bool:
        """Whether it was judged by loss rather than by answers."""
        return None not in (self.new_loss, self.base_loss) and self.accuracy is None

    def doubts(self) -> Iterator[str]:
        """What makes the accuracy less meaningful than it looks."""
        learnt, part = mapping(self.facts.get("learnt")), mapping(self.facts.get("partial"))
        seen, others = finite(learnt.get("cases")), finite(learnt.get("accuracy_of_others"))
        if seen:
            yield f"{seen:,.0f} of {len(self.cases):,} cases were also in the training rows" + (
                f"; without them {others:.1%} are correct" if others is not None else ""
            )
        if of := finite(part.get("of")):
            yield f"only {len(self.cases):,} of {of:,.0f} cases were judged"

    def sentence(self) -> tuple[str, str] | None:
        """How good the expert is, in two words and in a sentence; None if it was not judged."""
        if self.gate is None and not self.undecided:
            return None
        if self.mean_score is not None:
            known = [f"mean score {self.mean_score:.3g} by a judge command"]
        elif self.is_open_text:
            right = self.token_accuracy
            tokens = f", token accuracy {right:.1%}" if right is not None else ""
            ours, base = loss(self.new_loss or 0.0), loss(self.base_loss or 0.0)
            known = [f"open text: loss {ours} on held-out answers, base {base}{tokens}"]
        elif self.accuracy is not None:
            known = [f"{self.accuracy:.1%} of {counted(len(self.cases), 'answer')} correct"]
            known[0] += f" (95 % interval {self.interval})" if self.interval else ""
            known += [f"baseline {self.baseline:.1%}"] if self.baseline is not None else []
        else:
            return None
        return self.word, f"{'; '.join([*known, *self.doubts()])}."

    def cards(self) -> Iterator[tuple[str, str, str]]:
        """Name, value and note of each number."""
        if self.mean_score is not None:
            yield "Mean score", f"{self.mean_score:.3g}", "of the judge command"
        if self.accuracy is not None:
            yield "Correct answers", f"{self.accuracy:.1%}", self.interval
        if self.baseline is not None:
            yield "Baseline", f"{self.baseline:.1%}", "on the same cases"
        if (not self.cases or self.is_open_text) and self.loss is not None:
            yield "Loss", loss(self.loss), f"on {self.tokens or 0:,.0f} tokens"
        if self.is_open_text:
            yield "Loss of the base", loss(self.base_loss or 0.0), "same rows"
        if self.cases:
            passed = sum(case.get("passed") is True for case in self.cases)
            note = "open text" if self.is_open_text else f"{passed:,} correct"
            yield "Cases", f"{len(self.cases):,}", note

    def examples(self) -> Iterator[tuple[str, list[Example], bool]]:
        """Groups of cases: title, the first cases, and whether they are open by default."""
        groups: dict[str, list[Case]] = {
            "wrong answers": [], "correct answers": [], "answers of open text": [],
            "answers not judged": [],
        }  # fmt: skip
        for case in self.cases:
            other = "answers of open text" if case.get("kind") == "open" else "answers not judged"
            passed = case.get("passed")
            known = isinstance(passed, bool)
            groups[("correct answers" if passed else "wrong answers") if known else other].append(
                case
            )
        for title, cases in groups.items():
            more = f", the first {SHOWN_CASES}" if len(cases) > SHOWN_CASES else ""
            shown = [_example(case) for case in cases[:SHOWN_CASES]]
            yield f"{len(cases):,} {title}{more}", shown, title == "wrong answers"


def _example(case: Case) -> Example:
    known = {name: str(case[name]) for name in _TEXTS if case.get(name) is not None}
    if not known.get("reason"):  # a correct answer has no reason
        known.pop("reason", None)
    passed = case.get("passed")
    tone: Tone = "plain" if not isinstance(passed, bool) else "good" if passed else "error"
    return tone, [(name, text or "(empty)") for name, text in known.items()]
