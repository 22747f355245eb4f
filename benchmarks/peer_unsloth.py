"""The same job with Unsloth: LoRA or DoRA, packed, as its documentation says.

    python benchmarks/peer_unsloth.py --data FOLDER --model FOLDER --out FILE [--nf4] [--recompute]
        [--rank 16] [--rows 8] [--micro 8] [--steps 30] [--memory 24]

Arguments as for peer_trl.py. Unsloth has limits on the versions of TRL and datasets: where those of
peer_trl.py are newer, give it a folder of its own (`pip install --target`).
"""

import unsloth  # noqa: I001 - first: it changes the classes of the others

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH = 2048


class Clock(TrainerCallback):
    """Counts real tokens and seconds after the first third of the updates."""

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps = warm, steps
        self.tokens = torch.zeros((), dtype=torch.long, device="cuda")
        self.before = self.began = 0.0
        self.seconds, self.counted, self.shape = 0.0, 0, ()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.warm:
            torch.cuda.synchronize()
            self.began, self.before = time.perf_counter(), int(self.tokens)
        if state.global_step == self.steps:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
            self.counted = int(self.tokens) - int(self.before)

    def count(self, trainer: Any) -> None:
        """Count the tokens of every batch that is trained on."""
        plain = trainer.training_step

        def training_step(model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            self.tokens.add_((inputs["input_ids"] != 0).sum())
            self.shape = tuple(inputs["input_ids"].shape)
            return plain(model, inputs, *more, **options)

        trainer.training_step = training_step


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for flag in ("--dora", "--nf4", "--recompute"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--micro", type=int)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


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
    lines = (args.data / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    rows = datasets.Dataset.from_dict({"text": [json.loads(line)["text"] for line in lines]})
    return SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
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
    args = asked()
    if args.memory:
        card = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory * 1e9 / card)
    clock = Clock(args.steps // 3, args.steps)
    trainer = trainer_for(args, clock)
    clock.count(trainer)
    trainer.train()
    packages = ("torch", "unsloth", "unsloth_zoo", "trl", "peft", "xformers")
    result = {
        "peer": "unsloth",
        "model": args.model.name,
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "model", "out")},
        "tokens_per_second": clock.counted / clock.seconds,
        "batch": clock.shape,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "versions": {name: version(name) for name in packages},
    }
    print(json.dumps(result), flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
