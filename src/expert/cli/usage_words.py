"""What is wrong with an option, in words of ours instead of the libraries'."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperGroup

SHARES = ("min_accuracy", "max_regression")
"""Options that are a part of a whole; people write 95 for 95 %."""
_OURS = (
    (r"^Value error, ", ""),
    (r"^Input should be less than or equal to (\S+)$", r"at most \1 is possible"),
    (r"^Input should be greater than or equal to (\S+)$", r"at least \1 is needed"),
    (r"^Input should be a valid integer.*$", "expected a whole number"),
    (r"^Input should be a valid number.*$", "expected a number"),
)


class CommandsInWords(TyperGroup):
    """Commands whose options are refused in words that say what to write."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = in_our_words(error.message, getattr(error.param, "name", None))
            raise


def in_our_words(message: str, option: str | None = None) -> str:
    """A library's message about a value, as a person would say it."""
    if option in SHARES and message.startswith("Input should be"):
        return "it is a share between 0 and 1, such as 0.95"
    for theirs, ours in _OURS:
        message = re.sub(theirs, ours, message)
    return message
