"""A decision of the plan with its reason, and a remark on the plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Source = Literal["manifest", "--set", "preset", "machine", "measurement", "fallback"]
REQUESTED = ("manifest", "--set")
"""Sources of values that the user asked for."""


class Decision(BaseModel):
    """One line of the plan: the value, the reason, and its source."""

    model_config = ConfigDict(frozen=True)

    path: str
    """The path of the value in the plan."""
    value: Any
    """None if it is unknown; `because` then says why."""
    because: str
    source: Source


class Remark(BaseModel):
    """A warning, an overruled key, or advice."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["warning", "superseded", "advice"]
    path: str
    text: str

    @classmethod
    def warning(cls, path: str, text: str) -> Remark:
        return cls(kind="warning", path=path, text=text)
