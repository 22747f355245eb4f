"""Adds the plan's adapter with PEFT and decides what is trainable."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from expert.manifest.schema.kinds import ADAPTERS, LOW_RANK, QUANTISED
from expert.model.base_folder import INSIDE
from expert.model.errors import ModelError
from expert.model.fused.experts import PROJECTIONS, expert_layers
from expert.model.lora.dora import replace_dora_layers
from expert.model.lora.lora import replace_lora_layers
from expert.model.quantised import bitsandbytes_as_needed
from expert.planning.run_plan import AdapterPlan

ADAPTER = "default"
"""PEFT's name of the adapter."""
ADAPTER_FILE = "adapter_model.safetensors"
IN_PEFT = "base_model.model."
"""In front of the names of the base's weights."""
PISSA_PASSES = 16
"""Of the power iteration, as in PEFT's `pissa_niter_16`."""
IN_EXPERTS = {n: n for n in PROJECTIONS} | dict.fromkeys(("gate_proj", "up_proj"), PROJECTIONS[0])
"""Names of layers of an MLP, and of the experts' weights that they are part of."""
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
    """The model in which exactly what the plan trains requires gradients.

    Initial values depend on the seed alone: they are drawn on the CPU, and the global generator is
    left unchanged. `dtype`: of the adapter.
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
    if plan.init == "pissa" and quantization in QUANTISED:
        what = f"pissa changes the base weights, which are in {quantization}"
        fix = "use quantization: none, or leave it out"
        raise ModelError("training.config.adapter_init", what, fix)
    with bitsandbytes_as_needed(quantization):
        peft: Any = importlib.import_module("peft")
        config = adapter_config(model, plan, total_steps=total_steps)
        with torch.random.fork_rng(devices=[]):
            # Only the CPU generator: torch.manual_seed would also seed the GPU.
            torch.default_generator.manual_seed(seed)
            wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        for name, parameter in wrapped.named_parameters():
            if "ranknum" in name:  # AdaLoRA's rank counter: on a bf16 base PEFT makes it trainable
                parameter.requires_grad_(False)
            elif parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        if getattr(config, "target_parameters", None) and plan.dropout:
            for layer in low_rank_layers(wrapped):
                layer.lora_dropout[ADAPTER] = nn.Dropout(plan.dropout)
        if plan.modules_to_save:
            _train_whole(model, plan.modules_to_save, dtype)
        if plan.init == "pissa":
            _start_from_largest(wrapped, seed)
        if plan.start is not None:
            _load_adapter(wrapped, Path(plan.start), plan)
        if plan.type == "dora":
            replace_dora_layers(wrapped, ADAPTER)
        if plan.type in LOW_RANK:
            replace_lora_layers(wrapped, ADAPTER)
        return wrapped


def whole_modules(model: Any, names: Sequence[str]) -> dict[str, nn.Module]:
    """The embedding and the head that are trained beside the adapter, by their names in the model;
    both if they share their weights."""
    known = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    weights = {id(known[name].weight) for name in names}
    parts = [part for part in known.values() if id(part.weight) in weights]
    return {name: part for name, part in model.named_modules() if part in parts}


def _train_whole(model: Any, names: Sequence[str], dtype: torch.dtype) -> None:
    """Train these modules in the adapter's dtype; the model computes in its own, as before."""
    for part in whole_modules(model, names).values():
        weight: Any = part.weight
        computed = weight.dtype
        weight.data = weight.data.to(dtype)
        weight.requires_grad_(True)
        if computed != dtype and isinstance(part, nn.Embedding):  # the loss rounds the head itself
            part.register_forward_hook(lambda module, args, output, to=computed: output.to(to))


@torch.no_grad()
def _start_from_largest(wrapped: Any, seed: int) -> None:
    """PiSSA: the adapter starts as the largest singular values of each weight, which keeps the
    rest. What it started with stays at its layer: a saved adapter is for the whole weight."""
    for layer in low_rank_layers(wrapped):
        weight, scaling = layer.get_base_layer().weight, layer.scaling[ADAPTER]
        weight = weight.t() if layer.fan_in_fan_out else weight
        first, second = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            # Twice as many as are wanted: the last of them are found least well.
            size = min(2 * len(first), *weight.shape)
            left, values, right = torch.svd_lowrank(weight.float(), q=size, niter=PISSA_PASSES)
        root = (values / scaling).sqrt()
        first.copy_((right * root)[:, : len(first)].t())
        second.copy_((left * root)[:, : len(first)])
        weight.copy_(weight.float() - scaling * second.float() @ first.float())
        layer.started_with = first.clone(), second.clone()


def low_rank_layers(wrapped: nn.Module) -> list[Any]:
    return [layer for layer in wrapped.modules() if ADAPTER in getattr(layer, "lora_A", ())]


@torch.no_grad()
def _load_adapter(wrapped: Any, folder: Path, plan: AdapterPlan) -> None:
    """Give the adapter the weights in a folder in PEFT's format, which must have its shape."""
    peft, place = importlib.import_module("peft"), "training.config.start_from"
    try:
        tensors = {  # of an export for a model that also reads images, too
            name.replace(f"{IN_PEFT}{INSIDE}", f"{IN_PEFT}model.", 1): each
            for name, each in load_file(folder / ADAPTER_FILE).items()
        }
    except (OSError, SafetensorError) as error:
        fix = "name a finished run that trained an adapter, or a folder in PEFT's format"
        raise ModelError(place, f"{folder}: no adapter can be read there: {error}", fix) from error
    own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    parts = whole_modules(wrapped.get_base_model(), plan.modules_to_save)
    own |= {f"{IN_PEFT}{name}.weight": part.weight for name, part in parts.items()}
    shapes = [{name: tuple(t.shape) for name, t in each.items()} for each in (own, tensors)]
    differ = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    if differ:
        what = f"{folder}: {len(differ)} weights are not those of this adapter, such as {differ[0]}"
        raise ModelError(place, what, "use its adapter_type, rank, target_modules and base model")
    peft.set_peft_model_state_dict(wrapped, tensors, adapter_name=ADAPTER)


def adapter_config(model: Any, plan: AdapterPlan, *, total_steps: int | None) -> Any:
    """PEFT's config for the plan's adapter, with targets that the model has."""
    peft: Any = importlib.import_module("peft")
    layers, experts = linear_layers(model), _expert_weights(model, plan)
    if plan.type in LOW_RANK and (taken := _names_of_experts(model)):
        layers = {name: layer for name, layer in layers.items() if _last(name) not in taken}
    feedforward = checked_targets(plan.feedforward_modules, layers, "feedforward_modules")
    targets = sorted({*_targets(model, plan, layers, experts), *feedforward})
    parameters = [name for name in experts if any(_ends(name, target) for target in targets)]
    if experts:
        targets = [each for each in targets if any(_ends(name, each) for name in layers)]
    kinds = {
        isinstance(layer, nn.Linear)
        for name, layer in layers.items()
        if any(_ends(name, target) for target in targets)
    }
    if len(kinds) > 1:
        what = "the targets mix two kinds of linear layers; one adapter cannot cover both"
        raise ModelError(_TARGETS, what, "name layers of one kind")
    fan_in_fan_out = kinds == {False}  # weights are stored as [in, out], as in GPT-2
    if fan_in_fan_out and not ADAPTERS[plan.type].transposed:
        what = f"{plan.type} does not support transposed weights such as GPT-2's"
        able = [name for name, adapter in ADAPTERS.items() if adapter.transposed]
        raise ModelError("training.config.adapter_type", what, f"use {_listed(able)}")
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
    if parameters:  # PEFT knows no dropout for them: `add_adapter` adds it to the layers
        lasts = {_last(name) for name in parameters}
        if parameters == [name for name in experts if _last(name) in lasts]:
            parameters = sorted({".".join(name.rsplit(".", 2)[-2:]) for name in parameters})
        common |= {"target_parameters": parameters, "lora_dropout": 0.0}
    return peft.LoraConfig(r=rank, use_dora=plan.type == "dora", **common)


def saved_weights(module: nn.Module, plan: AdapterPlan) -> dict[str, Tensor]:
    """The weights to save, taken before blocks are compiled, fused or sharded."""
    if plan.type == "full":
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        return state
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def adalora_schedule(rank: int, total_steps: int | None) -> dict[str, int]:
    """AdaLoRA starts with 1.5x the rank, prunes nothing in the first tenth, and trains with the
    final ranks in the last quarter."""
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
        # Every pruning synchronises with the device; a hundred of them are enough.
        "deltaT": max(1, total_steps // 100),
    }


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """The layers that can have an adapter, by name: all linear ones except the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _expert_weights(model: Any, plan: AdapterPlan) -> list[str]:
    """The weights of experts that can have an adapter, by name."""
    if plan.type != "lora" or plan.init != "default":  # PEFT knows no other for them
        return []
    return [f"{name}.{each}" for name in expert_layers(model) for each in PROJECTIONS]


def _names_of_experts(model: Any) -> set[str]:
    """Names of layers that PEFT takes for the experts' of this model, also where another layer has
    them: it would give that one no adapter."""
    theirs: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    kinds: Any = getattr(theirs, "_MODEL_TO_CONVERSION_PATTERN", {})
    tables: Any = getattr(theirs, "_MOE_TARGET_MODULE_MAPPING", {})
    return set(tables.get(kinds.get(getattr(model.config, "model_type", None)), ()))


def _targets(
    model: Any, plan: AdapterPlan, layers: dict[str, nn.Module], experts: list[str]
) -> list[str]:
    """Names for PEFT, which matches every layer whose name ends with one of them."""
    requested = plan.target_modules
    if requested is None and plan.feedforward_modules:
        return []
    if requested is None or requested == "all-linear":
        last_names = {_last(name) for name in layers}
        matching = {name for name, _ in model.named_modules() if _last(name) in last_names}
        return sorted({*(last_names if matching == set(layers) else layers), *experts})
    names = [requested] if isinstance(requested, str) else list(requested)
    if experts:
        lasts = {_last(name) for name in layers}
        names = [name if name in lasts else IN_EXPERTS.get(name, name) for name in names]
    return checked_targets(names, [*layers, *experts], "target_modules")


def checked_targets(requested: list[str], layers: Iterable[str], key: str) -> list[str]:
    """The requested names, each checked to match a layer's name or its end."""
    unknown = [target for target in requested if not any(_ends(name, target) for name in layers)]
    if unknown:
        available = ", ".join(sorted({_last(name) for name in layers}))
        plural = "" if len(unknown) == 1 else "s"
        what = f"{', '.join(unknown)}: the model has no such linear layer{plural} to adapt"
        if any(re.search(r"(^|\.)(lm_head|embed_out|output)$", target) for target in unknown):
            what = f"{', '.join(unknown)}: the head cannot have an adapter: its loss is fused"
        raise ModelError(f"training.config.{key}", what, f"choose from {available}")
    return list(requested)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _ends(name: str, target: str) -> bool:
    """Whether PEFT would take a layer of this name for the target."""
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


class AdaLoraRanks:
    """AdaLoRA's rank pruning: penalty, pruning after each step, and state."""

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
        """Deviation of the singular vectors from orthogonality, weighted as in PEFT."""
        total: Any = 0.0
        for vectors, are_rows in self._vectors:
            gram = vectors @ vectors.T if are_rows else vectors.T @ vectors
            identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            total = total + torch.linalg.matrix_norm(gram - identity)
        weighted: Tensor = self.config.orth_reg_weight * total / len(self._vectors)
        return weighted

    def after_step(self, step: int) -> None:
        """Prune after step `step`, counted from 1, before gradients are cleared.

        Gradients that are not finite (a skipped step) count as zero: in PEFT's running averages
        they would stay forever.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)
        last = self.config.total_step - self.config.tfinal
        if step > last and self._tuner.rankallocator.exp_avg_ipt:
            step = last  # PEFT fixes the ranks in exactly this step, which was skipped
        if step > last and self.config.rank_pattern is None:
            return  # every pruning step was skipped: all ranks stay
        self._tuner.update_and_allocate(step)

    def tensors(self) -> dict[str, Tensor]:
        """State of the pruning: importances so far, and the remaining ranks."""
        allocator = self._tuner.rankallocator
        state: dict[str, Tensor] = {}
        for kind in ("exp_avg_ipt", "exp_avg_unc"):
            state |= {f"{kind}.{name}": value for name, value in getattr(allocator, kind).items()}
        for name, kept in (self.config.rank_pattern or {}).items():
            state[f"rank_pattern.{name}"] = torch.tensor(kept, dtype=torch.bool)
        return state

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state of `tensors`."""
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
        # PEFT creates all three together; this one is written before it is read.
        allocator.ipt = {name: torch.zeros_like(v) for name, v in allocator.exp_avg_ipt.items()}
        self.config.rank_pattern = pattern or None
