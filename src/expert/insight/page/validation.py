"""The validation of a finished expert, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from expert.core.text import counted, loss
from expert.insight.page.blocks import Block, Card, Cards, Example, Folded, Section, Words
from expert.insight.page.facts import RunFacts, listed, mapping, number

SHOWN_CASES = 20
"""Of each kind; validation.json has all."""
OPEN_CASES = 3
"""Of the wrong ones and of the right ones, to be read without a click."""
TEXTS = ("id", "prompt", "expected", "answer", "reason")


def judged(run: RunFacts) -> list[Section]:
    """What the validation said; nothing where there was none."""
    facts = run.record.validation
    if facts is None:
        return []
    old = run.record.outdated
    inside: list[Block] = [_out_of_date(run)] if old else []
    cards = tuple(_cards(facts))
    if cards:
        inside.append(Cards(cards=cards))
    cases = [mapping(case) for case in listed(facts.get("cases"))]
    inside += [] if old else _gate(facts)
    inside += _open(cases)
    for title, found in _groups(facts, cases):
        if found:
            shown = tuple(_example(case) for case in found[:SHOWN_CASES])
            more = f", the first {SHOWN_CASES}" if len(found) > SHOWN_CASES else ""
            inside.append(Folded(title=f"{len(found):,} {title}{more}", inside=shown))
    if not inside:
        inside.append(Words(text="validation.json holds nothing this page knows.", tone="note"))
    title = "Validation, out of date" if old else "Validation"
    return [Section(name="validation", title=title, inside=tuple(inside))]


def _open(cases: Sequence[Mapping[str, Any]]) -> list[Block]:
    """A few answers of both kinds, to be read without a click."""
    blocks: list[Block] = []
    for word, passed in (("wrong", False), ("right", True)):
        found = [case for case in cases if case.get("passed") is passed]
        if found:
            some = found[:OPEN_CASES]
            of = f"{len(some)} of {len(found):,}" if len(some) < len(found) else f"{len(found):,}"
            title = f"Answers that are {word}: {of}"
            shown = tuple(_example(case) for case in some)
            blocks.append(Folded(title=title, inside=shown, shown=True))
    return blocks


def _out_of_date(run: RunFacts) -> Words:
    """Above numbers that are those of a model which is no more."""
    text = (
        f"Out of date: validation.json {run.record.outdated}. What follows is what it found then; "
        f"expert validate --expert {run.record.folder} judges the weights there are now."
    )
    return Words(text=text, tone="warning")


def _gate(facts: Mapping[str, Any]) -> list[Block]:
    """Whether it was good enough, and what speaks against it."""
    gate = mapping(facts.get("gate"))
    if not isinstance(gate.get("passed"), bool):
        if "passed" not in gate or facts.get("cases") != []:
            return []
        return [Words(text="The rows are plain text: there is no answer to judge.")]
    remarks = [
        Words(text=f"{text[:1].upper()}{text[1:]}.", tone="warning") for text in _doubts(facts)
    ]
    wanted = "; ".join(str(each) for each in listed(mapping(facts.get("asked")).get("for")))
    because = mapping(facts.get("asked")).get("because")
    if wanted:
        why = f" ({because})" if because else ""
        remarks.insert(0, Words(text=f"It asks for {wanted}{why}.", tone="note"))
    if gate["passed"]:
        return [Words(text="The quality gate is passed."), *remarks]
    reasons = "; ".join(str(reason) for reason in listed(gate.get("reasons")))
    return [Words(text=f"The quality gate is not passed: {reasons}.", tone="warning"), *remarks]


def _doubts(facts: Mapping[str, Any]) -> Iterator[str]:
    """What makes the accuracy say less than it seems to."""
    learnt, part = mapping(facts.get("learnt")), mapping(facts.get("partial"))
    cases = len(listed(facts.get("cases")))
    count, others = number(learnt.get("cases")), number(learnt.get("accuracy_of_others"))
    if count:
        without = f"; without them {others:.1%} are right" if others is not None else ""
        yield f"{count:,.0f} of {cases:,} cases were also in the training rows{without}"
    if number(part.get("of")):
        yield f"only {cases:,} of {number(part.get('of')):,.0f} cases were judged"


def standing(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """How good the expert is, in a few words and in a sentence; None where nobody judged it."""
    accuracy, gate = number(facts.get("accuracy")), mapping(facts.get("gate")).get("passed")
    if not isinstance(gate, bool):
        return None
    told = f"gate {'' if gate else 'not '}passed"
    mean, open_text = number(facts.get("mean_score")), by_loss(facts)
    if mean is not None:
        return told, f"{'; '.join([f'mean score {mean:.3g} by a judge command', *_doubts(facts)])}."
    if open_text:
        return told, f"{'; '.join([open_text, *_doubts(facts)])}."
    if accuracy is None:
        return None
    cases = len(listed(facts.get("cases")))
    known = [f"{accuracy:.1%} of {counted(cases, 'answer')} {'is' if cases == 1 else 'are'} right"]
    ends = [number(end) for end in listed(facts.get("interval"))]
    if len(ends) == 2 and None not in ends:
        known[0] += f" (95 % interval {ends[0] or 0.0:.1%} to {ends[1] or 0.0:.1%})"
    before = number(mapping(facts.get("baseline")).get("accuracy"))
    known += [f"the baseline: {before:.1%}"] if before is not None else []
    known += list(_doubts(facts))
    return told, f"{'; '.join(known)}."


def by_loss(facts: Mapping[str, Any]) -> str:
    """What open text was judged by, in words; "" where it was judged by answers."""
    rows = mapping(facts.get("new_rows")) or mapping(facts.get("rows"))
    ours, base = number(rows.get("loss")), number(mapping(facts.get("base")).get("loss"))
    if ours is None or base is None or number(facts.get("accuracy")) is not None:
        return ""
    right = number(rows.get("token_accuracy"))
    tokens = f", {right:.1%} of tokens right" if right is not None else ""
    return f"open text: loss {loss(ours)} on held-out answers, the base's {loss(base)}{tokens}"


def _groups(
    facts: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Cases under a title each; those without an oracle are neither right nor wrong."""
    for title, key in (
        ("answers that the baseline had wrong", "wins"),
        ("answers that the baseline had right", "losses"),
    ):
        ids = {str(name) for name in listed(facts.get(key))}
        yield title, [case for case in cases if str(case.get("id")) in ids]
    for word, passed in (("wrong", False), ("right", True)):  # behind those that lie open
        found = [case for case in cases if case.get("passed") is passed]
        yield f"more answers are {word}", found[OPEN_CASES:]
    neither = [case for case in cases if not isinstance(case.get("passed"), bool)]
    yield "answers of open text", [case for case in neither if case.get("kind") == "open"]
    neither = [case for case in neither if case.get("kind") != "open"]
    yield "answers without an oracle, neither right nor wrong", neither


def _cards(facts: Mapping[str, Any]) -> Iterator[Card]:
    accuracy, mean = number(facts.get("accuracy")), number(facts.get("mean_score"))
    if mean is not None:
        yield Card(name="Mean score", value=f"{mean:.3g}", note="of the judge command")
    if accuracy is not None:
        ends = [number(end) for end in listed(facts.get("interval"))]
        known = len(ends) == 2 and None not in ends
        note = f"{ends[0] or 0.0:.1%} to {ends[1] or 0.0:.1%}" if known else ""
        yield Card(name="Answers right", value=f"{accuracy:.1%}", note=note)
    before = number(mapping(facts.get("baseline")).get("accuracy"))
    if before is not None:
        yield Card(name="Baseline", value=f"{before:.1%}", note="the same cases")
    cases = listed(facts.get("cases"))
    on_rows, tokens = (number(mapping(facts.get("rows")).get(key)) for key in ("loss", "tokens"))
    open_text = by_loss(facts)
    if (not cases or open_text) and on_rows is not None:
        yield Card(
            name="Loss on the rows", value=loss(on_rows), note=f"of {tokens or 0:,.0f} tokens"
        )
    base = number(mapping(facts.get("base")).get("loss"))
    if open_text and base is not None:
        yield Card(name="Loss of the base", value=loss(base), note="on the same rows")
    if open_text:
        yield Card(name="Cases", value=f"{len(cases):,}", note="open text, not right or wrong")
    elif cases:
        passed = sum(mapping(case).get("passed") is True for case in cases)
        yield Card(name="Cases", value=f"{len(cases):,}", note=f"{passed:,} passed")


def _example(case: Mapping[str, Any]) -> Example:
    passed = case.get("passed")
    known = {name: str(case[name]) for name in TEXTS if case.get(name) is not None}
    if not known.get("reason"):  # a right answer needs none
        known.pop("reason", None)
    texts = tuple((name, text or "(empty)") for name, text in known.items())
    return Example(passed=passed if isinstance(passed, bool) else None, texts=texts)
