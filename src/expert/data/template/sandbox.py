"""Runs a tokenizer's chat template in jinja's sandbox.

A template is a program that comes with a model. The sandbox keeps it from Python's internals and
from changing its inputs, but limits neither time nor memory. So a template is first compiled and
tried in a child process with limits, and the processes that prepare rows have the same limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expert.data.processes import (
    MEMORY_BYTES,
    RENDERING_SECONDS,
    LimitReached,
    deadline,
    try_in_child,
)
from expert.data.records import DataError
from expert.data.template.templates import TemplateError

WRITTEN_DATE = datetime(2024, 7, 26)
"""The date a template may write: constant, so that data prepared yesterday is found today. Llama
3's template uses the same one by default."""
CHATML_FIX = "  (set base_models[0].prompt_template: chatml)"
TEMPLATE = "the tokenizer's chat template"
_STOPPED = (
    f"{TEMPLATE} was stopped: it takes more memory or time than a conversation "
    f"needs (more than {RENDERING_SECONDS:g} s, or {MEMORY_BYTES // 2**30} GiB){CHATML_FIX}"
)


class _Refusal(jinja2.TemplateError):
    """The template itself refuses a conversation."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks answers for other trainers; here its content is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
    """As in transformers: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class SandboxedTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.filters["safe"] = lambda value: value  # nothing is ever escaped
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = WRITTEN_DATE.strftime
        try:
            with deadline():  # constants are evaluated here
                self._template = environment.from_string(source)
        except (LimitReached, MemoryError):
            raise DataError(_STOPPED) from None
        except Exception as error:  # noqa: BLE001 - whatever a foreign program does to the compiler
            why = _words(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                why = f"line {error.lineno}: {error.message}"
            raise DataError(f"{TEMPLATE} cannot be read: {why}{CHATML_FIX}") from None

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The text of a conversation; TemplateError if the template cannot write it, DataError if
        the template must not be run."""
        try:
            with deadline():
                return self._template.render(messages=messages, **variables)
        except (LimitReached, MemoryError):
            raise DataError(_STOPPED) from None
        except SecurityError as error:
            raise DataError(f"{TEMPLATE} is not safe to run: {error}{CHATML_FIX}") from None
        except _Refusal as error:
            raise TemplateError(f"{TEMPLATE} refuses this conversation: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever a foreign program may raise
            what = f"fails on this conversation: {_words(error)}"
            raise TemplateError(f"{TEMPLATE} {what}") from None


def refuse_costly(use: Callable[[], object]) -> None:
    """Raise DataError if `use`, which compiles a template and renders a little with it, takes too
    much memory or time; tried in a child process. Its other errors are left to the caller."""

    def attempt() -> str:
        try:
            use()
        except DataError as error:
            return str(error) if str(error) == _STOPPED else ""
        return ""

    if try_in_child(attempt) != "":
        raise DataError(_STOPPED)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
