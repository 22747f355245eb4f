"""Optimizers as planned: built, stepped, written down as named tensors and read back bit by bit."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.parallel.replicated import pieces
from expert.planning.run_plan import OptimPlan

Named = Sequence[tuple[str, Parameter]]

EIGHT_BIT = ("adamw_bnb_8bit", "paged_adamw_8bit")
MOMENTUM = 0.9
SCRATCH_WEIGHTS = 2**24  # 64 MiB of float32
# Tables that bitsandbytes' states share: written once, as safetensors wants no memory twice.
_SHARED = ("qmap1", "qmap2")
_SHARED_NAME = "shared"
_STATE_KEYS = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "8-bit": ("step", "state1", "state2", "absmax1", "absmax2"),
    "8-bit, small": ("step", "state1", "state2"),
}
# Norms and biases have one dimension; embeddings and soft prompts are told by their names.
_EMBEDDING = re.compile(
    r"(?:^|[._])(?:emb(?:ed(?:ding)?s?)?|wte|wpe|(?:soft_?)?prompts?)(?:$|[._])", re.IGNORECASE
)
_LOW_RANK_FACTOR = re.compile(r"lora_(?:embedding_)?[AB](?:$|\.)")


class OptimizerUnavailable(ExpertError):
    """The planned optimizer cannot run here; the plan after it names another."""

    def __init__(self, optimizer: str, reason: str) -> None:
        self.optimizer, self.reason = optimizer, reason
        super().__init__(optimizer, reason)

    def __str__(self) -> str:
        return f"optim: {self.optimizer} cannot run here: {self.reason}  (optim: adamw_torch can)"


class StateDoesNotFit(ExpertError):
    """Saved optimizer tensors that belong to other parameters or another optimizer."""


def build_optimizer(named: Named, plan: OptimPlan, *, device: torch.device) -> Optimizer:
    """The planned optimizer over these parameters, with weight decay on matrices only."""
    kind = plan.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": plan.weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, betas, epsilon = plan.learning_rate, plan.betas, plan.epsilon
    if kind == "adamw_torch":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon)
    if kind == "adamw_torch_fused":
        _try_fused(named)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)
    if kind in EIGHT_BIT:
        try:
            bitsandbytes = importlib.import_module("bitsandbytes")
        except ImportError as error:
            reason = f"bitsandbytes is not installed ({error}): {pip_install('quant')}"
            raise OptimizerUnavailable(kind, reason) from error
        # Paging moves states between card and host; on a CPU there is nowhere to move them.
        paged = kind == "paged_adamw_8bit" and device.type == "cuda"
        eight_bit: Optimizer = bitsandbytes.optim.AdamW8bit(
            groups, lr=rate, betas=betas, eps=epsilon, is_paged=paged
        )
        return eight_bit
    if kind == "sgd":
        return DecoupledSgd(groups, lr=rate, momentum=MOMENTUM)
    raise ValueError(f"optim: {kind} is not known")


class DecoupledSgd(torch.optim.SGD):
    """SGD whose weight decay shrinks the weights, as AdamW's does; torch's adds it to the gradient,
    where the momentum multiplies it by ten."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight.grad is not None]
            if group["weight_decay"] and moved:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


def _try_fused(named: Named) -> None:
    """Step one weight of every device and type: torch itself would only ask at the first step."""
    for device, dtype in {(parameter.device, parameter.dtype) for _, parameter in named}:
        probe = torch.zeros(1, device=device, dtype=dtype)
        probe.grad = torch.zeros_like(probe)
        try:
            torch.optim.AdamW([probe], fused=True).step()
        except RuntimeError as error:  # torch names the device or the type it has no kernel for
            raise OptimizerUnavailable("adamw_torch_fused", str(error)) from error


def decays(name: str, parameter: Tensor) -> bool:
    """True for matrices, low-rank factors among them; not for embeddings, norms and biases."""
    if _LOW_RANK_FACTOR.search(name):
        return True
    # IA3's scales and AdaLoRA's singular values are vectors with a second dimension of one.
    # Of a weight that is spread over ranks a rank may hold a single row.
    shape = getattr(parameter, "whole_shape", parameter.shape)
    is_matrix = len(shape) >= 2 and min(shape) > 1
    return is_matrix and not _EMBEDDING.search(name)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Every group steps with this rate from now on; a host number, so nothing waits."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(
    parameters: Iterable[Tensor], max_norm: float, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The norm of all gradients together, on their device; they are scaled down to `max_norm`.

    0 leaves them as they are, and so does a norm that is not finite: what was wrong can be seen.
    `total`: the norm of all ranks' gradients from the norms of this one's.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    with torch.no_grad():
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        each = torch.stack(norms)
        norm: Tensor = torch.linalg.vector_norm(each) if total is None else total(each)
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, torch.where(torch.isfinite(norm), factor, 1.0))
    return norm


def step_if_finite(optimizer: Optimizer, norm: Tensor) -> Tensor:
    """Take the step unless the norm of the gradients is not finite; returns whether it was taken.

    A step that is not taken changes nothing: no weight, no moment, no count. Fused optimizers
    decide that on the device; for the others the norm is read back, the one wait in a step.
    """
    applied = torch.isfinite(norm)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # As torch's own GradScaler does it: the kernel leaves early where found_inf is 1, and the
        # count of steps, already raised, is lowered by found_inf again.
        where = optimizer.param_groups[0]["params"][0].device  # the host's, where it is offloaded
        optimizer.found_inf = (~applied).to(where, torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif bool(applied):
        optimizer.step()
    return applied


def optimizer_tensors(optimizer: Optimizer, named: Named) -> dict[str, Tensor]:
    """The whole state as tensors called `<parameter>.<key>`, each with memory of its own.

    They are the live ones: copy them before the next step where they are to outlast it.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:  # SGD's momentum before its first step
                continue
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            if key in _SHARED:
                tensors.setdefault(f"{_SHARED_NAME}.{key}", tensor)
            else:
                tensors[f"{name}.{key}"] = tensor
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, named: Named, tensors: Mapping[str, Tensor]
) -> None:
    """Put the state back as `optimizer_tensors` gave it; the tensors are copied."""
    by_parameter = _split_by_parameter(named, tensors)
    for name, parameter in named:
        if name in by_parameter:
            _check_fits(optimizer, name, parameter, by_parameter[name])
    optimizer.state.clear()
    places = {
        parameter: (group, group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    }
    for name, parameter in named:
        if name not in by_parameter:  # it has had no gradient yet
            continue
        state = by_parameter[name]
        if _is_eight_bit(optimizer):
            group, group_index, index = places[parameter]
            optimizer.init_state(group, parameter, group_index, index)  # type: ignore[attr-defined]
            _fill_eight_bit(optimizer.state[parameter], state, tensors)
        else:
            on_device = bool(
                optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            )
            optimizer.state[parameter] = {
                key: value.detach().to(
                    "cpu" if key == "step" and not on_device else parameter.device, copy=True
                )
                for key, value in state.items()
            }


def _fill_eight_bit(
    made: dict[str, Any], state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Fill the buffers that bitsandbytes made, which may be paged, instead of replacing them."""
    for key, value in state.items():
        if key == "step":
            made[key] = int(value)
        else:
            made[key].copy_(value)
    for key in _SHARED:
        if key in made:
            made[key].copy_(tensors[f"{_SHARED_NAME}.{key}"])


def _split_by_parameter(
    named: Named, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    known = {name for name, _ in named}
    found: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name == _SHARED_NAME and key in _SHARED:
            continue
        if name not in known:
            raise StateDoesNotFit(
                f"{full_name}: no parameter of this run is called {name or full_name}  "
                "(resume with the manifest this checkpoint was written with)"
            )
        found.setdefault(name, {})[key] = tensor
    return found


def _check_fits(
    optimizer: Optimizer, name: str, parameter: Parameter, state: Mapping[str, Tensor]
) -> None:
    """Raise unless the saved keys and shapes are those this optimizer keeps for the parameter."""
    kind = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"
    if _is_eight_bit(optimizer):
        smallest = optimizer.args.min_8bit_size  # type: ignore[attr-defined]
        kind = "8-bit, small" if parameter.numel() < smallest else "8-bit"
    expected = set(_STATE_KEYS[kind])
    if set(state) != expected:
        raise StateDoesNotFit(
            f"{name}: the saved optimizer state has {', '.join(sorted(state))}, this optimizer "
            f"keeps {', '.join(sorted(expected))}  (resume with the optimizer of the checkpoint)"
        )
    for key, value in state.items():
        if key != "step" and not key.startswith("absmax") and value.shape != parameter.shape:
            raise StateDoesNotFit(
                f"{name}.{key}: saved with shape {list(value.shape)}, the parameter has "
                f"{list(parameter.shape)}  (resume with the manifest of the checkpoint)"
            )


def _is_eight_bit(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "init_state") and hasattr(optimizer, "name2qmap")


@dataclass(kw_only=True, eq=False)
class _Pair:
    """A parameter that computes in 16 bits, its float32 master and the master's gradient."""

    parameter: Parameter
    master: Parameter
    gradient: Tensor | None = None
    """Kept between steps: making 504 tensors took 2 ms of each on an H200."""


def _lies_in_another(parameter: Tensor) -> bool:
    """Whether the rows of a matrix lie apart: also where there is only one of them."""
    return parameter.dim() == 2 and parameter.stride() != (parameter.shape[1], 1)


class Masters:
    """Float32 copies of parameters that compute in 16 bits; the optimizer steps the copies.

    A step of 1e-5 on a bfloat16 weight of 1 is rounded away: half its spacing there is 2e-3. The
    copies keep such steps. A parameter that is float32 already is its own master, unless it is a
    part of a larger matrix: fused optimizers take gradients that lie as their weights do.
    """

    def __init__(self, named: Named) -> None:
        self._pairs = [
            _Pair(
                parameter=parameter,
                master=Parameter(parameter.detach().to(torch.float32, copy=True)),
            )
            for _, parameter in named
            if parameter.dtype != torch.float32 or _lies_in_another(parameter)
        ]
        self._scratch: Tensor | None = None
        self._computing = [parameter for _, parameter in named]
        self._kept: dict[int, Tensor] = {}
        masters = {id(pair.parameter): pair.master for pair in self._pairs}
        self._have_masters = frozenset(masters)
        self.named = [(name, masters.get(id(parameter), parameter)) for name, parameter in named]

    def collect(self) -> None:
        """Add the parameters' gradients to the masters' in float32 and let go of the former."""
        fresh, fresh_grads = list[Tensor](), list[Tensor]()
        sums, more_grads = list[Tensor](), list[Tensor]()
        for pair in self._pairs:
            grad = pair.parameter.grad
            if grad is None:
                continue
            if pair.master.grad is None:
                if pair.gradient is None:
                    pair.gradient = torch.empty_like(pair.master)
                pair.master.grad = pair.gradient
                fresh.append(pair.gradient)
                fresh_grads.append(grad)
            else:
                sums.append(pair.master.grad)
                more_grads.append(grad)
            pair.parameter.grad = None
        with torch.no_grad():
            if fresh:
                torch._foreach_copy_(fresh, fresh_grads)
            self._add(sums, more_grads)

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters, in their order, that will be overwritten where they
        are: a copy is kept of those that would not be copied anyway."""
        fresh, fresh_grads = list[Tensor](), list[Tensor]()
        sums, more_grads = list[Tensor](), list[Tensor]()
        for parameter, gradient in zip(self._computing, gradients, strict=True):
            if gradient is None:
                continue
            if id(parameter) in self._have_masters:
                parameter.grad = gradient  # its master takes it from there
            elif parameter.grad is None:
                kept = self._kept.setdefault(id(parameter), torch.empty_like(parameter))
                parameter.grad = kept
                fresh.append(kept)
                fresh_grads.append(gradient)
            else:
                sums.append(parameter.grad)
                more_grads.append(gradient)
        with torch.no_grad():
            if fresh:
                torch._foreach_copy_(fresh, fresh_grads)
            if sums:
                torch._foreach_add_(sums, more_grads)
        self.collect()

    def _add(self, sums: list[Tensor], grads: list[Tensor]) -> None:
        """Add by way of a float32 copy, piece by piece.

        Adding bfloat16 to float32 has no kernel for whole lists: 504 LoRA gradients took 2.9 ms on
        an H200 one by one, and 0.31 ms copied first. A tensor too large for a piece goes directly.
        """
        for piece in pieces([grad.numel() for grad in grads], SCRATCH_WEIGHTS):
            first, size = piece.start, sum(grads[index].numel() for index in piece)
            if size > SCRATCH_WEIGHTS:
                sums[first].add_(grads[first])
                continue
            if self._scratch is None:
                self._scratch = torch.empty(SCRATCH_WEIGHTS, device=grads[first].device)
            flat = torch.split(self._scratch[:size], [grads[index].numel() for index in piece])
            copies = [
                part.view(grads[index].shape) for part, index in zip(flat, piece, strict=True)
            ]
            torch._foreach_copy_(copies, [grads[index] for index in piece])
            torch._foreach_add_([sums[index] for index in piece], copies)

    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_(
                    [pair.parameter for pair in self._pairs], [pair.master for pair in self._pairs]
                )
