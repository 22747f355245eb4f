"""The same job of preferences with TRL: DPO with LoRA, as its documentation says.

    python benchmarks/peer_trl_dpo.py --data FOLDER --model FOLDER --out FILE [--rows 16]
        [--steps 20] [--micro 8] [--nf4] [--memory 24] [--recompute]

FOLDER holds pairs.jsonl (prompt, chosen, rejected); --rows: pairs a step. The reference is the
model without its adapter, and Liger's kernels are used except that for the loss of DPO.
Pairs a second over the last two thirds of the steps.
"""

import json
import tempfile
from importlib.metadata import version

import datasets
import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3
from peer_job import LENGTH, LINEARS, Clock, asked
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer


def main() -> None:
    args = asked("--nf4", "--recompute")
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        quantization_config=quantised if args.nf4 else None,
        device_map={"": 0},
    )
    model.config.use_cache = False
    lines = (args.data / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    clock, micro = Clock(args.steps), args.micro or args.rows
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=args.rows // micro,
            max_steps=args.steps,
            bf16=True,
            tf32=True,
            max_length=LENGTH,
            gradient_checkpointing=args.recompute,
            optim="adamw_torch_fused",
            learning_rate=5e-6,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataset_num_proc=8,
            dataloader_num_workers=8,
            dataloader_prefetch_factor=4,
            dataloader_persistent_workers=True,
        ),
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEARS, task_type="CAUSAL_LM"
        ),
        callbacks=[clock],
    )
    trainer.train()
    torch.cuda.synchronize()
    (start, _), (end, _) = clock.ends[args.steps // 3 - 1], clock.ends[-1]
    steps = args.steps - args.steps // 3
    result = {
        "peer": "trl",
        "pairs_per_second": args.rows * steps / (start.elapsed_time(end) / 1000),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "versions": {name: version(name) for name in ("torch", "trl", "peft", "liger-kernel")},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
