"""GPU memory measured by runs, stored for later plans.

A run measures two points: at rest after its first steps, when only weights and optimizer state
remain, and at its peak. Each is compared with the estimate to correct the next plan for the same
card, model and torch. A probe's weights and activations apply to plans of the same kind (adapter,
base, kernels); its CUDA context and allocator overhead apply to all.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from expert.manifest.schema.kinds import QUANTISED
from expert.planning.measurements import measurements_file, read_records, remember_record
from expert.planning.memory.memory import H200, Calibration, estimate
from expert.planning.memory.workload import CAPTURED_WIDTHS, Workload
from expert.planning.models.shapes import ModelShape
from expert.planning.run_plan import RunPlan

KEPT_PROBES = 500
# The allocator holds 1.6-6.1 % beyond the peak (H200, expandable segments), more for large batches
# than for the possibly small one of a probe.
LEAST_SLACK = 0.05


class MemoryProbe(BaseModel):
    """Two points of one run: counted and measured bytes at rest, and between rest and peak."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    torch: str
    shape: str
    kind: str
    tokens: int
    resting_counted: int
    resting_measured: PositiveInt
    moving_counted: int
    moving_measured: NonNegativeInt
    reserved: int
    """The most the allocator held."""
    context_bytes: int
    """Memory of the process on the card outside the allocator."""
    measured_on: str

    @property
    def slack(self) -> float:
        return self.reserved / (self.resting_measured + self.moving_measured) - 1

    def calibration(self) -> Calibration:
        """The calibration for plans of the same kind."""
        return replace(
            H200,
            resting=self.resting_measured / max(1, self.resting_counted),
            moving=self.moving_measured / max(1, self.moving_counted),
            slack=max(LEAST_SLACK, self.slack),
            context_bytes=self.context_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Calibrations:
    """The probes of one card and one torch."""

    probes: tuple[MemoryProbe, ...] = ()

    def of(self, work: Workload) -> tuple[Calibration, str]:
        """The calibration for a workload, and its source."""
        same = [
            probe
            for probe in self.probes
            if probe.kind == calibration_kind(work) and probe.shape == shape_key(work.shape)
        ]
        if same:
            best = max(same, key=lambda probe: probe.tokens)
            return best.calibration(), f"calibrated by a run of {best.measured_on}"
        if not self.probes:
            return H200, "counted"
        context = int(statistics.median(probe.context_bytes for probe in self.probes))
        return replace(H200, context_bytes=context), "counted; the context as measured here"


def calibrations_file(environ: Mapping[str, str] = os.environ) -> Path:
    return measurements_file(environ).parent / "memory-probes.json"


def calibrations_of(card: str, torch: str | None, path: Path) -> Calibrations:
    """The stored probes of this card with this torch."""
    probes = read_records(path, MemoryProbe)
    return Calibrations(probes=tuple(p for p in probes if (p.card, p.torch) == (card, torch)))


def remember(probe: MemoryProbe, path: Path) -> None:
    """Add a probe; one of the same card, torch, model, kind and size is replaced."""
    keys = ("card", "torch", "shape", "kind", "tokens")
    remember_record(path, probe, keys, most=KEPT_PROBES)


def shape_key(shape: ModelShape) -> str:
    """The sizes that decide memory as one string, which recognises a renamed model."""
    sizes = (shape.layers, shape.hidden, shape.ffn, shape.q_width, shape.kv_width, shape.vocab)
    return "x".join(map(str, sizes))


def calibration_kind(work: Workload) -> str:
    """What needs its own calibration; sizes, ranks and optimizers are counted accurately."""
    recomputed = "all" if work.recomputed_blocks == work.shape.layers else "some"
    parts = (
        work.adapter,
        work.quantization,
        work.precision,
        work.attention,
        "fused blocks" if work.is_fused else "compiled" if work.compiled else "uncompiled",
        f"{recomputed if work.recomputed_blocks else 'none'} recomputed",
        "fused loss" if work.fused_loss else "whole logits",
    )
    shared = () if work.engine == "single" else (f"{work.engine} over {work.shards}",)
    return ", ".join((*parts, *shared, *(("offloaded",) if work.offload else ())))


# --- the workload of a plan ----------------------------------------------------------------------


def workload_of(plan: RunPlan) -> Workload | None:
    """The workload of the plan as it is now; None if the model's sizes are unknown."""
    stored = plan.memory.workload
    if stored is None:
        return None
    base = Workload(
        **{
            **stored,
            "shape": ModelShape(**stored["shape"]),
            "targets": frozenset(stored["targets"]),
        }
    )
    kernels, quantization, micro = plan.kernels, plan.model.quantization, plan.batch.micro_batch
    sequences, parallel = plan.batch.sequences_per_update, plan.parallel
    return replace(
        base,
        rows=min(micro, parallel.share_of(sequences)) if sequences else micro,
        row_tokens=plan.data.sequence_length or base.row_tokens,
        quantization=quantization if quantization in QUANTISED else "none",
        precision=kernels.precision,
        attention=kernels.attention,
        compiled=kernels.compile,
        fused_blocks=kernels.fused_blocks,
        fused_loss=kernels.fused_loss,
        recomputed_blocks=kernels.recomputed_blocks or 0,
        optimizer=plan.optim.optimizer,
        accumulates=plan.batch.accumulation != 1,
        engine=parallel.engine,
        shards=parallel.shard_ranks,
        offload=parallel.offload,
        loss_rows=kernels.loss_chunk,
        captured=kernels.cuda_graphs,
        widths=CAPTURED_WIDTHS if kernels.cuda_graphs and plan.data.flat else 1,
        evaluated_rows=plan.batch.eval_batch if kernels.cuda_graphs else None,
        evaluated_row_tokens=plan.data.max_seq_length if kernels.cuda_graphs else None,
    )


def with_new_estimate(plan: RunPlan, calibrations: Calibrations) -> RunPlan:
    """The plan with its memory estimated again: batches and kernels may have changed."""
    work = workload_of(plan)
    if work is None:
        return plan
    calibration, because = calibrations.of(work)
    parts = dict(estimate(work, calibration).on(plan.kernels.device))
    peak = sum(parts.values())
    values: dict[str, Any] = {
        "memory.peak_bytes": peak,
        "memory.parts": parts,
        "memory.fits": peak <= plan.memory.budget_bytes,
    }
    return plan.with_values(values, f"estimate for the current plan: {because}", "machine")
