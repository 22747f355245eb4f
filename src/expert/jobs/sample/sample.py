"""`expert sample`: a trained expert answers prompts or continues a text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expert.answer.decoding import DecodingSettings, resolve_decoding
from expert.answer.writer import AnswerWriter, Tell
from expert.core.errors import ExpertError
from expert.data.examples.tools import tool_names
from expert.data.records import Example, Segment, Turn
from expert.data.template.templates import Template
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import Trained, base_warning, load_trained, pick_device, read_plan
from expert.run.stored.locate import find_trained

Begin = Callable[[str, bool], None]
"""Called before the first token with the prompt and whether it is continued as plain text."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The answer to one prompt."""

    prompt: str
    text: str
    tokens: int
    ended: bool
    """It is complete; otherwise it was cut at max_new_tokens."""
    note: str = ""
    """A remark for the user."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All answers, and what is needed to reproduce them."""

    run: Path
    checkpoint: str
    plain: bool
    """The prompts were continued as they are, without a template."""
    seed: int
    decoding: DecodingSettings
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class LoadedExpert:
    """A loaded expert, and how it answers."""

    run: Path
    trained: Trained
    plain: bool
    seed: int
    decoding: DecodingSettings
    notes: tuple[str, ...]
    tools: str = ""
    """As JSON: the tools offered with every prompt."""


def sample(
    run: Path | None,
    prompts: Sequence[str],
    *,
    system: str = "",
    begin: Begin = lambda prompt, plain: None,
    tell: Tell = lambda piece: None,
    **how: Any,
) -> Samples:
    """Answer every prompt with a trained run.

    `how`: arguments of `ready`. `begin` and `tell` report progress.
    """
    loaded = load_expert(run, prompts, system=system, **how)
    samples = [
        Conversation(loaded, system=system).ask(prompt, begin=begin, tell=tell)
        for prompt in prompts
    ]
    return Samples(
        run=loaded.run,
        checkpoint=loaded.trained.choice.name,
        plain=loaded.plain,
        seed=loaded.seed,
        decoding=loaded.decoding,
        notes=(*dict.fromkeys(answer.note for answer in samples if answer.note), *loaded.notes),
        samples=tuple(samples),
    )


def load_expert(
    run: Path | None,
    prompts: Sequence[str] = (),
    *,
    system: str = "",
    plain: bool | None = None,
    checkpoint: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    decoding: Mapping[str, Any] | None = None,
    loading: Callable[[str], None] = lambda what: None,
) -> LoadedExpert:
    """Load a trained run; what it cannot answer is refused before loading.

    `decoding`: overrides of the manifest's; `plain`: continue prompts as they are, None: decide by
    the data. A run trained on calls is offered the tools of its first row.
    """
    from expert.data.plain_text import FirstRow, trained_on_text

    folder = find_trained(run, "validated")
    plan = read_plan(folder)
    how, notes = resolve_decoding(plan, decoding or {})
    first = FirstRow(plan)
    continues = trained_on_text(plan, first) if plain is None else plain
    if system and continues:
        raise ExpertError("--system: continued text has no system turn  (put it into the prompt)")
    if not continues and any(not prompt.strip() for prompt in prompts):
        raise ExpertError("--prompt: is empty  (write a question)")
    offered = "" if continues else first.tools  # a run trained on calls expects some
    if offered:
        names = ", ".join(tool_names((), offered))
        more = "expert serve takes others with each request"
        notes = [*notes, f"asked with the tools of the first row: {names}  ({more})"]
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    remark = base_warning(folder, plan)
    loading(f"loading {plan.model.name} and {choice.name} of {folder.path}")
    return LoadedExpert(
        run=folder.path,
        trained=load_trained(folder, plan, choice, device=pick_device(device)),
        plain=continues,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        decoding=how,
        notes=(*notes, *([remark] if remark else [])),
        tools=offered,
    )


def prompt_text(template: Template, prompt: str, *, plain: bool = False, tools: str = "") -> str:
    """The model's input: a question up to where the answer starts, or plain text."""
    if not plain:
        return template.prompt([Turn("user", prompt)], tools)
    segments: list[Segment] = template.segments(Example(text=prompt))
    whole = "".join(segment.text for segment in segments)
    return whole[: whole.rindex(prompt) + len(prompt)]  # without the end token of training


class Conversation:
    """Several prompts to a loaded expert; continued texts do not depend on earlier ones."""

    def __init__(self, loaded: LoadedExpert, *, system: str = "") -> None:
        self._loaded, self._system = loaded, system
        self.keeps_history = not loaded.plain and loaded.trained.template is not None
        """Whether an answer depends on earlier turns."""
        self.reset()

    def reset(self) -> None:
        self._turns = [Turn("system", self._system)] if self._system else []

    def ask(
        self,
        prompt: str,
        *,
        begin: Begin = lambda prompt, plain: None,
        tell: Tell = lambda piece: None,
    ) -> Sample:
        """The answer to a prompt after all turns so far; a failed prompt is not added. The same
        seed gives the same text on the same machine."""
        loaded, template = self._loaded, self._loaded.trained.template
        if template is None:
            return _continue_characters(loaded, prompt, begin, tell)
        from expert.answer.engine import PromptTooLong, answer_row, finish_rows
        from expert.answer.scheduler import Scheduler
        from expert.answer.steps import AnswerModel

        turns, notes = [*self._turns, Turn("user", prompt)], list[str]()
        if loaded.plain:
            text = prompt_text(template, prompt, plain=True)
        else:
            text = template.prompt(turns, loaded.tools)
        answer_model = AnswerModel(loaded.trained, notes.append)
        how = replace(loaded.decoding, grammar="") if loaded.tools else loaded.decoding
        try:
            row = answer_row(
                answer_model, text, how, seed=loaded.seed, plain=loaded.plain, tell=tell
            )
        except PromptTooLong as error:
            raise ExpertError(f"--prompt: {error}") from None
        begin(prompt, loaded.plain)
        finish_rows(Scheduler(answer_model, alone=True), [row])
        answer = row.answer()
        if self.keeps_history:
            self._turns = [*turns, Turn("assistant", answer.text)]
        note = "; ".join(filter(None, [*notes, answer.note]))
        return Sample(
            prompt=prompt, text=answer.text, tokens=answer.tokens, ended=answer.ended, note=note
        )


def _continue_characters(loaded: LoadedExpert, prompt: str, begin: Begin, tell: Tell) -> Sample:
    """The character model continues a text; it has no KV cache and no template."""
    import torch

    trained, how = loaded.trained, loaded.decoding
    encoder: Any = trained.encoder
    module: Any = trained.loaded.module
    # A text starts after the end of another, which in most corpora is a line break.
    start = prompt or ("\n" if "\n" in encoder.characters else encoder.characters[0])
    ids = encoder.encode([[Segment(start, learn=False)]]).ids.tolist()
    tokens = torch.tensor([ids], device=trained.device)
    generator = torch.Generator(trained.device).manual_seed(loaded.seed)
    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: encoder.decode(ids))
    writer = AnswerWriter(decoder, [], how.stop_sequences, tell, strip=False)
    begin(prompt, loaded.plain)
    while not writer.ended and len(writer.ids) < how.max_new_tokens:
        tokens = module.generate(tokens, 1, how.temperature, how.top_k, generator)
        writer.take(int(tokens[0, -1]))
    writer.end()
    return Sample(prompt=prompt, text=writer.text(), tokens=len(writer.ids), ended=writer.ended)
