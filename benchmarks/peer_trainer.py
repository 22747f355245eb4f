"""The same job as scripts often have it: transformers' Trainer, before anything is made faster.

    python benchmarks/peer_trainer.py --data FOLDER --model FOLDER --out FILE [--rows 16]
        [--micro 4] [--workers 4] [--recompute] [--steps 30]

Rows are tokenised one by one as they are taken, cut at 1,024 tokens and padded to as many;
attention is the model's own, weights are float32 and computed with in float16. A careful script
is --rows 16 --micro 4 --workers 4 --recompute, the shortest one --rows 1 --workers 0. Real tokens
a second over the last two thirds of the updates.
"""

import argparse
import tempfile
from typing import Any

import torch
from peer_job import LINEARS, Clock, asked, measure, rows_in
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

LENGTH = 1024


class PaddedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, texts: list[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = texts, tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = self.tokenizer(
            self.texts[place],
            truncation=True,
            max_length=LENGTH,
            padding="max_length",
            return_tensors="pt",
        )
        tokens, mask = row["input_ids"][0], row["attention_mask"][0]
        labels = torch.where(mask > 0, tokens, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def model_for(args: argparse.Namespace) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager", device_map={"": 0}
    )
    model.config.use_cache = False
    adapter = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEARS, task_type="CAUSAL_LM"
    )
    wrapped = get_peft_model(model, adapter)
    if args.recompute:
        wrapped.enable_input_require_grads()
    return wrapped


def trainer_for(args: argparse.Namespace, clock: Clock) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    micro = args.micro or args.rows
    return Trainer(
        model=model_for(args),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(prefix="trainer-"),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=args.rows // micro,
            max_steps=args.steps,
            fp16=True,
            tf32=False,
            gradient_checkpointing=args.recompute,
            dataloader_num_workers=args.workers,
            dataloader_prefetch_factor=2 if args.workers else None,
            optim="adamw_torch",
            learning_rate=2e-4,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=PaddedRows(list(rows_in(args.data)["text"]), tokenizer),
        callbacks=[clock],
    )


def main() -> None:
    args = asked("--recompute", workers=4)
    clock = Clock(args.steps)
    measure("transformers Trainer", trainer_for(args, clock), clock, args, median=False)


if __name__ == "__main__":
    main()
