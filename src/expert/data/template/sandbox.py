"""Runs a tokenizer's chat template in jinja's sandbox, with limits on time and memory.

A template is a program that comes with a model. jinja's ImmutableSandboxedEnvironment keeps it from
Python's internals and from changing its inputs, but limits neither time nor memory beyond `range`:
`{{ "a" * 10**10 }}`, nested loops, `x ~ x` in a loop or `replace` on a long text could take the
machine down (all in tests/data/template/test_template_sandbox.py). So every loop, call,
concatenation and list is charged to an allowance of characters and checked against a deadline,
operations that could grow in a single step are charged in advance, and only the methods and filters
that chat templates need are available.
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
# Per rendering: characters of all intermediate results, and of any one text or list.
ALLOWANCE, ALLOWANCE_PER_CHARACTER = 64 * 2**20, 64
LARGEST, LARGEST_PER_CHARACTER = 2**20, 8
STEP = 64  # charged for one loop iteration, one call or one list item
INTEGER_BITS = 4096
INDENT_CHARACTERS = 64

WRITTEN_DATE = datetime(2024, 7, 26)
"""The date a template may write: constant, so that data prepared yesterday is found today. Llama
3's template uses the same one by default."""
CHATML_FIX = "  (set base_models[0].prompt_template: chatml)"

# Methods of texts and numbers whose result can be of any length, and conversions to bytes.
# fmt: off
_REFUSED_METHODS = frozenset({
    "center", "encode", "expandtabs", "format", "format_map", "from_bytes", "ljust", "maketrans",
    "rjust", "to_bytes", "translate", "zfill"
})
_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
    "wordcount"
)
# fmt: on
_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - _REFUSED_METHODS
_DICT_ATTRIBUTES = frozenset(dir(dict))
_CONTAINERS = frozenset({list, tuple, dict})
_JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})  # passed to every call inside a loop


class LimitReached(Exception):
    """The template uses more time or memory than a chat template can need."""


class Refusal(jinja2.TemplateError):
    """The template itself refuses a conversation."""


class Allowance:
    """The remaining characters and time of one rendering."""

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
        """Charge a new value: a text by its length, a list with all its content."""
        if type(value) is str:
            self.spend(len(value))
        elif type(value) in _CONTAINERS:
            self.spend(self.size(value))

    def size(self, value: Any) -> int:
        size = 0
        left = [value]
        while left and size <= self.largest:
            item = left.pop()
            size += STEP
            if isinstance(item, str):
                size += str.__len__(item)  # even if a tracked text overrides len
            elif isinstance(item, dict):
                left += item.keys()
                left += item.values()
            elif type(item) in _CONTAINERS:
                size += STEP * len(item)
                left += item
        return size

    def replace(self, text: str, old: str, new: str, /, count: int = -1) -> str:
        self.spend(len(text) + len(new) * text.count(old))
        return text.replace(old, new, count)

    def join(self, text: str, parts: Iterable[Any], /) -> str:
        texts = list(parts)
        self.spend(sum(map(len, texts)) + len(text) * len(texts))
        return text.join(texts)


class OpaqueNamespace(Namespace):
    """A namespace that does not print its content."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationBlock(Extension):
    """`{% generation %}` marks answers for other trainers; here its content is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Charges(NodeTransformer):
    """Adds a charge to every loop, list, slice and `~` of a template."""

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
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        is_item = isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        return node if is_target or is_item else self.charged(node, "_made")

    visit_List = visit_Dict = visit_Tuple = visit_Getitem = _visit_made


def _raise_exception(message: str) -> None:
    raise Refusal(message)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, with an allowance."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    charges = Charges

    def __init__(self) -> None:
        self.allowance = Allowance()
        self.source_characters = STEP
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=self._written,
        )
        kept = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")}
        self.globals = kept | {
            "namespace": OpaqueNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": WRITTEN_DATE.strftime,
        }
        filters: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _FILTERS}
        own = ("_loop", "_concat", "_made", "replace", "join", "indent", "tojson")
        filters |= {name: getattr(self, f"_filter_{name.strip('_')}") for name in own}
        self.filters = filters | {"safe": lambda value: value}  # nothing is ever escaped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self.source_characters = STEP + len(source)
        tree = super()._parse(source, name, filename)
        charged: nodes.Template = self.charges().visit(tree)
        charged.set_environment(self)
        return charged

    def _written(self, value: Any) -> Any:
        self.allowance.spend_on(value)
        return value

    # --- filters: added by `Charges`, and those of transformers with charges ----------------------

    @jinja2.pass_context  # keeps jinja from evaluating it at compile time
    def _filter_loop(self, context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
        for value in values:
            self.allowance.spend(cost)
            yield value

    @jinja2.pass_context
    def _filter_concat(self, context: Context, values: list[Any]) -> str:
        return self.allowance.join("", map(str, values))

    @jinja2.pass_context
    def _filter_made(self, context: Context, value: Any) -> Any:
        return self._written(value)

    def _filter_replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        times = -1 if count is None else count
        return self.allowance.replace(str(value), str(old), str(new), times)

    def _filter_join(
        self, values: Iterable[Any], d: str = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        return self.allowance.join(str(d), map(str, values))

    def _filter_indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        space = width if isinstance(width, str) else " " * min(width, INDENT_CHARACTERS + 1)
        if len(space) > INDENT_CHARACTERS:
            raise LimitReached("it indents by more than a line")
        lines = str(value).splitlines() or [""]
        self.allowance.spend(sum(map(len, lines)) + len(space) * len(lines))
        return "\n".join(
            space + line if (number or first) and (line or blank) else line
            for number, line in enumerate(lines)
        )

    def _filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As in transformers: nothing is escaped for HTML."""
        self.allowance.spend_on(value)
        if indent is not None and not 0 <= indent <= INDENT_CHARACTERS:
            raise LimitReached("it indents by more than a line")
        layout: dict[str, Any] = {"indent": indent, "separators": separators}
        text = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **layout)
        self.allowance.spend(len(text))
        return text

    # --- attributes, calls and operators ----------------------------------------------------------

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The sandbox's check with shortcuts for known cases: `message.content` and the like take a
        third of the time of a rendering."""
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
        raise SecurityError(f"{attribute!r} of {type(obj).__name__!r} is not accessible")

    def wrap_str_format(self, value: Any) -> None:
        """Leave `format` alone; is_safe_attribute refuses it."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.allowance.spend(self.source_characters if type(obj) is Macro else STEP)
        text = getattr(obj, "__self__", None)
        if type(text) is str and obj.__name__ in ("replace", "join"):
            keywords = {key: value for key, value in kwargs.items() if key not in _JINJAS_OWN}
            return getattr(self.allowance, obj.__name__)(text, *args, **keywords)
        return self._written(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse `*`, `**` and `%` in advance if the result would be too large."""
        if operator == "+":
            return self._written(left + right)
        spend = self.allowance.spend
        spend(STEP)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
            if bits + right.bit_length() > INTEGER_BITS:
                raise LimitReached("it computes with enormous numbers")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("'%' is for numbers here; texts are joined with '~'")
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int) and times > 0:
                    spend(times * self.allowance.size(one))
        return super().call_binop(context, operator, left, right)


class SandboxedTemplate:
    """A compiled template; renders in one thread at a time."""

    def __init__(self, source: str, *, environment: MeteredEnvironment) -> None:
        if len(source) > SOURCE_CHARACTERS:
            raise DataError(
                f"the tokenizer's chat template has {len(source):,} characters, more than "
                f"{SOURCE_CHARACTERS:,}{CHATML_FIX}"
            )
        self._environment = environment
        self._environment.allowance.start(len(source))  # constants are evaluated here
        self._lock = threading.Lock()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # noqa: BLE001 - whatever a foreign program does to the compiler
            why = _words(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                why = f"line {error.lineno}: {error.message}"
            raise DataError(
                f"the tokenizer's chat template cannot be read: {why}{CHATML_FIX}"
            ) from None

    def render(self, messages: list[dict[str, Any]], *, further: int = 0, **variables: Any) -> str:
        """Render the conversation; `further`: characters of input besides the messages."""
        characters = further + sum(str.__len__(message["content"]) for message in messages)
        with self._lock:
            self._environment.allowance.start(characters)
            try:
                return self._template.render(messages=messages, **variables)
            except LimitReached as error:
                stopped = f"the tokenizer's chat template was stopped: {error}{CHATML_FIX}"
            except SecurityError as error:
                stopped = f"the tokenizer's chat template is not safe to run: {error}{CHATML_FIX}"
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
