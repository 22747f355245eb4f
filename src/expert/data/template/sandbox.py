"""Where a tokenizer's chat template runs: jinja's sandbox, with a limit on what it may spend.

A template is a program that comes with a model. It sees what transformers shows it, may not reach
Python's internals nor change what it is given, and every loop, call, concatenation and list it
makes is charged to one allowance of characters and to one clock. What would grow in a single step
(`"a" * 10**10`, `replace`, `join`, …) is charged before it is done. Methods and filters are those a
chat template has a use for; the others are refused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from expert.data.records import DataError
from expert.data.template.templates import TemplateError

SECONDS = 2.0
SOURCE_CHARACTERS = 64 * 1024  # Qwen3's has 4,116; compiling the densest 64 Ki takes about 1 s
# Per rendering: characters of everything made on the way, and of any one text or list.
ALLOWANCE, ALLOWANCE_PER_CHARACTER = 64 * 2**20, 64
LARGEST, LARGEST_PER_CHARACTER = 2**20, 8
STEP = 64  # charged for one turn of a loop, one call or one member of a list
INTEGER_BITS = 4096
INDENT_CHARACTERS = 64

OTHERWISE = "  (set base_models[0].prompt_template: chatml)"

# Methods of texts and numbers whose result can be of any length, and the way to bytes.
# fmt: off
_REFUSED_METHODS = frozenset({
    "center", "encode", "expandtabs", "format", "format_map", "from_bytes", "ljust", "maketrans",
    "rjust", "to_bytes", "translate", "zfill",
})
_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
    "wordcount",
)
# fmt: on
_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - _REFUSED_METHODS
_DICT_ATTRIBUTES = frozenset(dir(dict))
_CONTAINERS = frozenset({list, tuple, dict})


class LimitReached(Exception):
    """The template spends more than a chat template can need."""


class Refusal(jinja2.TemplateError):
    """The template itself says that it cannot write a conversation."""


class Meter:
    """What one rendering has left of its allowance and its time."""

    def __init__(self) -> None:
        self.left = self.largest = 0
        self.deadline = 0.0

    def start(self, given_characters: int) -> None:
        self.left = ALLOWANCE + ALLOWANCE_PER_CHARACTER * given_characters
        self.largest = LARGEST + LARGEST_PER_CHARACTER * given_characters
        self.deadline = time.monotonic() + SECONDS

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0 or size > self.largest:
            raise LimitReached("it makes far more text than it is given")
        if time.monotonic() > self.deadline:
            raise LimitReached(f"it runs for more than {SECONDS:g} s")

    def spend_on(self, value: Any) -> None:
        """Charge a value that was made: a text by its length, a list with all that is in it."""
        if type(value) is str:
            self.spend(len(value))
        elif type(value) in _CONTAINERS:
            self.spend(self.size(value))

    def size(self, value: Any) -> int:
        size = 0
        left = [value]
        while left and size <= self.largest:
            one = left.pop()
            size += STEP
            if isinstance(one, str):
                size += str.__len__(one)  # its own, whatever a stand-in makes of len
            elif isinstance(one, dict):
                left += one.keys()
                left += one.values()
            elif type(one) in _CONTAINERS:
                size += STEP * len(one)
                left += one
        return size


class ShownNamespace(Namespace):
    """A namespace whose printed form does not show what is in it."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationBlock(Extension):
    """`{% generation %}` marks answers for other trainers; here its content is simply written."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Charges(NodeTransformer):
    """Puts a charge on every loop, list, slice and `~` of a template."""

    def charged(self, node: Any, by: str, *arguments: int) -> nodes.Filter:
        args = [nodes.Const(argument) for argument in arguments]
        return nodes.Filter(node, by, args, [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        literal = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = self.charged(node.iter, "_loop", STEP + literal)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self.charged(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _visit_made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self.charged(node, "_made")

    visit_List = visit_Dict = _visit_made

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self.charged(node, "_made") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self.charged(node, "_made") if isinstance(node.arg, nodes.Slice) else node


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _replace(meter: Meter, text: str, old: str, new: str, /, count: int = -1) -> str:
    meter.spend(len(text) + len(new) * text.count(old))
    return text.replace(old, new, count)


def _join(meter: Meter, text: str, parts: Iterable[Any], /) -> str:
    texts = list(parts)
    meter.spend(sum(map(len, texts)) + len(text) * len(texts))
    return text.join(texts)


_GROWING: dict[str, Callable[..., str]] = {"replace": _replace, "join": _join}
_JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})  # handed to every call inside a loop


def _charge_operation(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Refuse `*`, `**` and `%` whose result would be too large, before it is made."""
    meter.spend(STEP)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
        if bits + right.bit_length() > INTEGER_BITS:
            raise LimitReached("it computes with enormous numbers")
    elif operator == "%" and isinstance(left, str):
        raise SecurityError("'%' is for numbers here; texts are joined with '~'")
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(times, int) and times > 0:
                meter.spend(times * meter.size(one))


def _charging_filters(meter: Meter) -> dict[str, Callable[..., Any]]:
    """What `Charges` puts around loops, joined texts and things that are made."""

    @jinja2.pass_context  # keeps jinja from working it out when the template is compiled
    def loop(context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
        for value in values:
            meter.spend(cost)
            yield value

    @jinja2.pass_context
    def concat(context: Context, values: list[Any]) -> str:
        return _join(meter, "", map(str, values))

    @jinja2.pass_context
    def made(context: Context, value: Any) -> Any:
        meter.spend_on(value)
        return value

    return {"_loop": loop, "_concat": concat, "_made": made}


def _text_filters(meter: Meter) -> dict[str, Callable[..., Any]]:
    """Filters that are charged, or that differ from jinja's as they do in transformers."""

    def replace(value: Any, old: str, new: str, count: int | None = None) -> str:
        return _replace(meter, str(value), str(old), str(new), -1 if count is None else count)

    @jinja2.pass_environment
    def join(
        environment: jinja2.Environment,
        values: Iterable[Any],
        d: str = "",
        attribute: str | int | None = None,
    ) -> str:
        if attribute is not None:
            values = map(make_attrgetter(environment, attribute), values)
        return _join(meter, str(d), map(str, values))

    def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        space = width if isinstance(width, str) else " " * min(width, INDENT_CHARACTERS + 1)
        if len(space) > INDENT_CHARACTERS:
            raise LimitReached("it indents by more than a line")
        lines = str(value).splitlines() or [""]
        meter.spend(sum(map(len, lines)) + len(space) * len(lines))
        return "\n".join(
            space + line if (number or first) and (line or blank) else line
            for number, line in enumerate(lines)
        )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        meter.spend_on(value)
        if indent is not None and not 0 <= indent <= INDENT_CHARACTERS:
            raise LimitReached("it indents by more than a line")
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        meter.spend(len(text))
        return text

    return {
        "replace": replace,
        "join": join,
        "indent": indent,
        "tojson": tojson,
        "safe": lambda value: value,  # nothing is ever escaped
    }


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, with a meter on it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    charges = Charges

    def __init__(self, *, now: datetime) -> None:
        self.meter = Meter()
        self.source_characters = STEP
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=self._written,
        )
        self.globals = {
            name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")
        } | {
            "namespace": ShownNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": now.strftime,
        }
        kept: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _FILTERS}
        self.filters = kept | _charging_filters(self.meter) | _text_filters(self.meter)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self.source_characters = STEP + len(source)
        tree = super()._parse(source, name, filename)
        charged: nodes.Template = self.charges().visit(tree)
        charged.set_environment(self)
        return charged

    def _written(self, value: Any) -> Any:
        self.meter.spend_on(value)
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, but without asking where the answer is known: a third of the time
        of a rendering goes into `message.content` and the like."""
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, type) or (isinstance(obj, str | int) and attr in _REFUSED_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"{attribute!r} of {type(obj).__name__!r} is out of its reach")

    def wrap_str_format(self, value: Any) -> None:
        """`format` stays what it is, and is_safe_attribute refuses it."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = self.meter
        meter.spend(self.source_characters if type(obj) is Macro else STEP)
        text = getattr(obj, "__self__", None)
        if type(text) is str and obj.__name__ in _GROWING:
            given = {key: value for key, value in kwargs.items() if key not in _JINJAS_OWN}
            return _GROWING[obj.__name__](meter, text, *args, **given)
        result = super().call(context, obj, *args, **kwargs)
        meter.spend_on(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            result = left + right
            self.meter.spend_on(result)
            return result
        _charge_operation(self.meter, operator, left, right)
        return super().call_binop(context, operator, left, right)


class SandboxedTemplate:
    """A template that has been compiled and may be rendered by one thread at a time."""

    def __init__(self, source: str, *, environment: MeteredEnvironment) -> None:
        if len(source) > SOURCE_CHARACTERS:
            raise DataError(
                f"the tokenizer's chat template has {len(source):,} characters, more than "
                f"{SOURCE_CHARACTERS:,}{OTHERWISE}"
            )
        self._environment = environment
        self._environment.meter.start(len(source))  # constant parts are worked out right here
        self._lock = threading.Lock()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the tokenizer's chat template cannot be read: line {error.lineno}: "
                f"{error.message}{OTHERWISE}"
            ) from None
        except Exception as error:  # noqa: BLE001 - whatever a foreign program does to the compiler
            raise DataError(
                f"the tokenizer's chat template cannot be read: {_words(error)}{OTHERWISE}"
            ) from None

    def render(self, messages: list[dict[str, Any]], *, further: int = 0, **variables: Any) -> str:
        """The conversation as the template writes it; `further`: characters it is given besides
        what is said."""
        given = further + sum(str.__len__(message["content"]) for message in messages)
        with self._lock:
            self._environment.meter.start(given)
            try:
                return self._template.render(messages=messages, **variables)
            except LimitReached as error:
                stopped = f"the tokenizer's chat template was stopped: {error}{OTHERWISE}"
            except SecurityError as error:
                stopped = f"the tokenizer's chat template is not safe to run: {error}{OTHERWISE}"
            except Refusal as error:
                raise TemplateError(
                    f"the tokenizer's chat template refuses this conversation: {error}"
                ) from None
            except Exception as error:  # noqa: BLE001 - whatever a foreign program may raise
                raise TemplateError(
                    f"the tokenizer's chat template fails on this conversation: {_words(error)}"
                ) from None
        raise DataError(stopped)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
