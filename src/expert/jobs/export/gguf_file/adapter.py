"""Writes a LoRA adapter as GGUF, which llama.cpp loads with a base in GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.stored_json import read_object
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.gguf_file.architecture import Family, file_name, tensor_converters
from expert.jobs.export.gguf_file.file import GgufMetadata, new_writer, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def write_adapter(
    path: Path, folder: Path, config: Any, family: Family, about: GgufMetadata
) -> int:
    """Write the adapter of a PEFT folder; returns how many matrices it changes.

    llama.cpp scales by alpha / rank; other scaling (rslora, per-module ranks) is multiplied into B.
    """
    from safetensors.torch import load_file

    settings = read_object(folder / "adapter_config.json")
    pairs: dict[str, dict[str, Tensor]] = {}
    unsupported = []
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = _WEIGHT.fullmatch(key)
        name = file_name(f"{match[1]}.weight", family, config) if match else None
        if match is None or name is None or name == "token_embd.weight":
            unsupported.append(key)
            continue
        values = tensor.float()
        if match[2] == "B":
            values = tensor_converters(name, family, config)[0](
                values * _scaling(settings, match[1])
            )
        pairs.setdefault(name, {})[f"{name}.lora_{match[2].lower()}"] = values
    if unsupported or settings.get("use_dora"):
        shown = ", ".join(sorted(unsupported)[:3]) or "use_dora"
        raise CannotExport(
            f"--gguf-adapter: llama.cpp cannot load {shown}  (write the merged model with "
            "--gguf q8_0)"
        )
    tensors = {key: value for pair in pairs.values() for key, value in sorted(pair.items())}
    writer = new_writer(path, family, about, None)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    write_tensors(writer, shapes, dict.fromkeys(tensors, "F32"), iter(tensors.values()))
    return len(pairs)


def _scaling(settings: Mapping[str, Any], module: str) -> float:
    """PEFT's scaling of a module divided by llama.cpp's alpha / rank."""

    def own(name: str, default: float) -> float:
        patterns = settings.get(f"{name}_pattern") or {}
        fitting = (
            value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)
        )
        return float(next(fitting, default))

    alpha = float(settings["lora_alpha"])
    rank = own("rank", float(settings["r"]))
    under = rank**0.5 if settings.get("use_rslora") else rank
    return own("alpha", alpha) / under * rank / alpha
