"""The job behind `expert diagnose --profile N`: what the device did in N steps after warm-up.

A real short run; torch's profiler is started and stopped where steps are passed to the loop.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import sync_file
from expert.core.links import refuse_links
from expert.core.process import filtered_stderr
from expert.jobs.diagnose.first_fix import run_briefly
from expert.planning.plan import folder_name
from expert.run.session.short_run import SETTLING

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest

# Purposes in the order they are tried: a kernel gets the first that matches its name. The names are
# those of CUDA kernels (cutlass, nvjet, triton_…) and of torch's operators on a CPU.
PURPOSES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|all_?gather|c10d"),
    ("copy", r"memcpy|memset|aten::copy_|aten::_to_copy|_local_scalar_dense|direct_copy"),
    (
        "attention",
        r"flash|fmha|flex_attention|attention|varlen|sdpa|mem_eff|cudnn.*sdp|softmax(?!.*nll)",
    ),
    ("loss", r"row_kernel|cross_entropy|nll_loss|log_softmax|_fusedloss"),
    ("optimizer", r"adam|multi_tensor|_foreach|fused_adamw|sgd|8bit.*(opt|blockwise)"),
    (
        "matmul",
        r"gemm|gemv|matmul|\bmm\b|aten::(mm|bmm|addmm|linear|_scaled_mm)|cutlass|nvjet|xmma|"
        r"sm\d+_.*(tensorop|bf16)|mkldnn|dequantize|splitk",
    ),
    (
        "norm and elementwise",
        r"norm|elementwise|vectorized|reduce|triton_|aten::(add|mul|sub|div|silu|gelu|sum|mean|pow|"
        r"rsqrt|neg|cat|index|embedding|where|masked|exp|cos|sin|clamp|fill_|zero_|sigmoid)",
    ),
)
OTHER = "other"
KINETO = b"USDT:"
"""Prefix of the profiler's start and stop messages on standard error; no log level hides them."""
GAP_MICROSECONDS = 20.0
"""Shorter pauses occur between any two kernels."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel (on a CPU: operator), summed over the steps."""

    name: str
    purpose: str
    seconds: float
    calls: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What N steps spent their time on."""

    trace: str
    device: str
    on_gpu: bool
    updates: int
    seconds: float
    """From the first to the last span."""
    busy: float
    """Share of that in which something ran on the device."""
    gaps: int
    """Pauses of the device of more than 20 µs."""
    gap_seconds: float
    longest_gap_seconds: float
    purposes: dict[str, float]
    """Seconds by purpose."""
    kernels: tuple[Kernel, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that ran, in microseconds."""

    name: str
    start: float
    end: float
    own: float
    """Time not spent in the operators it called."""


def profile(read: ReadManifest, *, updates: int, folder: Path | None = None, **how: Any) -> Profile:
    """Run, profile, write the trace to profile/ next to the manifest, and sum it up; `how`: further
    arguments of `run_briefly`."""
    place = folder or read.folder / "profile"
    refuse_links(place, below=place.parent)
    step_profiler = _StepProfiler(updates)
    done = run_briefly(read, updates=SETTLING + updates + 1, through=step_profiler.through, **how)
    seen = step_profiler.finish()
    on_gpu = done.plan.kernels.device == "cuda"
    trace = (
        place / f"{folder_name(done.plan.expert)}-{datetime.now(UTC):%Y%m%d-%H%M%S}.trace.json.gz"
    )
    _write(seen, trace)
    return summed(
        spans_of(seen, on_gpu=on_gpu),
        trace=str(trace),
        device=done.plan.target,
        on_gpu=on_gpu,
        updates=step_profiler.seen,
    )


class _StepProfiler:
    """The profiler around steps after warm-up. A step ends when the loop asks for the next one."""

    def __init__(self, updates: int) -> None:
        self._wanted = updates
        self._profiler: Any = None
        self.seen = 0

    def through(self, updates: Iterable[Any]) -> Iterator[Any]:
        for number, fed in enumerate(updates):
            if number == SETTLING and self._profiler is None:
                self._start()
            yield fed
            if self._profiler is not None and self.seen < self._wanted:
                self.seen += 1
                if self.seen == self._wanted:
                    self._stop()

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        with filtered_stderr(KINETO):
            self._profiler.start()

    def _stop(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with filtered_stderr(KINETO):
            self._profiler.stop()

    def finish(self) -> Any:
        """The profiler with its events; an error if the data has too few steps."""
        if self._profiler is not None and self.seen < self._wanted:
            self._stop()
        if not self.seen:
            raise ExpertError(
                f"--profile: the run has too few steps: {SETTLING} warm up, then some are "
                "traced  (more epochs, or a smaller batch_size)"
            )
        return self._profiler


def _write(profiler: Any, trace: Path) -> None:
    """Write the trace for Perfetto, atomically."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-trace-", dir=trace.parent) as place:
        packed = Path(place) / "trace.json.gz"
        profiler.export_chrome_trace(str(packed))
        sync_file(packed)
        os.replace(packed, trace)


# --- what was seen -------------------------------------------------------------------------------


def spans_of(profiler: Any, *, on_gpu: bool) -> list[Span]:
    """Kernels and copies on the card; operators on the CPU, each without the ones it called."""
    found = []
    for event in profiler.events():
        ours = (
            str(event.device_type).endswith("CUDA") if on_gpu else event.name.startswith("aten::")
        )
        if ours and not getattr(event, "is_user_annotation", False):
            start, end = float(event.time_range.start), float(event.time_range.end)
            own = end - start if on_gpu else float(event.self_cpu_time_total)
            found.append(Span(name=event.name, start=start, end=end, own=own))
    return found


def purpose_of(name: str) -> str:
    fitting = (each for each, pattern in PURPOSES if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, OTHER)


def summed(
    spans: Sequence[Span], *, trace: str, device: str, on_gpu: bool, updates: int
) -> Profile:
    """Seconds by kernel and by purpose, and the share of time in which something ran."""
    kernels: dict[str, list[float]] = {}
    for span in spans:
        kernels.setdefault(span.name, []).append(span.own / 1e6)
    listed = [
        Kernel(name=name, purpose=purpose_of(name), seconds=sum(times), calls=len(times))
        for name, times in kernels.items()
    ]
    listed.sort(key=lambda kernel: -kernel.seconds)
    purposes: dict[str, float] = {}
    for kernel in listed:
        purposes[kernel.purpose] = purposes.get(kernel.purpose, 0.0) + kernel.seconds
    whole, busy, gaps = busy_time(spans)
    return Profile(
        trace=trace,
        device=device,
        on_gpu=on_gpu,
        updates=updates,
        seconds=whole / 1e6,
        busy=busy / whole if whole else 0.0,
        gaps=len(gaps),
        gap_seconds=sum(gaps) / 1e6,
        longest_gap_seconds=max(gaps, default=0.0) / 1e6,
        purposes=dict(sorted(purposes.items(), key=lambda item: -item[1])),
        kernels=tuple(listed),
    )


def busy_time(spans: Sequence[Span]) -> tuple[float, float, list[float]]:
    """Total time, time in which something ran, and the pauses long enough to count."""
    if not spans:
        return 0.0, 0.0, []
    ordered = sorted(spans, key=lambda span: span.start)
    begin, reached = ordered[0].start, ordered[0].start
    busy, gaps = 0.0, []
    for span in ordered:
        if span.start > reached:
            if span.start - reached > GAP_MICROSECONDS:
                gaps.append(span.start - reached)
            reached = span.start
        if span.end > reached:
            busy += span.end - reached
            reached = span.end
    return reached - begin, busy, gaps
