"""The validation of a finished expert, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expert.core.text import counted, loss
from expert.insight.page.blocks import Block, CaseExample, Folded, PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts
from expert.insight.record import listed, mapping
from expert.insight.step.anatomy import finite

SHOWN_CASES = 20
"""Of each kind; validation.json has all."""
OPEN_CASES = 3
"""Wrong ones and correct ones that are open by default."""
TEXTS = ("id", "prompt", "expected", "answer", "baseline answer", "reason")
Case = Mapping[str, Any]


class Validated:
    """The numbers in validation.json; None where one is missing or has the wrong type."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        gate, rows = mapping(facts.get("gate")), mapping(facts.get("rows"))
        passed = gate.get("passed")
        self.facts = facts
        self.gate = passed if isinstance(passed, bool) else None
        self.reasons = "; ".join(str(reason) for reason in listed(gate.get("reasons")))
        baseline = mapping(facts.get("baseline"))
        others = [mapping(case) for case in listed(baseline.get("cases"))]
        answers = {str(case.get("id")): case.get("answer") for case in others}
        self.cases: list[Case] = [
            {**case, "baseline answer": answers.get(str(case.get("id")))}
            for case in map(mapping, listed(facts.get("cases")))
        ]
        self.is_plain_text = facts.get("cases") == []
        self.has_no_gate = self.gate is None and "passed" in gate
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
        if self.gate is None:
            return None
        if self.mean_score is not None:
            known = [f"mean score {self.mean_score:.3g} by a judge command"]
        elif self.is_open_text:
            right = self.token_accuracy
            tokens = f", token accuracy {right:.1%}" if right is not None else ""
            ours, base = loss(self.new_loss or 0.0), loss(self.base_loss or 0.0)
            known = [f"open text: loss {ours} on held-out answers, base {base}{tokens}"]
        elif self.accuracy is not None:
            total = len(self.cases)
            known = [f"{self.accuracy:.1%} of {counted(total, 'answer')} correct"]
            known[0] += f" (95 % interval {self.interval})" if self.interval else ""
            known += [f"baseline {self.baseline:.1%}"] if self.baseline is not None else []
        else:
            return None
        return (
            f"gate {'passes' if self.gate else 'fails'}",
            f"{'; '.join([*known, *self.doubts()])}.",
        )

    def cards(self) -> Iterator[Tile]:
        if self.mean_score is not None:
            note = "of the judge command"
            yield Tile(name="Mean score", value=f"{self.mean_score:.3g}", note=note)
        if self.accuracy is not None:
            yield Tile(name="Correct answers", value=f"{self.accuracy:.1%}", note=self.interval)
        if self.baseline is not None:
            yield Tile(name="Baseline", value=f"{self.baseline:.1%}", note="on the same cases")
        if (not self.cases or self.is_open_text) and self.loss is not None:
            note = f"on {self.tokens or 0:,.0f} tokens"
            yield Tile(name="Loss", value=loss(self.loss), note=note)
        if self.is_open_text:
            yield Tile(name="Loss of the base", value=loss(self.base_loss or 0.0), note="same rows")
        if self.cases:
            passed = sum(case.get("passed") is True for case in self.cases)
            note = "open text" if self.is_open_text else f"{passed:,} correct"
            yield Tile(name="Cases", value=f"{len(self.cases):,}", note=note)


def validation_sections(run: RunFacts) -> list[PageSection]:
    """The validation; nothing if there was none."""
    if run.record.validation is None:
        return []
    found, old = Validated(run.record.validation), run.record.outdated
    inside: list[Block] = []
    if old:
        text = (
            f"Out of date: validation.json {old}. These are its numbers from then; run expert "
            f"validate --expert {run.record.folder} again."
        )
        inside.append(Words(text=text, tone="warning"))
    cards = tuple(found.cards())
    inside += [Tiles(cards=cards)] if cards else []
    inside += [] if old else _gate(found)
    by_verdict = {
        word: [case for case in found.cases if case.get("passed") is passed]
        for word, passed in (("wrong", False), ("correct", True))
    }
    for word, cases in by_verdict.items():
        some = tuple(map(_example, cases[:OPEN_CASES]))
        of = f"{len(some)} of {len(cases):,}" if len(some) < len(cases) else f"{len(cases):,}"
        if some:
            inside.append(Folded(title=f"{word.title()} answers: {of}", inside=some, shown=True))
    groups = {}
    for verdict, key in (("wrong", "wins"), ("right", "losses")):
        ids = {str(name) for name in listed(found.facts.get(key))}
        same = [case for case in found.cases if str(case.get("id")) in ids]
        groups[f"answers that the baseline got {verdict}"] = same
    groups |= {f"more {word} answers": cases[OPEN_CASES:] for word, cases in by_verdict.items()}
    neither = [case for case in found.cases if not isinstance(case.get("passed"), bool)]
    groups["answers of open text"] = [one for one in neither if one.get("kind") == "open"]
    groups["answers not judged"] = [one for one in neither if one.get("kind") != "open"]
    for title, cases in groups.items():
        if cases:
            shown = tuple(map(_example, cases[:SHOWN_CASES]))
            more = f", the first {SHOWN_CASES}" if len(cases) > SHOWN_CASES else ""
            inside.append(Folded(title=f"{len(cases):,} {title}{more}", inside=shown))
    if not inside:
        inside.append(Words(text="validation.json holds no known numbers.", tone="note"))
    title = "Validation, out of date" if old else "Validation"
    return [PageSection(name="validation", title=title, inside=tuple(inside))]


def _gate(found: Validated) -> list[Block]:
    """Whether the gate passes, what it requires, and doubts."""
    if found.gate is None:
        plain = "The rows are plain text: there are no answers to judge."
        return [Words(text=plain)] if found.has_no_gate and found.is_plain_text else []
    blocks: list[Block] = [Words(text="The quality gate passes.")]
    if not found.gate:
        blocks = [Words(text=f"The quality gate fails: {found.reasons}.", tone="warning")]
    asked = mapping(found.facts.get("asked"))
    wanted = "; ".join(str(each) for each in listed(asked.get("for")))
    if wanted:
        why = f" ({asked['because']})" if asked.get("because") else ""
        blocks.append(Words(text=f"Required: {wanted}{why}.", tone="note"))
    doubts = [f"{text[:1].upper()}{text[1:]}." for text in found.doubts()]
    return [*blocks, *(Words(text=text, tone="warning") for text in doubts)]


def _example(case: Case) -> CaseExample:
    passed = case.get("passed")
    known = {name: str(case[name]) for name in TEXTS if case.get(name) is not None}
    if not known.get("reason"):  # a correct answer has no reason
        known.pop("reason", None)
    texts = tuple((name, text or "(empty)") for name, text in known.items())
    return CaseExample(passed=passed if isinstance(passed, bool) else None, texts=texts)
