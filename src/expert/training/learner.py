"""Gradients to weights: masters in float32, loss scaling for float16, clipping, one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from expert.parallel.engine import Applied
from expert.parallel.graphs import Capture, Made, Replay, captured
from expert.planning.run_plan import OptimPlan
from expert.training.optim import (
    Masters,
    Named,
    StateDoesNotFit,
    build_optimizer,
    clip,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
    step_if_finite,
)

MODEL, OPTIMIZER = "model", "optimizer"
LOSS_SCALE = "loss_scale."
"""How the names of loss scaling's own numbers begin, in the optimizer's group."""
WARM_UPS = 2
"""Steps before one is captured: the first makes the moments."""

Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""With the sum of the losses: the norm of the gradients, and whether the weights were changed."""


class OptimizerLearner:
    """The planned optimizer over the float32 masters of what is trained."""

    def __init__(
        self,
        named: Named,
        plan: OptimPlan,
        *,
        device: torch.device,
        loss_scaling: bool = False,
        capture: Capture | None = None,
        total_norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`capture`: the step is captured with it once gradients stay where they are.
        `total_norm`: where weights are spread over ranks, the norm of all gradients from the norms
        of this rank's."""
        self._total_norm = total_norm
        self._device = device
        self._masters = Masters(named)
        self._computing = [parameter for _, parameter in named]
        self._parameters = [parameter for _, parameter in self._masters.named]
        self._optimizer = build_optimizer(self._masters.named, plan, device=device)
        self._scaler = torch.amp.GradScaler(device.type) if loss_scaling else None
        self._losses: Tensor | None = None
        self._captured: CapturedStep | None = None
        # Only a fused step asks the host for nothing: not even whether the gradients are finite.
        fused = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        if capture is not None and self._scaler is None and fused:
            self._captured = CapturedStep(self._optimizer, capture, device)

    def computing(self) -> list[Tensor]:
        """What gets gradients from a backward pass: the weights that compute."""
        return list(self._computing)

    def backpropagate(self, loss: Tensor) -> None:
        """The gradients of a loss, where the weights that compute have theirs."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def collect(self, loss: Tensor) -> None:
        """Add the gradients of this loss to what was accumulated."""
        self._losses = loss if self._losses is None else self._losses + loss
        self._masters.collect()

    def take(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that lie elsewhere and will be overwritten there."""
        self._masters.take(gradients)
        self._losses = loss.clone() if self._losses is None else self._losses + loss

    def to_sum_over_ranks(self) -> list[Tensor]:
        """What was accumulated, in the same order on every rank, and the sum of the losses: it
        says whether the step is taken, which must be the same everywhere."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        losses = torch.zeros((), device=self._device) if self._losses is None else self._losses
        self._losses = losses.clone()
        return [*(parameter.grad for parameter in self._parameters), self._losses]  # type: ignore[list-item]

    def step(self, *, rate: float, max_norm: float) -> Applied:
        """One step with what was accumulated; none where it is not finite."""
        if self._captured is not None:
            assert self._losses is not None, "a step of nothing"
            gradients = [parameter.grad for parameter in self._parameters]
            norm, applied = self._captured.step(
                partial(self._step, max_norm=max_norm), rate, self._losses, gradients
            )
        else:
            set_rate(self._optimizer, rate)
            norm, applied = self._step(self._losses, max_norm=max_norm)
        return Applied(grad_norm=norm, applied=applied)

    def _step(self, losses: Tensor | None, *, max_norm: float) -> tuple[Tensor, Tensor]:
        """The norm of the gradients, and whether the weights were changed by them."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = clip(self._parameters, max_norm, self._total_norm)
        if losses is not None:
            norm = norm + 0 * losses  # a loss that is not finite counts like its gradients
        applied = step_if_finite(self._optimizer, norm)
        if self._scaler is not None:
            self._scaler.update()
        self._masters.publish()
        return norm, applied

    def discard(self) -> None:
        """Forget what was accumulated; the memory goes back too."""
        # Those that compute have gradients of their own where a backward pass broke off halfway.
        for parameter in (*self._parameters, *self._computing):
            parameter.grad = None
        self._losses = None

    def gradients(self) -> dict[str, Tensor]:
        """What was accumulated so far, in full precision; valid until the next change."""
        named = self._masters.named
        return {name: weight.grad for name, weight in named if weight.grad is not None}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What is trained in full precision, and the optimizer's state."""
        model = {name: parameter.detach() for name, parameter in self._masters.named}
        state = optimizer_tensors(self._optimizer, self._masters.named)
        if self._scaler is not None:
            facts = self._scaler.state_dict()
            state[f"{LOSS_SCALE}scale"] = torch.tensor(facts["scale"], dtype=torch.float64)
            state[f"{LOSS_SCALE}growth"] = torch.tensor(facts["_growth_tracker"])
        return {MODEL: model, OPTIMIZER: state}

    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go back to what `tensors` gave."""
        saved = groups[MODEL]
        self._check_fits(saved)
        with torch.no_grad():
            for name, parameter in self._masters.named:
                parameter.copy_(saved[name])
        self._masters.publish()
        state = {k: v for k, v in groups[OPTIMIZER].items() if not k.startswith(LOSS_SCALE)}
        load_optimizer_tensors(self._optimizer, self._masters.named, state)
        if self._captured is not None:
            self._captured.forget()  # its moments lie elsewhere now
        # A run that fell back to float16 has no scale yet.
        if self._scaler is not None and f"{LOSS_SCALE}scale" in groups[OPTIMIZER]:
            facts = self._scaler.state_dict()
            facts["scale"] = float(groups[OPTIMIZER][f"{LOSS_SCALE}scale"])
            facts["_growth_tracker"] = int(groups[OPTIMIZER][f"{LOSS_SCALE}growth"])
            self._scaler.load_state_dict(facts)
        self.discard()

    def _check_fits(self, saved: Mapping[str, Tensor]) -> None:
        own = {name: tuple(parameter.shape) for name, parameter in self._masters.named}
        there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        wrong = sorted(name for name in {*own, *there} if own.get(name) != there.get(name))
        if wrong:
            was, now = (shapes.get(wrong[0], "absent") for shapes in (there, own))
            raise StateDoesNotFit(
                f"{wrong[0]}: saved as {was}, the model has {now}; {len(wrong)} such weights  "
                "(resume with the model and adapter of the checkpoint)"
            )


class CapturedStep:
    """The step of a fused optimizer whose gradients stay in place: one launch for all weights.

    Sorting 420 LoRA weights into the lists that fused kernels take costs torch 7 ms of a CPU core
    each time; the kernels themselves run for less than one on a card.
    """

    def __init__(self, optimizer: Optimizer, capture: Capture, device: torch.device) -> None:
        self._capture = capture
        self._rate = torch.zeros((), device=device)
        self._losses = torch.zeros((), device=device)
        self._met: tuple[int, ...] = ()
        self._times = 0
        self._made: tuple[Made, Replay] | None = None
        optimizer._warned_capturable_if_run_uncaptured = True
        for group in optimizer.param_groups:
            group["lr"] = self._rate  # what is captured reads it again each time
            if device.type == "cuda":
                group["capturable"] = True

    def step(
        self, step: Step, rate: float, losses: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Take a step: directly while gradients move, captured once they have stayed."""
        self._rate.fill_(rate)
        self._losses.copy_(losses)
        places = tuple(0 if tensor is None else tensor.data_ptr() for tensor in gradients)
        if places != self._met:
            self._met, self._times, self._made = places, 0, None
        self._times += 1
        if self._times <= WARM_UPS:
            return step(self._losses)
        if self._made is None:
            self._made = captured(lambda: list(step(self._losses)), self._capture)
        (norm, applied), replay = self._made
        replay()
        assert norm is not None
        assert applied is not None
        return norm.clone(), applied.clone()

    def forget(self) -> None:
        """Capture again: the graph reads memory that is no longer used."""
        self._times, self._made = 0, None
