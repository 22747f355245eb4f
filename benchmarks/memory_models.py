"""The models of memory_peaks.py: real shapes with random weights, as a case arranges them."""

import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from memory_cases import LINEARS, ROW, SHAPES, SIZES, TINY
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import AttentionInterface, AutoModelForCausalLM

# Selective checkpointing keeps these outputs and recomputes norms, rope and activation functions.
SAVED_OPS = {
    *("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", "bitsandbytes.gemm_4bit"),
    "torch_attn._varlen_attn",
    *(f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "aten._scaled_dot_product_flash_attention_for_cpu",
}

VARLEN_TAKES = inspect.signature(varlen_attn).parameters
CAUSAL = {"window_size": (-1, 0)} if "window_size" in VARLEN_TAKES else {"is_causal": True}
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN_TAKES else {}  # 2.11 needs no word of it


def packed_attention(module, query, key, value, mask, scaling=None, **kwargs):
    """Causal attention inside every document of one packed row [1, heads, T, width]."""
    bounds = kwargs["cu_seq_lens_q"]
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 under autocast, after rope
    if not query.is_cuda:
        parts = zip(*(x.split(bounds.diff().tolist(), 2) for x in (query, key, value)), strict=True)
        options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
        outputs = [F.scaled_dot_product_attention(*part, **options) for part in parts]
        return torch.cat(outputs, 2).transpose(1, 2), None
    query, key, value = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    options = {"scale": scaling, **CAUSAL, **GROUPED}
    output = varlen_attn(query, key, value, bounds, bounds, ROW, ROW, **options)
    return output.unsqueeze(0), None


AttentionInterface.register("packed_varlen", packed_attention)  # unknown to the masks: gets None


def selective_contexts():
    def choose(context, op, *args, **kwargs):
        saved = str(getattr(op, "overloadpacket", op)) in SAVED_OPS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class CheckpointedBlock(nn.Module):
    """A block recomputed in the backward pass; being not reentrant, it asks nothing of its input,
    so no case needs enable_input_require_grads."""

    def __init__(self, block: nn.Module, selective: bool):
        super().__init__()
        self.block, self.selective = block, selective

    def forward(self, hidden, **kwargs):
        kwargs["context_fn"] = selective_contexts if self.selective else noop_context_fn
        return checkpoint(self.block, hidden, use_reentrant=False, **kwargs)


def random_model(job: dict[str, Any], *, device: str, tiny: bool) -> nn.Module:
    family, *sizes = SHAPES[job["shape"]]
    sizes = dict(zip(SIZES, sizes, strict=True)) | (TINY if tiny else {})
    config = family(**sizes, bos_token_id=None, eos_token_id=2, pad_token_id=0, use_cache=False)
    attention = {"varlen": "packed_varlen", "sdpa-flash": "sdpa"}.get(*[job["attention"]] * 2)
    dtype = torch.float32 if job["adapter"] == "full-amp" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.train()


def quantised(linear: nn.Linear, base: str) -> nn.Module:
    bnb = importlib.import_module("bitsandbytes")
    weight, sizes = linear.weight.data, (linear.in_features, linear.out_features)
    if base == "nf4":
        options = {"quant_type": "nf4", "compress_statistics": True, "requires_grad": False}
        new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, device="meta")
        new.weight = bnb.nn.Params4bit(weight, module=new, **options).to(weight.device)
        return new
    options = {"has_fp16_weights": False}
    new = bnb.nn.Linear8bitLt(*sizes, bias=False, threshold=6.0, device="meta", **options)
    # Int8Params.to("cuda") quantises only weights that come from the CPU; these are there already.
    rows, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    new.weight = bnb.nn.Int8Params(rows, requires_grad=False, CB=rows, SCB=scales, **options)
    return new


def quantise_blocks(model: nn.Module, base: str) -> None:
    layers = model.model.layers
    for name in [n for n, m in layers.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(parent), leaf, quantised(layers.get_submodule(name), base))
    setattr(model, {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}[base], True)


def with_adapter(model: nn.Module, kind: str) -> nn.Module:
    from peft import IA3Config, LoraConfig, get_peft_model

    if kind == "ia3":
        options = {"feedforward_modules": ["down_proj"], "task_type": "CAUSAL_LM"}
        config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], **options)
    else:
        options = {"use_dora": kind == "dora", "task_type": "CAUSAL_LM", "lora_alpha": 32}
        targets = ["q_proj", "v_proj"] if "qv" in kind else LINEARS
        config = LoraConfig(r=16, lora_dropout=0.0, target_modules=targets, **options)
    model = get_peft_model(model, config)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.data = parameter.data.to(torch.float32 if "f32" in kind else torch.bfloat16)
    return model


def arrange_blocks(layers: nn.ModuleList, job: dict[str, Any], compiles: bool) -> None:
    """Full checkpointing goes around the compiled block, selective checkpointing inside it, where
    the compiler sees which operations are recomputed."""
    selective = job["checkpoint"] == "selective"
    for index, block in enumerate(layers):
        if job["checkpoint"] != "none" and not (job["checkpoint"] == "half" and index % 2):
            layers[index] = CheckpointedBlock(block, selective)
        if compiles and job["blocks"] == "compiled":
            (layers[index] if selective else block).compile(dynamic=False)
