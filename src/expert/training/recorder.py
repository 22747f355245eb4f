"""Records every step: times it, reads its numbers late, judges them and emits events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.telemetry.meter import Meter, StepCounts
from expert.telemetry.timeline import ANSWERS, Timeline
from expert.training.objectives.objective import MEAN_OF, means_of
from expert.training.recovery import LossSpike, NotFinite
from expert.training.spikes import SpikeWatch
from expert.training.step import StepStats

# 16 halvings take a scale of 65,536 down to 1; float16 that overflows more often is broken.
SCALE_HALVINGS = 20
COMPILING_STEPS = 10
"""First steps, whose shapes are new."""


MoreFields = Callable[[int], dict[str, Any]]
"""Additional fields of a step's event."""


class Emit(Protocol):
    def __call__(self, event: str, *, step: int | None = None, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the host knows of a step whose numbers are still on the device."""

    step: int
    epoch: float
    rate: float
    weight: int
    bins: tuple[int, ...]
    made_seconds: float | None
    """Time spent on making its batches; None if worker processes did."""
    metrics: tuple[str, ...]
    facts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A step that went wrong; `skips`: consecutive steps before it that changed nothing."""

    what: NotFinite | LossSpike
    skips: int = 0


class RecompileCounter:
    """Counts graphs compiled in steps after every shape should have been seen."""

    def __init__(self, graphs: Callable[[], int]) -> None:
        self._graphs = graphs
        self.restart()

    def restart(self) -> None:
        """Reset when the model was built again: it may compile."""
        self._warming, self._known = COMPILING_STEPS, 0

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore graphs compiled meanwhile, for another reason than a step: an evaluation."""
        before = self._graphs()
        yield
        self._known += self._graphs() - before

    def after_step(self) -> None:
        if self._warming:
            self._warming -= 1
            self._known = self._graphs()

    @property
    def since_warm_up(self) -> int:
        return 0 if self._warming else self._graphs() - self._known


class DelayedValues:
    """Numbers of past steps. A step's numbers are read once `lag` more steps have been launched.

    With a lag of one, the GPU works on the next step while the host reads the last one, and when a
    number is read does not depend on timing.
    """

    def __init__(self, device: torch.device, *, lag: int | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.lag = lag if lag is not None else int(self._cuda)
        # The key of each step, its numbers on the host, and the event after their copy.
        self._pending: deque[tuple[int, Tensor, Any]] = deque()

    def add(self, key: int, numbers: list[Tensor]) -> None:
        """Start copying the numbers of one step to the host."""
        together = torch.stack([number.detach().double().reshape(()) for number in numbers])
        if not self._cuda:
            self._pending.append((key, together, None))
            return
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((key, host, event))

    def take(self, *, everything: bool = False) -> list[tuple[int, list[float]]]:
        """Numbers of the steps that are far enough back, or of all."""
        taken = []
        while len(self._pending) > (0 if everything else self.lag):
            key, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            taken.append((key, host.tolist()))
        return taken


class Recorder:
    """Follows the steps of a run. Numbers from the device arrive one step late."""

    def __init__(
        self,
        emit: Emit,
        *,
        device: torch.device,
        meter: Meter,
        timeline: Timeline,
        spikes: SpikeWatch,
        recompiling: RecompileCounter,
        log_every: int,
        flops_per_token: float | None = None,
        loss_scaling: bool = False,
        compiles: bool = False,
        answers: bool = False,
        more: MoreFields = lambda step: {},
        skips: int = 0,
    ) -> None:
        """`answers`: the model makes its own batches, whose losses have no level to keep."""
        self.meter = meter
        self.spikes = spikes
        self.skips = skips
        """Consecutive steps that changed nothing, of those whose numbers have arrived."""
        self._recompiling = recompiling
        self._emit = emit
        self._timeline = timeline
        self._late = DelayedValues(device)
        self._log_every = log_every
        self._flops_per_token = flops_per_token
        self._loss_scaling = loss_scaling
        self._compiles, self._answers = compiles, answers
        self._more = more
        self._pending: dict[int, Launched] = {}
        self._unreported: tuple[Launched, float, float] | None = None
        self._phases: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        """Sums since the last line, and under "weight" what they are divided by."""
        self._made: list[float] = []
        self._dry: list[bool] = []

    def begin(self, step: int) -> None:
        """Start a step; the device waits until its batches are there."""
        self._timeline.begin(step)

    def waiting(self) -> AbstractContextManager[None]:
        return self._timeline.phase(ANSWERS if self._answers else "data_wait")

    def end(self, fed: Any, stats: StepStats, *, rate: float, epoch: float) -> list[Trouble]:
        """The step was launched: report and judge earlier ones whose numbers have arrived."""
        if fed.copied is not None:
            self._timeline.add_copy(*fed.copied)
        self._timeline.end()
        self._recompiling.after_step()
        step = fed.step.done
        self._pending[step] = Launched(
            step=step,
            epoch=epoch,
            rate=rate,
            weight=stats.weight,
            bins=tuple(map(int, fed.step.bins)),
            made_seconds=fed.made_seconds,
            metrics=tuple(stats.metrics),
            facts=fed.facts,
        )
        numbers = [stats.loss_sum, stats.grad_norm, stats.applied, *stats.metrics.values()]
        self._late.add(step, numbers)
        flops, fresh = self._flops_per_token, self.meter.fresh
        seconds = self.meter.add(
            StepCounts(
                step=step,
                real_tokens=stats.real_tokens,
                places=stats.places,
                examples=stats.examples,
                targets=stats.weight,
                flops=None if flops is None else flops * stats.real_tokens,
            )
        )
        if fresh and self._compiles:
            self._emit("compiled", step=step + 1, seconds=seconds)
        return self._read(everything=False)

    def state(self) -> dict[str, Any]:
        """Fields of TrainState; all numbers should have arrived."""
        return {
            "losses": self.spikes.state(),
            "skips": self.skips,
            "sums": self.meter.state(),
        }

    def wait_for_numbers(self) -> list[Trouble]:
        """Wait for all launched steps, and judge them."""
        return self._read(everything=True)

    def report_remaining(self) -> None:
        """Emit a line for the steps since the last one, if any: otherwise a run shorter than its
        log interval would leave nothing to diagnose."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            self._report(*unreported)

    def _read(self, *, everything: bool) -> list[Trouble]:
        # Waits for the device where it is behind: after that, its times of these steps are there.
        late = self._late.take(everything=everything)
        timeline = self._timeline
        for times in timeline.drain() if everything else timeline.ready(self._late.lag):
            self.meter.add_times(times)
            for name, seconds in times.phases.items():
                self._phases[name] = self._phases.get(name, 0.0) + seconds
            if times.ran_dry is not None:
                self._dry.append(times.ran_dry)
        troubles = []
        for step, (loss_sum, grad_norm, applied, *metrics) in late:
            launched = self._pending.pop(step)
            trouble = self._judge(launched, loss_sum, bool(applied))
            if trouble is not None:
                troubles.append(trouble)
            if launched.made_seconds is not None:
                self._made.append(launched.made_seconds)
            sums = dict(zip(launched.metrics, metrics, strict=True), weight=launched.weight)
            for name, value in launched.facts.items():
                sums |= {name: value, name + MEAN_OF: 1}
            for name, value in sums.items():
                self._metrics[name] = self._metrics.get(name, 0.0) + value
            self._unreported = (launched, loss_sum / max(1, launched.weight), grad_norm)
            if due(step + 1, self._log_every) or trouble is not None:
                self.report_remaining()
        return troubles

    def _judge(self, launched: Launched, loss_sum: float, applied: bool) -> Trouble | None:
        """Whether a step went wrong: its loss is not finite, or has spiked."""
        loss = loss_sum / max(1, launched.weight)
        if math.isfinite(loss_sum):
            self.meter.add_loss(loss_sum, launched.weight)
        if not applied:
            before, self.skips = self.skips, self.skips + 1
            if self._loss_scaling and math.isfinite(loss) and self.skips <= SCALE_HALVINGS:
                return None  # float16 overflowed and the scale was halved, as intended
            return Trouble(what=NotFinite(step=launched.step, bins=launched.bins), skips=before)
        self.skips = 0
        if self._answers:
            return None
        spike, high = self.spikes.observe(launched.step, loss), self.spikes.begun
        if spike is not None:
            return Trouble(what=spike)
        if high is not None:
            stays = self.spikes.test.stays
            fields = {"loss": high.loss, "median": high.median, "z": high.z, "stays": stays}
            self._emit("high_loss", step=launched.step + 1, **fields)
        return None

    def _report(self, launched: Launched, loss: float, grad_norm: float) -> None:
        """Emit a line for the steps since the last one; a loss of this step that is not finite
        replaces the mean."""
        line = self.meter.step_line(launched.step)
        times: dict[str, float | None] = {
            f"time_{name}": seconds for name, seconds in self._phases.items()
        }
        times["time_feed"] = sum(self._made) if self._made else None
        times["ran_dry"] = sum(self._dry) / len(self._dry) if self._dry else None
        means = means_of(self._metrics, self._metrics.pop("weight", 1.0))
        self._phases, self._made, self._dry, self._metrics = {}, [], [], {}
        more = self._more(launched.step + 1)
        if self._compiles:
            more["recompiles"] = self._recompiling.since_warm_up
        self._emit(
            "step",
            step=launched.step + 1,
            **{**line, "loss": line["loss"] if math.isfinite(loss) else loss},
            rate=launched.rate,
            grad_norm=grad_norm,
            epoch=launched.epoch,
            **means,
            **times,
            **more,
        )


def due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0
