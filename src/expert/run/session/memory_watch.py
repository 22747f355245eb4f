"""Measures the GPU memory of a run, reports it, and stores it for later plans."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from expert.planning.machine.host import package_version
from expert.planning.memory.calibration import (
    Calibrations,
    MemoryProbe,
    calibration_kind,
    calibrations_file,
    calibrations_of,
    remember,
    shape_key,
    workload_of,
)
from expert.planning.memory.memory import H200, estimate, resting_bytes

if TYPE_CHECKING:
    import torch

    from expert.planning.memory.workload import Workload
    from expert.planning.run_plan import RunPlan
    from expert.telemetry.gpu import GpuSampler
    from expert.training.recorder import Emit

STEPS = 3
"""The first creates the optimizer state and compiles; by the third nothing new is allocated."""


def known_calibrations(card: str) -> Calibrations:
    """What earlier runs on this card with this torch measured."""
    return calibrations_of(card, package_version("torch").value, calibrations_file())


class MemoryWatch:
    """Measures the first steps of a plan on a card: at rest and at the peak."""

    def __init__(
        self, plan: RunPlan, device: torch.device, gpu: GpuSampler | None, emit: Emit
    ) -> None:
        import torch

        self._plan, self._device, self._gpu, self._emit = plan, device, gpu, emit
        # CUDA graphs keep gradients and activations, which would be counted as weights; and where
        # widths vary, these steps may not have the widest batches, which are estimated.
        varies = plan.data.trim or plan.data.flat
        measures = device.type == "cuda" and not (plan.kernels.cuda_graphs or varies)
        self._left = STEPS if measures and plan.memory.workload else 0
        self._work: Workload | None = workload_of(plan) if self._left else None
        if self._left:
            # Trial batches have left their blocks with the allocator.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def after_step(self, *, disturbed: bool) -> None:
        """Count a launched step; `disturbed`: something else allocated memory meanwhile."""
        if not self._left:
            return
        self._left = 0 if disturbed else self._left - 1
        if self._left == 0 and not disturbed:
            self._report(self._measured())

    def _measured(self) -> MemoryProbe:
        import torch

        assert self._work is not None
        work, device = self._work, self._device
        stats = torch.cuda.memory_stats(device)
        peak, rest = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        counted = resting_bytes(work)
        return MemoryProbe(
            card=self._plan.target,
            torch=package_version("torch").value or "",
            shape=shape_key(work.shape),
            kind=calibration_kind(work),
            tokens=work.tokens,
            resting_counted=counted,
            resting_measured=rest,
            moving_counted=estimate(work).allocated - counted,
            moving_measured=peak - rest,
            reserved=stats["reserved_bytes.all.peak"],
            context_bytes=self._context(stats["reserved_bytes.all.current"]),
            measured_on=datetime.date.today().isoformat(),
        )

    def _context(self, reserved: int) -> int:
        """GPU memory of this process outside the allocator.

        A container may hide the use per process: then take all memory in use on a card that was
        free at the start, and the built-in constant on a shared one.
        """
        import torch

        sample = self._gpu.sample() if self._gpu is not None else None
        used = sample.process_memory_bytes if sample is not None else None
        shared = any(remark.path == "memory.budget_bytes" for remark in self._plan.remarks)
        if used is None and not shared:
            free, total = torch.cuda.mem_get_info(self._device)
            used = total - free
        return max(0, used - reserved) if used is not None else H200.context_bytes

    def _report(self, probe: MemoryProbe) -> None:
        measured = probe.reserved + probe.context_bytes
        self._emit(
            "memory",
            planned_bytes=self._plan.memory.peak_bytes,
            measured_bytes=measured,
            allocated_bytes=probe.resting_measured + probe.moving_measured,
            resting_bytes=probe.resting_measured,
            reserved_bytes=probe.reserved,
            context_bytes=probe.context_bytes,
        )
        try:
            remember(probe, calibrations_file())
        except OSError as error:
            text = f"the memory measurement could not be stored: {error.strerror}"
            self._emit("warning", text=text)
