"""The job behind `expert diagnose --parity`: do the fast paths compute the same as the baseline?

On the user's own model and rows, through the functions training uses. Every comparison is of summed
losses and of gradients, after one real step, so that no adapter is still zero, and without dropout.

Tolerances follow from rounding. A value passes about OPS_PER_BLOCK operations in each block, and a
float32 sum of K terms is off by sqrt(K) roundings: u * sqrt(ops * blocks * K) in float32. In bf16
or fp16 sums are kept in float32 and each operation's result is rounded once: u * sqrt(ops *
blocks). The gradient passes the model twice and is multiplied on its way: GRADIENT times
that. A sum of losses over many targets averages errors out, up to AVERAGED: errors common to all
remain. If the same pass differs when repeated (kernels that add in any order), three times that
spread is allowed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import EXIT_OK, EXIT_RUN_FAILED, ExpertError
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.build import Built, device_of
from expert.run.open import open_run
from expert.run.session.failures import is_out_of_memory
from expert.run.session.session import copied, release_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.data.feed.feed import Batch
    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.manifest.reader import ReadManifest
    from expert.parallel.engine import Groups
    from expert.planning.run_plan import RunPlan

SEQUENCES = 4
"""Sequences that are compared: enough for several micro-batches, few enough for any card."""
MOST_CHECKPOINT_BYTES = 2**31
OPS_PER_BLOCK = 16
GRADIENT_FACTOR = 4.0
MAX_AVERAGING = 8.0
MAX_KEPT_GRADIENTS = 50_000_000
"""Gradients kept for comparing; of a larger model those of the first and last layers."""

State = Literal["equal", "differs", "left out"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One claim, and its error."""

    claim: str
    state: State
    loss: float | None = None
    """Relative difference of the summed losses (`off_by`)."""
    loss_tolerance: float | None = None
    gradient: float | None = None
    """Norm of the difference of the gradients over the norm of the baseline's."""
    gradient_tolerance: float | None = None
    because: str = ""
    """Where the tolerance comes from, or why the claim was left out."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingPass:
    """A pass over the sequences: the summed loss, and float32 gradients on the CPU."""

    loss: float
    targets: int
    gradients: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    loss: float
    gradient: float
    because: str


def skipped(claim: str, because: str) -> Compared:
    return Compared(claim=claim, state="left out", because=because)


def kept_gradients(built: Built) -> list[Tensor]:
    """Gradients of the trainable weights, from both ends of the model until enough are kept."""
    found = list(built.engine.gradients().values())
    order = sorted(range(len(found)), key=lambda place: min(place, len(found) - 1 - place))
    kept, count = list["Tensor"](), 0
    for place in order:
        gradient = found[place]
        if count and count + gradient.numel() > MAX_KEPT_GRADIENTS:
            break
        kept.append(gradient.detach().float().cpu().clone())
        count += gradient.numel()
    return kept


def differences(one: TrainingPass, other: TrainingPass) -> tuple[float, float]:
    """Relative differences of the losses and of the gradients."""
    loss = off_by(one.loss, other.loss, other.targets)
    return loss, relative(one.gradients, other.gradients)


def off_by(loss: float, right: float, targets: int) -> float:
    """A difference of summed losses, relative to the reference, or to 1 per target if that is
    larger: rounding moves the small losses of a model that has memorised its rows by as much."""
    return abs(loss - right) / max(abs(right), targets)


def relative(ours: list[Tensor], right: list[Tensor]) -> float:
    apart = math.sqrt(
        sum(float((a - b).double().pow(2).sum()) for a, b in zip(ours, right, strict=True))
    )
    size = math.sqrt(sum(float(b.double().pow(2).sum()) for b in right))
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def tolerance(plan: RunPlan, blocks: int, width: int, targets: int) -> Tolerance:
    """The error that rounding alone may cause in a loss and a gradient; see the top of the file."""
    kernels = plan.kernels
    ops = OPS_PER_BLOCK * blocks
    unit, name = {
        "bf16": (2.0**-9, "bf16 rounds at 2^-9"),
        "fp16": (2.0**-12, "fp16 rounds at 2^-12"),
        "fp32": (2.0**-24, "float32 rounds at 2^-24"),
    }[kernels.precision]
    if kernels.precision == "fp32" and kernels.tf32 and kernels.device == "cuda":
        unit, name = 2.0**-12, "TF32 rounds at 2^-12"
    terms = width if unit == 2.0**-24 else 1
    size = unit * math.sqrt(ops * terms)
    summed = f", sums of {width} terms" if terms > 1 else ""
    return Tolerance(
        loss=size / min(math.sqrt(max(1, targets)), MAX_AVERAGING),
        gradient=GRADIENT_FACTOR * size,
        because=f"{name}, {ops} operations in {blocks} blocks{summed}",
    )


def widened(allowed: Tolerance, loss: float, gradient: float) -> Tolerance:
    """If the same pass differs when repeated, allow at least three times that."""
    if 3 * loss <= allowed.loss and 3 * gradient <= allowed.gradient:
        return allowed
    return Tolerance(
        loss=max(allowed.loss, 3 * loss),
        gradient=max(allowed.gradient, 3 * gradient),
        because=f"{allowed.because}; three times the measured spread of the same pass twice "
        f"({loss:.1e}, {gradient:.1e})",
    )


@dataclass(frozen=True, kw_only=True)
class Parity:
    model: str
    device: str
    sequences: int
    targets: int
    compared: tuple[Compared, ...]

    @property
    def exit_code(self) -> int:
        """0, or 4 if a claim does not hold."""
        wrong = any(each.state == "differs" for each in self.compared)
        return EXIT_RUN_FAILED if wrong else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": self.exit_code}


class CannotCompare(ExpertError):
    """A run whose paths cannot be compared."""


def parity(
    read: ReadManifest,
    *,
    model: str | None = None,
    vram: str | None = None,
    allow_remote_code: bool = False,
    tell: Callable[[str], None] = lambda claim: None,
) -> Parity:
    """Compare every fast path of the plan with the baseline."""
    opened = open_run(read, model=model, vram=vram)
    data = opened.data
    if data.train is None:
        raise CannotCompare(
            "--parity: streamed rows cannot be read twice  (set training.dataset.streaming: false)"
        )
    return _Comparison(opened.plan, data, data.train, allow_remote_code, tell).all()


class _Comparison:
    def __init__(
        self,
        plan: RunPlan,
        data: RunData,
        split: PreparedSplit,
        allow_remote_code: bool,
        tell: Callable[[str], None],
    ) -> None:
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
        self.step(built, 0)
        self._groups = copied(built.tensors())
        whole = self.trained(built, self.batches(rows=self.rows))
        again = self.trained(built, self.batches(rows=self.rows))
        blocks = max(1, len(built.loaded.blocks))
        sizes = [parameter.shape[-1] for parameter in built.loaded.module.parameters()]
        width = max((size for size in sizes if size), default=1)
        self.allowed = tolerance(self.plan, blocks, width, whole.targets)
        self.allowed = widened(self.allowed, *differences(whole, again))
        compared = [self.accumulated(built, whole), self.alone(built, whole), self.isolated(built)]
        del built
        release_memory(self.device)
        compared += [*self.kernels(whole), self.resumed()]
        return Parity(
            model=self.plan.model.name,
            device=self.plan.target,
            sequences=self.count,
            targets=whole.targets,
            compared=tuple(compared),
        )

    # --- claims --------------------------------------------------------------------------------

    def accumulated(self, built: Built, whole: TrainingPass) -> Compared:
        claim = f"accumulated = whole ({self.rows} × 1 = 1 × {self.rows})"
        self._tell(claim)
        if self.rows < 2:
            return skipped(claim, "one sequence goes at once: there is nothing to accumulate")
        return self.verdict(claim, self.trained(built, self.batches(rows=1)), whole)

    def alone(self, built: Built, whole: TrainingPass) -> Compared:
        claim = "padded = alone" if self.plan.is_padded else "packed = unpacked"
        self._tell(claim)
        pieces = self._pieces()
        if pieces <= self.count and not self.plan.is_padded:
            return skipped(claim, "no sequence holds two documents")
        return self.verdict(claim, whole, self.pass_unpacked(built))

    def isolated(self, built: Built) -> Compared:
        """Change the first document of every sequence: the losses of the others must stay."""
        from expert.training.objectives.next_token import NextToken

        claim = "documents are isolated"
        self._tell(claim)
        sums, targets = [0.0] * 4, 0
        for batch in self.batches(rows=1):
            if (parts := apart(batch)) is None:
                continue
            others, first, turned = parts
            changed = replace(others, tokens=turned), replace(first, tokens=turned)
            targets += others.targets
            for place, part in enumerate((others, changed[0], first, changed[1])):
                sums[place] += float(built.engine.evaluate(NextToken().evaluate, part)["loss"])
        if not targets:
            return skipped(claim, "no sequence holds two documents")
        others_off = off_by(sums[1], sums[0], targets)
        own = abs(sums[3] - sums[2]) / max(abs(sums[2]), 1e-30)
        why = f"the first document of each sequence was changed, and its own loss by {own:.0%}; "
        return self.judged(claim, loss=others_off, because=why)

    def kernels(self, whole: TrainingPass) -> list[Compared]:
        """Every kernel switch that the plan turns on, against the baseline without it."""
        kernels, found = self.plan.kernels, []
        kind, characters = kernels.attention, self.plan.model.name == CHAR_GPT
        eager = "the plan is eager already" if kind == "eager" else ""
        alone = "the character model has one attention" if characters else ""
        for claim, path, off, left_out in (
            (f"{'chosen' if eager else kind} attention = eager attention",
             "attention", "eager", eager or alone),
            ("compiled = eager",
             "compile", False, "" if kernels.compile else "the plan compiles nothing"),
            ("fused loss = plain loss",
             "fused_loss", False, "" if kernels.fused_loss else "the plan has the plain loss"),
            ("fused blocks = plain blocks",
             "fused_blocks", False, "" if kernels.fused_blocks else "the plan has none"),
        ):  # fmt: skip
            found.append(
                skipped(claim, left_out)
                if left_out
                else self.other(claim, {f"kernels.{path}": off}, whole)
            )
        return found

    def resumed(self) -> Compared:
        """Two steps in a row, and with a checkpoint on disk between them: bit for bit."""
        claim = "resumed = uninterrupted"
        self._tell(claim)
        size = self.plan.disk.checkpoint_bytes or 0
        if size > MOST_CHECKPOINT_BYTES:
            return skipped(claim, f"a checkpoint has {size / 2**30:.1f} GiB")
        straight, broken = self.two_steps_and_resumed()
        pairs = [(straight[name], broken[name]) for name in sorted(straight)]
        apart_by = relative([a.float() for a, _ in pairs], [b.float() for _, b in pairs])
        if self.device.type == "cpu":
            because = "bit for bit: the same numbers in the same order"
            allowed = Tolerance(loss=0.0, gradient=0.0, because=because)
        else:
            allowed = replace(self.allowed, gradient=self.allowed.loss)
        what = "all trained weights after two steps; "
        return self.judged(claim, gradient=apart_by, because=what, allowed=allowed)

    def other(self, claim: str, values: dict[str, Any], whole: TrainingPass) -> Compared:
        """The same sequences through a model that is built as the baseline."""
        self._tell(claim)
        plain = None
        try:
            plain = self.plain(values)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        release_memory(self.device)
        if plain is None:
            return skipped(claim, "the baseline does not fit into the memory")
        return self.verdict(claim, whole, plain)

    def plain(self, values: dict[str, Any]) -> TrainingPass:
        built = self.build(self.plan.with_values(values, "for comparing", "machine"))
        assert self._groups is not None
        built.load(self._groups)
        return self.trained(built, self.batches(rows=1))

    def verdict(self, claim: str, fast: TrainingPass, plain: TrainingPass) -> Compared:
        loss, gradient = differences(fast, plain)
        return self.judged(claim, loss=loss, gradient=gradient)

    def judged(
        self,
        claim: str,
        *,
        loss: float | None = None,
        gradient: float | None = None,
        allowed: Tolerance | None = None,
        because: str = "",
    ) -> Compared:
        """Compare a claim with the usual tolerances, or with its own."""
        allowed = allowed or self.allowed
        right = (loss or 0.0) <= allowed.loss and (gradient or 0.0) <= allowed.gradient
        return Compared(
            claim=claim,
            state="equal" if right else "differs",
            loss=loss,
            loss_tolerance=allowed.loss if loss is not None else None,
            gradient=gradient,
            gradient_tolerance=allowed.gradient if gradient is not None else None,
            because=because + allowed.because,
        )

    # --- doing it ------------------------------------------------------------------------------

    def build(self, plan: RunPlan) -> Built:
        from expert.run.build import build

        built = build(plan, self.data.encoder, device=self.device, allow_remote_code=self._remote)
        built.loaded.module.eval()  # no dropout; gradients are still computed
        return built

    def batches(self, *, rows: int) -> Generator[Batch]:
        """The first sequences as training would get them; each is valid until the next is taken."""
        from expert.data.feed.run_data import split_batches

        with split_batches(self.plan, self.first, rows=rows, device=self.device) as batches:
            yield from batches

    @property
    def first(self) -> PreparedSplit:
        """The training rows, cut to the sequences that are compared."""
        offsets = self.split.index.bin_offsets[: self.count + 1]
        return replace(self.split, index=replace(self.split.index, bin_offsets=offsets))

    def pass_unpacked(self, built: Built) -> TrainingPass:
        """Every document of the sequences in its own row."""
        import numpy as np

        from expert.data.feed.loader import padded_rows
        from expert.data.feed.order import RankBatch

        pieces = self._pieces()
        index = replace(self.split.index, rule="none", bin_offsets=np.arange(pieces + 1))
        store = self.split.open()
        # A fixed width, or every width would be compiled.
        width = self.split.index.length if self.plan.kernels.compile else None
        bins = (RankBatch(np.array([number])) for number in range(pieces))
        rows = (padded_rows(index, some, store, self.device, width) for some in bins)
        return self.trained(built, rows)

    def trained(self, built: Built, batches: Iterable[Batch]) -> TrainingPass:
        from expert.training.objectives.next_token import NextToken
        from expert.training.step import forward_backward

        loss, targets = 0.0, 0
        for batch in batches:
            loss += float(
                forward_backward(built.engine, NextToken(), batch, divisor=self.divisor)[0]
            )
            targets += batch.targets
        gradients = kept_gradients(built)
        built.engine.discard()
        return TrainingPass(loss=loss, targets=targets, gradients=gradients)

    def step(self, built: Built, number: int) -> None:
        from expert.training.objectives.next_token import NextToken
        from expert.training.step import seed_step, train_step

        seed_step(self.plan.optim.seed, number)
        with closing(self.batches(rows=1)) as batches:
            train_step(
                built.engine,
                NextToken(),
                [next(batches)],
                step=number + 1,
                rate=self.plan.optim.learning_rate,
                max_norm=self.plan.optim.max_grad_norm,
            )

    def two_steps_and_resumed(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights after two steps in a row, and with a checkpoint on disk between them."""
        from expert.training.checkpoint import load_checkpoint, save_checkpoint

        with tempfile.TemporaryDirectory(prefix="expert-parity-") as place:
            built = self.build(self.plan)
            self.step(built, 0)
            saved = save_checkpoint(Path(place), 1, built.tensors(), {})
            self.step(built, 1)
            straight = dict(copied(built.tensors())["model"])
            del built
            release_memory(self.device)
            built = self.build(self.plan)
            built.load(load_checkpoint(saved)[0])
            self.step(built, 1)
            return straight, dict(copied(built.tensors())["model"])

    def _pieces(self) -> int:
        return int(self.split.index.bin_offsets[self.count])


# --- one document changed ------------------------------------------------------------------------


def apart(batch: Batch) -> tuple[Batch, Batch, Tensor] | None:
    """A one-row batch with the labels of all documents but the first, the same with those of the
    first, and its tokens with the first document changed. None if either has no label."""
    import torch

    places = batch.target_places[: batch.targets].long()
    own = torch.arange(batch.labels.numel(), device=places.device) < batch.boundaries[1]
    if not own[places].any() or own[places].all():
        return None
    tokens, end = batch.tokens.clone(), int(batch.boundaries[1])
    # Reversed: every token stays in the vocabulary, and few keep their place.
    tokens.view(-1)[:end] = tokens.view(-1)[:end].flip(0)
    return _with_labels_at(batch, ~own), _with_labels_at(batch, own), tokens


def _with_labels_at(batch: Batch, where: Tensor) -> Batch:
    """The batch with the labels of some places only."""
    import torch

    from expert.data.feed.batches import IGNORED

    places = batch.target_places[: batch.targets].long()
    kept = places[where[places]]
    target_places = torch.full_like(batch.target_places, batch.labels.numel() - 1)
    target_places[: len(kept)] = kept.to(target_places.dtype)
    return replace(
        batch,
        labels=batch.labels.masked_fill(~where.view_as(batch.labels), IGNORED),
        target_places=target_places,
        counts=replace(batch.counts, targets=len(kept)),
    )
