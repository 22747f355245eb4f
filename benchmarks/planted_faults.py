"""Faults planted in runs on a card, each diagnosed from its run folder alone.

Every case is a whole run through the product with random weights of a real shape and made-up rows.
The fault comes from the manifest, or is patched into this process as a careless change would put it
there. The run folder is then copied away, the rest is deleted, and the diagnosis is held to what
was planted; thresholds are the ones in expert/insight, which know nothing of this file.

    python benchmarks/planted_faults.py --out FILE [--only TEXT ...] [--smoke]

--smoke tries every case with a toy on whatever device there is, without holding it to anything.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from memory_cases import SHAPES, SIZES
from transformers import AutoModelForCausalLM, Qwen3Config

import expert
from expert.data import feed, loader
from expert.insight.finding import Finding
from expert.jobs.diagnosing import Diagnosis, diagnose_run
from expert.model.load import LoadedModel
from expert.training import checkpoint, evaluation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENIZER = Path(expert.__file__).parent / "model" / "tiny"
TOY = (Qwen3Config, 2, 64, 128, 4, 2, 16, 32768, True)
SMALL = (Qwen3Config, 1, 1024, 3072, 16, 8, 128, 32768, True)
"""One layer: enough to compile, quick to compile again."""
ALARMS = ("error", "warning")
TEXT = "the cat sat on a red mat and one dog ran to two blue trees while it rained"
WORDS = tuple(TEXT.split())
PADDED = {"packing": False, "group_by_length": False, "dataloader_num_workers": 0}


# --- what is planted -----------------------------------------------------------------------------


def slowed(place: Any, name: str, seconds: float) -> AbstractContextManager[Any]:
    """A function that takes so much longer."""
    real = getattr(place, name)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **more)

    return patch.object(place, name, slow)


def item_in_every_micro_batch() -> AbstractContextManager[Any]:
    """A loss that somebody wants to see at once."""
    real = LoadedModel.loss_sum

    def watched(self: LoadedModel, batch: Any) -> Any:
        loss = real(self, batch)
        loss.item()
        return loss

    return patch.object(LoadedModel, "loss_sum", watched)


def slow_bus() -> AbstractContextManager[Any]:
    """Copies that take long on their own stream, as over a crowded bus."""
    real = feed._Slot.send

    def crowded(self: Any, batches: int, stream: Any, new_event: Any) -> None:
        if stream is None:
            return real(self, batches, stream, new_event)
        copy = torch.Tensor.copy_

        def late(here: Any, *args: Any, **more: Any) -> Any:
            torch.cuda._sleep(int(2e8))  # cycles: about a tenth of a second
            return copy(here, *args, **more)

        with patch.object(torch.Tensor, "copy_", late):
            return real(self, batches, stream, new_event)

    return patch.object(feed._Slot, "send", crowded)


OTHER_PROCESS = """
import torch
held = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""


@contextmanager
def company() -> Iterator[None]:
    """Another process that holds 8 GiB of the card and computes on it."""
    if DEVICE != "cuda":
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", OTHER_PROCESS], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == b"ready"
        yield
    finally:
        other.kill()
        other.wait()


# --- the cases -----------------------------------------------------------------------------------


@dataclass
class Case:
    """A run, what is wrong with it, and what the diagnosis should say."""

    name: str
    expects: str
    """The finding; empty for a healthy run."""
    config: dict[str, Any] = field(default_factory=dict)
    verdicts: tuple[str, ...] = ()
    """Any of these; empty: whichever."""
    shape: str = "qwen3-0.6b"
    sequences: int | None = 16
    """Packed sequences of an update; None: `batch_size` is in the config."""
    rows: str = "mixed"
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    also: tuple[str, ...] = ()
    """Further alarms that the same fault rightly draws."""


CHARACTERS = {"adapter_type": "full", "max_seq_length": None, "rank": None}
FULL = {"adapter_type": "full", "rank": None, "learning_rate": 1e-5}
CASES = [
    Case("healthy", "", verdicts=("compute-bound",)),
    Case("healthy, small model", "", shape="smollm2-135m", sequences=64),
    Case(
        "tokenises late, 0 workers",
        "tokenised-late",
        {**PADDED, "tokenize": "late", "max_seq_length": 512, "batch_size": 16},
        ("data-bound",),
        shape="smollm2-135m",
        sequences=None,
        rows="long",
        also=("short-rows-alone", "padding-waste"),
    ),
    Case(
        "slow disk",
        "slow-disk",
        {},
        ("data-bound",),
        sequences=8,
        plant=lambda: slowed(feed, "fill_batch", 1.5),
        also=("below-the-band",),
    ),
    Case(
        "slow rows, 0 workers",
        "too-few-workers",
        {**PADDED, "batch_size": 16},
        ("data-bound",),
        sequences=None,
        plant=lambda: slowed(loader.PreparedRows, "__getitems__", 1.5),
        also=("padding-waste", "short-rows-alone", "below-the-band"),
    ),
    Case(
        ".item() per micro-batch",
        "host-sync",
        {"micro_batch_size": 4},
        ("sync-bound",),
        plant=item_in_every_micro_batch,
        also=("small-micro-batch",),
    ),
    Case(
        "batch 1",
        "batch-1",
        {"batch_size": 1, "packing": False},
        ("launch-bound", "sync-bound"),
        sequences=None,
        also=("launch-bound", "short-rows-alone", "below-the-band", "host-sync"),
    ),
    Case(
        "micro-batch 1 of short sequences",
        "small-micro-batch",
        {"micro_batch_size": 1, "max_seq_length": 512},
        also=("launch-bound", "below-the-band"),
    ),
    Case("eager attention", "eager-attention", {"attention": "eager"}, sequences=8),
    Case("recomputes with free memory", "needless-recomputing", {"gradient_checkpointing": True}),
    Case(
        "recompiles every step",
        "recompiling",
        # After ten updates, in which every shape should have been met, four more that compile.
        {**PADDED, "torch_compile": True, "batch_size": 4, "max_steps": 14},
        shape="small",
        sequences=None,
        also=(
            *("launch-bound", "padding-waste", "short-rows-alone", "too-few-workers"),
            *("too-short-to-compile", "host-sync"),
        ),
    ),
    Case("another process", "other-process", plant=company, also=("below-the-band",)),
    Case(
        "float32 without TF32",
        "tf32-off",
        {"bf16": False, "fp16": False, "use_tf32": False, "max_steps": 12},
        sequences=8,
        also=("fp32-on-a-bf16-card", "below-the-band"),
    ),
    Case(
        "float32 with TF32",
        "fp32-on-a-bf16-card",
        {"bf16": False, "fp16": False},
        sequences=8,
        also=("below-the-band",),
    ),
    Case(
        "padded rows of mixed lengths",
        "padding-waste",
        {**PADDED, "batch_size": 64},
        sequences=None,
        also=("short-rows-alone", "below-the-band", "too-few-workers", "host-sync"),
    ),
    Case(
        "slow copies",
        "slow-copies",
        {"dataloader_pin_memory": False},
        ("copy-bound",),
        sequences=4,
        plant=slow_bus,
        also=("below-the-band",),
    ),
    Case(
        "char-gpt, batch 1",
        "batch-1",
        {**CHARACTERS, "batch_size": 1, "max_steps": 600, "logging_steps": 50},
        ("launch-bound",),
        shape="char-gpt",
        sequences=None,
        also=("launch-bound", "below-the-band"),
    ),
    Case(
        "evaluates every update",
        "evaluation-often",
        {"eval_steps": 1, "validation_split": 0.05, "max_steps": 12},
        ("evaluation-bound",),
        plant=lambda: slowed(evaluation, "evaluate", 0.2),
    ),
    Case(
        "saves every update",
        "saving-often",
        {**FULL, "save_strategy": "steps", "save_steps": 1, "max_steps": 8},
        ("saving-bound",),
        shape="smollm2-135m",
        plant=lambda: slowed(checkpoint, "save_checkpoint", 0.2),
        also=("launch-bound", "below-the-band"),
    ),
    Case(
        "plain AdamW for every weight",
        "plain-optimizer",
        {**FULL, "optim": "adamw_torch"},
        shape="smollm2-135m",
        sequences=2,
        also=("launch-bound", "below-the-band"),
    ),
    Case("whole logits", "whole-logits", {"fused_loss": False}, also=("below-the-band",)),
    Case(
        "CPU beside a GPU",
        "gpu-unused",
        {"device": "cpu", "max_steps": 6, "max_seq_length": 256},
        shape="toy",
        sequences=4,
    ),
    Case(
        "compiles for twelve updates",
        "too-short-to-compile",
        {"torch_compile": True, "max_steps": 12},
        shape="small",
        also=("launch-bound",),
    ),
]


# --- running them --------------------------------------------------------------------------------


def write_model(shape: str, folder: Path) -> None:
    """Random weights of a shape, with the tokenizer of the built-in model."""
    if folder.exists():
        return
    family, *sizes = {**SHAPES, "small": SMALL, "toy": TOY}[shape]
    config = family(
        **dict(zip(SIZES, sizes, strict=True)),
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    let_go()
    for file in TOKENIZER.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(TOKENIZER / "chat_template.jinja", folder / "chat_template.jinja")


def let_go() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write_rows(folder: Path, kind: str, *, few: bool) -> str:
    """Made-up rows; `long` ones are cut, but tokenising them takes its time."""
    draw = random.Random(0)
    if kind == "characters":
        text = "\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(20_000))
        (folder / "corpus.txt").write_text(text, encoding="utf-8")
        return "corpus.txt"
    count = 64 if few or kind == "long" else 4000
    rows = []
    for _ in range(count):
        words = 20_000 if kind == "long" else draw.choice((20, 40, 80, 600))
        text = " ".join(draw.choices(WORDS, k=words))
        rows.append({"instruction": text, "response": " ".join(draw.choices(WORDS, k=20))})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return "rows.jsonl"


def write_manifest(case: Case, folder: Path, args: argparse.Namespace) -> Path:
    characters = case.shape == "char-gpt"
    rows = write_rows(folder, "characters" if characters else case.rows, few=args.smoke)
    shape = "toy" if args.smoke and not characters else case.shape
    base: dict[str, Any] = {"name": "char-gpt"}
    if not characters:
        write_model(shape, args.work / "models" / shape)
        base = {"name": str(args.work / "models" / shape), "prompt_template": "chatml"}
    settings: dict[str, Any] = {
        "adapter_type": "lora",
        "rank": 16,
        "max_seq_length": 2048,
        "train_on_prompt": True,
        "max_steps": 30,
        "epochs": 1000,
        "logging_steps": 2,
        "save_strategy": "no",
        "trackers": [],
        **case.config,
    }
    if args.smoke:
        smaller = {"max_steps": 6, "max_seq_length": 128, "logging_steps": 1}
        settings |= {key: value for key, value in smaller.items() if settings.get(key)}
    split = settings.pop("validation_split", 0.1 if characters else 0)
    config = {key: value for key, value in settings.items() if value is not None}
    manifest = {
        "name": "planted",
        "base_model": base,
        "training": {"dataset": {"path": rows, "validation_split": split}, "config": config},
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return path


def trained(case: Case, args: argparse.Namespace) -> Path:
    """The run folder of a case, all by itself."""
    folder = args.work / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest = write_manifest(case, folder, args)
    overrides: tuple[str, ...] = ()
    if case.sequences is not None:  # the rows that fill so many sequences
        index = expert.prepare(manifest).train.index
        examples = round(case.sequences * index.examples / index.bins)
        overrides = (f"training.config.batch_size={max(2, examples)}",)
    with case.plant():
        done = expert.train(manifest, overrides=overrides)
    if done.exit_code in (130, 143):  # somebody wants all of this to end, not the one case
        sys.exit(done.exit_code)
    alone = args.work / "alone" / "run"
    shutil.rmtree(alone.parent, ignore_errors=True)
    shutil.copytree(done.folder, alone, ignore=shutil.ignore_patterns("checkpoints", "final"))
    shutil.rmtree(folder)
    let_go()
    return alone


def judged(case: Case, found: Diagnosis) -> dict[str, Any]:
    """What was found, held to what was planted."""
    names = {each.name: each for each in found.findings}
    alarms = sorted(name for name, each in names.items() if each.severity in ALARMS)
    kinds = {found.verdict.kind, found.step_verdict.kind}
    right = case.expects in names if case.expects else not alarms
    if case.verdicts:
        right = right and bool(kinds & set(case.verdicts))
    return {
        "ok": right,
        "verdict": found.verdict.kind,
        "step_verdict": found.step_verdict.kind,
        "sentence": found.verdict.sentence,
        "found": {name: each.severity for name, each in names.items()},
        "unexpected": sorted(set(alarms) - {case.expects, *case.also}),
        "evidence": evidence_of(names.get(case.expects)),
        "update": found.anatomy.step.as_dict() if found.anatomy.step else None,
        "seconds": found.anatomy.run.as_dict(),
    }


def evidence_of(finding: Finding | None) -> str:
    return "" if finding is None else finding.evidence


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "python": platform.python_version(),
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "peft")
        },
        "command": "python benchmarks/planted_faults.py",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ["EXPERT_HOME"] = str(args.work / "home")  # no run learns from another
    results: list[dict[str, Any]] = []
    print(f"{'':4}{'planted':34}{'expects':24}{'verdict':18}unexpected", flush=True)
    for case in CASES:
        if args.only and not any(text in case.name for text in args.only):
            continue
        result: dict[str, Any] = {"fault": case.name, "expects": case.expects}
        began = time.perf_counter()
        try:
            result |= judged(case, diagnose_run(trained(case, args)))
        except Exception as error:  # noqa: BLE001 - the other cases are still worth running
            result |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            let_go()
        result["wall_seconds"] = time.perf_counter() - began
        results.append(result)
        mark = "ok" if result["ok"] else "NO"
        rest = ", ".join(result.get("unexpected", [])) or result.get("error", "")[:150]
        verdict = result.get("verdict", "")
        print(f"{mark:4}{case.name:34}{case.expects:24}{verdict:18}{rest}", flush=True)
        record = {"environment": environment(), "results": results}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(args.work)
    right = sum(result["ok"] for result in results)
    print(f"{right} of {len(results)} as they should be")


if __name__ == "__main__":
    main()
