"""Types of GGUF files, and the type of each tensor in them.

The mixes are those of llama-quantize: the `_m` types keep more bits for two tensors in some layers,
and the head has at least 6 bits.
"""

from __future__ import annotations

FILE_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0"),
    *("q4_k_m", "q4_k_s", "q4_1", "q4_0"),
)
UNQUANTISED = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
"""Floating-point types, and the same dtype in Expert."""
_PLAIN = ("F32", "F16", "BF16")
_WITHOUT_BLOCKS_OF_256 = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def tensor_type(name: str, shape: tuple[int, ...], file: str, *, layers: int, tied: bool) -> str:
    """The type of one tensor, by its name in GGUF and its shape (rows, columns)."""
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
