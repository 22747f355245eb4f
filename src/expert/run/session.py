"""One run while it lasts: what was built, where it stands, and where its facts go."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from expert.core.events import Sink
    from expert.core.rundir import RunFolder
    from expert.data.feed.run_data import RunData
    from expert.data.feed.streaming import Stream
    from expert.manifest.schema.manifest import Manifest
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built
    from expert.run.calibrate import MemoryWatch
    from expert.run.checkpoints import Groups
    from expert.telemetry.timeline import Timeline
    from expert.training.evaluation import EvalResult
    from expert.training.loop import Ending, LoopPlan
    from expert.training.pressure import Pressure
    from expert.training.recorder import Recorder, Trouble
    from expert.training.state import TrainState
    from expert.training.stopping import BestSoFar

Evaluating = Callable[[str, int, int], None]
"""Told of an evaluation: the split, its rows that were launched, and all of its rows."""
REBUILD = ("model.", "kernels.", "optim.", "adapter.")
"""Changes of the plan after which the model is built anew; others concern only the data."""


class Session:
    """Everything a run needs between its start and its end; closing it lets go of all of it."""

    given_threads: int | None = None
    """Threads of a CPU run that somebody else has settled; None: it settles them itself."""
    look_seconds: float | None = None
    """For which it looks at the cores first, where that is not the usual."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        plan: RunPlan,
        data: RunData,
        manifest: Manifest,
        source: str = "",
        sinks: tuple[Sink, ...],
        restream: Callable[[RunPlan], Stream] | None = None,
        allow_remote_code: bool = False,
        vram: str | None = None,
        machine: Machine | None = None,
        acknowledge: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda done: None,
        evaluating: Evaluating = lambda split, rows, total: None,
        began: float | None = None,
    ) -> None:
        from expert.core.events import EventLog
        from expert.run.build import device_of
        from expert.run.checkpoints import Checkpoints
        from expert.run.parts import best_so_far, pressure_of, recorder_of, tracker_of
        from expert.telemetry.gpu import GpuSampler
        from expert.training.state import TrainState
        from expert.training.stopping import Signals

        self.folder, self.plan, self.data, self.manifest = folder, plan, data, manifest
        self.device: torch.device = device_of(plan)
        self.state: TrainState = TrainState()
        self.signals = Signals(acknowledge=acknowledge)
        self._progress, self.evaluating, self._source = progress, evaluating, source
        self.began = time.monotonic() if began is None else began
        """When somebody began to wait for the run, by the clock that only goes forward."""
        self.gpu = GpuSampler(self.device.index or 0) if self.device.type == "cuda" else None
        self.doing: Literal["training", "probe"] = "training"
        self._restream, self.machine = restream, machine
        self._allow_remote_code, self._vram = allow_remote_code, vram
        self._warned: set[str] = set()
        self._warnings: list[str] = []
        self._announced = False
        self._tracker, refused = tracker_of(plan, folder, self._warn_of_tracker)
        self._warnings += [refused] if refused else []
        tracked = (self._tracker,) if self._tracker else ()
        self._log = EventLog(folder.events, (*sinks, *tracked))
        self.emit = self._log.emit
        self.checkpoints = Checkpoints(folder, self.emit)
        self._close = contextlib.ExitStack()
        self._built: Built | None = None
        self._pending: Groups | None = None
        self._tried: object = None
        self.pressure: Pressure = pressure_of(plan)
        self.taken: int | None = None
        """The update whose weights the run ends with, where they are not the last ones."""
        self.last_eval: EvalResult | None = None
        self._memory: MemoryWatch | None = None
        self.recorder: Recorder = recorder_of(self)
        self.best: BestSoFar = best_so_far(plan, self.state)

    def __enter__(self) -> Session:
        self._close.callback(self._log.close)
        if self._tracker is not None:
            self._close.callback(self._tracker.close)
        self._close.enter_context(self.signals)
        if self.gpu is not None:
            self._close.enter_context(self.gpu)
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    # --- starting ------------------------------------------------------------------------------

    def announce(self) -> None:
        """Write down what was asked, what was decided and on what, and say that it begins."""
        from expert.model.loss import loss_kernel_trouble
        from expert.model.switches import list_switches
        from expert.run.announce import started_facts, write_down
        from expert.run.cpu_threads import settle_threads

        write_down(self.folder, self.plan, self.manifest, self.data, self.machine)
        asked = (self._vram, self._allow_remote_code)
        facts = started_facts(self.folder, self.plan, self._source, asked)
        ahead = self.recorder.meter.ahead
        cost = ahead.cost(self.state.done) if ahead is not None else None
        self.emit("started", step=self.state.done, **facts, evaluation_updates=cost)
        self._announced = True
        if self.device.type == "cpu":
            settle_threads(self)
        for text in self._warnings:
            self.emit("warning", text=text)
        self.emit("kernels", lines=[str(line) for line in list_switches(self.plan, self.device)])
        trouble = loss_kernel_trouble(self.device) if self.plan.kernels.fused_loss else ""
        if trouble:
            self.warn_once("loss kernel", f"the loss runs without its Triton kernel: {trouble}")

    def at_the_end(self, undo: Callable[[], None]) -> None:
        """Have something undone when the run has ended, however it ends."""
        self._close.callback(undo)

    def _warn_of_tracker(self, text: str) -> None:
        """What is said before the run was announced waits for that."""
        if self._announced:
            self.emit("warning", text=text)
        else:
            self._warnings.append(text)

    def warn_once(self, about: str, text: str) -> None:
        """Say something once in a run."""
        if about not in self._warned:
            self._warned.add(about)
            self.emit("warning", step=self.state.done, text=text)

    @property
    def built(self) -> Built:
        """The model of the plan, built when it is first needed and after each change of it."""
        from expert.data.feed.run_data import largest_ids
        from expert.model.load import check_vocabulary
        from expert.run.build import build
        from expert.run.parts import recorder_of

        if self._built is None:
            self._built = build(
                self.plan,
                self.data.encoder,
                device=self.device,
                allow_remote_code=self._allow_remote_code,
            )
            for largest in largest_ids(self.data):
                check_vocabulary(self._built.loaded, largest)
            self.recorder = recorder_of(self)
            self.pressure.recompiling.restart()
            if self._pending is not None:
                self._built.load(self._pending)
                self._pending = None
        return self._built

    @property
    def timeline(self) -> Timeline | None:
        """What times the model that is built now."""
        return self._built.timeline if self._built is not None else None

    @property
    def blocks(self) -> int | None:
        """Blocks of the model, where it is loaded."""
        return len(self._built.loaded.blocks) if self._built is not None else None

    @property
    def evaluates(self) -> bool:
        return self.data.validation is not None and self.plan.watch.evaluation_strategy != "no"

    @property
    def has_workers(self) -> bool:
        """Whether processes make the batches; a thread that fills them has nothing to tune."""
        from expert.data.pack.packing import is_padded

        return self.data.stream is not None or is_padded(self.plan)

    def resume(self, checkpoint: Path, *, allow_changed: bool) -> None:
        """Go on from a checkpoint, or from the newest good one of a folder of them."""
        from expert.run.checkpoints import put_final_aside, with_fallbacks
        from expert.run.resume import changed_options

        options = changed_options(self.folder, self.manifest)
        found = self.checkpoints.chosen(
            checkpoint, self.plan, self.data, options=options, allow=allow_changed
        )
        self.plan = with_fallbacks(self.plan, found.fallbacks)
        self._settle_loader()
        self.stand_at(found.state, found.groups)
        self.recorder.meter.restore(found.state.sums)
        if found.state.done != self.plan.length.total_steps:
            aside = put_final_aside(self.folder)
            if aside is not None:
                self.emit("warning", text=f"final was renamed to {aside.name}: training goes on")

    # --- running -------------------------------------------------------------------------------

    def attempt(self) -> Ending:
        """Train from where the run stands until something ends it."""
        from expert.data.feed.run_data import feed_facts, training_feed
        from expert.run.calibrate import MemoryWatch
        from expert.run.recover import rows_behind
        from expert.training.loop import Tools, train

        began = time.monotonic()
        built = self.built
        self._try_out()
        self.emit("loaded", step=self.state.done, seconds=time.monotonic() - began)
        self._memory = MemoryWatch(self.plan, self.device, self.gpu, self.emit)
        self.emit("feed", step=self.state.done, **feed_facts(self.plan, self.data))
        timed = built.timeline.take_event if self.device.type == "cuda" else None
        feed = training_feed(self.plan, self.data, self.state, device=self.device, new_event=timed)
        tools = Tools(
            emit=self.emit,
            recorder=self.recorder,
            best=self.best,
            evaluate=lambda step: self.evaluate(),
            save=self.save,
            reached=self._reached,
            stop_requested=lambda: self.signals.requested,
            rows_of=lambda bins: rows_behind(self.data, bins),
        )
        self.pressure.data.restart()
        self.recorder.meter.start()
        with feed as fed:
            updates = self.passing(fed)
            self.state, ending = train(built.engine, updates, self.state, self.loop_plan(), tools)
        return ending

    def passing(self, updates: Iterable[Any]) -> Iterable[Any]:
        """The updates on their way to the loop; a rehearsal looks at them here."""
        return updates

    def _try_out(self) -> None:
        """Once for every plan, before the next update: does it fit on the device and the disk?"""
        from expert.run.evaluate import probe

        plan = self.plan
        trial = (plan.batch.micro_batch, plan.kernels, plan.model, plan.optim.optimizer)
        if self._tried == trial or self.state.done == plan.length.total_steps:
            return
        self.doing = "probe"
        self.checkpoints.check_room(self.built, plan, self._saves_to_come())
        probe(self)
        self.doing, self._tried = "training", trial

    def _saves_to_come(self) -> int | None:
        loop = self.loop_plan()
        if loop.total_steps is None or loop.save_best:
            return None
        left = loop.total_steps - self.state.done
        return 1 + math.ceil(left / loop.save_every) if loop.save_every else 1

    def _reached(self, state: TrainState) -> None:
        evaluated = state.evaluated != self.state.evaluated
        if evaluated or state.done > self.state.done:
            assert self._memory is not None
            self._memory.after_update(disturbed=evaluated)
        if state.done > self.state.done:
            self._progress(state.done)
        self.state = state

    def loop_plan(self) -> LoopPlan:
        """When what happens in this run, from where it stands."""
        from expert.run.parts import loop_plan

        return loop_plan(self.plan, self.data, self.state)

    def verdict_on(self, trouble: Trouble) -> str:
        """What the run's policy says about trouble that was only now read."""
        from expert.training.loop import verdict_on

        return verdict_on(trouble, self.state, self.loop_plan().stability)

    def save(self, state: TrainState, due: bool = False) -> None:
        """Write a checkpoint; `due`: one of those that the manifest asks for."""
        self.state = state
        self.checkpoints.save(state, self.built.tensors(), self.plan, self.data, due=due)

    def evaluate(self) -> EvalResult | None:
        """The validation rows; None where a signal asked for an end in between."""
        from expert.run.evaluate import evaluate_split

        assert self.data.validation is not None
        before = self.pressure.recompiling.count()
        result = evaluate_split(self, self.data.validation)
        self.pressure.recompiling.forgive(self.pressure.recompiling.count() - before)
        self.last_eval = result or self.last_eval
        return result

    # --- ending --------------------------------------------------------------------------------

    def evaluate_test(self) -> EvalResult | None:
        """The test rows at the end, where there are any."""
        from expert.run.ending import evaluate_test

        return evaluate_test(self)

    def publish_final(self) -> Path:
        """What a user takes away, whole or not at all."""
        from expert.run.ending import publish_final

        return publish_final(self)

    # --- changing ------------------------------------------------------------------------------

    def change_plan(self, after: RunPlan, changed: set[str]) -> None:
        """Go on with another plan; weights and optimizer state stay, and what the run remembers."""
        from expert.planning.memory.calibration import estimated_again
        from expert.run.calibrate import known_calibrations
        from expert.run.locate import as_recorded

        after = estimated_again(after, known_calibrations(after.target))
        self.plan = after
        try:
            self.folder.write_json("plan.json", as_recorded(after))
        except OSError as error:
            self.emit("warning", text=f"plan.json cannot be written: {error.strerror}")
        self.state = replace(
            self.state, losses=self.recorder.spikes.state(), skips=self.recorder.skips
        )
        if self._built is not None:
            self._built.engine.discard()
            if any(path.startswith(REBUILD) for path in changed):
                self._set_aside_weights()
            if any(path.startswith((*REBUILD, "batch.micro_batch")) for path in changed):
                self.recorder.meter.resettle()
        if any(path.startswith("loader.") for path in changed):
            self._settle_loader()
        self._let_go()

    def stand_at(self, state: TrainState, groups: Groups | None) -> None:
        """Go on from this state with these tensors; without them the model begins anew."""
        from expert.run.parts import best_so_far, recorder_of

        self.state = state
        if groups is None:
            self._built = self._pending = None
            self.recorder.meter.resettle()
            self._let_go()
        elif self._built is None:
            self._pending = groups
        else:
            self._built.load(groups)
        self.best = best_so_far(self.plan, state)
        self.recorder = recorder_of(self)
        self.recorder.meter.restore_losses(state.sums)

    def _let_go(self) -> None:
        """Give back the memory of what was dropped; compiled blocks refer to themselves."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle_loader(self) -> None:
        self.pressure.data.workers = self.plan.loader.workers
        if self.data.stream is not None and self._restream is not None:
            self.data = replace(self.data, stream=self._restream(self.plan))

    def _set_aside_weights(self) -> None:
        assert self._built is not None
        if self._pending is None:
            self._pending = {
                group: {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
                for group, named in self._built.tensors().items()
            }
        self._built = None
