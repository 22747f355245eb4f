"""The same job with Unsloth: LoRA or DoRA, packed, as its documentation says.

    python benchmarks/peer_unsloth.py --data FOLDER --model FOLDER --out FILE [--nf4] [--recompute]
        [--rank 16] [--rows 8] [--micro 8] [--steps 30] [--memory 24]

Arguments as for peer_trl.py. Unsloth has limits on the versions of TRL and datasets: where those of
peer_trl.py are newer, give it a folder of its own (`pip install --target`).
"""

import unsloth  # noqa: I001 - first: it changes the classes of the others

import argparse
import tempfile
from typing import Any

import torch
from peer_job import LENGTH, LINEARS, Clock, asked, measure, rows_in
from trl import SFTConfig, SFTTrainer


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(args.model),
        max_seq_length=LENGTH,
        dtype=torch.bfloat16,
        load_in_4bit=args.nf4,
        local_files_only=True,
    )
    adapted = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0,
        bias="none",
        target_modules=LINEARS,
        use_dora=args.dora,
        use_gradient_checkpointing="unsloth" if args.recompute else False,
    )
    return adapted, tokenizer


def trainer_for(args: argparse.Namespace, clock: Clock) -> Any:
    model, tokenizer = load(args)
    return SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows_in(args.data),
        callbacks=[clock],
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="unsloth-"),
            dataset_text_field="text",
            per_device_train_batch_size=args.micro or args.rows,
            gradient_accumulation_steps=args.rows // (args.micro or args.rows),
            max_steps=args.steps,
            bf16=True,
            packing=True,
            max_length=LENGTH,
            optim="adamw_torch_fused",
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            dataset_num_proc=8,
        ),
    )


def main() -> None:
    args = asked("--dora", "--nf4", "--recompute")
    clock = Clock(args.steps)
    trainer = trainer_for(args, clock)
    measure("unsloth", trainer, clock, args, "unsloth", "unsloth_zoo", "xformers")


if __name__ == "__main__":
    main()
