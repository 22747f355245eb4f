"""What DPO with TRL makes of the pairs that `expert improve --method dpo` trained on.

    python benchmarks/preference_quality.py --round IMPROVED/round-1 --out FILE [--ways ...]

Starting adapter, number of steps, batch size, learning rate and the SFT term are the round's; TRL
draws from all its pairs, of which ours held out a few. TRL's adapter is written into a copy of the
round's run, FILE's folder / trl, for `expert validate`. Ways are tried in turn until no gradient is
NaN; exact: products of the fused head are not summed in place.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import PeftModel
from safetensors.torch import save_file
from surroundings import environment
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer
from trl.kernels import chunked_logprob

from expert.core.events import read_events

WAYS = {
    "plain": {"dtype": torch.bfloat16, "attn_implementation": "sdpa"},
    "exact": {"dtype": torch.bfloat16, "attn_implementation": "sdpa"},
    "eager": {"dtype": torch.bfloat16, "attn_implementation": "eager"},
    "float32": {"dtype": torch.float32, "attn_implementation": "sdpa"},
}


class StopAtNan(TrainerCallback):
    """Keeps every step's numbers in a file at once, and stops after one that is not finite."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
        if logs and not math.isfinite(float(logs.get("grad_norm", 0.0))):
            control.should_training_stop = True


def train(
    way: str, ours: Path, plan: dict[str, Any], rows: list[dict[str, Any]], steps_file: Path
) -> Any:
    chunked_logprob._MM_OUT_DTYPE = way != "exact" and chunked_logprob._MM_OUT_DTYPE
    settings = json.loads((ours / "manifest.json").read_text())["training"]["config"]
    start = Path(settings["start_from"]) / "final"
    base = json.loads((start / "adapter_config.json").read_text())["base_model_name_or_path"]
    on_gpu = torch.cuda.is_available()
    where = {"": 0 if on_gpu else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(base, device_map=where, **WAYS[way])
    model.config.use_cache = False
    trainer = DPOTrainer(
        model=PeftModel.from_pretrained(model, start, is_trainable=True),
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=plan["batch"]["examples_per_update"],
            max_steps=plan["length"]["total_steps"],
            learning_rate=plan["optim"]["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=round(plan["optim"]["warmup_ratio"] * plan["length"]["total_steps"]),
            beta=settings["beta"],
            loss_type=["sigmoid", "sft"],
            loss_weights=[1.0, settings["sft_weight"]],
            bf16=on_gpu,
            use_cpu=not on_gpu,
            tf32=True if on_gpu else None,
            max_length=1024,
            gradient_checkpointing=False,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(start),
        callbacks=[StopAtNan(steps_file)],
    )
    began = time.perf_counter()
    trainer.train()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    keys = ("loss", "grad_norm", "rewards/accuracies", "rewards/margins", "rewards/chosen")
    steps = [each for each in trainer.state.log_history if "rewards/margins" in each]
    told = {key: [step.get(key) for step in steps] for key in keys}
    told |= {"way": way, "seconds": seconds, "steps": len(steps)}
    if on_gpu:
        told["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    finite = all(math.isfinite(float(norm)) for norm in told["grad_norm"] if norm is not None)
    return trainer.model, told, finite and len(steps) >= plan["length"]["total_steps"]


def write_run(model: Any, ours: Path, run: Path) -> None:
    """A copy of our run with the weights of TRL's adapter."""
    shutil.copytree(ours, run)
    file = run / "final" / "adapter_model.safetensors"
    found = {
        name.replace(".default.", "."): value.detach().float().cpu().contiguous()
        for name, value in model.named_parameters()
        if ".default." in name
    }
    save_file(found, file, metadata={"format": "pt"})
    done = run / "final" / "DONE"
    known = json.loads(done.read_text())
    data = file.read_bytes()
    known[file.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    done.write_text(json.dumps(known))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--round", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", default="plain,exact,eager,float32")
    args = parser.parse_args()
    ours = next((args.round / "runs").iterdir())
    plan = json.loads((ours / "plan.json").read_text())
    rows = [json.loads(line) for line in (args.round / "rows.jsonl").open(encoding="utf-8")]
    steps = [event for event in read_events(ours / "events.jsonl") if event["event"] == "step"]
    last = [e for e in read_events(ours / "events.jsonl") if e["event"] == "finished"][-1]
    own = {key: steps[-1].get(key) for key in ("loss", "rewards/margins", "rewards/accuracies")}
    own |= {"seconds": last["seconds"], "peak_reserved_bytes": steps[-1].get("peak_reserved_bytes")}
    own["planned_bytes"] = plan["memory"]["peak_bytes"]
    record = {"environment": environment(), "trl": version("trl"), "pairs": len(rows), "own": own}
    record["tries"] = []
    for way in args.ways.split(","):
        steps_file = args.out.with_name(f"{args.out.stem}-{way}.jsonl")
        model, told, sound = train(way, ours, plan, rows, steps_file)
        record["tries"].append(told)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        norms = [round(float(norm), 3) for norm in told["grad_norm"][:12] if norm is not None]
        print(way, f"{told['seconds']:.0f} s", told["steps"], "steps, gradient norms", norms)
        if sound:
            write_run(model, ours, args.out.parent / "trl")
            return
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
