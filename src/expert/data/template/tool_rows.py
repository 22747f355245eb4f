"""Conversations with tools as a model's own template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from expert.data.examples.tools import tool_names
from expert.data.records import Segment, Turn
from expert.data.template.templates import TemplateError, segments_at

_SHOWN_CHARACTERS = 40

Render = Callable[[Sequence[Turn], str], str]
"""Turns and tools to text."""


@dataclass(frozen=True)
class ToolRows:
    """Where answers stand in the text of a template, found by rendering beginnings of it."""

    whole: Render
    """The text of a conversation, with its end."""
    beginning: Render
    """The text that asks for an answer."""

    def segments(self, turns: Sequence[Turn], tools: str, end: str) -> list[Segment]:
        """The text in stretches that are trained on and that are not: an answer is what a text with
        it has beyond one that asks for it. `end`: what ends an answer that another turn follows."""
        text = self.whole(turns, tools)
        self._refuse_what_is_left_out(turns, tools, text)
        spans: list[tuple[int, int]] = []
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            start, stop = self._start(turns[:place], tools, text), len(text)
            if place < len(turns) - 1:
                # Not by a rendering that ends here: of a last answer thoughts may be written.
                stop = text.find(end, start) + len(end)
            if not (spans[-1][1] if spans else 0) <= start < stop:
                raise TemplateError(
                    f"the tokenizer's chat template rewrites turn {place + 1} (assistant) so that "
                    "its answer cannot be found in the text"
                )
            spans.append((start, stop))
        return segments_at(text, spans)

    def _start(self, before: Sequence[Turn], tools: str, text: str) -> int:
        """Where the answer to these turns begins in the text; -1 where it is not found. A template
        may write thoughts after the last question alone, and the text may have a later one."""
        for turns in (before, [_without_thoughts(turn) for turn in before]):
            asked = self.beginning(turns, tools)
            if text.startswith(asked):
                return len(asked)
        return -1

    @cached_property
    def _leaves_out(self) -> str:
        """What the template does not write of a conversation with tools; "" where it writes all of
        it, or wants more than this conversation has. Names that no text has by chance."""
        offered, called, given, result = "zq0offered", "zq1called", "zq2given", "zq3told"
        tool = {"name": offered, "description": "", "parameters": {"type": "object"}}
        call = {"name": called, "arguments": {"x": given}}
        extra = json.dumps({"tool_calls": [{"type": "function", "function": call}]})
        turns = (
            Turn("user", "x"),
            Turn("assistant", "", extra=extra),
            Turn("tool", result),
            Turn("assistant", "x"),
        )
        try:
            text = self.whole(turns, json.dumps([{"type": "function", "function": tool}]))
        except TemplateError:
            return ""
        parts = {
            "the tools": offered,
            "calls": called,
            "arguments": given,
            "tools' answers": result,
        }
        return next((words for words, part in parts.items() if part not in text), "")

    def _refuse_what_is_left_out(self, turns: Sequence[Turn], tools: str, text: str) -> None:
        said = [*tool_names(turns, tools), *(t.text.strip() for t in turns if t.role == "tool")]
        missing = (
            repr(each[:_SHOWN_CHARACTERS])
            for each in said
            if each not in text and json.dumps(each)[1:-1] not in text
        )
        left_out = next(missing, "") or self._leaves_out
        if left_out:
            raise TemplateError(
                "the tokenizer's chat template does not write tools and their calls: "
                f"{left_out} is not in its text  (set base_models[0].prompt_template: chatml)"
            )


def _without_thoughts(turn: Turn) -> Turn:
    if turn.role != "assistant" or "</think>" not in turn.text:
        return turn
    said = turn.text.rpartition("</think>")[2].lstrip("\n")
    return Turn(turn.role, said, turn.learn, turn.extra)
