"""The job behind `expert diagnose --parity`: do the fast paths compute what the plain ones do?

On the user's own model and rows, through the functions training uses. Every comparison is of summed
losses and of gradients, after one real update, so that no adapter is still zero; without dropout,
so that both sides draw nothing.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import EXIT_OK, EXIT_RUN_FAILED, ExpertError
from expert.jobs.diagnose.parity_numbers import (
    Compared,
    Learnt,
    differences,
    first_document,
    kept_gradients,
    left_out,
    relative,
    spoilt,
    tolerance,
    widened,
)
from expert.run.session.session import copied
from expert.run.session.short_run import prepared_plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.manifest.reader import ReadManifest
    from expert.parallel.engine import Groups
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built

SEQUENCES = 4
"""Sequences that are compared: enough for several micro-batches, few enough for any card."""
MOST_CHECKPOINT_BYTES = 2**31


@dataclass(frozen=True, kw_only=True)
class Parity:
    """All claims."""

    model: str
    device: str
    sequences: int
    targets: int
    compared: tuple[Compared, ...]

    @property
    def exit_code(self) -> int:
        """0, or 4 where a claim does not hold."""
        wrong = any(each.state == "differs" for each in self.compared)
        return EXIT_RUN_FAILED if wrong else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": self.exit_code}


class NoParity(ExpertError):
    """A run whose paths cannot be compared."""


def parity(
    read: ReadManifest,
    *,
    model: str | None = None,
    vram: str | None = None,
    allow_remote_code: bool = False,
    tell: Callable[[str], None] = lambda claim: None,
) -> Parity:
    """Compare every fast path of the plan with the plain one."""
    plan, data = prepared_plan(read, model=model, vram=vram)
    if data.train is None:
        raise NoParity(
            "--parity: streamed rows cannot be looked at twice  (set training.dataset.streaming: "
            "false)"
        )
    return _Comparison(plan, data, data.train, allow_remote_code, tell).all()


class _Comparison:
    def __init__(
        self,
        plan: RunPlan,
        data: RunData,
        split: PreparedSplit,
        allow_remote_code: bool,
        tell: Callable[[str], None],
    ) -> None:
        from expert.run.build import device_of

        self.plan, self.data, self.split = plan, data, split
        self.device: torch.device = device_of(plan)
        some = min(SEQUENCES, split.index.bins)
        self.rows = min(some, plan.batch.micro_batch)
        self.count = some - some % self.rows
        self._remote = allow_remote_code
        self._tell = tell
        self._groups: Groups | None = None

    def all(self) -> Parity:
        built = self.build(self.plan)
        self.divisor = max(1, sum(batch.targets for batch in self.batches(rows=1)))
        self._groups = self.one_update(built)
        whole = self.learnt(built, rows=self.rows)
        again = self.learnt(built, rows=self.rows)
        blocks = max(1, len(built.loaded.blocks))
        self.allowed = tolerance(self.plan, blocks, self._width(built), whole.targets)
        self.allowed = widened(self.allowed, *differences(whole, again))
        compared = [self.accumulated(built, whole), self.alone(built, whole), self.isolated(built)]
        del built
        self._let_go()
        compared += [
            self.attention(whole),
            self.compiled(whole),
            self.fused_loss(whole),
            self.resumed(),
        ]
        return Parity(
            model=self.plan.model.name,
            device=self.plan.target,
            sequences=self.count,
            targets=whole.targets,
            compared=tuple(compared),
        )

    # --- claims --------------------------------------------------------------------------------

    def accumulated(self, built: Built, whole: Learnt) -> Compared:
        claim = f"accumulated = whole ({self.rows} × 1 = 1 × {self.rows})"
        self._tell(claim)
        if self.rows < 2:
            return left_out(claim, "one sequence goes at once: there is nothing to accumulate")
        return self.verdict(claim, self.learnt(built, rows=1), whole)

    def alone(self, built: Built, whole: Learnt) -> Compared:
        from expert.data.pack.packing import is_padded

        claim = "padded = alone" if is_padded(self.plan) else "packed = unpacked"
        self._tell(claim)
        pieces = self._pieces()
        if pieces <= self.count and not is_padded(self.plan):
            return left_out(claim, "no sequence holds two documents")
        return self.verdict(claim, whole, self.learnt_alone(built))

    def isolated(self, built: Built) -> Compared:
        """Change the first document of every sequence: the losses of the others must stay."""
        claim = "documents are isolated"
        self._tell(claim)
        before = after = 0.0
        own_before = own_after = 0.0
        targets = 0
        for batch in self.batches(rows=1):
            first = first_document(batch)
            if first is None:
                continue
            others, own, spoilt_others, spoilt_own = spoilt(batch, first)
            targets += others.targets
            before += float(built.engine.evaluate(others)[0])
            after += float(built.engine.evaluate(spoilt_others)[0])
            own_before += float(built.engine.evaluate(own)[0])
            own_after += float(built.engine.evaluate(spoilt_own)[0])
        if not targets:
            return left_out(claim, "no sequence holds two documents")
        changed = abs(own_after - own_before) / max(abs(own_before), 1e-30)
        off_by = abs(after - before) / max(abs(before), 1e-30)
        allowed = self.allowed.loss
        return Compared(
            claim=claim,
            state="equal" if off_by <= allowed else "differs",
            loss=off_by,
            loss_tolerance=allowed,
            because=f"the first document of each sequence was changed, and its own loss by "
            f"{changed:.0%}; {self.allowed.because}",
        )

    def attention(self, whole: Learnt) -> Compared:
        from expert.manifest.schema.manifest import CHAR_GPT

        kind = self.plan.kernels.attention
        claim = f"{kind} attention = eager attention"
        if kind == "eager":
            return left_out("chosen attention = eager attention", "the plan is eager already")
        if self.plan.model.name == CHAR_GPT:
            return left_out(claim, "the character model has one attention")
        return self.other(claim, {"kernels.attention": "eager"}, whole)

    def compiled(self, whole: Learnt) -> Compared:
        claim = "compiled = eager"
        if not self.plan.kernels.compile:
            return left_out(claim, "the plan compiles nothing")
        return self.other(claim, {"kernels.compile": False}, whole)

    def fused_loss(self, whole: Learnt) -> Compared:
        claim = "fused loss = plain loss"
        if not self.plan.kernels.fused_loss:
            return left_out(claim, "the plan has the plain loss")
        return self.other(claim, {"kernels.fused_loss": False}, whole)

    def resumed(self) -> Compared:
        """Two updates in one go, and with a checkpoint on disk between them: bit for bit."""
        claim = "resumed = uninterrupted"
        self._tell(claim)
        size = self.plan.disk.checkpoint_bytes or 0
        if size > MOST_CHECKPOINT_BYTES:
            return left_out(claim, f"a checkpoint has {size / 2**30:.1f} GiB")
        straight, saved = self.two_updates()
        broken = self.second_update(saved)
        pairs = [(straight[name], broken[name]) for name in sorted(straight)]
        off_by = relative([a.float() for a, _ in pairs], [b.float() for _, b in pairs])
        exact = self.device.type == "cpu"
        allowed = 0.0 if exact else self.allowed.loss
        why = "bit for bit: the same numbers in the same order" if exact else self.allowed.because
        return Compared(
            claim=claim,
            state="equal" if off_by <= allowed else "differs",
            gradient=off_by,
            gradient_tolerance=allowed,
            because=f"all trained weights after two updates; {why}",
        )

    def other(self, claim: str, values: dict[str, Any], whole: Learnt) -> Compared:
        """The same sequences through a model that is built in the plain way."""
        self._tell(claim)
        from expert.run.session.failures import is_out_of_memory

        plain, trouble = None, ""
        try:
            plain = self.plain(values)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            trouble = "the plain way does not fit into the memory"
        self._let_go()
        return left_out(claim, trouble) if plain is None else self.verdict(claim, whole, plain)

    def plain(self, values: dict[str, Any]) -> Learnt:
        built = self.build(self.plan.with_values(values, "for comparing", "machine"))
        assert self._groups is not None
        built.load(self._groups)
        return self.learnt(built, rows=1)

    def verdict(self, claim: str, fast: Learnt, plain: Learnt) -> Compared:
        loss, gradient = differences(fast, plain)
        allowed = self.allowed
        right = loss <= allowed.loss and gradient <= allowed.gradient
        return Compared(
            claim=claim,
            state="equal" if right else "differs",
            loss=loss,
            loss_tolerance=allowed.loss,
            gradient=gradient,
            gradient_tolerance=allowed.gradient,
            because=allowed.because,
        )

    # --- doing it ------------------------------------------------------------------------------

    def build(self, plan: RunPlan) -> Built:
        from expert.run.build import build

        built = build(plan, self.data.encoder, device=self.device, allow_remote_code=self._remote)
        built.loaded.module.eval()  # no dropout; gradients are computed all the same
        return built

    def batches(self, *, rows: int) -> Any:
        """The first sequences as training would get them; valid until the next is taken."""
        from expert.data.feed.run_data import split_batches

        def made() -> Any:
            taken = 0
            with split_batches(self.plan, self.first, rows=rows, device=self.device) as batches:
                for batch in batches:
                    yield batch
                    taken += rows
                    if taken >= self.count:
                        return

        return made()

    @property
    def first(self) -> PreparedSplit:
        """The training rows, cut to the sequences that are compared."""
        offsets = self.split.index.bin_offsets[: self.count + 1]
        return replace(self.split, index=replace(self.split.index, bin_offsets=offsets))

    def learnt(self, built: Built, *, rows: int) -> Learnt:
        return self._learnt(built, self.batches(rows=rows))

    def learnt_alone(self, built: Built) -> Learnt:
        """Every document of the sequences in a row of its own."""
        import numpy as np

        from expert.data.feed.loader import on_device, padded_tensors
        from expert.data.pack.packing import PAD_ID

        pieces = self._pieces()
        index = replace(self.split.index, rule="none", bin_offsets=np.arange(pieces + 1))
        store = self.split.open()
        bins = [np.array([number]) for number in range(pieces)]
        # A compiled model is compiled once for every width.
        width = self.split.index.length if self.plan.kernels.compile else None
        return self._learnt(
            built,
            (
                on_device(
                    padded_tensors(index, some, store, pad_id=PAD_ID, width=width),
                    some,
                    self.device,
                    soft=self.data.soft,
                )
                for some in bins
            ),
        )

    def _learnt(self, built: Built, batches: Any) -> Learnt:
        loss, targets = 0.0, 0
        for batch in batches:
            loss += float(built.engine.accumulate(batch, divisor=self.divisor))
            targets += batch.targets
        gradients = kept_gradients(built)
        built.engine.discard()
        return Learnt(loss=loss, targets=targets, gradients=gradients)

    def one_update(self, built: Built) -> Groups:
        """A real update, and the weights after it."""
        self.step(built, 0)
        return copied(built.tensors())

    def step(self, built: Built, number: int) -> None:
        from expert.training.step import seed_step, train_step

        seed_step(self.plan.optim.seed, number)
        batches = self.batches(rows=1)
        train_step(
            built.engine,
            [next(batches)],
            step=number + 1,
            rate=self.plan.optim.learning_rate,
            max_norm=self.plan.optim.max_grad_norm,
        )
        batches.close()

    def two_updates(self) -> tuple[dict[str, Tensor], Path]:
        from expert.training.checkpoint import save_checkpoint

        self._place = tempfile.TemporaryDirectory(prefix="expert-parity-")
        built = self.build(self.plan)
        self.step(built, 0)
        saved = save_checkpoint(Path(self._place.name), 1, built.tensors(), {})
        self.step(built, 1)
        weights = copied(built.tensors())["model"]
        del built
        self._let_go()
        return dict(weights), saved

    def second_update(self, saved: Path) -> dict[str, Tensor]:
        from expert.training.checkpoint import load_checkpoint

        try:
            built = self.build(self.plan)
            built.load(load_checkpoint(saved)[0])
            self.step(built, 1)
            return dict(copied(built.tensors())["model"])
        finally:
            self._place.cleanup()

    def _pieces(self) -> int:
        return int(self.split.index.bin_offsets[self.count])

    def _width(self, built: Built) -> int:
        sizes = [parameter.shape[-1] for parameter in built.loaded.module.parameters()]
        return max((size for size in sizes if size), default=1)

    def _let_go(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
