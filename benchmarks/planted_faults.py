"""Faults planted in runs on a card, each diagnosed from its run folder alone.

Every case is a whole run through the product with random weights of a real shape and made-up rows.
The fault comes from the manifest, or is patched into this process as a careless change would put it
there. The run folder is then copied away, the rest is deleted, and the diagnosis is held to what
was planted; thresholds are the ones in expert/insight, which know nothing of this file.

    python benchmarks/planted_faults.py --out FILE [--only TEXT ...] [--smoke]

--smoke tries every case with a toy on whatever device there is, without holding it to anything.
"""

import argparse
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from memory_cases import SHAPES, SIZES
from planted_cases import CASES, DEVICE, Case
from surroundings import environment
from transformers import AutoModelForCausalLM, Qwen3Config

import expert
from expert.insight.findings.finding import Finding
from expert.insight.page.facts import RunFacts
from expert.jobs.diagnose.diagnose import diagnose_run

TOKENIZER = Path(expert.__file__).parent / "model" / "tiny"
TOY = (Qwen3Config, 2, 64, 128, 4, 2, 16, 32768, True)
SMALL = (Qwen3Config, 1, 1024, 3072, 16, 8, 128, 32768, True)
"""One layer: enough to compile, quick to compile again."""
ALARMS = ("error", "warning")
TEXT = "the cat sat on a red mat and one dog ran to two blue trees while it rained"
WORDS = tuple(TEXT.split())


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
        # Faults of launching are to be seen, not mended by the plan.
        "use_cuda_graphs": False,
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


def judged(case: Case, found: RunFacts) -> dict[str, Any]:
    """What was found, held to what was planted."""
    names = {each.name: each for each in found.findings}
    alarms = sorted(name for name, each in names.items() if each.severity in ALARMS)
    kinds = {found.verdict.kind}
    right = case.expects in names if case.expects else not alarms
    if case.verdicts:
        right = right and bool(kinds & set(case.verdicts))
    return {
        "ok": right,
        "verdict": found.verdict.kind,
        "sentence": found.verdict.sentence,
        "found": {name: each.severity for name, each in names.items()},
        "unexpected": sorted(set(alarms) - {case.expects, *case.also}),
        "evidence": evidence_of(names.get(case.expects)),
        **{key: found.as_dict()[key] for key in ("update", "seconds")},
    }


def evidence_of(finding: Finding | None) -> str:
    return "" if finding is None else finding.evidence


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
