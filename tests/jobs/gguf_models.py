"""Small random models of every supported GGUF family, with tokenizers of both kinds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.tokenizers import TOKENIZER
from tests.jobs.runs import place, run, write_expert

_SIZES: dict[str, Any] = {
    "hidden_size": 256,  # a block of the K types
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + place / 16 for place in range(16)],
    "long_factor": [2.0 + place / 8 for place in range(16)],
    "original_max_position_embeddings": 256,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
# family: class of its config, tokenizer, changes
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "bytes", {"attention_bias": True, "tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", "llama3", {"rope_parameters": _LLAMA3, "mlp_bias": True}),
    "llama2": ("LlamaConfig", "pieces", {"rope_parameters": _LINEAR}),
    "mistral": ("MistralConfig", "pieces", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "qwen", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "qwen", {"rope_parameters": _YARN}),
    "gemma": ("GemmaConfig", "gemma", {}),
    "gemma2": (
        "Gemma2Config",
        "gemma",
        {
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "sliding_window": 8,
            "layer_types": _WINDOWS,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "gemma",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "layer_types": _WINDOWS,
            "rope_parameters": _GEMMA3,
        },
    ),
    "phi3": ("Phi3Config", "pieces", {"rope_parameters": _LONG, "sliding_window": None}),
}
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    "The cat sat on the mat, and the dog ran to the cat.",
    "Write 17 March 2021 as YYYY-MM-DD: 2021-03-17.",
    'Take {"name": "Ada", "year": 1843} and make 2 columns of it.',
    "Hello! How are you? Why is grass green?",
    "say red and green and blue, one two three",
] * 4


@cache
def model_folder(family: str) -> Path:
    """A model with random weights, and its tokenizer."""
    import torch
    import transformers

    name, kind, changes = MODELS[family]
    folder = place() / "gguf" / family
    tokenizer, special = small_tokenizer(kind)
    ends = {"bos_token_id": special.get("bos"), "eos_token_id": special["eos"], "pad_token_id": 0}
    # Some rows have no token, as in many models.
    sizes = {**_SIZES, "vocab_size": tokenizer.get_vocab_size() + 5, **ends}
    config = getattr(transformers, name)(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Norms and biases too: values that are never 1 or 0 show that each is in its place.
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() < 2 else 0.09)
            if parameter.dim() < 2:
                parameter.data += 0.5
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {f"{name}_token": tokenizer.id_to_token(number) for name, number in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")
    return folder


@cache
def small_tokenizer(kind: str) -> tuple[Any, dict[str, int]]:
    """A tokenizer and its special tokens: `bytes` as GPT-2 cuts text, `qwen` and `llama3` as these
    do; `pieces` as Llama 2's SentencePiece, `gemma` as Gemma's."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

    if kind in ("pieces", "gemma"):
        return _pieces(kind)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids: dict[str, Any] = {"eos": tokenizer.token_to_id("<|im_end|>")}
    if kind != "bytes":
        cut = _QWEN if kind == "qwen" else _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "llama3":
        whole = json.loads(tokenizer.to_str())
        whole["model"]["ignore_merges"] = True
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        ids["bos"] = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", ids["bos"])]
        )
    return tokenizer, ids


def _pieces(kind: str) -> tuple[Any, dict[str, int]]:
    """As transformers converts SentencePiece: every way to join two pieces is a merge."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    marks = ["<pad>", "<s>", "</s>", "<unk>"]
    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=marks, show_progress=False)
    learner.train_from_iterator(TEXT, trainer)
    whole = json.loads(learner.to_str())["model"]
    ranked = ["".join(merge) for merge in whole["merges"]]
    letters = [text for text in whole["vocab"] if text not in ranked and text not in marks]
    texts = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *ranked, *letters]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    merges = [
        (text[:cut], text[cut:])
        for text in dict.fromkeys(ranked)
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        spaces if kind == "gemma" else normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in marks])
    more = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in more])
    if kind == "gemma":
        tokenizer.add_tokens([AddedToken("▁▁▁▁", normalized=True), AddedToken("\n\n")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {"bos": 1, "eos": 2, "pad": 0, "unk": 3}


@cache
def trained_family(family: str) -> Path:
    """The folder of a LoRA run of a few steps on such a model."""
    config = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
    return run(write_expert(place() / f"gguf-{family}", model_folder(family), config)).folder
