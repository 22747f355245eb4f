"""Saves trained results: an adapter in PEFT's format or a whole model; restores checkpoints."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from expert.core.files import write_text_atomically
from expert.manifest.schema.kinds import ADAPTERS
from expert.model.adapters import ADAPTER, ADAPTER_FILE, IN_PEFT, whole_modules
from expert.model.base_folder import base_reference, copy_tokenizer
from expert.model.chargpt import CharGpt, save_char_gpt
from expert.model.errors import ModelError
from expert.model.load import LoadedModel, without_progress_bar
from expert.model.soft_prompts import save_soft_prompt

_ADALORA = "adalora."


def save_trained(loaded: LoadedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(loaded.module, CharGpt):
        save_char_gpt(loaded.module, folder, loaded.characters, loaded.weights)
        return
    if loaded.adapter.type in ADAPTERS:
        _save_adapter(loaded, folder)
    elif loaded.adapter.type == "full":
        # Save with transformers. Only the special tokens of the generation settings are kept: many
        # bases set a temperature without sampling, which transformers refuses to save.
        transformers: Any = importlib.import_module("transformers")
        model = loaded.causal_lm
        original = model.generation_config
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special_tokens = {name: getattr(original, name, None) for name in names}
        model.generation_config = transformers.GenerationConfig(**special_tokens)
        try:
            with without_progress_bar():
                model.save_pretrained(folder, state_dict=_detached(loaded.weights))
        finally:
            model.generation_config = original
    if loaded.soft_prompts is not None:
        prompts = loaded.soft_prompts
        base, revision = base_reference(loaded.plan)
        alone = loaded.adapter.type == "none" and len(prompts.names) == 1
        for name, prompt in zip(prompts.names, prompts.prompts, strict=True):
            target = folder if alone else folder / "soft_prompts" / name
            config = loaded.causal_lm.config
            save_soft_prompt(prompt, target, base=base, revision=revision, config=config)
    if loaded.folder is not None:
        copy_tokenizer(loaded.folder, folder)


def _save_adapter(loaded: LoadedModel, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    module: Any = loaded.module
    config = module.peft_config[ADAPTER]
    base, revision = base_reference(loaded.plan)
    # AdaLoRA's pruned ranks stay in the file as zeros. Cutting them out by the pattern would save a
    # third of it, but PEFT 0.21 renames the pattern of the running model while saving and warns
    # when loading it.
    pattern = getattr(config, "rank_pattern", None)
    if loaded.ranks is not None:
        config.rank_pattern = None
    try:
        tensors = get_peft_model_state_dict(
            module, state_dict=_detached(loaded.weights), save_embedding_layers=False
        )
        settings = {**config.to_dict(), "base_model_name_or_path": base}
    finally:
        if loaded.ranks is not None:
            config.rank_pattern = pattern
    if loaded.adapter.init == "pissa":
        tensors |= _added_to_the_whole(loaded.module)
        settings |= {"r": 2 * config.r, "lora_alpha": 2 * config.lora_alpha}
        settings["init_lora_weights"] = True
    parts = whole_modules(loaded.causal_lm, loaded.adapter.modules_to_save)
    if parts:
        weights: dict[str, Any] = {name: part.weight for name, part in parts.items()}
        tensors |= {f"{IN_PEFT}{name}.weight": each.detach() for name, each in weights.items()}
        settings["modules_to_save"] = sorted(name.rpartition(".")[2] for name in parts)
        settings["ensure_weight_tying"] = len(set(weights.values())) < len(weights)
    # Cloned where two names share their weights, which safetensors refuses.
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(whole, folder / ADAPTER_FILE, metadata={"format": "pt"})
    settings["inference_mode"] = True
    settings["revision"] = revision
    text = json.dumps(settings, indent=2, sort_keys=True, default=_plain)
    write_text_atomically(folder / "adapter_config.json", text + "\n")


def _added_to_the_whole(module: Any) -> dict[str, Tensor]:
    """The factors of PiSSA for the base as it is: those trained, less those started with."""
    tensors = {}
    for name, layer in module.named_modules():
        if hasattr(layer, "started_with"):
            first, second = (getattr(layer, each)[ADAPTER].weight for each in ("lora_A", "lora_B"))
            before, after = layer.started_with
            tensors[f"{name}.lora_A.weight"] = torch.cat([first.detach(), before])
            tensors[f"{name}.lora_B.weight"] = torch.cat([second.detach(), -after], dim=1)
    return tensors


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


@torch.no_grad()
def load_trainable(loaded: LoadedModel, tensors: Mapping[str, Tensor]) -> None:
    """Restore a checkpoint's trainable tensors and AdaLoRA state. Missing, extra or differently
    sized tensors raise an error before anything is changed."""
    own = {name: value for name, value in tensors.items() if not name.startswith(_ADALORA)}
    wanted = dict(loaded.trainable)
    wrong = sorted(own.keys() ^ wanted.keys())
    wrong += [name for name in own.keys() & wanted.keys() if own[name].shape != wanted[name].shape]
    if wrong:
        shown = ", ".join(wrong[:3]) + (" and more" if len(wrong) > 3 else "")
        what = f"{len(wrong)} tensors do not fit this model: {shown}"
        fix = "resume with the manifest the checkpoint was made with"
        raise ModelError("checkpoint", what, fix)
    for name, parameter in loaded.trainable:
        parameter.copy_(own[name])
    if loaded.ranks is not None:
        state = {name.removeprefix(_ADALORA): v for name, v in tensors.items() if name not in own}
        loaded.ranks.load(state)
