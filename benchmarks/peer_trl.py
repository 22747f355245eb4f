"""The same job with TRL: LoRA, DoRA or the whole model, packed, as its documentation says.

    python benchmarks/peer_trl.py --data FOLDER --model FOLDER --out FILE [--dora | --full] [--nf4]
        [--rank 16] [--rows 8] [--micro 8] [--steps 30] [--liger] [--compile] [--recompute]
        [--memory 24] [--experts]

--rows: sequences of 2048 tokens a step, --micro of them at once. --memory: gigabytes of the card.
--experts: adapters on attention and on the experts of a mixture.

FOLDER holds corpus.jsonl (a `text` column); the model's folder has its tokenizer. Real tokens a
second over the last two thirds of the updates. Attention is torch's varlen kernel, so that packing
is possible without flash-attn.
"""

import argparse
import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
from liger_kernel.transformers import (
    apply_liger_kernel_to_gemma3_text,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_phi3,
    apply_liger_kernel_to_qwen3,
    apply_liger_kernel_to_qwen3_moe,
    apply_liger_kernel_to_smollm3,
)
from peer_job import LENGTH, LINEARS, Clock, asked, measure, rows_in
from peft import LoraConfig
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from trl import SFTConfig, SFTTrainer

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
_OPTIONS = inspect.signature(varlen_attn).parameters
MORE: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
WINDOWS = "window_size" in _OPTIONS


def varlen(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, None]:
    """Documents of a packed row by themselves, with the boundaries the collator makes."""
    rows, _, length, width = q.shape
    # Norms that TRL keeps in float32 beside a quantised base hand over float32.
    q, k, v = (
        x.transpose(1, 2).reshape(rows * length, -1, width).to(torch.bfloat16) for x in (q, k, v)
    )
    edges, longest = options["cu_seq_lens_q"], options["max_length_q"]
    scale, window = options.get("scaling"), options.get("sliding_window")
    causal = {"window_size": (window - 1 if window else -1, 0)} if WINDOWS else {"is_causal": True}
    out = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scale, **causal, **MORE)
    return out.view(rows, length, -1, width), None


def load_base(folder: Path, *, nf4: bool, full: bool) -> Any:
    """Weights that are trained are in float32, as with us, and computed with in bfloat16."""
    AttentionInterface.register("varlen", varlen)
    AttentionMaskInterface.register("varlen", lambda *a, **k: None)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32 if full else torch.bfloat16,
        attn_implementation="varlen",
        quantization_config=quantised if nf4 else None,
        device_map={"": 0},
    )
    model.config.use_cache = False
    return model


def adapter_for(args: argparse.Namespace) -> LoraConfig:
    return LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=LINEARS[:4] if args.experts else LINEARS,
        target_parameters=EXPERTS if args.experts else None,
        use_dora=args.dora,
        task_type="CAUSAL_LM",
    )


def trainer_for(args: argparse.Namespace, clock: Clock) -> SFTTrainer:
    return SFTTrainer(
        model=load_base(args.model, nf4=args.nf4, full=args.full),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=args.micro or args.rows,
            gradient_accumulation_steps=args.rows // (args.micro or args.rows),
            max_steps=args.steps,
            bf16=True,
            tf32=True,
            packing=True,
            max_length=LENGTH,
            gradient_checkpointing=args.recompute,
            torch_compile=args.compile,
            optim="adamw_torch_fused",
            learning_rate=2e-5 if args.full else 2e-4,
            lr_scheduler_type="constant",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            dataset_num_proc=8,
            dataloader_num_workers=8,
            dataloader_prefetch_factor=8,
            dataloader_persistent_workers=True,
        ),
        train_dataset=rows_in(args.data),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=None if args.full else adapter_for(args),
        callbacks=[clock],
    )


def main() -> None:
    args = asked("--dora", "--full", "--nf4", "--liger", "--compile", "--recompute", "--experts")
    if args.liger:
        # On the classes, before the model is made: with TRL's own switch, use_liger_kernel, a
        # compiled 0.6B ran at 35,585 tokens/s on an H200, and at 79,068 this way in another script.
        apply_liger_kernel_to_llama()
        apply_liger_kernel_to_qwen3()
        apply_liger_kernel_to_qwen3_moe(swiglu=False)  # experts stay those that PEFT adapts
        apply_liger_kernel_to_gemma3_text()
        apply_liger_kernel_to_phi3()
        apply_liger_kernel_to_smollm3()
    clock = Clock(args.steps)
    measure("trl", trainer_for(args, clock), clock, args)


if __name__ == "__main__":
    main()
