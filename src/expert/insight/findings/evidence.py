"""The evidence that rules examine: a run with its events, or a plan and the machine before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expert.core.events import Event
from expert.insight.record import RunRecord, listed, mapping
from expert.insight.step.anatomy import Anatomy, StepAnatomy, finite, median, number
from expert.insight.step.bands import Band, expected_band
from expert.manifest.schema.manifest import CHAR_GPT, Manifest
from expert.planning.decisions import REQUESTED
from expert.planning.draft import KEYS
from expert.planning.machine.cards import card_by_nvml_name
from expert.planning.memory.memory import CONTEXT_BYTES
from expert.planning.run_plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Before:
    """What is known of a run that has not started, besides its plan."""

    capability: tuple[int, int] | None
    cores: int
    gpu_here: str
    """Name of this machine's card; empty if there is none."""


def evidence_before(manifest: Manifest, plan: RunPlan, before: Before) -> Evidence:
    """Evidence for a run that has not started: its plan and no events."""
    written = manifest.model_dump(mode="json", exclude_unset=True)
    run = RunRecord(manifest=written, plan=plan.model_dump(mode="json"))
    return Evidence(run=run, anatomy=Anatomy(), before=before)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything a rule may examine."""

    run: RunRecord
    anatomy: Anatomy
    before: Before | None = None
    """None for a run that has started."""
    resume_command: str = ""
    """The command that continues the run; empty if it is unknown how the run was started."""

    @property
    def step(self) -> StepAnatomy | None:
        return self.anatomy.step

    # --- the plan ------------------------------------------------------------------------------

    def planned(self, path: str) -> Any:
        return self.run.planned(path)

    @property
    def on_gpu(self) -> bool:
        return self.run.on_gpu

    def amount(self, path: str) -> float | None:
        """A finite number of the plan; None if there is none."""
        return finite(self.planned(path))

    def decision(self, path: str) -> Mapping[str, Any]:
        taken = map(mapping, listed(self.run.plan.get("decisions")))
        return next((one for one in taken if one.get("path") == path), {})

    def requested(self, path: str) -> bool:
        """Whether the manifest set it, rather than the planner or a fallback."""
        return self.decision(path).get("source") in REQUESTED

    def setting_words(self, path: str) -> str:
        """`you set X: value`, or why the planner chose it."""
        value, key = self.planned(path), KEYS.get(path, path.rpartition(".")[2])
        shown = str(value).lower() if isinstance(value, bool) else value
        if self.requested(path):
            return f"you set {key}: {shown}"
        because = self.decision(path).get("because")
        return f"{key} {shown}" + (f" ({because})" if because else "")

    def part(self, name: str) -> float:
        """Bytes the plan estimated for one purpose."""
        return number(mapping(self.planned("memory.parts")), name) or 0.0

    # --- the machine ---------------------------------------------------------------------------

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        machine = mapping(self.run.environment.get("machine"))
        return [gpu for gpu in listed(machine.get("gpus")) if isinstance(gpu, dict)]

    def gpu_fact(self, name: str) -> Any:
        """A fact about the first card, the one a run uses."""
        return mapping(self.gpus[0].get(name)).get("value") if self.gpus else None

    @property
    def gpu_bytes(self) -> int | None:
        size = self.gpu_fact("memory_total_bytes")
        return size if isinstance(size, int) else None

    @property
    def band(self) -> Band | None:
        """How fast models of this size run on this card, according to the shipped measurements."""
        size = self.gpu_bytes
        card = card_by_nvml_name(str(self.gpu_fact("name")), size) if size is not None else None
        return expected_band(self.run, card.slug) if self.on_gpu and card is not None else None

    @property
    def cores(self) -> int | None:
        if self.before is not None:
            return self.before.cores
        machine = mapping(self.run.environment.get("machine"))
        found = mapping(machine.get("cores_available")).get("value")
        return found if isinstance(found, int) else None

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 and TF32 units: compute capability 8.0 and up; assumed for a
        card that is only planned for."""
        if self.before is not None:
            return self.on_gpu and (self.before.capability or (8, 0)) >= (8, 0)
        major, *_ = listed(self.gpu_fact("capability")) or [None]
        return self.on_gpu and isinstance(major, int) and major >= 8

    # --- what was seen -------------------------------------------------------------------------

    def median(self, name: str) -> float | None:
        return median(self.anatomy.steady, name)

    def last(self, name: str) -> float | None:
        """The newest value in the step events."""
        for line in reversed(self.anatomy.lines):
            value = number(line.event, name)
            if value is not None:
                return value
        return None

    def newest(self, kind: str) -> Event:
        """The newest event of a kind; empty if there is none."""
        found = self.run.of(kind)
        return found[-1] if found else {}

    @property
    def feed_kind(self) -> str:
        """packed, padded, stream or late; before a run, what the plan implies."""
        planned = "packed"
        if mapping(self.planned("data.dataset")).get("streaming"):
            planned = "stream"
        elif self.planned("data.tokenize") == "late":
            planned = "late"
        elif self.planned("data.packing") == "none" and self.planned("model.name") != CHAR_GPT:
            planned = "padded"  # the blocks of a corpus are full without packing
        return str(self.newest("feed").get("kind", planned))

    @property
    def workers(self) -> int:
        """Processes that make batches; packed batches are filled by a thread."""
        planned = 0 if self.feed_kind == "packed" else self.amount("loader.workers")
        seen = number(self.newest("feed"), "workers")
        return int((planned if seen is None else seen) or 0)

    @property
    def micro_batches(self) -> int:
        return max(1, int(self.amount("batch.accumulation") or 1))

    @property
    def recomputes(self) -> bool:
        return self.planned("kernels.checkpointing") in ("full", "selective")

    @property
    def retries_per_update(self) -> float:
        """How often per step the allocator had to empty its cache."""
        counts = [number(line.event, "allocator_retries") for line in self.anatomy.steady]
        known = [count for count in counts if count is not None]
        updates = sum(line.updates for line in self.anatomy.steady)
        return max(0.0, known[-1] - known[0]) / updates if known and updates else 0.0

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of the run on its card, CUDA context included; before a run the estimate."""
        seen = self.last("peak_reserved_bytes")
        return seen + CONTEXT_BYTES if seen is not None else self.amount("memory.peak_bytes")

    def fell_back(self, failure: str) -> Event | None:
        """The newest fallback with this failure."""
        found = [e for e in self.run.of("fell_back") if e.get("failure") == failure]
        return found[-1] if found else None
