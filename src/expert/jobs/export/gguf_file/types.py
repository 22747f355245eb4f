"""Types of GGUF files, and the type of each tensor in them.

The mixes are those of llama-quantize: the `_m` types keep more bits for two tensors in some layers,
and the head has at least 6 bits.
"""

from __future__ import annotations

from typing import NamedTuple


class FileType(NamedTuple):
    """Names of a type in the gguf package."""

    file: str
    """In LlamaFileType."""
    tensors: str
    """In GGMLQuantizationType, for most tensors."""


FILE_TYPES = {
    "f32": FileType("ALL_F32", "F32"),
    "f16": FileType("MOSTLY_F16", "F16"),
    "bf16": FileType("MOSTLY_BF16", "BF16"),
    "q8_0": FileType("MOSTLY_Q8_0", "Q8_0"),
    "q6_k": FileType("MOSTLY_Q6_K", "Q6_K"),
    "q5_k_m": FileType("MOSTLY_Q5_K_M", "Q5_K"),
    "q5_k_s": FileType("MOSTLY_Q5_K_S", "Q5_K"),
    "q5_1": FileType("MOSTLY_Q5_1", "Q5_1"),
    "q5_0": FileType("MOSTLY_Q5_0", "Q5_0"),
    "q4_k_m": FileType("MOSTLY_Q4_K_M", "Q4_K"),
    "q4_k_s": FileType("MOSTLY_Q4_K_S", "Q4_K"),
    "q4_1": FileType("MOSTLY_Q4_1", "Q4_1"),
    "q4_0": FileType("MOSTLY_Q4_0", "Q4_0"),
}
UNQUANTISED = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
"""Floating-point types, and the same dtype in Expert."""
_PLAIN = ("F32", "F16", "BF16")
_WITHOUT_BLOCKS_OF_256 = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def tensor_type(name: str, shape: tuple[int, ...], file: str, *, layers: int, tied: bool) -> str:
    """The type of one tensor, by its name in GGUF and its shape (rows, columns)."""
    own = FILE_TYPES[file].tensors
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
