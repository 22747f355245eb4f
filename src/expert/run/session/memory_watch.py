"""Measures the GPU memory of a run's first steps and reports it beside the plan's estimate."""

from __future__ import annotations

import torch

from expert.planning.memory.memory import CONTEXT_BYTES
from expert.planning.run_plan import RunPlan
from expert.telemetry.gpu import GpuSampler
from expert.training.recorder import Emit

STEPS = 3
"""The first creates the optimizer state and compiles; by the third nothing new is allocated."""


class MemoryWatch:
    """Measures the first steps of a plan on a card: at rest and at the peak."""

    def __init__(
        self, plan: RunPlan, device: torch.device, gpu: GpuSampler | None, emit: Emit
    ) -> None:
        self._plan, self._device, self._gpu, self._emit = plan, device, gpu, emit
        # CUDA graphs keep gradients and activations, which would be counted as weights; and where
        # widths vary, these steps may not have the widest batches, which are estimated.
        varies = plan.data.trim or plan.data.flat
        measures = device.type == "cuda" and not (plan.kernels.cuda_graphs or varies)
        self._left = STEPS if measures and plan.memory.workload else 0
        if self._left:
            # Trial batches have left their blocks with the allocator.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def after_step(self, *, disturbed: bool) -> None:
        """Count a launched step; `disturbed`: something else allocated memory meanwhile."""
        if not self._left:
            return
        self._left = 0 if disturbed else self._left - 1
        if self._left or disturbed:
            return

        stats = torch.cuda.memory_stats(self._device)
        reserved = stats["reserved_bytes.all.peak"]
        context = self._context(stats["reserved_bytes.all.current"])
        self._emit(
            "memory",
            planned_bytes=self._plan.memory.peak_bytes,
            measured_bytes=reserved + context,
            allocated_bytes=stats["allocated_bytes.all.peak"],
            resting_bytes=stats["allocated_bytes.all.current"],
            reserved_bytes=reserved,
            context_bytes=context,
        )

    def _context(self, reserved: int) -> int:
        """GPU memory of this process outside the allocator.

        A container may hide the use per process: then take all memory in use on a card that was
        free at the start, and the built-in constant on a shared one.
        """
        sample = self._gpu.sample() if self._gpu is not None else None
        used = sample.process_memory_bytes if sample is not None else None
        shared = any(remark.path == "memory.budget_bytes" for remark in self._plan.remarks)
        if used is None and not shared:
            free, total = torch.cuda.mem_get_info(self._device)
            used = total - free
        return max(0, used - reserved) if used is not None else CONTEXT_BYTES
