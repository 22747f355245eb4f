"""What a rule looks at: the run, its anatomy, and what the plan says about who decided what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expert.core.events import Event
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import Anatomy, StepAnatomy, median, number

CONTEXT_BYTES = 840 * 2**20
"""What a process holds on a card outside torch's allocator (docs/benchmarks/memory-h200.json)."""

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
"""Where in training.config a value of the plan is asked for."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything a rule may look at."""

    run: RunRecord
    anatomy: Anatomy
    go_on: str = ""
    """The command that goes on with the run, where somebody knows how it was started."""

    @property
    def step(self) -> StepAnatomy | None:
        return self.anatomy.step

    # --- the plan ------------------------------------------------------------------------------

    def amount(self, path: str) -> float | None:
        """A number of the plan; None where there is none."""
        value = self.run.planned(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def decision(self, path: str) -> Mapping[str, Any]:
        decisions = self.run.plan.get("decisions")
        for one in decisions if isinstance(decisions, list) else ():
            if isinstance(one, Mapping) and one.get("path") == path:
                return one
        return {}

    def asked(self, path: str) -> bool:
        """Whether the manifest said so, rather than the planner or a fallback."""
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
        """What the planner advised before the run; empty where it had nothing to say."""
        remarks = self.run.plan.get("remarks")
        for one in remarks if isinstance(remarks, list) else ():
            if isinstance(one, Mapping) and (one.get("kind"), one.get("path")) == ("advice", path):
                return str(one.get("text", ""))
        return ""

    def part(self, name: str) -> float:
        """Bytes of one purpose, as the plan estimated them."""
        parts = self.run.planned("memory.parts")
        return (number(parts, name) or 0.0) if isinstance(parts, Mapping) else 0.0

    # --- the machine ---------------------------------------------------------------------------

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        machine = self.run.environment.get("machine")
        found = machine.get("gpus") if isinstance(machine, Mapping) else None
        return [gpu for gpu in found if isinstance(gpu, Mapping)] if isinstance(found, list) else []

    def gpu_fact(self, name: str) -> Any:
        """A fact of the first card, which is the one a run takes."""
        return _value(self.gpus[0].get(name)) if self.gpus else None

    @property
    def cores(self) -> int | None:
        machine = self.run.environment.get("machine")
        found = _value(machine.get("cores_available")) if isinstance(machine, Mapping) else None
        return found if isinstance(found, int) else None

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 and TF32 units: from 8.0 on."""
        found = self.gpu_fact("capability")
        return isinstance(found, list | tuple) and list(found) >= [8, 0]

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
        """packed, padded, stream or late; of older runs what the plan makes likely."""
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
        """Times the host waited for the device in the one update that was listened to."""
        return int(number(self.newest("syncs"), "count") or 0)

    @property
    def micro_batches(self) -> int:
        return max(1, int(self.amount("batch.accumulation") or 1))

    @property
    def recomputes(self) -> bool:
        return self.run.planned("kernels.checkpointing") in ("full", "selective")

    @property
    def retries_per_update(self) -> float:
        """How often the allocator had to give memory back and ask again."""
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
        it had cores to itself; None where they sufficed, or where nobody knows."""
        told, share = self.newest("threads"), self.median("cpu_others")
        threads, cores = number(told, "threads"), number(told, "cores")
        if self.run.on_gpu:
            threads, cores = 1.0, float(self.cores or 0)  # the one that launches
        if share is None or not threads or not cores:
            return None
        others = share * cores
        if threads + others <= cores + CROWDED_CORES:
            return None
        return int(threads), int(cores), others

    @property
    def neighbours(self) -> str:
        """Who took the cores, as far as the run has looked; empty or `, most of all: …`."""
        told = self.newest("neighbours").get("processes")
        known = [one for one in told if isinstance(one, Mapping)] if isinstance(told, list) else []
        names = [
            f"{one.get('name') or 'a process'} (pid {one.get('pid')}, {cores:.1f} cores)"
            for one in known
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
        """Whether others computed on the cores of a CPU run, so that it was slower for them."""
        told = self.newest("threads")
        threads, own = number(told, "threads"), number(told, "own")
        fewer = threads is not None and own is not None and threads < own
        return fewer or bool(told.get("lowered")) or self.crowded is not None

    def fell_back(self, failure: str) -> Event | None:
        """The newest fallback of a kind."""
        found = [e for e in self.run.of("fell_back") if e.get("failure") == failure]
        return found[-1] if found else None


def _value(fact: Any) -> Any:
    return fact.get("value") if isinstance(fact, Mapping) else None
