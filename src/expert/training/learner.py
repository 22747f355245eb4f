"""From gradients to weights: float32 master weights, fp16 loss scaling, clipping, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from expert.core.errors import ExpertError
from expert.parallel.engine import StepResult
from expert.parallel.graphs import Capture, CapturedOutputs, Replay, captured
from expert.planning.run_plan import OptimPlan
from expert.training.optim import (
    MasterWeights,
    Named,
    build_optimizer,
    clip,
    load_optimizer_tensors,
    optimizer_tensors,
    step_if_finite,
)

MODEL, OPTIMIZER = "model", "optimizer"
LOSS_SCALE = "loss_scale."
"""Prefix of the loss scaler's state in the optimizer's group."""
WARM_UPS = 2
"""Steps before the capture: the first one allocates the moments."""

Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the summed loss to the gradient norm and whether the weights changed."""


class OptimizerLearner:
    """The planned optimizer over float32 master weights."""

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
        """`capture`: captures the step once gradients stay at their addresses. `total_norm`: with
        sharded weights, computes the norm of all gradients from this rank's norms."""
        self._total_norm = total_norm
        self._device = device
        self._masters = MasterWeights(named)
        self._computing = [parameter for _, parameter in named]
        self._parameters = [parameter for _, parameter in self._masters.named]
        self._optimizer = build_optimizer(self._masters.named, plan, device=device)
        self._scaler = torch.amp.GradScaler(device.type) if loss_scaling else None
        self._losses: Tensor | None = None
        self._captured: CapturedStep | None = None
        # Only fused steps never synchronise with the host, not even to check for infinities.
        fused = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        if capture is not None and self._scaler is None and fused:
            self._captured = CapturedStep(self._optimizer, capture, device)

    def computing(self) -> list[Tensor]:
        """The weights that get gradients from a backward pass."""
        return list(self._computing)

    def backpropagate(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def collect(self, loss: Tensor) -> None:
        self._losses = loss if self._losses is None else self._losses + loss
        self._masters.collect()

    def take(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients from memory that will be overwritten."""
        self._masters.take(gradients)
        self._losses = loss.clone() if self._losses is None else self._losses + loss

    def gradients_to_reduce(self) -> list[Tensor]:
        """The accumulated gradients, in the same order on every rank, and the summed loss: it
        decides whether the step is applied, which must be the same on all ranks."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        losses = torch.zeros((), device=self._device) if self._losses is None else self._losses
        self._losses = losses.clone()
        return [*(parameter.grad for parameter in self._parameters), self._losses]  # type: ignore[list-item]

    def step(self, *, rate: float, max_norm: float) -> StepResult:
        """Step with the accumulated gradients, unless they are not finite."""
        if self._captured is not None:
            assert self._losses is not None, "a step of nothing"
            gradients = [parameter.grad for parameter in self._parameters]
            norm, applied = self._captured.step(
                partial(self._step, max_norm=max_norm), rate, self._losses, gradients
            )
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]  # a host number: nothing synchronises
            norm, applied = self._step(self._losses, max_norm=max_norm)
        return StepResult(grad_norm=norm, applied=applied)

    def _step(self, losses: Tensor | None, *, max_norm: float) -> tuple[Tensor, Tensor]:
        """The gradient norm, and whether the weights changed."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = clip(self._parameters, max_norm, self._total_norm)
        if losses is not None:
            norm = norm + 0 * losses  # a loss that is not finite also skips the step
        applied = step_if_finite(self._optimizer, norm)
        if self._scaler is not None:
            self._scaler.update()
        self._masters.publish()
        return norm, applied

    def discard(self) -> None:
        """Drop the accumulated gradients and free their memory."""
        # A backward pass that failed halfway leaves gradients on the computing parameters.
        for parameter in (*self._parameters, *self._computing):
            parameter.grad = None
        self._losses = None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The trained weights in full precision, and the optimizer state."""
        model = {name: parameter.detach() for name, parameter in self._masters.named}
        state = optimizer_tensors(self._optimizer, self._masters.named)
        if self._scaler is not None:
            scaler = self._scaler.state_dict()
            state[f"{LOSS_SCALE}scale"] = torch.tensor(scaler["scale"], dtype=torch.float64)
            state[f"{LOSS_SCALE}growth"] = torch.tensor(scaler["_growth_tracker"])
        return {MODEL: model, OPTIMIZER: state}

    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `tensors` returned."""
        saved = groups[MODEL]
        self._check_fits(saved)
        with torch.no_grad():
            for name, parameter in self._masters.named:
                parameter.copy_(saved[name])
        self._masters.publish()
        state = {k: v for k, v in groups[OPTIMIZER].items() if not k.startswith(LOSS_SCALE)}
        load_optimizer_tensors(self._optimizer, self._masters.named, state)
        if self._captured is not None:
            self._captured.forget()  # the moments have moved
        # After a fallback to float16, the checkpoint has no scale yet.
        if self._scaler is not None and f"{LOSS_SCALE}scale" in groups[OPTIMIZER]:
            scaler = self._scaler.state_dict()
            scaler["scale"] = float(groups[OPTIMIZER][f"{LOSS_SCALE}scale"])
            scaler["_growth_tracker"] = int(groups[OPTIMIZER][f"{LOSS_SCALE}growth"])
            self._scaler.load_state_dict(scaler)
        self.discard()

    def _check_fits(self, saved: Mapping[str, Tensor]) -> None:
        model = {name: tuple(parameter.shape) for name, parameter in self._masters.named}
        checkpoint = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        wrong = sorted(
            name for name in {*model, *checkpoint} if model.get(name) != checkpoint.get(name)
        )
        if wrong:
            was, now = (shapes.get(wrong[0], "absent") for shapes in (checkpoint, model))
            raise ExpertError(
                f"{wrong[0]}: saved as {was}, the model has {now}; {len(wrong)} such weights  "
                "(resume with the model and adapter of the checkpoint)"
            )


class CapturedStep:
    """A fused optimizer step as a CUDA graph, once the gradients stay at their addresses.

    Sorting 420 LoRA weights into the lists that fused kernels need takes torch 7 ms of CPU time per
    step; the kernels themselves run for less than 1 ms.
    """

    def __init__(self, optimizer: Optimizer, capture: Capture, device: torch.device) -> None:
        self._capture = capture
        factors = {group["rate_factor"] for group in optimizer.param_groups}
        self._rates = {factor: torch.zeros((), device=device) for factor in factors}
        self._losses = torch.zeros((), device=device)
        self._met: tuple[int, ...] = ()
        self._times = 0
        self._made: tuple[CapturedOutputs, Replay] | None = None
        optimizer._warned_capturable_if_run_uncaptured = True
        for group in optimizer.param_groups:
            # A tensor, which the graph reads again at every replay.
            group["lr"] = self._rates[group["rate_factor"]]
            if device.type == "cuda":
                group["capturable"] = True

    def step(
        self, step: Step, rate: float, losses: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Take a step: directly while gradients move, by the graph once they have stayed."""
        for factor, tensor in self._rates.items():
            tensor.fill_(rate * factor)
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
        """Capture again: the graph reads memory that is no longer in use."""
        self._times, self._made = 0, None
