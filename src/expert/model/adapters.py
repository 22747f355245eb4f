"""What is trained beside or instead of the base weights: PEFT's adapters, made from the plan."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from expert.manifest.schema.kinds import ADAPTERS
from expert.model.errors import ModelError
from expert.model.lora.dora import settle_dora
from expert.model.lora.lora import settle_lora
from expert.model.quantised import QUANTISED, bitsandbytes_as_needed
from expert.planning.run_plan import AdapterPlan

ADAPTER = "default"
"""PEFT's name for the only adapter."""
_TARGETS = "training.config.target_modules"


def add_adapter(
    model: Any,
    plan: AdapterPlan,
    *,
    quantization: str,
    dtype: torch.dtype,
    total_steps: int | None,
    seed: int,
) -> Any:
    """The model with what the plan trains, and nothing else, asking for gradients.

    The first values depend on the seed alone: they are drawn on the CPU, and the global generator
    is left as it was. `dtype` is the adapter's own.
    """
    model.requires_grad_(plan.type == "full")
    if plan.type in ("full", "none"):
        return model
    if not ADAPTERS[plan.type].quantised and quantization in QUANTISED:
        what = (
            f"{plan.type} cannot be trained on {quantization} base weights: PEFT has no such layer"
        )
        able = [name for name, kind in ADAPTERS.items() if kind.quantised]
        fix = f"use quantization: none, or {_listed(able)}"
        raise ModelError("training.config.adapter_type", what, fix)
    with bitsandbytes_as_needed(quantization):
        return _wrapped(model, plan, dtype=dtype, total_steps=total_steps, seed=seed)


def _wrapped(
    model: Any, plan: AdapterPlan, *, dtype: torch.dtype, total_steps: int | None, seed: int
) -> Any:
    peft: Any = importlib.import_module("peft")
    config = adapter_config(model, plan, total_steps=total_steps)
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: torch.manual_seed would also set that of the GPU.
        torch.default_generator.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "ranknum" in name:  # AdaLoRA's count of ranks: on a bf16 base PEFT asks for its gradient
            parameter.requires_grad_(False)
        elif parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if plan.type == "dora":
        settle_dora(wrapped, ADAPTER)
    if plan.type in ("lora", "dora"):
        settle_lora(wrapped, ADAPTER)
    return wrapped


def adapter_config(model: Any, plan: AdapterPlan, *, total_steps: int | None) -> Any:
    """PEFT's config for the plan's adapter; its targets are names that the model has."""
    peft: Any = importlib.import_module("peft")
    layers = linear_layers(model)
    feedforward = matched(plan.feedforward_modules, layers, "feedforward_modules")
    targets = sorted({*_targets(model, plan, layers), *feedforward})
    fan_in_fan_out = _are_conv1d(targets, layers, plan.type)
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": targets}
    rank, alpha = plan.rank or 0, plan.alpha or 0.0
    if plan.type == "ia3":
        options = {"feedforward_modules": feedforward, "fan_in_fan_out": fan_in_fan_out}
        return peft.IA3Config(**options, **common)
    if plan.type == "lokr":
        return peft.LoKrConfig(r=rank, alpha=alpha, rank_dropout=plan.dropout, **common)
    common |= {"lora_alpha": alpha, "lora_dropout": plan.dropout, "fan_in_fan_out": fan_in_fan_out}
    if plan.type == "adalora":
        return peft.AdaLoraConfig(**adalora_schedule(rank, total_steps), **common)
    assert plan.type in ("lora", "dora"), f"adapter_type: {plan.type} is not built here"
    return peft.LoraConfig(r=rank, use_dora=plan.type == "dora", **common)


def saved_weights(module: nn.Module, plan: AdapterPlan) -> dict[str, Tensor]:
    """What is saved of the module, as it is before anything else is done to it."""
    if plan.type == "full":
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        return state
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def adalora_schedule(rank: int, total_steps: int | None) -> dict[str, int]:
    """Ranks and steps of AdaLoRA: half as much rank again at first, nothing pruned in the first
    tenth, and a last quarter to train with the ranks that are left."""
    if total_steps is None or total_steps < 2:
        length = "unknown" if total_steps is None else f"{total_steps} step"
        what = f"adalora prunes ranks over the whole run and needs its length, which is {length}"
        raise ModelError("training.config.adapter_type", what, "set max_steps, or use lora")
    return {
        "target_r": rank,
        "init_r": rank + (rank + 1) // 2,
        "total_step": total_steps,
        "tinit": total_steps // 10,
        "tfinal": total_steps // 4,
        # Every pruning waits for the device; a hundred of them are enough.
        "deltaT": max(1, total_steps // 100),
    }


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """The layers that can carry an adapter, by name: all linear ones but the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _targets(model: Any, plan: AdapterPlan, layers: dict[str, nn.Module]) -> list[str]:
    """Names for PEFT, which takes every layer whose name ends with one of them."""
    asked = plan.target_modules
    if asked is None and plan.feedforward_modules:
        return []
    if asked is None or asked == "all-linear":
        last_names = {_last(name) for name in layers}
        meant = {name for name, _ in model.named_modules() if _last(name) in last_names}
        return sorted(last_names if meant == set(layers) else layers)
    return matched([asked] if isinstance(asked, str) else asked, layers, "target_modules")


def matched(asked: list[str], layers: dict[str, nn.Module], key: str) -> list[str]:
    """The asked names, every one of which is that of a layer or the end of one."""
    strange = [
        target
        for target in asked
        if not any(name == target or name.endswith(f".{target}") for name in layers)
    ]
    if strange:
        there = ", ".join(sorted({_last(name) for name in layers}))
        plural = "" if len(strange) == 1 else "s"
        what = f"{', '.join(strange)}: the model has no such linear layer{plural} to adapt"
        if any(re.search(r"(^|\.)(lm_head|embed_out|output)$", target) for target in strange):
            what = f"{', '.join(strange)}: the head cannot have an adapter: its loss is fused"
        raise ModelError(f"training.config.{key}", what, f"there are {there}")
    return list(asked)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _are_conv1d(targets: list[str], layers: dict[str, nn.Module], kind: str) -> bool:
    """Whether the targets keep their weights as [in, out], in the manner of GPT-2."""
    kinds = {
        isinstance(layer, nn.Linear)
        for name, layer in layers.items()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }
    if len(kinds) > 1:
        what = "the targets mix two kinds of linear layers; one adapter cannot cover both"
        raise ModelError(_TARGETS, what, "name layers of one kind")
    turned = kinds == {False}
    if turned and not ADAPTERS[kind].transposed:
        what = f"{kind} does not support transposed weights such as GPT-2's"
        able = [name for name, each in ADAPTERS.items() if each.transposed]
        raise ModelError("training.config.adapter_type", what, f"use {_listed(able)}")
    return turned


class AdaLoraRanks:
    """The pruning of AdaLoRA: its penalty, what it does after a step, and its state."""

    def __init__(self, wrapped: Any) -> None:
        self._tuner = wrapped.base_model
        self.config = wrapped.peft_config[ADAPTER]
        self._vectors = [
            (parameter, "lora_A" in name)
            for name, parameter in wrapped.named_parameters()
            if parameter.requires_grad and ("lora_A" in name or "lora_B" in name)
        ]
        self._parameters = [
            parameter
            for name, parameter in wrapped.named_parameters()
            if parameter.requires_grad and "lora_" in name
        ]

    def penalty(self) -> Tensor:
        """How far the singular vectors are from orthogonal, as PEFT weighs it."""
        total: Any = 0.0
        for vectors, are_rows in self._vectors:
            gram = vectors @ vectors.T if are_rows else vectors.T @ vectors
            one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            total = total + torch.linalg.matrix_norm(gram - one)
        weighed: Tensor = self.config.orth_reg_weight * total / len(self._vectors)
        return weighed

    def after_update(self, step: int) -> None:
        """Prune after step number `step`, counted from 1, while its gradients are still there.

        Those of a step that was skipped because they are not finite count as zero: in PEFT's
        running averages they would stay for ever.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)
        last = self.config.total_step - self.config.tfinal
        if step > last and self._tuner.rankallocator.exp_avg_ipt:
            step = last  # PEFT fixes the ranks in this very step, which was skipped
        if step > last and self.config.rank_pattern is None:
            return  # every pruning step was skipped: all ranks stay
        self._tuner.update_and_allocate(step)

    def tensors(self) -> dict[str, Tensor]:
        """What the next pruning needs: importance so far, and the ranks that are left."""
        allocator = self._tuner.rankallocator
        found: dict[str, Tensor] = {}
        for kind in ("exp_avg_ipt", "exp_avg_unc"):
            found |= {f"{kind}.{name}": value for name, value in getattr(allocator, kind).items()}
        for name, kept in (self.config.rank_pattern or {}).items():
            found[f"rank_pattern.{name}"] = torch.tensor(kept, dtype=torch.bool)
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` gave."""
        allocator = self._tuner.rankallocator
        device = self._vectors[0][0].device
        allocator.reset_ipt()
        pattern: dict[str, list[bool]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if kind == "rank_pattern":
                pattern[name] = value.tolist()
            else:
                getattr(allocator, kind)[name] = value.to(device, copy=True)
        # PEFT makes all three together, and the one that is not kept is written before it is read.
        allocator.ipt = {name: torch.zeros_like(v) for name, v in allocator.exp_avg_ipt.items()}
        self.config.rank_pattern = pattern or None


def ranks_of(wrapped: Any, plan: AdapterPlan) -> AdaLoraRanks | None:
    """The pruning of the plan's adapter, where it prunes."""
    return AdaLoraRanks(wrapped) if plan.type == "adalora" else None
