"""A settled value with its reason, and a remark on the plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Source = Literal["manifest", "preset", "machine", "measurement", "fallback"]


class Decision(BaseModel):
    """One line of the plan: what was settled, why, and on whose authority."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Where the value is in the plan."""
    value: Any
    """The settled value; None where it cannot be known, and then `because` says why."""
    because: str
    source: Source


class Remark(BaseModel):
    """A consequence to know before starting, a key that was overruled, or a better choice."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["warning", "superseded", "advice"]
    path: str
    text: str

    @classmethod
    def warning(cls, path: str, text: str) -> Remark:
        return cls(kind="warning", path=path, text=text)
