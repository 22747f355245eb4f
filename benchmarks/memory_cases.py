"""The cases of memory_peaks.py: which shapes, and which settings are told apart on them."""

from functools import partial
from typing import Any

from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

ROW = 2048  # the longest document, and the width of a padded row
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
MIXED = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
GEMMA_3_1B = (26, 1152, 6912, 4, 1, 256, 262144, True)
GEMMA_3_4B = (34, 2560, 10240, 8, 4, 256, 262208, True)  # its language model
SHAPES: dict[str, tuple[Any, ...]] = {
    "smollm2-135m": (LlamaConfig, 30, 576, 1536, 9, 3, 64, 49152, True),
    "qwen3-0.6b": (Qwen3Config, 28, 1024, 3072, 16, 8, 128, 151936, True),
    "llama-1b": (LlamaConfig, 16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-8b": (LlamaConfig, 32, 4096, 14336, 32, 8, 128, 128256, False),
    "gemma-3-1b": (partial(Gemma3TextConfig, sliding_window=512), *GEMMA_3_1B),
    "gemma-3-4b": (partial(Gemma3TextConfig, sliding_window=1024), *GEMMA_3_4B),
    "phi-4-mini": (
        partial(Phi3Config, partial_rotary_factor=0.75, sliding_window=None),
        *(32, 3072, 8192, 24, 8, 128, 200064, True),
    ),
    # Qwen3-30B-A3B, a sixth of its layers.
    "qwen3-moe-5b": (
        partial(Qwen3MoeConfig, **MIXED, norm_topk_prob=True),
        *(8, 2048, 6144, 32, 4, 128, 151936, False),
    ),
    "smollm3-3b": (SmolLM3Config, 36, 2048, 11008, 16, 4, 128, 128256, True),
}
TINY = dict(zip(SIZES, (2, 64, 128, 4, 2, 16, 512), strict=False))  # the rest is the shape's own

DEFAULTS = {
    # lora[-qv][-f32][-amp], dora, ia3, full-bf16, full-amp; rank 16, adapters in bf16 unless f32;
    # amp runs the forward under bf16 autocast, and full-amp holds its weights in float32
    "adapter": "lora",
    "base": "bf16",  # nf4 (doubly quantised) and int8 replace the linears of the blocks
    "blocks": "eager",  # compiled: every block by itself, with static shapes
    "attention": "varlen",  # in rows, not packed: sdpa, eager (padded), sdpa-flash (filled)
    "checkpoint": "none",  # full, selective: every block; half: every second one, whole
    "loss": "fused",  # logits: the whole logits, upcast to float32
    "optimizer": "adamw",  # adam8bit: of bitsandbytes
    "boundaries": "tight",  # a number: the list of document boundaries padded to so many entries
}


def case(shape: str, *tokens: int, **settings: str) -> dict[str, Any]:
    """One line of the table: a shape, the batch sizes, and the settings that are not default."""
    filled = {key: settings.pop(key, default) for key, default in DEFAULTS.items()}
    assert not settings
    name = "{adapter}/{base}/{blocks}/{attention}/ckpt-{checkpoint}/{loss}/{optimizer}/{boundaries}"
    return {"name": f"{shape}/{name.format(**filled)}", "shape": shape, "tokens": tokens, **filled}


Q, S, L1, L8 = "qwen3-0.6b", "smollm2-135m", "llama-1b", "llama-8b"
K4, K8, K16, K32, K64 = 4096, 8192, 16384, 32768, 65536
CASES = [
    case(Q, K8, K16),
    case(Q, K8, K16, checkpoint="full"),
    case(Q, K8, K16, checkpoint="half"),
    case(Q, K8, K16, checkpoint="selective"),
    case(Q, K8, K16, loss="logits"),
    case(Q, K8, K16, adapter="lora-f32"),
    case(Q, K16, adapter="lora-f32-amp"),
    case(Q, K8, K16, adapter="lora-qv"),
    case(Q, K8, K16, adapter="dora"),
    case(Q, K16, adapter="ia3"),
    case(Q, K8, K16, adapter="full-amp"),
    case(Q, K8, K16, adapter="full-bf16"),
    case(Q, K16, adapter="full-bf16", optimizer="adam8bit"),
    case(Q, K8, K16, base="nf4"),
    case(Q, K8, K16, base="int8"),
    case(Q, K16, base="int8", checkpoint="full"),
    case(Q, K8, K16, attention="sdpa"),
    case(Q, K16, attention="sdpa-flash"),
    case(Q, K4, K8, attention="eager"),
    case(Q, K16, boundaries="512"),
    case(S, K8, K16),
    case(S, K8, K16, adapter="full-amp"),
    case(L1, K8, K16),
    case(L1, K8, K16, checkpoint="full"),
    case(L1, K8, K16, adapter="full-amp"),
    case(L1, K8, base="nf4"),
    case(L1, K8, loss="logits"),
    case(L8, K4, K8),
    case(L8, K8, K16, checkpoint="full"),
    case(L8, K4, K8, checkpoint="half"),
    case(L8, K4, K8, base="nf4"),
    case(L8, K4, adapter="full-bf16", checkpoint="full"),
    case(Q, K8, K16, K32, K64, blocks="compiled"),
    case(L8, K8, K16, blocks="compiled"),
    case(Q, K8, K16, blocks="compiled", checkpoint="full"),
    case(Q, K8, K16, blocks="compiled", checkpoint="half"),
    case(Q, K8, K16, blocks="compiled", checkpoint="selective"),
    case(L1, K8, K16, blocks="compiled"),
    case(S, K8, K16, blocks="compiled", adapter="full-amp"),
    case(Q, K8, K16, blocks="compiled", adapter="full-bf16"),
    case(Q, K8, K16, blocks="compiled", adapter="lora-f32"),
    case(Q, K16, blocks="compiled", base="nf4"),
    case(Q, K16, blocks="compiled", adapter="full-amp"),
    case(Q, K16, blocks="compiled", adapter="dora"),
]


def expected_seconds(job: dict[str, Any]) -> int:
    seconds = 7 if job["shape"] == L8 else 3
    if job["blocks"] == "compiled":
        seconds += 40 if job["adapter"] == "dora" else 8 + seconds  # its blocks break into pieces
    return seconds
