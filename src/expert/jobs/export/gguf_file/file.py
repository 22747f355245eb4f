"""Writes GGUF files tensor by tensor, and reads them back into the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expert.jobs.export.gguf_file.architecture import (
    StoredTensor,
    add_settings,
    stored_tensors,
)
from expert.jobs.export.gguf_file.k_quants import K_TYPES, k_quantised
from expert.jobs.export.gguf_file.vocabulary import Vocabulary
from expert.planning.models.architectures import Gguf

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

FILE_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0"),
    *("q4_k_m", "q4_k_s", "q4_1", "q4_0"),
)
UNQUANTISED = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
"""Floating-point types, and the same dtype in Expert."""
_PLAIN = ("F32", "F16", "BF16")
_WITHOUT_BLOCKS_OF_256 = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


_QUANTIZATION_VERSION = 2
_PHI3_MARKS = ("</s>", "<unk>", "<s>", "<|endoftext|>")
_AT_ONCE = 2**24  # values quantised per call, which bounds memory


class GgufMetadata(NamedTuple):
    """Metadata of a file."""

    name: str
    license: str = ""
    base: str = ""
    languages: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


def write_model(
    path: Path, model: Any, family: Gguf, words: Vocabulary, kind: str, about: GgufMetadata
) -> None:
    """Write a model as `kind`."""
    import gguf

    writer = new_writer(path, family, about, words)
    add_settings(writer, model.config, family)
    file_type = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    for method, *arguments in words.calls:
        getattr(writer, method)(*arguments)
    stored = stored_tensors(model, family)
    layers, tied = model.config.num_hidden_layers, "output.weight" not in {s.name for s in stored}
    types = {s.name: tensor_type(s.name, s.shape, kind, layers=layers, tied=tied) for s in stored}
    weights = model.state_dict()

    def values(tensor: StoredTensor) -> Tensor:
        source: Tensor = tensor.computed if tensor.computed is not None else weights[tensor.source]
        return tensor.to_file(source.detach().float())

    write_tensors(writer, {s.name: s.shape for s in stored}, types, iter(map(values, stored)))


def tensor_type(name: str, shape: tuple[int, ...], file: str, *, layers: int, tied: bool) -> str:
    """The type of one tensor, by its name in GGUF and its shape (rows, columns).

    The mixes are those of llama-quantize: the `_m` types keep more bits for two tensors in some
    layers, and the head has at least 6 bits.
    """
    own = file.upper().removesuffix("_M").removesuffix("_S")  # of most tensors
    if len(shape) < 2 or name.startswith("rope_"):
        return "F32"
    if own in _PLAIN:
        return own
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        if own != "Q8_0":
            own = "Q6_K" if shape[1] % (256 if own.endswith("K") else 32) == 0 else "Q8_0"
    elif name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        own = _in_layer(own, file, part, int(layer), layers)
    if own in _WITHOUT_BLOCKS_OF_256 and shape[1] % 256:
        own = _WITHOUT_BLOCKS_OF_256[own]
    return own if shape[1] % 32 == 0 else "F16"


def _in_layer(own: str, file: str, part: str, layer: int, layers: int) -> str:
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    value = part in ("attn_v", "attn_qkv")
    if file.endswith("_k_m") and (value or part == "ffn_down") and more:
        return "Q6_K"
    if file == "q4_k_s" and (layer < 4 if value else part == "ffn_down" and layer < eighth):
        return "Q5_K"
    return own


def new_writer(path: Path, family: Gguf, about: GgufMetadata, words: Vocabulary | None) -> Any:
    """A writer with the metadata; `words`: the vocabulary of a model, None for an adapter."""
    import gguf

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.arch]])
    writer.add_type("model" if words is not None else "adapter")
    writer.add_name(_name(about.name, words))
    if about.license:
        writer.add_license(about.license)
    if about.base:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, about.base)
    if about.languages:
        writer.add_languages(list(about.languages))
    if about.tags:
        writer.add_tags(list(about.tags))
    return writer


def _name(name: str, words: Vocabulary | None) -> str:
    """llama.cpp drops spaces after the markers of a model with "phi-3" in its name, and aborts if
    some of those markers are missing."""
    plain = re.sub("phi-?3", "phi 3", name, flags=re.IGNORECASE)
    strips = words is not None and words.strips_after and set(_PHI3_MARKS) <= set(words.tokens)
    return f"{plain} (Phi-3)" if strips else plain


def write_tensors(
    writer: Any, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], values: Any
) -> None:
    """Write the table of all tensors, then the tensors, one in memory at a time."""
    import gguf
    import numpy as np

    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[types[name]]
        if types[name] in ("F32", "F16"):
            dtype = np.dtype(np.float32 if types[name] == "F32" else np.float16)
            size = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(name, shape, dtype, size)
            continue
        in_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
        size = int(np.prod(in_bytes))
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in shapes:
        writer.write_tensor_data(rounded(next(values), types[name]))
    writer.flush()
    writer.close()


def rounded(tensor: Tensor, kind: str) -> npt.NDArray[Any]:
    """A tensor converted to a GGUF type."""
    import gguf
    import numpy as np

    if kind == "F32":
        plain: npt.NDArray[Any] = tensor.cpu().numpy()
        return plain
    if kind == "F16":
        largest = float(np.finfo(np.float16).max)
        half: npt.NDArray[Any] = tensor.clamp(-largest, largest).half().cpu().numpy()
        return half
    rows = max(1, _AT_ONCE // tensor.shape[-1])
    parts = [tensor[place : place + rows] for place in range(0, len(tensor), rows)]
    if kind in K_TYPES:
        return np.concatenate([k_quantised(part, kind) for part in parts])
    own = gguf.GGMLQuantizationType[kind]
    return np.concatenate([gguf.quantize(part.cpu().numpy(), own) for part in parts])


def read_into(path: Path, model: Any, family: Gguf) -> None:
    """Load the dequantised weights of a file into the model it was written from."""
    import gguf
    import torch

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = model.state_dict()
    with torch.no_grad():
        for stored in stored_tensors(model, family):
            tensor = written[stored.name]
            if stored.source:
                values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(stored.shape)
                weights[stored.source].copy_(stored.to_model(torch.from_numpy(values.copy())))
