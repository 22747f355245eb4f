"""A GGUF file: written tensor by tensor, and read back into the model it was made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.install import pip_install
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.gguf_file.architecture import Family, Stored, add_settings, stored_tensors
from expert.jobs.export.gguf_file.k_quants import K_TYPES, k_quantised
from expert.jobs.export.gguf_file.types import FILE_TYPES, tensor_type
from expert.jobs.export.gguf_file.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_QUANTIZATION_VERSION = 2
_PHI3_MARKS = ("</s>", "<unk>", "<s>", "<|endoftext|>")
_AT_ONCE = 2**24  # values that are rounded at once: memory stays flat


@dataclass(frozen=True, kw_only=True)
class About:
    """What a file says of itself."""

    name: str
    license: str = ""
    base: str = ""
    languages: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


def refuse_without_package(flag: str) -> None:
    """CannotExport where the package that writes GGUF is missing."""
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise CannotExport(f"{flag}: the package gguf is missing  ({pip_install('gguf')})")


def refuse_type(kind: str) -> None:
    """CannotExport for a type that is not written here, with those that are."""
    if kind not in FILE_TYPES:
        raise CannotExport(
            f"--gguf {kind}: this type is not written here  (use {', '.join(FILE_TYPES)}; others "
            "with llama-quantize of llama.cpp from f16)"
        )


def write_model(
    path: Path, model: Any, family: Family, words: Vocabulary, kind: str, about: About
) -> dict[str, int]:
    """Write a model as `kind`; returns how many tensors have which type."""
    import gguf

    writer = begin(path, family, about, words)
    add_settings(writer, model.config, family)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind].file])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    words.add_to(writer)
    stored = stored_tensors(model, family)
    layers, tied = model.config.num_hidden_layers, "output.weight" not in {s.name for s in stored}
    types = {s.name: tensor_type(s.name, s.shape, kind, layers=layers, tied=tied) for s in stored}
    own = model.state_dict()

    def values(one: Stored) -> Tensor:
        tensor: Tensor = one.made if one.made is not None else own[one.source]
        return one.to_file(tensor.detach().float())

    write_tensors(writer, {one.name: one.shape for one in stored}, types, iter(map(values, stored)))
    return dict(Counter(types.values()))


def begin(path: Path, family: Family, about: About, words: Vocabulary | None) -> Any:
    """A file that says what it is."""
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
    """llama.cpp looks for "phi-3" in the name of a model to drop spaces after its markers, and ends
    where such a model lacks some of them."""
    plain = re.sub("phi-?3", "phi 3", name, flags=re.IGNORECASE)
    strips = words is not None and words.strips_after and set(_PHI3_MARKS) <= set(words.tokens)
    return f"{plain} (Phi-3)" if strips else plain


def write_tensors(
    writer: Any, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], values: Any
) -> None:
    """All tensors, one in memory at a time: their table first, which the types decide."""
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
    """The values of a tensor in a type of GGUF."""
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


def read_into(path: Path, model: Any, family: Family) -> None:
    """Put the weights of a file back into the model it was made of, as they are there."""
    import gguf
    import torch

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    own = model.state_dict()
    with torch.no_grad():
        for one in stored_tensors(model, family):
            tensor = written[one.name]
            if one.source:
                values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(one.shape)
                own[one.source].copy_(one.to_model(torch.from_numpy(values.copy())))
