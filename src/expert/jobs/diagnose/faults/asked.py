"""What the rules about a configuration look at, and how they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.insight.findings.finding import Finding, Severity

if TYPE_CHECKING:
    from expert.manifest.schema.manifest import Manifest
    from expert.planning.run_plan import RunPlan

CONFIG = "training.config"
AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the rules look at."""

    manifest: Manifest
    plan: RunPlan
    capability: tuple[int, int] | None
    windows: bool
    cores: int
    gpu_here: str
    """Name of the card of this machine; empty where there is none."""
    named_card: bool
    """The plan is for a card that is not here."""
    mean_tokens: float | None = None
    """Of a row, where it is known or was sampled."""
    longest_tokens: int | None = None
    replan: Callable[[tuple[str, ...]], RunPlan | None] = lambda overrides: None
    """The plan with overrides; None where they are refused."""

    def is_set(self, key: str) -> bool:
        """Whether the manifest itself says something about a key of training.config."""
        return key in self.manifest.training.config.model_fields_set

    def asked(self, key: str) -> Any:
        return getattr(self.manifest.training.config, key, None)

    @property
    def on_gpu(self) -> bool:
        return self.plan.kernels.device == "cuda"

    @property
    def ampere(self) -> bool:
        return self.on_gpu and (self.capability is None or self.capability >= AMPERE)

    @property
    def padded(self) -> bool:
        from expert.data.pack.packing import is_padded

        return is_padded(self.plan)

    @property
    def makes_batches(self) -> bool:
        """Whether making a batch is real work: rows are tokenised or padded while training."""
        streaming = self.manifest.training.dataset.streaming
        return streaming or self.padded or late(self.plan)

    @property
    def memory_share(self) -> float | None:
        peak, budget = self.plan.memory.peak_bytes, self.plan.memory.budget_bytes
        return peak / budget if peak and budget else None

    def why(self, path: str) -> str:
        return next((d.because for d in self.plan.decisions if d.path == path), "")


def late(plan: RunPlan) -> bool:
    """Whether rows are tokenised when they are asked for."""
    return getattr(plan.data, "tokenize", "ahead") == "late"


Answer = Finding | None
Rule = Callable[[Asked], Answer]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that a guide names, and the rule that looks for it."""

    name: str
    guides: tuple[str, ...]
    named_as: str
    rule: Rule


def answer(
    name: str,
    severity: Severity,
    title: str,
    evidence: str,
    consequence: str = "",
    *,
    set_to: tuple[str, ...] = (),
    fix: str = "",
    gain: float | None = None,
    **numbers: float,
) -> Finding:
    """A finding whose fix is keys of training.config, each as `key=value`."""
    overrides = tuple(f"{CONFIG}.{each}" for each in set_to)
    words = fix or " ".join(f"--set {each}" for each in overrides)
    return Finding(
        name=name,
        severity=severity,
        title=title,
        evidence=evidence,
        consequence=consequence,
        fix=words,
        overrides=overrides,
        gain=gain,
        numbers=numbers,
    )
