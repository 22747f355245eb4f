"""The rounds of `expert improve`, and answers to training prompts that a round learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expert.insight.page.figures import Tone
from expert.insight.page.render import PageSection, make_section
from expert.insight.page.validation import Example
from expert.insight.record import RunRecord, listed, mapping
from expert.insight.step.anatomy import finite

COLUMNS = ("", "right answers", "both", "tokens", "rows", "accuracy", "95 % interval", "won / lost")
SHOWN_PROMPTS = 12


def improvement_section(record: RunRecord) -> PageSection:
    """Every round as a bar and a row; then prompts that were answered right and wrong."""
    state = record.improvement
    rounds = [mapping(each) for each in listed(state.get("rounds"))]
    stands: list[tuple[str, dict[str, Any], dict[str, Any]]]
    stands = [("start", {}, mapping(state.get("before")))]
    stands += [
        (f"round {number}", each, mapping(each.get("standing")))
        for number, each in enumerate(rounds, 1)
    ]
    own = str(record.folder.absolute())
    bars = [
        (f"{name}{' (this run)' if standing.get('run') == own else ''}", accuracy, _share(accuracy))
        for name, _, standing in stands
        if (accuracy := finite(standing.get("accuracy"))) is not None
    ]
    rows = [_row(name, each, standing) for name, each, standing in stands]
    doubts = [str(text) for each in rounds for text in listed(each.get("doubts"))]
    return make_section(
        *("improvement", "Improvement", bars, COLUMNS, rows, doubts),
        [example for each in record.answers if (example := _example(each))][:SHOWN_PROMPTS],
        f"{mapping(state.get('settings')).get('method')}; {state.get('ended') or 'not finished'}",
    )


def _row(name: str, each: Mapping[str, Any], standing: Mapping[str, Any]) -> list[str]:
    facts, change = mapping(each.get("facts")), mapping(each.get("difference"))
    tokens, ends = (
        finite(facts.get("tokens")),
        [finite(e) for e in listed(standing.get("interval"))],
    )
    return [
        name,
        _share(finite(facts.get("right"))),
        _share(finite(facts.get("mixed"))),
        "–" if tokens is None else f"{tokens:.0f}",
        str(each.get("rows") or "–"),
        _share(finite(standing.get("accuracy"))),
        f"{_share(ends[0])} to {_share(ends[1])}" if len(ends) == 2 else "–",
        f"{change.get('won')} / {change.get('lost')}" if change else "–",
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _example(asked: Mapping[str, Any]) -> Example | None:
    """A prompt with its answers; None if they are all right or all wrong."""
    answers = [mapping(each) for each in listed(asked.get("answers"))]
    if {True, False} - {each.get("passed") for each in answers}:
        return None
    texts = [(name, str(asked.get(name) or "")) for name in ("prompt", "expected")]
    for each in answers:
        verdict = {"True": "right", "False": "wrong"}.get(str(each.get("passed")), "not judged")
        reason = f"  ({each['reason']})" if each.get("reason") else ""
        texts.append((verdict, f"{each.get('text')}{reason}"))
    tone: Tone = "note"
    return tone, list(dict.fromkeys(texts))
