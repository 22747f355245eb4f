"""What a rule looks at: a run with its events, or a plan and the machine before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.events import Event
from expert.insight.record import RunRecord, listed, mapping
from expert.insight.step.anatomy import Anatomy, RunTimes, StepAnatomy, median, number
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.memory.memory import H200

if TYPE_CHECKING:
    from expert.manifest.schema.manifest import Manifest
    from expert.planning.run_plan import RunPlan

CONTEXT_BYTES = H200.context_bytes
"""What a process holds on a card outside torch's allocator."""

CROWDED_CORES = 0.3
"""Share of the cores that other processes may use; threads are lowered from here on."""

PADDING_SHARE = 0.2
"""Rows grouped by length pad less than a tenth; from a fifth on, packing is worth its change."""
PACKED_PADDING_SHARE = 0.4
"""Sequences of packed rows are filled to 90 % and more, except where there are few rows in all."""

KEYS = {
    "kernels.attention": "attention",
    "kernels.checkpointing": "gradient_checkpointing",
    "kernels.compile": "torch_compile",
    "kernels.device": "device",
    "kernels.fused_loss": "fused_loss",
    "kernels.fused_blocks": "fused_blocks",
    "kernels.tf32": "use_tf32",
    "batch.examples_per_update": "batch_size",
    "batch.micro_batch": "micro_batch_size",
    "data.packing": "packing",
    "data.tokenize": "tokenize",
    "loader.workers": "dataloader_num_workers",
    "loader.pin_memory": "dataloader_pin_memory",
    "optim.optimizer": "optim",
    "watch.eval_steps": "eval_steps",
    "watch.evaluation_strategy": "evaluation_strategy",
    "watch.logging_steps": "logging_steps",
    "watch.save_steps": "save_steps",
    "watch.save_strategy": "save_strategy",
}
"""Where in training.config a value of the plan is set."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """What is known of a run that has not started, besides its plan."""

    capability: tuple[int, int] | None
    windows: bool
    cores: int
    gpu_here: str
    """Name of this machine's card; empty where there is none."""
    named_card: bool
    """The plan is for a card that is not here."""
    mean_tokens: float | None = None
    """Of a row, where it is known or was sampled."""
    longest_tokens: int | None = None
    replan: Callable[[tuple[str, ...]], RunPlan | None] = lambda overrides: None
    """The plan with overrides; None where they are refused."""


def evidence_before(manifest: Manifest, plan: RunPlan, before: Before) -> Evidence:
    """Evidence of a run that has not started: its plan, and no event."""
    run = RunRecord(
        folder=Path(),
        manifest=manifest.model_dump(mode="json", exclude_unset=True),
        plan=plan.model_dump(mode="json"),
        environment={},
        events=(),
        damaged_lines=0,
        validation=None,
    )
    return Evidence(run=run, anatomy=Anatomy(run=RunTimes(), step=None), before=before)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything a rule may look at."""

    run: RunRecord
    anatomy: Anatomy
    before: Before | None = None
    """None for a run that has started."""
    go_on: str = ""
    """The command that continues the run, where it is known how it was started."""

    @property
    def step(self) -> StepAnatomy | None:
        return self.anatomy.step

    # --- the plan ------------------------------------------------------------------------------

    def planned(self, path: str) -> Any:
        return self.run.planned(path)

    @property
    def on_gpu(self) -> bool:
        return self.run.on_gpu

    @property
    def padded(self) -> bool:
        """Rows are not packed; blocks of a corpus are full without padding."""
        alone = self.planned("data.packing") == "none"
        return bool(alone and self.planned("model.name") != CHAR_GPT)

    def written(self, part: str, key: str) -> Any:
        """A value as the manifest has it in `training`; None where it has none."""
        return mapping(mapping(self.run.manifest.get("training")).get(part)).get(key)

    def amount(self, path: str) -> float | None:
        """A number of the plan; None where there is none."""
        value = self.run.planned(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def decision(self, path: str) -> Mapping[str, Any]:
        taken = map(mapping, listed(self.run.plan.get("decisions")))
        return next((one for one in taken if one.get("path") == path), {})

    def asked(self, path: str) -> bool:
        """Whether the manifest set it, rather than the planner or a fallback."""
        return self.decision(path).get("source") == "manifest"

    def who(self, path: str) -> str:
        """`you set X: value`, or why the planner chose it."""
        value, key = self.run.planned(path), KEYS.get(path, path)
        shown = str(value).lower() if isinstance(value, bool) else value
        if self.asked(path):
            return f"you set {key}: {shown}"
        because = self.decision(path).get("because")
        return f"{key} {shown}" + (f" ({because})" if because else "")

    def advice(self, path: str) -> str:
        """What the planner advised before the run; empty where it had no advice."""
        for one in map(mapping, listed(self.run.plan.get("remarks"))):
            if (one.get("kind"), one.get("path")) == ("advice", path):
                return str(one.get("text", ""))
        return ""

    def part(self, name: str) -> float:
        """Bytes of one purpose, as the plan estimated them."""
        return number(mapping(self.run.planned("memory.parts")), name) or 0.0

    # --- the machine ---------------------------------------------------------------------------

    @property
    def _machine(self) -> Mapping[str, Any]:
        return mapping(self.run.environment.get("machine"))

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        return [gpu for gpu in listed(self._machine.get("gpus")) if isinstance(gpu, dict)]

    def gpu_fact(self, name: str) -> Any:
        """A fact of the first card, which is the one a run takes."""
        return mapping(self.gpus[0].get(name)).get("value") if self.gpus else None

    @property
    def cores(self) -> int | None:
        if self.before is not None:
            return self.before.cores
        found = mapping(self._machine.get("cores_available")).get("value")
        return found if isinstance(found, int) else None

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 and TF32 units: from 8.0 on, and assumed of a planned one."""
        if self.before is not None:
            return self.on_gpu and (self.before.capability or (8, 0)) >= (8, 0)
        found = self.gpu_fact("capability")
        return self.on_gpu and isinstance(found, list | tuple) and list(found) >= [8, 0]

    # --- what was seen -------------------------------------------------------------------------

    def median(self, name: str) -> float | None:
        return median(self.anatomy.steady, name)

    def last(self, name: str) -> float | None:
        """The newest value of the step events."""
        for line in reversed(self.anatomy.lines):
            value = number(line.event, name)
            if value is not None:
                return value
        return None

    def grown(self, name: str) -> float:
        """By how much a count grew over the settled lines."""
        found = [number(line.event, name) for line in self.anatomy.steady]
        known = [value for value in found if value is not None]
        return max(0.0, known[-1] - known[0]) if known else 0.0

    def newest(self, kind: str) -> Event:
        """The newest event of a kind; empty where there is none."""
        found = self.run.of(kind)
        return found[-1] if found else {}

    @property
    def feed_kind(self) -> str:
        """packed, padded, stream or late; without an event what the plan makes likely."""
        told = self.newest("feed").get("kind")
        if isinstance(told, str):
            return told
        if self.run.planned("data.tokenize") == "late":
            return "late"
        return "padded" if self.run.planned("data.packing") == "none" else "packed"

    @property
    def workers(self) -> int:
        """Processes that make batches; a packed feed is filled by a thread."""
        told = number(self.newest("feed"), "workers")
        if told is not None:
            return int(told)
        return 0 if self.feed_kind == "packed" else int(self.amount("loader.workers") or 0)

    @property
    def syncs(self) -> int:
        """Times the host waited for the device in the one step that was watched."""
        return int(number(self.newest("syncs"), "count") or 0)

    @property
    def micro_batches(self) -> int:
        return max(1, int(self.amount("batch.accumulation") or 1))

    @property
    def recomputes(self) -> bool:
        return self.run.planned("kernels.checkpointing") in ("full", "selective")

    @property
    def retries_per_update(self) -> float:
        """How often the allocator had to empty its cache."""
        updates = sum(line.updates for line in self.anatomy.steady)
        return self.grown("allocator_retries") / updates if updates else 0.0

    @property
    def peak_bytes(self) -> float | None:
        """The most memory the run held on its card, its context included; else the estimate."""
        seen = self.last("peak_reserved_bytes")
        return seen + CONTEXT_BYTES if seen is not None else self.amount("memory.peak_bytes")

    @property
    def crowded(self) -> tuple[int, int, float] | None:
        """(threads, cores, cores that others used) of a run that computed with more threads than
        it had free cores; None where they sufficed, or where that is unknown."""
        told, share = self.newest("threads"), self.median("cpu_others")
        threads, cores = number(told, "threads"), number(told, "cores")
        if self.on_gpu:
            threads, cores = 1.0, float(self.cores or 0)  # the one that launches
        if share is None or not threads or not cores:
            return None
        others = share * cores
        if threads + others <= cores + CROWDED_CORES:
            return None
        return int(threads), int(cores), others

    @property
    def neighbours(self) -> str:
        """Which processes took the cores, where the run has looked: `, most of all …`."""
        names = [
            f"{one.get('name') or 'a process'} (pid {one.get('pid')}, {cores:.1f} cores)"
            for one in map(mapping, listed(self.newest("neighbours").get("processes")))
            if (cores := number(one, "cores")) is not None
        ]
        return f", most of all {', '.join(names)}" if names else ""

    @property
    def wasted(self) -> float | None:
        """The share of what is computed that is padding, where it is more than usual."""
        padding = self.step.padding if self.step is not None else None
        packed = self.run.planned("data.packing") != "none"
        usual = PACKED_PADDING_SHARE if packed else PADDING_SHARE
        return padding if padding is not None and padding >= usual else None

    @property
    def had_neighbours(self) -> bool:
        """Whether other processes slowed a CPU run down."""
        told = self.newest("threads")
        threads, own = number(told, "threads"), number(told, "own")
        fewer = threads is not None and own is not None and threads < own
        return fewer or bool(told.get("lowered")) or self.crowded is not None

    def fell_back(self, failure: str) -> Event | None:
        """The newest fallback of a kind."""
        found = [e for e in self.run.of("fell_back") if e.get("failure") == failure]
        return found[-1] if found else None
