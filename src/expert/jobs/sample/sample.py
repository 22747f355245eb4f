"""The job behind `expert sample`: a trained expert answers, or continues a text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import read_text
from expert.core.text import counted
from expert.data.examples.tools import tool_names, tools_of
from expert.data.records import Example, Segment, Turn, UnfitRow
from expert.jobs.sample.answer_steps import Speaker
from expert.jobs.sample.answer_writer import AnswerWriter, Tell, cut_at
from expert.jobs.sample.decoding import CannotSample, DecodingSettings, end_tokens, settle_decoding
from expert.jobs.sample.token_choice import TokenChoice
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import Trained, base_remark, load_trained, pick_device, read_plan
from expert.run.stored.locate import find_trained

if TYPE_CHECKING:
    from expert.data.plain_text import FirstRow
    from expert.data.template.templates import Template


Begin = Callable[[str, bool], None]
"""Called with the prompt, and whether it is continued as plain text, before the first token."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What became of one prompt."""

    prompt: str
    text: str
    tokens: int
    ended: bool
    """It came to its end; otherwise it was cut at max_new_tokens."""
    note: str = ""
    """What is to be said of it."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All prompts, and what is needed to get the same texts again."""

    run: Path
    checkpoint: str
    plain: bool
    """The prompts were continued as they stand, without a template."""
    seed: int
    decoding: DecodingSettings
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A trained expert that is loaded, and how it answers."""

    run: Path
    trained: Trained
    plain: bool
    seed: int
    decoding: DecodingSettings
    notes: tuple[str, ...]
    tools: str = ""
    """As JSON, those that the model is offered with every prompt."""


def sample(
    run: Path | None,
    prompts: Sequence[str],
    *,
    system: str = "",
    begin: Begin = lambda prompt, plain: None,
    tell: Tell = lambda piece: None,
    **how: Any,
) -> Samples:
    """Answer every prompt with what a run trained.

    `how`: what `ready` takes. `begin` and `tell` follow the work.
    """
    loaded = ready(run, prompts, system=system, **how)
    done = [
        Conversation(loaded, system=system).ask(prompt, begin=begin, tell=tell)
        for prompt in prompts
    ]
    return Samples(
        run=loaded.run,
        checkpoint=loaded.trained.choice.name,
        plain=loaded.plain,
        seed=loaded.seed,
        decoding=loaded.decoding,
        notes=(*dict.fromkeys(each.note for each in done if each.note), *loaded.notes),
        samples=tuple(done),
    )


def ready(
    run: Path | None,
    prompts: Sequence[str] = (),
    *,
    system: str = "",
    plain: bool | None = None,
    checkpoint: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    decoding: Mapping[str, Any] | None = None,
    tools: Path | None = None,
    loading: Callable[[str], None] = lambda what: None,
) -> Ready:
    """A trained run, loaded to answer; what cannot be answered is refused before that.

    `decoding` holds what differs from the manifest's; `plain` continues prompts as they stand, None
    decides by the data. `tools` is a file that names them; None: those of the first training row.
    """
    from expert.data.plain_text import FirstRow, trained_on_text

    folder = find_trained(run)
    plan = read_plan(folder)
    how, notes = settle_decoding(plan, decoding or {})
    first = FirstRow(plan)
    continues = trained_on_text(plan, first) if plain is None else plain
    if system and continues:
        raise CannotSample("--system: continued text has no system turn  (put it into the prompt)")
    if not continues and any(not prompt.strip() for prompt in prompts):
        raise CannotSample("--prompt: is empty  (write a question)")
    offered, told = _offered(first, tools, continues=continues)
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    remark = base_remark(folder, plan)
    loading(f"loading {plan.model.name} and {choice.name} of {folder.path}")
    return Ready(
        run=folder.path,
        trained=load_trained(folder, plan, choice, device=pick_device(device)),
        plain=continues,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        decoding=how,
        notes=(*notes, *told, *([remark] if remark else [])),
        tools=offered,
    )


def _offered(first: FirstRow, file: Path | None, *, continues: bool) -> tuple[str, list[str]]:
    """The tools of a prompt, and notes on them: a run trained on calls expects
    some."""
    if continues and file is not None:
        raise CannotSample("--tools: continued text makes no calls  (leave it out)")
    if continues or file is not None:
        return (tools_in(file) if file is not None else ""), []
    if not first.tools:
        return "", []
    names = ", ".join(tool_names((), first.tools))
    return first.tools, [
        f"asked with the tools of the first row: {names}  (--tools FILE for others)"
    ]


def prompt_text(
    template: Template, prompt: str, *, system: str = "", plain: bool = False, tools: str = ""
) -> str:
    """What the model is given: a conversation that ends where the answer begins, or plain text."""
    if not plain:
        turns = [Turn("system", system)] if system else []
        return template.prompt([*turns, Turn("user", prompt)], tools)
    segments: list[Segment] = template.segments(Example(text=prompt))
    whole = "".join(segment.text for segment in segments)
    return whole[: whole.rindex(prompt) + len(prompt)]  # without the end that training adds


# --- characters ----------------------------------------------------------------------------------


def _continue_characters(loaded: Ready, prompt: str, begin: Begin, tell: Tell) -> Sample:
    import torch

    from expert.data.tokens.encoder import CharacterEncoder
    from expert.model.chargpt import CharGpt

    trained, how = loaded.trained, loaded.decoding
    encoder, module = trained.encoder, trained.loaded.module
    assert isinstance(encoder, CharacterEncoder)
    assert isinstance(module, CharGpt)
    # A text begins after the end of another one, which in most corpora is a line's.
    start = prompt or ("\n" if "\n" in encoder.characters else encoder.characters[0])
    ids = encoder.encode([[Segment(start, learn=False)]]).ids.tolist()
    tokens = torch.tensor([ids], device=trained.device)
    generator = torch.Generator(trained.device).manual_seed(loaded.seed)
    begin(prompt, loaded.plain)
    text, ended, count = "", False, 0
    while count < how.max_new_tokens and not ended:
        tokens = module.generate(tokens, 1, how.temperature, how.top_k, generator)
        count += 1
        piece = encoder.decode(tokens[0, -1:].tolist())
        text += piece
        cut = cut_at(text, how.stop_sequences)
        ended = cut is not None
        if not ended:
            tell(piece)
    text = text if not ended else text[: cut_at(text, how.stop_sequences)]
    return Sample(prompt=prompt, text=text, tokens=count, ended=ended)


# --- transformers models -------------------------------------------------------------------------


def generate(
    loaded: Ready,
    prompt: str,
    text: str,
    *,
    begin: Begin = lambda prompt, plain: None,
    tell: Tell = lambda piece: None,
) -> Sample:
    """What follows a text as the model is given it; `prompt`: the part of it that was asked."""
    import torch

    from expert.data.tokens.encoder import TextEncoder

    trained, how, plain = loaded.trained, loaded.decoding, loaded.plain
    encoder, template = trained.encoder, trained.template
    assert isinstance(encoder, TextEncoder)
    assert template is not None
    notes: list[str] = []
    speaker = Speaker(trained, notes.append)
    ids = encoder.encode([[Segment(text, learn=False)]]).ids.tolist()
    if not ids:
        raise CannotSample("--prompt: an empty text cannot be continued  (write a word)")
    room = _room_left(speaker, len(ids), trained.plan.model.name)
    fitting = replace(how, max_new_tokens=min(how.max_new_tokens, room))
    ends = end_tokens(encoder, template)
    stops = list(how.stop_sequences)
    if not plain and encoder.tokenizer.token_to_id(template.stop) is None:
        stops.append(template.stop)
    writer = AnswerWriter(encoder.tokenizer, ends, stops, tell, strip=not plain)
    begin(prompt, plain)
    with torch.inference_mode():
        steps = speaker.begin([[ids]], fitting.max_new_tokens)
        tokens = TokenChoice(fitting, {0: ids}, loaded.seed, speaker)
        while True:
            chosen = tokens.of(steps.scores)
            writer.take(int(chosen))
            if writer.ended or len(writer.ids) >= fitting.max_new_tokens:
                break
            tokens.took(chosen)
            steps.go_on(chosen)
    writer.end()
    if not writer.ended and room < how.max_new_tokens:
        notes.append(f"cut after {counted(room, 'token')}: the model's context is full")
    return Sample(
        prompt=prompt,
        text=writer.text(),
        tokens=len(writer.ids),
        ended=writer.ended,
        note="; ".join(notes),
    )


def _room_left(speaker: Speaker, prompt_tokens: int, model: str) -> int:
    """Tokens that an answer may have; positions beyond its context were never trained."""
    taken = prompt_tokens + speaker.lead
    if taken >= speaker.context:
        raise CannotSample(
            f"--prompt: has {taken:,} tokens with its template, and the context of "
            f"{model} is {speaker.context:,} with the answer  (shorten it, or train an expert of a "
            "model with a longer context)"
        )
    return speaker.context - taken


class NoTools(ExpertError):
    """A file that names no tools."""


def tools_in(file: Path) -> str:
    """The tools of a JSON file: a list of them, or a row that has a field `tools`."""
    how = "a JSON list of functions as OpenAI has them, or a file of rows with a column tools"
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise NoTools(f"--tools {file}: {why}  ({how})") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _first_line(text)
    given = value.get("tools") if isinstance(value, dict) else value
    try:
        found = tools_of(given, "tools")
    except UnfitRow as fault:
        raise NoTools(f"--tools {file}: {fault}  ({how})") from None
    if not found:
        raise NoTools(f"--tools {file}: there are no tools in it  ({how})")
    return found


def _first_line(text: str) -> object:
    try:
        return json.loads(text.lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return None


class Conversation:
    """A loaded expert asked again and again; a text that is continued has nothing before it."""

    def __init__(self, loaded: Ready, *, system: str = "") -> None:
        self._loaded, self._system = loaded, system
        self.anew()

    @property
    def remembers(self) -> bool:
        """Whether an answer depends on the turns before it."""
        return not self._loaded.plain and self._loaded.trained.template is not None

    def anew(self) -> None:
        """Start a new conversation."""
        self._turns = [Turn("system", self._system)] if self._system else []

    def ask(
        self,
        prompt: str,
        *,
        begin: Begin = lambda prompt, plain: None,
        tell: Tell = lambda piece: None,
    ) -> Sample:
        """The answer to a prompt after all turns so far; a failed one does not become a turn. The
        same seed gives the same text on the same machine."""
        loaded, template = self._loaded, self._loaded.trained.template
        if template is None:
            return _continue_characters(loaded, prompt, begin, tell)
        if loaded.plain:
            text = prompt_text(template, prompt, plain=True)
            return generate(loaded, prompt, text, begin=begin, tell=tell)
        asked = [*self._turns, Turn("user", prompt)]
        text = template.prompt(asked, loaded.tools)
        said = generate(loaded, prompt, text, begin=begin, tell=tell)
        self._turns = [*asked, Turn("assistant", said.text)]
        return said
