"""How tokens are chosen: the manifest's decoding with the user's overrides."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import ValidationError

from expert.answer.grammar import missing_package
from expert.core.errors import ExpertError
from expert.data.template.templates import Template
from expert.manifest.schema.dataset import Decoding as Defaults
from expert.manifest.schema.expectations import expected, schema_at
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.run_plan import RunPlan

CHARACTER_TEMPERATURE = 0.8
"""Default for the character model: always taking the most likely character soon repeats itself."""


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    stop_sequences: tuple[str, ...]
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: str = ""
    """That answers keep to: a JSON Schema or a Lark grammar; "": none."""


def resolve_decoding(
    plan: RunPlan, overrides: Mapping[str, Any]
) -> tuple[DecodingSettings, list[str]]:
    """The manifest's decoding with overrides, and notes for the user."""
    given = {key: value for key, value in overrides.items() if value is not None}
    _refuse_wrong(given)
    merged = {**Defaults().model_dump(), **plan.decoding, **given}
    merged = {key: merged[key] for key in DecodingSettings.__annotations__ if key in merged}
    merged["stop_sequences"] = tuple(merged["stop_sequences"])
    how, notes = DecodingSettings(**merged), list[str]()
    missing = missing_package()
    if how.grammar and (missing or plan.model.name == CHAR_GPT):
        notes.append(f"answers keep to no grammar: {missing or 'the character model has none'}")
        how = replace(how, grammar="")
    if plan.model.name != CHAR_GPT:
        return how, notes
    if "temperature" not in given and how.temperature == Defaults().temperature:
        how = replace(how, temperature=CHARACTER_TEMPERATURE)
        notes.append(f"temperature {CHARACTER_TEMPERATURE}: at 0 the text soon repeats itself")
    for key, neutral in (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if getattr(how, key) == neutral:
            continue
        if key in given:
            flag = "--" + key.replace("_", "-")
            raise ExpertError(
                f"{flag}: the character model supports only temperature and top-k  (use --top-k)"
            )
        notes.append(f"{key} of the manifest is ignored: the character model supports only top_k")
        how = replace(how, **cast(Any, {key: neutral}))
    return how, notes


def _refuse_wrong(given: Mapping[str, Any]) -> None:
    """Raise all overrides that are unknown or out of range: the command line checks its own."""
    problems = []
    known = DecodingSettings.__annotations__
    for key in (key for key in given if key not in known):
        problems.append(f"decoding.{key}: is not known  (there are {', '.join(known)})")
    try:
        settings = DecodingSettings.__annotations__.keys() & Defaults.model_fields.keys()
        Defaults.model_validate({key: value for key, value in given.items() if key in settings})
    except ValidationError as error:
        for wrong in dict.fromkeys(str(fault["loc"][0]) for fault in error.errors()):
            node = schema_at(("training", "decoding", wrong)) or {}
            problems.append(f"decoding.{wrong}: got {given[wrong]!r}, expected {expected(node)}")
    if problems:
        raise ExpertError("\n".join(problems))


def generation_config(how: DecodingSettings, ends: Sequence[int]) -> Any:
    """Settings for transformers' generate; greedy at temperature 0."""
    transformers: Any = importlib.import_module("transformers")
    options: dict[str, Any] = {"do_sample": False}
    if how.temperature > 0:
        options = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p}
        # Zero turns it off; by default transformers would use 50.
        options |= {"top_k": how.top_k or 0, "min_p": how.min_p or None}
    return transformers.GenerationConfig(
        **options,
        max_new_tokens=how.max_new_tokens,
        repetition_penalty=how.repetition_penalty,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
    )


def stop_texts(
    how: DecodingSettings, encoder: Any, template: Template, *, plain: bool = False
) -> list[str]:
    """Texts that end an answer, besides its end tokens: the template's, if it is not a token."""
    is_token = encoder.tokenizer.token_to_id(template.stop) is not None
    return [*how.stop_sequences, *([] if plain or is_token else [template.stop])]


def end_tokens(encoder: Any, template: Template) -> list[int]:
    """The tokens that end an answer: the template's and the tokenizer's."""
    tokens = (encoder.tokenizer.token_to_id(text) for text in (template.stop, encoder.special.eos))
    return list(dict.fromkeys(token for token in tokens if token is not None))
