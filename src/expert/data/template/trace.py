"""Traces a chat template to avoid rendering every row.

A conversation of placeholders is rendered, and every question the template asks about a text is
recorded: does it start with this, does it contain that. A row whose texts give the same answers
takes the same path through the template, so its text is the traced one with the placeholders
replaced. If the template uses a text in any other way than writing it, concatenating it or asking
such a question, the trace is blind and every row is rendered.

Measured on one core with Qwen3's template: a traced row of SQL takes 17 us, a rendered one 191 us;
tokenising it takes 232 us, so rendering every row would nearly double the time of preparing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro

from expert.data.template.sandbox import Charges, MeteredEnvironment, OpaqueNamespace

Question = tuple[int, str, tuple[Any, ...], Any]
"""Turn number, method of its text, arguments, and the result."""

SLOT_START, SLOT_END = "\ue0f0", "\ue0f1"  # private use area: does not occur in text

# Methods that return a plain answer, and methods that leave most texts unchanged.
_QUESTIONS = frozenset({"startswith", "endswith", "__contains__", "__eq__", "__ne__"})
_STRIPS = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix"})
# Filters and tests that use a text only through its methods, or not at all.
_NEUTRAL = frozenset({"trim", "string", "safe", "default", "d", "_made", "_concat"}) | frozenset(
    {"boolean", "defined", "eq", "equalto", "mapping", "ne", "none", "number", "string"}
    | {"undefined", "==", "!="}
)
# Methods needed to be an object at all, and to be written.
_UNTOUCHED = frozenset(dir(object)) - {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__hash__", "__repr__", "__format__"),
}


class Trace:
    """What a template asked about the texts, and whether it did anything else with them."""

    def __init__(self) -> None:
        self.questions: dict[tuple[int, str, tuple[Any, ...]], Any] = {}
        self.blind = False

    def answers(self) -> tuple[Question, ...] | None:
        if self.blind:
            return None
        return tuple((*asked, answer) for asked, answer in self.questions.items())


class Tracked(str):
    """A text that records what is asked about it; `turn` is None for concatenated texts."""

    trace: Trace
    turn: int | None

    def __bool__(self) -> bool:
        return True  # rows with an empty text are rendered


def tracked(text: str, trace: Trace, turn: int | None = None) -> Tracked:
    result = Tracked(text)
    result.trace, result.turn = trace, turn
    return result


def placeholder(place: int) -> str:
    return f"{SLOT_START}{place}{SLOT_END}"


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        known = self.turn is not None and not kwargs and not any(map(_is_tracked, args))
        if known and name in _STRIPS and str.__eq__(result, self):
            self.trace.questions[self.turn or 0, name, args] = None
            return self
        if known and name in _QUESTIONS and isinstance(result, bool):
            self.trace.questions[self.turn or 0, name, args] = result
        else:
            self.trace.blind = True
        return result

    return method


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tracked)


for _name in set(dir(str)) - _UNTOUCHED:
    setattr(Tracked, _name, _watched(_name))


def same_answers(questions: tuple[Question, ...], texts: list[str]) -> bool:
    """Whether these texts take the same path through the template as the placeholders."""
    for turn, name, args, answer in questions:
        text = texts[turn]
        if getattr(text, name)(*args) != (text if answer is None else answer):
            return False
    return all(texts)


class _TracedCharges(Charges):
    """Also records texts searched for in others, which the text itself cannot notice."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if any(operand.op.endswith("in") for operand in node.ops):  # `in` and `not in`
            node.expr = self.charged(node.expr, "_needle")
        return node


class TracingEnvironment(MeteredEnvironment):
    """The same sandbox, for placeholders."""

    charges = _TracedCharges

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.captures = False
        filters: dict[str, Callable[..., Any]] = self.filters | {"_needle": lambda value: value}
        concat = filters.pop("_concat")
        self.filters = {name: self._seen(name, each) for name, each in filters.items()}
        self.filters["_concat"] = concat
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: self._seen(name, each) for name, each in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        # These blocks capture output as a new text that is not tracked.
        captures = (nodes.AssignBlock, nodes.FilterBlock)
        self.captures = any(tree.find(kind) is not None for kind in captures)
        return tree

    def start(self) -> Trace:
        """Start a new trace for the following renderings."""
        self.trace = Trace()
        self.trace.blind = self.captures
        return self.trace

    def _seen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watching(*args: Any, **kwargs: Any) -> Any:
            if name not in _NEUTRAL and any(map(_is_tracked, (*args, *kwargs.values()))):
                self.trace.blind = True
            return self._result(function(*args, **kwargs))

        return watching

    def _result(self, value: Any) -> Any:
        """A text containing a placeholder that was not tracked makes the trace blind."""
        if type(value) is str and SLOT_START in value:
            self.trace.blind = True
        return value

    @jinja2.pass_context
    def _filter_concat(self, context: Context, values: list[Any]) -> str:
        text = "".join(map(str, values))
        self.allowance.spend(len(text))
        return tracked(text, self.trace) if any(map(_is_tracked, values)) else self._result(text)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        passes_on = (
            type(obj) is Macro
            or obj is OpaqueNamespace
            or _is_tracked(getattr(obj, "__self__", ""))
        )
        if not passes_on and any(map(_is_tracked, (*args, *kwargs.values()))):
            self.trace.blind = True
        result = super().call(context, obj, *args, **kwargs)
        if type(obj) is Macro and type(result) is str and SLOT_START in result:
            return tracked(result, self.trace)
        return self._result(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not _is_tracked(left) and not _is_tracked(right):
            return self._result(super().call_binop(context, operator, left, right))
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return tracked(str(left) + str(right), self.trace)
        self.trace.blind = True
        return super().call_binop(context, operator, left, right)
