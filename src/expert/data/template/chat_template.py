"""The tokenizer's own chat template; finds the answers in its output by rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix

from expert.data.examples.tools import has_tools, tool_names
from expert.data.records import DataError, Example, Segment, Turn
from expert.data.template.sandbox import (
    CHATML_FIX,
    TEMPLATE,
    WRITTEN_DATE,
    SandboxedTemplate,
    refuse_costly,
)
from expert.data.template.templates import (
    Template,
    TemplateError,
    check_prompt_turns,
    fingerprint_of,
    plain_segments,
    segments_at,
    train_on_whole_text,
    with_trained_answers,
)
from expert.manifest.schema.message_names import Role

_SLOT_START, _SLOT_END = "\ue0f0", "\ue0f1"  # private use area: does not occur in text
_SLOT = re.compile(f"{_SLOT_START}([0-9]+){_SLOT_END}")
_Parts = tuple[str | int, ...]
"""Text, and the numbers of the turns in between."""
_SHOWN_CHARACTERS = 40
MOST_RENDERED_TURNS = 100_000
"""Turns rendered for one conversation, over all its beginnings: a few seconds. Counted rather than
timed, so that the same rows are refused on every machine."""


def placeholder(place: int) -> str:
    """Stands for the text of a turn while a template is examined."""
    return f"{_SLOT_START}{place}{_SLOT_END}"


@dataclass(frozen=True)
class _Answer:
    """How to locate an answer in conversations of one shape, whatever their texts."""

    opened: bool
    """It begins where the generation prompt ends; otherwise where its text begins."""
    before: str
    """The template's text right before it."""
    end: str
    """The template's text that ends it."""


@dataclass(frozen=True)
class _Shape:
    """The template's text around the turns, for one sequence of roles."""

    pieces: tuple[tuple[bool, _Parts], ...]
    """Segments (trained on or not) of text and turn numbers."""
    answers: Mapping[int, _Answer]

    def segments(self, texts: list[str]) -> list[Segment]:
        return [
            Segment("".join([p if isinstance(p, str) else texts[p] for p in parts]), learn)
            for learn, parts in self.pieces
        ]


class ChatTemplate(Template):
    """Renders conversations the way the model was trained on them before.

    The positions of the answers are known from the shape of the conversation, measured once with
    placeholders, so that a row needs one rendering. If the template changes a text (trims
    it, removes reasoning), the beginnings of the conversation are rendered as well: an answer is
    what a rendering with it has beyond one that ends before it. The template is tested on a small
    conversation first.
    """

    name = "tokenizer"
    measured_turns = 8
    """Answers further on are measured like the one before them."""
    _turns_left = MOST_RENDERED_TURNS
    """How many more turns may be rendered for this conversation."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self._source, self._bos, self._eos = source, bos, eos
        self._variables = {"tools": None, "documents": None, "bos_token": bos, "eos_token": eos}
        self._shapes: dict[tuple[Role, ...], _Shape] = {}
        self._finish = ""
        refuse_costly(self._examine)
        exchange = self._examine()
        end = exchange.partition(placeholder(1))[2]
        if not end.strip():
            self._finish = eos  # without it no answer would ever end
        self.stop = end.strip() or eos
        self.adds_bos = bool(bos) and exchange.startswith(bos)
        # A bos that occurs in every turn marks turns, so plain text does not begin with it.
        self._plain_bos = bos if self.adds_bos and exchange.count(bos) == 1 else ""

    def _examine(self) -> str:
        """Compile the template and find out whether it has a system turn; returns the text of a
        question and its answer."""
        self._sandbox = SandboxedTemplate(self._source)
        exchange = self._probe(("user", "assistant"))
        try:
            self._probe(("system", "user", "assistant"))
            self._folds_system = False
        except DataError:
            self._folds_system = True
        return exchange

    @property
    def fingerprint(self) -> str:
        today = str(WRITTEN_DATE) if "strftime_now" in self._source else ""
        # "{}": no variables; kept from when there could be some.
        return fingerprint_of("chat", self._source, self._bos, self._eos, "{}", today)

    def segments(self, example: Example, *, learn_prompt: bool = False) -> list[Segment]:
        self._turns_left = MOST_RENDERED_TURNS
        if not example.turns:
            segments = plain_segments(example.text, eos=self._eos, bos=self._plain_bos)
            return train_on_whole_text(segments) if learn_prompt else segments
        turns = self._folded(example.turns)
        if has_tools(example):
            end = self._shape(("user", "assistant", "user", "assistant")).answers[1].end
            segments = self._tool_segments(turns, example.tools, end)
            return with_trained_answers(segments, turns, learn_prompt=learn_prompt)
        texts = [turn.text for turn in turns]
        shape = self._shape(tuple([turn.role for turn in turns]))
        segments, text = shape.segments(texts), self._finished(turns)
        if "".join([segment.text for segment in segments]) != text:  # it changed some turn
            if learn_prompt and all(turn.learn for turn in turns):
                return [Segment(text, learn=True)]
            segments = self._found(turns, text, shape)
        return with_trained_answers(segments, turns, learn_prompt=learn_prompt)

    def prompt(self, turns: Sequence[Turn], tools: str = "") -> str:
        self._turns_left = MOST_RENDERED_TURNS
        check_prompt_turns(turns)
        turns = self._folded(turns)
        if has_tools(Example(tuple(turns), tools=tools)):
            return self._render(turns, generate=True, tools=tools)
        if self._opens_answers(turns):
            return self._render(turns, generate=True)
        slot = placeholder(len(turns))
        return self._render([*turns, Turn("assistant", slot)]).partition(slot)[0]

    def _opens_answers(self, turns: Sequence[Turn]) -> bool:
        """Whether an answer begins where the generation prompt ends, measured on a conversation of
        at most two questions: a template treats all later ones alike."""
        questions = sum(turn.role == "user" for turn in turns)
        roles: tuple[Role, ...] = ("user", "assistant") * min(2, questions)
        shape = self._shape(("system", *roles) if turns[0].role == "system" else roles)
        return shape.answers[max(shape.answers)].opened

    def _finished(self, turns: Sequence[Turn], tools: str = "") -> str:
        text = self._render(turns, tools=tools)
        return text + self._finish if turns[-1].role == "assistant" else text

    def _render(self, turns: Sequence[Turn], *, generate: bool = False, tools: str = "") -> str:
        self._require(len(turns))
        self._turns_left -= len(turns)
        messages = [
            {"role": turn.role, "content": turn.text, **json.loads(turn.extra or "{}")}
            for turn in turns
        ]
        variables = {**self._variables, "tools": json.loads(tools)} if tools else self._variables
        return self._sandbox.render(messages, add_generation_prompt=generate, **variables)

    def _require(self, turns: int) -> None:
        """TemplateError if rendering so many more turns takes too long."""
        if turns > self._turns_left:
            what = f"{TEMPLATE} would write more than {MOST_RENDERED_TURNS:,}"
            fix = "divide it into several, or set base_models[0].prompt_template: chatml"
            raise TemplateError(
                f"the conversation has too many turns: to find its answers, {what}  ({fix})"
            )

    def _require_beginnings(self, turns: Sequence[Turn]) -> None:
        """The same for the beginnings of a conversation up to each of its answers."""
        self._require(sum(place for place, turn in enumerate(turns) if turn.role == "assistant"))

    def _folded(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """The turns; without a system turn in the template, its text goes into the first user
        turn."""
        if not self._folds_system or turns[0].role != "system" or len(turns) < 2:
            return turns
        return (Turn("user", f"{turns[0].text}\n\n{turns[1].text}"), *turns[2:])

    def _probe(self, roles: Sequence[Role]) -> str:
        """Render a small conversation; DataError if the template cannot."""
        turns = [Turn(role, placeholder(place)) for place, role in enumerate(roles)]
        try:
            text = self._render(turns)
        except TemplateError as error:
            raise DataError(f"{error}  (it is: {', '.join(roles)}){CHATML_FIX}") from None
        for place, role in enumerate(roles):
            if placeholder(place) not in text:
                raise DataError(f"{TEMPLATE} leaves out the {role} turn{CHATML_FIX}")
        return text

    def _shape(self, roles: tuple[Role, ...]) -> _Shape:
        shape = self._shapes.get(roles)
        if shape is None:
            shape = self._shapes[roles] = self._measured(roles)
        return shape

    def _measured(self, roles: tuple[Role, ...]) -> _Shape:
        """The shape of conversations with these roles, measured with placeholders."""
        turns = [Turn(role, placeholder(place)) for place, role in enumerate(roles)]
        text = self._finished(turns)
        measured: dict[int, tuple[_Answer, tuple[int, int]]] = {}
        for place, role in enumerate(roles):
            if role == "assistant":
                alike = self._measured_alike(roles, place, measured, text)
                measured[place] = alike or self._measured_answer(turns, place, text)
        pieces = segments_at(text, [span for _, span in measured.values()])
        parts = tuple((piece.learn, _parts(piece.text)) for piece in pieces)
        answers = {place: answer for place, (answer, _) in measured.items()}
        return _Shape(parts, answers)

    def _measured_alike(
        self,
        roles: tuple[Role, ...],
        place: int,
        measured: Mapping[int, tuple[_Answer, tuple[int, int]]],
        text: str,
    ) -> tuple[_Answer, tuple[int, int]] | None:
        """The measure of an answer in the middle of a long conversation, from the one before it:
        rendering every beginning would take the square of the turns."""
        around = roles[place - 1 : place + 2]
        before = place - len(around) + 1
        if place < self.measured_turns or place == len(roles) - 1 or before not in measured:
            return None
        answer, (start, end) = measured[before]
        slots = [(text.find(slot), len(slot)) for slot in map(placeholder, (before, place))]
        (position, width), (here, here_width) = slots
        opening, closing = text[start:position], text[position + width : end]
        same = roles[before - 1 : before + 2] == around and text.count(placeholder(place)) == 1
        if not same or not text.startswith(closing, here + here_width):
            return None
        if not text.endswith(answer.before, 0, here) or not text.endswith(opening, 0, here):
            return None
        return answer, (here - len(opening), here + here_width + len(closing))

    def _measured_answer(
        self, turns: Sequence[Turn], place: int, text: str
    ) -> tuple[_Answer, tuple[int, int]]:
        slot = placeholder(place)
        if text.count(slot) != 1:
            turn_number = f"turn {place + 1} (assistant)"
            raise TemplateError(f"{TEMPLATE} does not write {turn_number} exactly once")
        position = text.index(slot)
        behind = position + len(slot)
        asked = self._render(turns[:place], generate=True)
        opened = text.startswith(asked) and len(asked) <= position
        if opened and text[len(asked) : position].strip():
            # A template without a generation prompt: the header is not part of the answer.
            opened = asked != self._render(turns[:place])
        end = text[behind:] if place == len(turns) - 1 else self._end(turns, place, text[behind:])
        start = len(asked) if opened else position
        before = _SLOT.split(text[:position])[-1]
        return _Answer(opened, before, end), (start, behind + len(end))

    def _end(self, turns: Sequence[Turn], place: int, rest: str) -> str:
        """The text that ends an answer followed by another turn."""
        alone = self._render(turns[: place + 1]).partition(placeholder(place))[2]
        following = _SLOT.split(rest, maxsplit=1)[0]
        end: str = commonprefix([alone, following])  # noqa: RUF071 - of characters, not of paths
        if not end.strip() and self._eos and self._eos in following:
            end = following[: following.index(self._eos) + len(self._eos)]
        if not end.strip():
            raise TemplateError(f"{TEMPLATE} does not end turn {place + 1} (assistant)")
        return end

    def _found(self, turns: Sequence[Turn], text: str, shape: _Shape) -> list[Segment]:
        """The segments of a text in which the template changed some turn."""
        if any(answer.opened for answer in shape.answers.values()):
            self._require_beginnings(turns)
        spans: list[tuple[int, int]] = []
        for place, answer in shape.answers.items():
            done = spans[-1][1] if spans else 0
            spans.append(self._span(turns, place, text, done, answer))
        return segments_at(text, spans)

    def _span(
        self, turns: Sequence[Turn], place: int, text: str, done: int, answer: _Answer
    ) -> tuple[int, int]:
        """Where an answer begins and ends in the text."""
        asked = self._render(turns[:place], generate=True) if answer.opened else ""
        opened = answer.opened and len(asked) >= done and text.startswith(asked)
        if opened:
            if place == len(turns) - 1:
                return len(asked), len(text)
            answered = self._render(turns[: place + 1])
            if text.startswith(answered) and len(answered) > len(asked):
                return len(asked), len(answered)
        before, since = ("", len(asked)) if opened else (answer.before, done)
        said = turns[place].text
        # Unchanged, stripped, or without the reasoning before it.
        for written in (said, said.strip(), said.rpartition("</think>")[2].strip()):
            at = text.find(before + written + answer.end, since) if written else -1
            if at >= 0:
                first = at + len(before)
                return len(asked) if opened else first, first + len(written + answer.end)
        shown = said[:_SHOWN_CHARACTERS]
        raise TemplateError(f"{_rewritten(place)}: {shown!r}")

    # --- conversations with tools ----------------------------------------------------------------

    def _tool_segments(self, turns: Sequence[Turn], tools: str, end: str) -> list[Segment]:
        """The text in segments that are trained on or not: an answer is what a text with it has
        beyond one that asks for it. `end`: what ends an answer followed by another turn."""
        self._require_beginnings(turns)
        text = self._finished(turns, tools)
        said = [*tool_names(turns, tools), *(t.text.strip() for t in turns if t.role == "tool")]
        missing = (
            repr(each[:_SHOWN_CHARACTERS])
            for each in said
            if each not in text and json.dumps(each)[1:-1] not in text
        )
        left_out = next(missing, "") or self._leaves_out
        if left_out:
            what = f"does not write tools and their calls: {left_out} is not in its text"
            raise TemplateError(f"{TEMPLATE} {what}{CHATML_FIX}")
        spans: list[tuple[int, int]] = []
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            start, stop = self._start_with_tools(turns[:place], tools, text), len(text)
            if place < len(turns) - 1:
                # Not by a rendering that ends here, which may include the reasoning of a last
                # answer.
                stop = text.find(end, start) + len(end)
            if not (spans[-1][1] if spans else 0) <= start < stop:
                raise TemplateError(_rewritten(place))
            spans.append((start, stop))
        return segments_at(text, spans)

    def _start_with_tools(self, before: Sequence[Turn], tools: str, text: str) -> int:
        """Where the answer to these turns begins in the text; -1 if not found. A template may keep
        only reasoning after the last question, and the text may have a later one."""
        for turns in (before, [_without_reasoning(turn) for turn in before]):
            asked = self._render(turns, generate=True, tools=tools)
            if text.startswith(asked):
                return len(asked)
        return -1

    @cached_property
    def _leaves_out(self) -> str:
        """What the template omits from a conversation with tools; "" if nothing, or if it needs
        more than this conversation has. Uses names that do not occur in text by chance."""
        offered, called, argument, result = "zq0offered", "zq1called", "zq2given", "zq3told"
        tool = {"name": offered, "description": "", "parameters": {"type": "object"}}
        call = {"name": called, "arguments": {"x": argument}}
        extra = json.dumps({"tool_calls": [{"type": "function", "function": call}]})
        turns = (
            Turn("user", "x"),
            Turn("assistant", "", extra=extra),
            Turn("tool", result),
            Turn("assistant", "x"),
        )
        try:
            text = self._finished(turns, json.dumps([{"type": "function", "function": tool}]))
        except TemplateError:
            return ""
        parts = {"the tools": offered, "calls": called, "arguments": argument}
        parts["tools' answers"] = result
        return next((words for words, part in parts.items() if part not in text), "")


def _rewritten(place: int) -> str:
    turn = f"turn {place + 1} (assistant)"
    return f"{TEMPLATE} rewrites {turn} so that its answer cannot be found in the text"


def _without_reasoning(turn: Turn) -> Turn:
    if turn.role != "assistant" or "</think>" not in turn.text:
        return turn
    said = turn.text.rpartition("</think>")[2].lstrip("\n")
    return replace(turn, text=said)


def _parts(text: str) -> _Parts:
    """Split a text at its placeholders, which become turn numbers."""
    parts = _SLOT.split(text)
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts) if part)
