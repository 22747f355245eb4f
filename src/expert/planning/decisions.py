"""A settled value with its reason, and the list they are collected in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Source = Literal["manifest", "preset", "machine", "measurement", "fallback"]


class Decision(BaseModel):
    """One line of the plan: what was settled, why, and who settled it."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Where the value stands in the plan."""
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


@dataclass
class Ledger:
    """Decisions in the order they were taken; a path is settled once."""

    decisions: dict[str, Decision] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)

    def settle(self, path: str, value: Any, because: str, source: Source) -> Any:
        """Record a value and return it."""
        assert path not in self.decisions, f"{path} is settled twice"
        value = list(value) if isinstance(value, tuple) else value  # as JSON would have it
        self.decisions[path] = Decision(path=path, value=value, because=because, source=source)
        return value

    def unknown(self, path: str, because: str) -> None:
        """Record that a value cannot be known yet, and why."""
        self.settle(path, None, f"unknown, because {because}", "machine")

    def warn(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="warning", path=path, text=text))

    def supersede(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="superseded", path=path, text=text))

    def advise(self, path: str, text: str) -> None:
        self.remarks.append(Remark(kind="advice", path=path, text=text))

    def tree(self) -> dict[str, Any]:
        """The settled values as nested objects, by the steps of their paths."""
        root: dict[str, Any] = {}
        for decision in self.decisions.values():
            *parents, leaf = decision.path.split(".")
            here = root
            for step in parents:
                here = here.setdefault(step, {})
            here[leaf] = decision.value
        return root
