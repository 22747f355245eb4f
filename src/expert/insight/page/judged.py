"""The validation of a finished expert, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expert.insight.page.blocks import Block, Card, Cards, Example, Folded, Section, Words
from expert.insight.page.facts import RunFacts, listed, mapping, number

SHOWN_CASES = 20
"""Of each kind; validation.json has all."""
TEXTS = ("prompt", "expected", "answer", "reason")


def judged(run: RunFacts) -> list[Section]:
    """What the validation said; nothing where there was none."""
    facts = run.record.validation
    if facts is None:
        return []
    inside: list[Block] = []
    cards = tuple(_cards(facts))
    if cards:
        inside.append(Cards(cards=cards))
    cases = [mapping(case) for case in listed(facts.get("cases"))]
    failed = [case for case in cases if case.get("passed") is False]
    others = [case for case in cases if case.get("passed") is not False]
    for title, found in (("wrong", failed), ("right", others)):
        if found:
            shown = tuple(_example(case) for case in found[:SHOWN_CASES])
            more = f", the first {SHOWN_CASES}" if len(found) > SHOWN_CASES else ""
            inside.append(Folded(title=f"{len(found):,} answers are {title}{more}", inside=shown))
    if not inside:
        inside.append(Words(text="validation.json holds nothing this page knows.", tone="note"))
    return [Section(name="validation", title="Validation", inside=tuple(inside))]


def _cards(facts: Mapping[str, Any]) -> Iterator[Card]:
    accuracy = number(facts.get("accuracy"))
    if accuracy is not None:
        ends = [number(end) for end in listed(facts.get("interval"))]
        known = len(ends) == 2 and None not in ends
        note = f"{ends[0] or 0.0:.1%} to {ends[1] or 0.0:.1%}" if known else ""
        yield Card(name="Answers right", value=f"{accuracy:.1%}", note=note)
    cases = listed(facts.get("cases"))
    if cases:
        passed = sum(mapping(case).get("passed") is True for case in cases)
        yield Card(name="Cases", value=f"{len(cases):,}", note=f"{passed:,} passed")


def _example(case: Mapping[str, Any]) -> Example:
    passed = case.get("passed")
    texts = tuple((name, str(case[name])) for name in TEXTS if case.get(name) is not None)
    return Example(passed=passed if isinstance(passed, bool) else None, texts=texts)
