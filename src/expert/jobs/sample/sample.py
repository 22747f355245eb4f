"""The job behind `expert sample`: a trained expert answers, or continues a text."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.jobs.sample.answer_writer import Tell, Writer, cut_at

if TYPE_CHECKING:
    from expert.data.plain_text import FirstRow
    from expert.data.template.templates import Template
    from expert.jobs.sample.answer_steps import Speaker
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.load import Trained

CHARACTER_TEMPERATURE = 0.8
"""For the character model where nothing is asked for: the likeliest character alone soon repeats
itself."""


class CannotSample(ExpertError):
    """A prompt or a way of decoding that this model has no use for."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are chosen."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    stop_sequences: tuple[str, ...]


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
    decoding: Decoding
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A trained expert that is loaded, and how it answers."""

    run: Path
    trained: Trained
    plain: bool
    seed: int
    decoding: Decoding
    notes: tuple[str, ...]
    tools: str = ""
    """As JSON, those that the model is offered with every prompt."""


def sample(
    run: Path | None,
    prompts: Sequence[str],
    *,
    system: str = "",
    begin: Callable[[str, bool], None] = lambda prompt, plain: None,
    tell: Tell = lambda piece: None,
    **how: Any,
) -> Samples:
    """Answer every prompt with what a run has learnt.

    `how`: what `ready` takes. `begin` and `tell` follow the work.
    """
    loaded = ready(run, prompts, system=system, **how)
    done = []
    for prompt in prompts:
        work = Work(seed=loaded.seed, plain=loaded.plain, begin=begin, tell=tell)
        asked = {"system": system, "tools": loaded.tools}
        done.append(answer(loaded.trained, prompt, loaded.decoding, work, **asked))
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
    """What a run has learnt, loaded to answer; what cannot be answered is told before that.

    `decoding` holds what differs from the manifest's; `plain` continues prompts as they stand, None
    decides by the data. `tools` is a file that names them; None: those of the first row learnt.
    """
    from expert.data.plain_text import FirstRow, trained_on_text
    from expert.run.stored.choose_checkpoint import choose
    from expert.run.stored.load import base_remark, load_trained, pick_device, read_plan
    from expert.run.stored.locate import find_trained

    folder = find_trained(run)
    plan = read_plan(folder)
    how, notes = settle_decoding(plan, decoding or {})
    first = FirstRow(plan)
    continues = trained_on_text(plan, first) if plain is None else plain
    if system and continues:
        raise CannotSample(
            "--system: a text that is continued has no system turn  (put it into the prompt)"
        )
    if not continues and any(not prompt.strip() for prompt in prompts):
        raise CannotSample("--prompt: is empty: there is nothing to answer  (write a question)")
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
    """The tools of a prompt, and what is to be said of them: a run that has learnt calls expects
    some."""
    from expert.data.examples.tools import tool_names
    from expert.jobs.sample.offered_tools import tools_in

    if continues and file is not None:
        raise CannotSample("--tools: a text that is continued calls nothing  (leave it out)")
    if continues or file is not None:
        return (tools_in(file) if file is not None else ""), []
    if not first.tools:
        return "", []
    names = ", ".join(tool_names((), first.tools))
    return first.tools, [
        f"asked with the tools of the first row: {names}  (--tools FILE for others)"
    ]


def settle_decoding(plan: RunPlan, asked: Mapping[str, Any]) -> tuple[Decoding, list[str]]:
    """The manifest's decoding with what was asked for laid over it, and what is to be said."""
    from expert.manifest.schema.dataset import Decoding as Defaults
    from expert.manifest.schema.manifest import CHAR_GPT

    given = {key: value for key, value in asked.items() if value is not None}
    base = {**Defaults().model_dump(), **plan.decoding}
    merged = {key: given.get(key, base[key]) for key in Decoding.__annotations__}
    merged["stop_sequences"] = tuple(merged["stop_sequences"])
    how = Decoding(**merged)
    if plan.model.name != CHAR_GPT:
        return how, []
    notes = []
    if "temperature" not in given and how.temperature == Defaults().temperature:
        how = replace(how, temperature=CHARACTER_TEMPERATURE)
        notes.append(
            f"temperature {CHARACTER_TEMPERATURE}: with 0 the text would soon repeat itself"
        )
    for key, neutral in (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if getattr(how, key) == neutral:
            continue
        if key in given:
            flag = "--" + key.replace("_", "-")
            raise CannotSample(
                f"{flag}: the character model knows temperature and top-k only  (use --top-k)"
            )
        notes.append(f"{key} of the manifest is not used: the character model knows top_k only")
        how = replace(how, **cast(Any, {key: neutral}))
    return how, notes


@dataclass(frozen=True, kw_only=True)
class Work:
    """How one prompt is worked on, and who follows it."""

    seed: int
    plain: bool
    begin: Callable[[str, bool], None]
    """Told the prompt when it was understood, right before the first token."""
    tell: Tell


def answer(
    trained: Trained,
    prompt: str,
    how: Decoding,
    work: Work,
    *,
    system: str = "",
    tools: str = "",
) -> Sample:
    """One prompt answered; the same seed gives the same text on the same machine."""
    if trained.template is None:
        return _continue_characters(trained, prompt, how, work)
    text = prompt_text(trained.template, prompt, system=system, plain=work.plain, tools=tools)
    return generate(trained, prompt, text, how, work)


def prompt_text(
    template: Template, prompt: str, *, system: str = "", plain: bool = False, tools: str = ""
) -> str:
    """What the model is given: a conversation that ends where the answer begins, or plain text."""
    from expert.data.records import Example, Segment, Turn

    if not plain:
        turns = [Turn("system", system)] if system else []
        return template.prompt([*turns, Turn("user", prompt)], tools)
    segments: list[Segment] = template.segments(Example(text=prompt))
    whole = "".join(segment.text for segment in segments)
    return whole[: whole.rindex(prompt) + len(prompt)]  # without the end that training adds


# --- characters ----------------------------------------------------------------------------------


def _continue_characters(trained: Trained, prompt: str, how: Decoding, work: Work) -> Sample:
    import torch

    from expert.data.records import Segment
    from expert.data.tokens.encoder import CharacterEncoder
    from expert.model.chargpt import CharGpt

    encoder, module = trained.encoder, trained.loaded.module
    assert isinstance(encoder, CharacterEncoder)
    assert isinstance(module, CharGpt)
    # A text begins after the end of another one, which in most corpora is a line's.
    start = prompt or ("\n" if "\n" in encoder.characters else encoder.characters[0])
    ids = encoder.encode([[Segment(start, learn=False)]]).ids.tolist()
    tokens = torch.tensor([ids], device=trained.device)
    generator = torch.Generator(trained.device).manual_seed(work.seed)
    work.begin(prompt, work.plain)
    text, ended, count = "", False, 0
    while count < how.max_new_tokens and not ended:
        tokens = module.generate(tokens, 1, how.temperature, how.top_k, generator)
        count += 1
        piece = encoder.decode(tokens[0, -1:].tolist())
        text += piece
        cut = cut_at(text, how.stop_sequences)
        ended = cut is not None
        if not ended:
            work.tell(piece)
    text = text if not ended else text[: cut_at(text, how.stop_sequences)]
    return Sample(prompt=prompt, text=text, tokens=count, ended=ended)


# --- transformers models -------------------------------------------------------------------------


def generate(trained: Trained, prompt: str, text: str, how: Decoding, work: Work) -> Sample:
    """What follows a text as the model is given it; `prompt`: what of it somebody asked."""
    import torch

    from expert.data.records import Segment
    from expert.data.tokens.encoder import TextEncoder
    from expert.jobs.sample.answer_steps import Speaker

    encoder, template = trained.encoder, trained.template
    assert isinstance(encoder, TextEncoder)
    assert template is not None
    notes: list[str] = []
    speaker = Speaker(trained, notes.append)
    ids = encoder.encode([[Segment(text, learn=False)]]).ids.tolist()
    if not ids:
        raise CannotSample("--prompt: an empty text has nothing to be continued  (write a word)")
    room = _room_left(speaker, len(ids), trained.plan.model.name)
    fitting = replace(how, max_new_tokens=min(how.max_new_tokens, room))
    ends = end_tokens(encoder, template)
    stops = list(how.stop_sequences)
    if not work.plain and encoder.tokenizer.token_to_id(template.stop) is None:
        stops.append(template.stop)
    writer = Writer(encoder.tokenizer, ends, stops, work.tell, strip=not work.plain)
    work.begin(prompt, work.plain)
    with torch.inference_mode():
        _say(speaker, ids, fitting, work.seed, writer)
    if not writer.ended and room < how.max_new_tokens:
        notes.append(f"cut after {counted(room, 'token')}: there the model's context is full")
    return Sample(
        prompt=prompt,
        text=writer.text(),
        tokens=len(writer.ids),
        ended=writer.ended,
        note="; ".join(notes),
    )


def _say(speaker: Speaker, ids: list[int], how: Decoding, seed: int, writer: Writer) -> None:
    """Token by token until the answer has ended, or is as long as it may be."""
    from expert.jobs.sample.token_choice import Tokens

    steps = speaker.begin([[ids]], how.max_new_tokens)
    tokens = Tokens(how, {0: ids}, seed, speaker)
    while True:
        chosen = tokens.of(steps.scores)
        writer.take(int(chosen))
        if writer.ended or len(writer.ids) >= how.max_new_tokens:
            break
        tokens.took(chosen)
        steps.go_on(chosen)
    writer.end()


def _room_left(speaker: Speaker, prompt_tokens: int, model: str) -> int:
    """Tokens that an answer may have; what a model has not learnt to look back to is no context."""
    taken = prompt_tokens + speaker.lead
    if taken >= speaker.context:
        raise CannotSample(
            f"--prompt: has {taken:,} tokens as the model is given it, and the context of "
            f"{model} is {speaker.context:,} with the answer  (shorten it, or train an expert of a "
            "model with a longer context)"
        )
    return speaker.context - taken


def generation_config(how: Decoding, ends: Sequence[int]) -> Any:
    """The settings of transformers' generate; at temperature 0 the likeliest token is taken."""
    transformers: Any = importlib.import_module("transformers")
    options: dict[str, Any] = {"do_sample": False}
    if how.temperature > 0:
        options = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p}
        # Zero turns it off; left out, transformers would take the 50 likeliest.
        options |= {"top_k": how.top_k or 0, "min_p": how.min_p or None}
    return transformers.GenerationConfig(
        **options,
        max_new_tokens=how.max_new_tokens,
        repetition_penalty=how.repetition_penalty,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
    )


def end_tokens(encoder: Any, template: Template) -> list[int]:
    """The tokens that end an answer: the template's, and the tokenizer's own."""
    found = (encoder.tokenizer.token_to_id(text) for text in (template.stop, encoder.special.eos))
    return list(dict.fromkeys(token for token in found if token is not None))
