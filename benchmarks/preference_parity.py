"""DPO beside TRL's DPOTrainer, step by step: loss, rewards and log-probabilities, float32 on a CPU.

    python benchmarks/preference_parity.py --out FILE [--steps 50] [--loss sigmoid]

Needs trl. Both start from the same adapter of `tiny`, and get the same rows in the same order;
ours are packed with a shared prompt, TRL's are padded, and their prompts computed twice.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from surroundings import environment
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from expert.core.events import read_events
from expert.jobs.train import train
from expert.model.base_folder import built_in_folder
from expert.run.open import open_run

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMPARED = {
    "loss": "loss",
    **{f"rewards/{name}": f"rewards/{name}" for name in ("chosen", "rejected", "margins")},
    **{f"logps/{name}": f"logps/{name}" for name in ("chosen", "rejected")},
}
ROWS_PER_STEP, RATE, BETA = 8, 1e-3, 0.1


def rows_of(steps: int) -> list[dict[str, str]]:
    """Pairs of nearly one length, so that every step has as many."""
    draw = random.Random(0)
    return [
        {
            "prompt": f"Add {draw.randrange(100, 1000)} and {draw.randrange(100, 1000)}.",
            "chosen": f"it is {draw.randrange(100, 1000)}",
            "rejected": f"maybe {draw.randrange(10, 100)} or {draw.randrange(10, 100)}",
        }
        for _ in range(ROWS_PER_STEP * steps)
    ]


def make_adapter(base: Path, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)


def ours(
    work: Path, rows: list[dict[str, str]], adapter: Path, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The step events, and the rows of every step."""
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        **{"method": "dpo", "beta": BETA, "learning_rate": RATE},
        **({"loss_type": args.loss} if args.loss != "sigmoid" else {}),
        **{"adapter_type": "lora", "rank": 8, "alpha": 16, "batch_size": ROWS_PER_STEP},
        **{"lr_scheduler": "constant", "warmup_steps": 0, "max_steps": args.steps, "epochs": 1},
        **{"logging_steps": 1, "evaluation_strategy": "no", "save_strategy": "no", "trackers": []},
        **{"max_seq_length": 512, "packing": True},
    }
    manifest = {
        "name": "parity",
        "base_model": {"name": "tiny", "prompt_template": "chatml"},
        "training": {
            "dataset": {"path": "pairs.jsonl", "validation_split": 0},
            "config": config,
        },
    }
    file = work / "manifest.json"
    file.write_text(json.dumps(manifest))
    start = (f"training.config.start_from={adapter}",)
    split, order = open_run(file, overrides=start).data.prepared
    store = split.open()
    steps = [split.index.documents_in(step.bins) for step in order.steps(0, args.steps)]
    done = train(file, overrides=start)
    events = [e for e in read_events(done.folder / "events.jsonl") if e["event"] == "step"]
    return events, [[store.row(int(document)) for document in step] for step in steps]


def theirs(
    work: Path, base: Path, rows: list[dict[str, str]], adapter: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    start, end = "<|im_start|>", "<|im_end|>"
    texts = [
        {**row, "prompt": f"{start}user\n{row['prompt']}{end}\n{start}assistant\n"} for row in rows
    ]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = end
    tokenizer.pad_token = tokenizer.pad_token or end
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=PeftModel.from_pretrained(model, adapter, is_trainable=True),
        args=DPOConfig(
            **{"output_dir": str(work / "trl"), "per_device_train_batch_size": ROWS_PER_STEP},
            **{"max_steps": args.steps, "logging_steps": 1, "save_strategy": "no"},
            **{"report_to": [], "learning_rate": RATE, "lr_scheduler_type": "constant"},
            **{"beta": BETA, "loss_type": args.loss, "max_length": 512, "use_cpu": True},
            **{"bf16": False, "gradient_checkpointing": False, "optim": "adamw_torch"},
        ),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--loss", default="sigmoid")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="parity-"))
    base = built_in_folder("tiny")
    assert base is not None
    rows, adapter = rows_of(args.steps), work / "adapter"
    make_adapter(base, adapter)
    events, order = ours(work, rows, adapter, args)
    assert {len(step) for step in order} == {ROWS_PER_STEP}, "steps of other sizes"
    lines = theirs(work, base, [rows[number] for step in order for number in step], adapter, args)
    differences = {
        name: max(abs(e[name] - line[key]) for e, line in zip(events, lines, strict=True))
        for name, key in COMPARED.items()
    }
    record = {
        "environment": environment(),
        "loss": args.loss,
        "steps": args.steps,
        "largest_differences": differences,
        "losses": {
            "ours": [event["loss"] for event in events],
            "trl": [line["loss"] for line in lines],
        },
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(differences, indent=1))


if __name__ == "__main__":
    main()
