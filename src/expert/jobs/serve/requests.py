"""OpenAI's requests: every field is supported, ignored as harmless, or refused with the reason.

Unknown fields are refused, so that nothing a client asks for is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from expert.answer.decoding import DecodingSettings
from expert.core.text import visible
from expert.data.examples.messages import conversation, turns_in, unused_fields
from expert.data.examples.tools import tools_of
from expert.data.records import RowError, Turn
from expert.data.template.templates import Template
from expert.jobs.sample.sample import prompt_text
from expert.jobs.serve.body import RequestError

MAX_ANSWER_TOKENS = 2**17
MAX_ANSWERS = 16
MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_PROMPTS = 64
MAX_SCHEMA_CHARACTERS = 2**16
"""llguidance takes 20 s for a schema of half a megabyte."""
IGNORED = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("service_tier", "prediction"),
)
"""Fields that do not affect answers: labels, and hints for OpenAI's service."""
_TEXT_ONLY = "answers are plain text"
ACCEPTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), "biases of tokens are not supported"),
    "response_format": (({"type": "text"},), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "tool_choice": (("auto", "none"), "the model itself decides whether it calls a tool"),
    "parallel_tool_calls": ((True,), "an answer may hold several calls"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tools"),
    "reasoning_effort": (("none",), "it cannot be set"),
    "store": ((False,), "nothing is stored"),
    "best_of": ((1,), "use n"),
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "text is continued, not filled in"),
}
"""Fields with the only accepted values, and why."""


Request = TypeVar("Request", bound="_Common")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class _NamedSchema(_Strict):
    name: str = Field("", max_length=200)
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")

    @field_validator("schema_")
    @classmethod
    def _short(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
            raise ValueError(f"has more than {MAX_SCHEMA_CHARACTERS:,} characters")
        return schema


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @property
    def grammar(self) -> str:
        """As a JSON Schema; "" for a text."""
        if self.type == "json_object":
            return '{"type": "object"}'
        return json.dumps(self.json_schema.schema_) if self.json_schema is not None else ""

    @model_validator(mode="after")
    def _has_schema(self) -> _ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type json_schema, and only there")
        return self


class _Common(_Strict):
    """What can be asked of both addresses."""

    model: str = Field(max_length=200)
    max_tokens: int | None = Field(None, ge=1, le=MAX_ANSWER_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"up to {MAX_STOPS} texts, none of them empty")
        return stops

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def settings(self, defaults: DecodingSettings) -> DecodingSettings:
        """How its tokens are chosen: as the manifest says, but for what is asked for."""
        given = self.model_dump(include=set(DecodingSettings.__annotations__), exclude_none=True)
        longest = getattr(self, "max_completion_tokens", None) or self.max_tokens
        if longest is not None:
            given["max_new_tokens"] = longest
        if (form := getattr(self, "response_format", None)) is not None:
            given["grammar"] = form.grammar
        return replace(defaults, **given)


class ChatRequest(_Common):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_ANSWER_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: _ResponseFormat | None = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are reported beside each; None: no probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def answers(self) -> int:
        return self.n

    @property
    def may_be_voted_on(self) -> bool:
        """Whether one answer is asked for that is text and need not be the likeliest."""
        plain = self.n == 1 and not self.offers_tools and not self.logprobs
        return plain and self.temperature != 0

    def turns(self) -> tuple[Turn, ...]:
        """The conversation; RowError if it is invalid."""
        return _turns(self.messages)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, most: int | None, info: ValidationInfo) -> int | None:
        if most and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return most

    @field_validator("response_format")
    @classmethod
    def _without_tools(
        cls, form: _ResponseFormat | None, info: ValidationInfo
    ) -> _ResponseFormat | None:
        calls = bool(info.data.get("tools")) and info.data.get("tool_choice") == "auto"
        if calls and form is not None and form.grammar:
            raise ValueError("with tools an answer may be a call: leave one of the two out")
        return form

    def texts(self, template: Template) -> list[str]:
        """The input of the model; RequestError if the messages or tools are invalid."""
        param = "messages"
        try:
            turns = self.turns()
            param = "tools"
            tools = tools_of(self.tools, "tools") if self.offers_tools else ""
        except RowError as fault:
            raise RequestError(400, str(fault), param=param) from None
        return [template.prompt(turns, tools)]


class TextRequest(_Common):
    """Of /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    offers_tools: ClassVar[bool] = False

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def answers(self) -> int:
        return self.n * (1 if isinstance(self.prompt, str) else len(self.prompt))

    def texts(self, template: Template) -> list[str]:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt_text(template, prompt, plain=True) for prompt in prompts]


def checked(kind: type[Request], body: Mapping[str, Any]) -> Request:
    """The request of a body; RequestError with all problems."""
    fields = {k: v for k, v in body.items() if v is not None and k not in IGNORED}
    problems: list[tuple[str, str]] = []
    for name, (allowed, why) in ACCEPTED_VALUES.items():
        if name in kind.model_fields and name != "tool_choice":
            continue
        if name in fields and fields[name] not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            only = f"only {values} is supported" if values else "is not supported"
            problems.append((name, f"{only}: {why}"))
            del fields[name]
        elif name in fields and name not in kind.model_fields:
            del fields[name]
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False):
            # Of a union, the place has the names of types too.
            where = ".".join(map(str, fault["loc"][: 1 if fault["loc"][0] == "prompt" else None]))
            unknown = fault["type"] == "extra_forbidden"
            said = fault["msg"].removeprefix("Value error, ")
            problems.append((where, "unknown field" if unknown else said))
    if problems:
        text = "; ".join(f"{visible(name, keep='')[:100]}: {what}" for name, what in problems[:10])
        raise RequestError(400, text, param=visible(problems[0][0], keep="")[:100])
    return request


def _turns(messages: list[dict[str, Any]]) -> tuple[Turn, ...]:
    """The turns of a conversation, which must end with a user or tool message."""
    for number, message in enumerate(messages, 1):
        unknown = [name for name in unused_fields([message]) if message[name]]
        if unknown:
            field = visible(unknown[0], keep="")[:100]
            raise RowError(f"messages[{number}]: unknown field {field!r}")
    turns = turns_in(messages, "messages")
    if turns[-1].role not in ("user", "tool"):
        raise RowError("the last message must have the role user or tool")
    # Checked like a training row, with a placeholder for the answer.
    return conversation([*turns, Turn("assistant", "…")]).turns[:-1]
