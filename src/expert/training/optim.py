"""Builds the planned optimizer, steps it, and saves and restores its state exactly."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.parallel.replicated import chunk_ranges
from expert.planning.run_plan import OptimPlan

Named = Sequence[tuple[str, Parameter]]

EIGHT_BIT = ("adamw_bnb_8bit", "paged_adamw_8bit")
MOMENTUM = 0.9
SCRATCH_WEIGHTS = 2**24  # 64 MiB of float32
# Lookup tables shared by bitsandbytes' states: saved once, as safetensors refuses shared memory.
_SHARED = ("qmap1", "qmap2")
_SHARED_NAME = "shared"
_STATE_KEYS = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "8-bit": ("step", "state1", "state2", "absmax1", "absmax2"),
    "8-bit, small": ("step", "state1", "state2"),
}
# Norms and biases are one-dimensional; embeddings and soft prompts are recognised by name.
_EMBEDDING = re.compile(
    r"(?:^|[._])(?:emb(?:ed(?:ding)?s?)?|wte|wpe|(?:soft_?)?prompts?)(?:$|[._])", re.IGNORECASE
)
_SECOND_FACTOR = re.compile(r"lora_(?:embedding_)?B(?:$|\.)")
_LOW_RANK_FACTOR = re.compile(r"lora_(?:embedding_)?[AB](?:$|\.)")


class OptimizerUnavailable(ExpertError):
    """The planned optimizer cannot run here; recovery chooses another."""

    def __init__(self, optimizer: str, reason: str) -> None:
        self.optimizer, self.reason = optimizer, reason
        super().__init__(optimizer, reason)

    def __str__(self) -> str:
        return f"optim: {self.optimizer} cannot run here: {self.reason}  (use optim: adamw_torch)"


def build_optimizer(named: Named, plan: OptimPlan, *, device: torch.device) -> Optimizer:
    """The planned optimizer for these parameters, with weight decay on matrices only, and with the
    higher rate of LoRA+ for the second factor of every adapter."""
    kind = plan.optimizer
    by_treatment: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in named:
        decay = plan.weight_decay if has_weight_decay(name, parameter) else 0.0
        factor = plan.loraplus_lr_ratio if _SECOND_FACTOR.search(name) else 1.0
        by_treatment.setdefault((decay, factor), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (decay, factor), parameters in by_treatment.items()
    ]
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
        # Paging moves states between GPU and host memory; on a CPU it has no meaning.
        paged = kind == "paged_adamw_8bit" and device.type == "cuda"
        eight_bit: Optimizer = bitsandbytes.optim.AdamW8bit(
            groups, lr=rate, betas=betas, eps=epsilon, is_paged=paged
        )
        return eight_bit
    if kind == "sgd":
        return DecoupledSgd(groups, lr=rate, momentum=MOMENTUM)
    raise ValueError(f"optim: {kind} is not known")


class DecoupledSgd(torch.optim.SGD):
    """SGD with decoupled weight decay like AdamW's; torch adds it to the gradient, where momentum
    multiplies it by ten."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        weight_decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight.grad is not None]
            if group["weight_decay"] and moved:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, weight_decays, strict=True):
                group["weight_decay"] = decay


def _try_fused(named: Named) -> None:
    """Try a step for each device and dtype: torch itself would only fail at the first step."""
    for device, dtype in {(parameter.device, parameter.dtype) for _, parameter in named}:
        probe = torch.zeros(1, device=device, dtype=dtype)
        probe.grad = torch.zeros_like(probe)
        try:
            torch.optim.AdamW([probe], fused=True).step()
        except RuntimeError as error:  # names the unsupported device or dtype
            raise OptimizerUnavailable("adamw_torch_fused", str(error)) from error


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and LoRA factors, not to embeddings, norms and
    biases."""
    if _LOW_RANK_FACTOR.search(name):
        return True
    # IA3's scales and AdaLoRA's singular values are vectors with a second dimension of one.
    # A rank may hold a single row of a sharded weight.
    shape = getattr(parameter, "whole_shape", parameter.shape)
    is_matrix = len(shape) >= 2 and min(shape) > 1
    return is_matrix and not _EMBEDDING.search(name)


def clip(
    parameters: Iterable[Tensor], max_norm: float, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale the gradients down to `max_norm` and return their total norm, on their device.

    `max_norm` 0 or a norm that is not finite leaves them unchanged, for diagnosis. `total`:
    computes the norm over all ranks from this rank's norms.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    with torch.no_grad():
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        norms_tensor = torch.stack(norms)
        norm: Tensor = (
            torch.linalg.vector_norm(norms_tensor) if total is None else total(norms_tensor)
        )
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, torch.where(torch.isfinite(norm), factor, 1.0))
    return norm


def step_if_finite(optimizer: Optimizer, norm: Tensor) -> Tensor:
    """Step unless the gradient norm is not finite; returns whether the step was applied.

    A skipped step changes no weight, moment or counter. Fused optimizers decide on the device; for
    others the norm is read back, the only synchronisation in a step.
    """
    applied = torch.isfinite(norm)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # As torch's GradScaler does it: if found_inf is 1, the kernel returns early and the step
        # counter, already incremented, is decremented by found_inf.
        where = optimizer.param_groups[0]["params"][0].device  # the host if offloaded
        optimizer.found_inf = (~applied).to(where, torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif bool(applied):
        optimizer.step()
    return applied


def optimizer_tensors(optimizer: Optimizer, named: Named) -> dict[str, Tensor]:
    """The whole state as tensors named `<parameter>.<key>`, without shared memory.

    These are the live tensors: copy them if they must outlive the next step.
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
    """Restore the state returned by `optimizer_tensors`; the tensors are copied."""
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
        if name not in by_parameter:  # has not had a gradient yet
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
    buffers: dict[str, Any], state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Fill the buffers that bitsandbytes allocated (maybe paged) instead of replacing them."""
    for key, value in state.items():
        if key == "step":
            buffers[key] = int(value)
        else:
            buffers[key].copy_(value)
    for key in _SHARED:
        if key in buffers:
            buffers[key].copy_(tensors[f"{_SHARED_NAME}.{key}"])


def _split_by_parameter(
    named: Named, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    known = {name for name, _ in named}
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name == _SHARED_NAME and key in _SHARED:
            continue
        if name not in known:
            raise ExpertError(
                f"{full_name}: no parameter of this run is called {name or full_name}  "
                "(resume with the manifest this checkpoint was written with)"
            )
        by_name.setdefault(name, {})[key] = tensor
    return by_name


def _check_fits(
    optimizer: Optimizer, name: str, parameter: Parameter, state: Mapping[str, Tensor]
) -> None:
    """Raise unless the saved keys and shapes are what this optimizer keeps for the parameter."""
    kind = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"
    if _is_eight_bit(optimizer):
        smallest = optimizer.args.min_8bit_size  # type: ignore[attr-defined]
        kind = "8-bit, small" if parameter.numel() < smallest else "8-bit"
    expected = set(_STATE_KEYS[kind])
    if set(state) != expected:
        raise ExpertError(
            f"{name}: the saved optimizer state has {', '.join(sorted(state))}, this optimizer "
            f"keeps {', '.join(sorted(expected))}  (resume with the optimizer of the checkpoint)"
        )
    for key, value in state.items():
        if key != "step" and not key.startswith("absmax") and value.shape != parameter.shape:
            raise ExpertError(
                f"{name}.{key}: saved with shape {list(value.shape)}, the parameter has "
                f"{list(parameter.shape)}  (resume with the manifest of the checkpoint)"
            )


def _is_eight_bit(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "init_state") and hasattr(optimizer, "name2qmap")


def _lies_in_another(parameter: Tensor) -> bool:
    """Whether a matrix is a strided part of another, even if it has only one row."""
    return parameter.dim() == 2 and parameter.stride() != (parameter.shape[1], 1)


class MasterWeights:
    """Float32 copies of 16-bit parameters, which the optimizer updates instead.

    A change of 1e-5 to a bfloat16 weight of 1 would be rounded away (half its spacing is 2e-3); the
    copies keep it. A float32 parameter is its own master, unless it is part of a larger matrix:
    fused optimizers need gradients with the same strides as their weights.
    """

    def __init__(self, named: Named) -> None:
        self._pairs = [
            (parameter, Parameter(parameter.detach().to(torch.float32, copy=True)))
            for _, parameter in named
            if parameter.dtype != torch.float32 or _lies_in_another(parameter)
        ]
        """16-bit parameters and their masters."""
        self._scratch: Tensor | None = None
        self._computing = [parameter for _, parameter in named]
        self._kept: dict[int, Tensor] = {}
        masters = {id(parameter): master for parameter, master in self._pairs}
        self._have_masters = frozenset(masters)
        self.named = [(name, masters.get(id(parameter), parameter)) for name, parameter in named]

    def collect(self) -> None:
        """Add the parameters' gradients to the masters' in float32, and free the former."""
        fresh, more = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for parameter, master in self._pairs:
            grad = parameter.grad
            if grad is None:
                continue
            if master.grad is None:
                master.grad = self._gradient_memory(master)
                fresh.append((master.grad, grad))
            else:
                more.append((master.grad, grad))
            parameter.grad = None
        with torch.no_grad():
            _on_pairs(torch._foreach_copy_, fresh)
            self._add([total for total, _ in more], [grad for _, grad in more])

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, in the order of the parameters, from memory that will be overwritten;
        copies those that `collect` does not."""
        fresh, more = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for parameter, gradient in zip(self._computing, gradients, strict=True):
            if gradient is None:
                continue
            if id(parameter) in self._have_masters:
                parameter.grad = gradient  # `collect` adds it to the master
            elif parameter.grad is None:
                parameter.grad = self._gradient_memory(parameter)
                fresh.append((parameter.grad, gradient))
            else:
                more.append((parameter.grad, gradient))
        with torch.no_grad():
            _on_pairs(torch._foreach_copy_, fresh)
            _on_pairs(torch._foreach_add_, more)
        self.collect()

    def _gradient_memory(self, weight: Tensor) -> Tensor:
        """Kept between steps: allocating 504 tensors took 2 ms per step on an H200."""
        if id(weight) not in self._kept:
            self._kept[id(weight)] = torch.empty_like(weight)
        return self._kept[id(weight)]

    def _add(self, sums: list[Tensor], grads: list[Tensor]) -> None:
        """Add through a float32 copy, piece by piece.

        torch has no multi-tensor kernel that adds bfloat16 to float32: 504 LoRA gradients took
        2.9 ms on an H200 one by one, and 0.31 ms when copied first. Tensors larger than a piece are
        added directly.
        """
        for piece in chunk_ranges([grad.numel() for grad in grads], SCRATCH_WEIGHTS):
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
        """Round the masters into the computing parameters."""
        with torch.no_grad():
            _on_pairs(torch._foreach_copy_, self._pairs)


def _on_pairs(change: Callable[..., Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Apply a multi-tensor operation to the first tensors of pairs; torch refuses empty lists."""
    if pairs:
        change(*map(list, zip(*pairs, strict=True)))
