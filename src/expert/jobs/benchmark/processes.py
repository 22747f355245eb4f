"""Controls the process that measures a setting: sends orders, waits for answers, kills it if it
hangs.

Each setting has its own process, forked from a server that has imported everything (otherwise 9 s
of CPU time each): nothing is left over for the next setting, and a crash ends only one. Uses the
standard library's forkserver; without fork, a fresh process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.process import describe_exit, last_line
from expert.jobs.benchmark.pace import BenchmarkPace

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

START_SECONDS = 180.0
"""For importing torch from a slow disk."""
LEAST_WAIT_SECONDS = 60.0
"""For a window, however short: another process may delay everything."""
NO_TRACKER_WARNING = ("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
PRELOADED_MODULES = (
    *("torch", "transformers.modeling_utils", "expert.data.feed.loader", "expert.model.load"),
    *("expert.run.session.execute", "expert.telemetry.gpu", "expert.training.loop"),
)

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and the total."""


class MeasurementFailed(Exception):
    """A setting that can no longer be measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures, and how."""

    name: str
    plan: RunPlan
    read: ReadManifest
    runs: Path
    """Where its run folder goes."""
    pace: BenchmarkPace
    steps: int | None
    """Trained before the loss is evaluated; None: as many as there is time for."""
    eval_precision: str
    """Precision of the evaluation, the same for all settings."""
    own_loss_too: bool = False
    """Evaluate the loss also as this setting trains."""
    speed_only: bool = False
    """Measured before: only its speed is needed, so few steps are trained and no loss computed."""
    keeps_running: bool = True
    """The evaluated model fits next to the trained one, so the loss comes first and the process
    remains ready for windows. Otherwise the loss comes last and the process ends."""
    beside: bool = False
    """Another setting is on the device, paused."""
    threads: int | None = None
    """CPU threads fixed by the first setting; None: this is the first."""
    allow_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What is known of a setting before it is timed."""

    step_seconds: float
    steps: int
    """Trained so far."""
    threads: int | None = None
    """CPU threads; None on a card."""
    cores: int | None = None
    lowered: bool | None = None
    """Fewer threads than cores, because other processes use the cores."""
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps timed together, with the device idle before and after."""

    first: int
    """Steps of the run before it."""
    steps: int
    tokens: int
    """Without padding."""
    examples: int
    seconds: float
    others: float
    """Cores that other processes used meanwhile."""
    gpu_percent: float | None = None
    """NVML utilization at its end; None if it was too short."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class SettingProcess:
    """A process that has trained a setting's first steps and is ready to time windows."""

    def __init__(
        self, job: Job, *, log: Path, progress: Progress, target: Callable[..., None]
    ) -> None:
        """`target` is the function the process runs, with the job, its end of a pipe, a file for
        its output, and the environment."""
        self._log, self._progress, self.alive = log, progress, True
        self._limit = job.pace.limit_seconds
        method = "forkserver" if os.name == "posix" else "spawn"
        progress("starting", 0, 0)
        self._start(target, job, method)
        try:
            answer = self._wait_for(("ready", "spawn"), max(START_SECONDS, self._limit))
            if "spawn" in answer:  # CUDA was initialised before the fork, which it does not survive
                self.stop()
                self.alive = True
                self._start(target, job, "spawn")
                answer = self._wait_for(("ready",), max(START_SECONDS, self._limit))
        except BaseException:  # also on Ctrl-C: nothing may be left behind
            self.stop()
            raise
        self.ready: Ready = answer["ready"]

    def window(self, steps: int, skip: int) -> Window:
        """Time `steps` steps, after `skip` untimed ones."""
        expected = (steps + skip) * self.ready.step_seconds
        self._send({"steps": steps, "skip": skip})
        found: Window = self._wait_for(("window",), LEAST_WAIT_SECONDS + 10 * expected)["window"]
        return found

    def measured(self) -> dict[str, Any]:
        """The results so far; a process that does not stay evaluates its loss now and ends."""
        self._send({})
        found: dict[str, Any] = self._wait_for(("measured",), self._limit)["measured"]
        return found

    def stop(self) -> None:
        """Kill the process and everything it started."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # before it had its own group
        self._process.join()
        self._connection.close()

    # --- inside --------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], job: Job, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        # A killed process leaves semaphores, which Python's tracker cleans up and would report.
        os.environ.setdefault(*NO_TRACKER_WARNING)
        if method == "forkserver":
            # Importing peft imports bitsandbytes, which initialises CUDA; then each process imports
            # peft itself, in two seconds.
            cuda = job.plan.kernels.device == "cuda" and find_spec("bitsandbytes")
            context.set_forkserver_preload([*PRELOADED_MODULES, *(() if cuda else ("peft",))])
            # cuInit before a fork would break CUDA after it; with this, torch asks NVML instead.
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=target, args=(job, theirs, str(self._log), dict(os.environ))
        )
        self._process.start()
        theirs.close()

    def _send(self, order: Mapping[str, Any]) -> None:
        try:
            self._connection.send(order)
        except OSError:
            raise self._lost() from None

    def _wait_for(self, wanted: tuple[str, ...], limit: float) -> dict[str, Any]:
        """The answer with one of these names; slow settings report each step, so silence is
        limited."""
        while True:
            try:
                if not self._connection.poll(limit):
                    self.stop()
                    raise MeasurementFailed(f"no answer for {limit:.0f} s")
                answer: dict[str, Any] = self._connection.recv()
            except (EOFError, OSError):
                raise self._lost() from None
            if any(name in answer for name in wanted):
                return answer
            if "failed" in answer:
                self.stop()
                raise MeasurementFailed(str(answer["failed"]))
            if "doing" in answer:
                self._progress(answer["doing"], answer["done"], answer["of"])

    def _lost(self) -> MeasurementFailed:
        """The error for a process that ended without an answer: its signal, or its last output."""
        self._process.join(LEAST_WAIT_SECONDS)
        code = self._process.exitcode
        self.stop()
        ended = describe_exit(code) if code is not None else "ended"
        if code is not None and code >= 0:
            ended += f": {last_line(self._log) or 'it printed nothing'}"
        return MeasurementFailed(f"its process {ended}")
