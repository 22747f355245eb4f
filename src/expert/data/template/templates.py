"""Prompt templates, shared by training, evaluation and sampling."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

from expert.data.examples.tools import has_tools, in_chatml
from expert.data.records import DataError, Example, Segment, Turn


class TemplateError(DataError):
    """A template cannot render this example, but perhaps others."""


class Template(ABC):
    """Renders examples as text, and knows which parts are answers."""

    name: str
    adds_bos: bool
    """Texts already begin with the bos token; the encoder must not add one."""
    stop: str
    """The text that ends an answer, where generation may stop."""

    @abstractmethod
    def segments(self, example: Example, *, learn_prompt: bool = False) -> list[Segment]:
        """The text in segments that are trained on (answers, each with its end) or not."""

    @abstractmethod
    def prompt(self, turns: Sequence[Turn], tools: str = "") -> str:
        """The prompt for an answer to the last turn, with tools; the same text as in training."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes with everything that affects the text."""


@dataclass(frozen=True)
class Layout:
    """The text around the turns; `{eos}` and `{bos}` are the tokenizer's tokens."""

    system: tuple[str, str]
    """Before and after the system text."""
    user: tuple[str, str]
    """Before and after the user's text."""
    answer: tuple[str, str]
    """The generation prompt, and what ends an answer (trained on)."""
    lead: str = ""
    """Trained on with the answer: tokenizers merge a space with the next word."""
    system_in_user: bool = False
    """The format has no system turn: the system text is part of the first user turn."""
    between: str = ""
    """Before every user turn but the first."""
    finish: str = ""
    """Trained on after the last answer, if `answer` does not end with the eos token."""


LAYOUTS = {
    "alpaca": Layout(
        system=("", "\n\n"),
        user=("### Instruction:\n", "\n\n"),
        answer=("### Response:\n", "{eos}"),
        between="\n\n",
    ),
    "chatml": Layout(
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        answer=("<|im_start|>assistant\n", "<|im_end|>\n"),
    ),
    "llama": Layout(
        system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
        user=("[INST] ", " [/INST]"),
        answer=("", " {eos}"),
        lead=" ",
        system_in_user=True,
        between="{bos}",
    ),
    "mistral": Layout(
        system=("", "\n\n"),
        user=("[INST] ", " [/INST]"),
        answer=("", "{eos}"),
        lead=" ",
        system_in_user=True,
    ),
    "phi": Layout(
        system=("System: ", "\n\n"),
        user=("User: ", "\n"),
        answer=("Assistant:", "{eos}"),
        lead=" ",
        between="\n",
    ),
    "deepseek": Layout(
        system=("System: ", "\n\n"),
        user=("User: ", "\n\n"),
        answer=("Assistant:", "{eos}"),
        lead=" ",
    ),
    "gemma": Layout(
        system=("", "\n\n"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        answer=("<start_of_turn>model\n", "<end_of_turn>\n"),
        system_in_user=True,
        finish="{eos}",
    ),
}

INPUT_LABEL = re.compile(r"\n\n(Schema|Context|Input):\n")
"""What stands before the input of a request."""


@dataclass(frozen=True)
class NamedTemplate(Template):
    """One of LAYOUTS, for a tokenizer."""

    name: str
    layout: Layout
    bos: str
    eos: str

    @cached_property
    def adds_bos(self) -> bool:  # type: ignore[override]
        # Only if the tokenizer's bos opens every turn.
        openings = (self.layout.system[0], self.layout.user[0])
        return bool(self.bos) and all(opening.startswith(self.bos) for opening in openings)

    @cached_property
    def stop(self) -> str:  # type: ignore[override]
        return self.layout.answer[1].strip()

    @property
    def fingerprint(self) -> str:
        return fingerprint_of("named", repr(self.layout), self.bos, self.eos)

    def segments(self, example: Example, *, learn_prompt: bool = False) -> list[Segment]:
        if not example.turns:
            return plain_segments(example.text, eos=self.eos)
        layout = self.layout
        opening, end = layout.answer
        turns = example.turns
        if has_tools(example):
            if self.name != "chatml":
                fix = "set base_models[0].prompt_template: chatml, or tokenizer if its template can"
                what = f"the template {self.name!r} has no way to write tools and their calls"
                raise TemplateError(f"{what}  ({fix})")
            turns = in_chatml(example)
        segments: list[Segment] = []
        prompt = ""
        for place, turn in enumerate(turns):
            if turn.role == "assistant":
                segments.append(Segment(prompt + opening, learn=False))
                segments.append(Segment(layout.lead + turn.text + end, learn=True))
                prompt = ""
            else:
                prompt += self._before_answer(turns, place)
        if prompt:
            segments.append(Segment(prompt, learn=False))
        elif layout.finish:
            segments[-1] = Segment(segments[-1].text + layout.finish, learn=True)
        return with_trained_answers(segments, turns, learn_prompt=learn_prompt)

    def prompt(self, turns: Sequence[Turn], tools: str = "") -> str:
        check_prompt_turns(turns)
        answered = Example((*turns, Turn("assistant", "")), tools=tools)
        return "".join(segment.text for segment in self.segments(answered)[:-1])

    def _before_answer(self, turns: Sequence[Turn], place: int) -> str:
        """A system or user turn at its position in the conversation."""
        layout = self.layout
        turn = turns[place]
        if turn.role == "system":
            return "" if layout.system_in_user else _between(layout.system, turn.text)
        text = turn.text
        if self.name == "alpaca":  # the input has its own heading, like the request
            text = INPUT_LABEL.sub(r"\n\n### \1:\n", text, count=1)
        if layout.system_in_user and place == 1 and turns[0].role == "system":
            text = _between(layout.system, turns[0].text) + text
        written = _between(layout.user, text)
        first = place == 0 or (place == 1 and turns[0].role == "system")
        return written if first else layout.between + written


def named_template(name: str, *, eos: str, bos: str = "") -> NamedTemplate:
    """One of LAYOUTS with the tokenizer's tokens filled in. It writes no bos before the first turn:
    whether a text begins with one is up to the encoder."""
    if name not in LAYOUTS:
        raise DataError(f"unknown prompt template {name!r}  (known: {', '.join(LAYOUTS)})")
    layout = LAYOUTS[name]
    if not eos and "{eos}" in layout.answer[1]:
        what = f"the template {name!r} ends an answer with the tokenizer's end token"
        raise DataError(f"{what}, but it has none  (set base_models[0].prompt_template: chatml)")

    def filled(piece: str) -> str:
        return piece.replace("{eos}", eos).replace("{bos}", bos)

    answer = (layout.answer[0], filled(layout.answer[1]))
    between, finish = filled(layout.between), filled(layout.finish)
    layout = replace(layout, answer=answer, between=between, finish=finish)
    return NamedTemplate(name, layout, bos, eos)


def _between(pieces: tuple[str, str], text: str) -> str:
    return f"{pieces[0]}{text}{pieces[1]}"


def segments_at(text: str, answers: Sequence[tuple[int, int]]) -> list[Segment]:
    """The text in segments; those at these positions are trained on."""
    edges = [0, *(edge for span in answers for edge in span), len(text)]
    spans = enumerate(pairwise(edges))
    return [Segment(text[a:b], learn=n % 2 == 1) for n, (a, b) in spans if a < b]


def plain_segments(text: str, *, eos: str, bos: str = "") -> list[Segment]:
    """Plain text, all of it trained on, including the eos token."""
    trained = Segment(text + eos, learn=True)
    return [Segment(bos, learn=False), trained] if bos else [trained]


def train_on_whole_text(segments: Sequence[Segment]) -> list[Segment]:
    """The same text as one segment, all of it trained on."""
    return [Segment("".join(segment.text for segment in segments), learn=True)]


def with_trained_answers(
    segments: list[Segment], turns: Sequence[Turn], *, learn_prompt: bool
) -> list[Segment]:
    """Adjust segments in which all answers are marked: train on the prompt too if asked, and not on
    answers that are excluded."""
    trained = [turn.is_trained(learn_prompt=learn_prompt) for turn in turns]
    if all(trained):
        return train_on_whole_text(segments) if learn_prompt else segments
    answers = zip(turns, trained, strict=True)
    wanted = iter([is_trained for turn, is_trained in answers if turn.role == "assistant"])
    marked = [
        Segment(segment.text, next(wanted) if segment.learn else learn_prompt)
        for segment in segments
    ]
    if not learn_prompt:
        return marked
    runs = groupby(marked, key=lambda segment: segment.learn)
    return [Segment("".join(part.text for part in run), learn) for learn, run in runs]


def check_prompt_turns(turns: Sequence[Turn]) -> None:
    if not turns or turns[-1].role not in ("user", "tool"):
        raise TemplateError("an answer can be generated only after a user or tool turn")


def fingerprint_of(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()
