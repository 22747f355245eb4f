"""Both ladders on one card: an expert of 0.6B on real rows, and the character GPT.

The model has random weights of Qwen3-0.6B's shape; the character GPT has nanoGPT's configuration
for Shakespeare (config/train_shakespeare_char.py: six layers, 384 wide, 64 blocks of 256, dropout
0.2). Each ladder is one `expert benchmark`; JSON, Markdown and page of each go to the folder named.
On an H200 with a slow host the character GPT took 170 s, and the expert 330 s to its last setting.

    python benchmarks/ladder_h200.py --data FOLDER --text input.txt --out FOLDER [--minutes N]

FOLDER of the data holds corpus.jsonl (a `text` column) and tok/ (a tokenizer).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import expert

SHAPE = "qwen3-0.6b"
SEQUENCES_AN_UPDATE = 4
ROWS_AT_ONCE = 4
"""The batch as a cautious user writes it."""
EXPERT = {
    "adapter_type": "lora",
    "rank": 16,
    "alpha": 32,
    "max_seq_length": 2048,
    "train_on_prompt": True,
    "learning_rate": 2e-4,
    "batch_size": ROWS_AT_ONCE,
}
NANOGPT = {
    "adapter_type": "full",
    "batch_size": 64,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.99],
    "max_grad_norm": 1.0,
}


def write_manifest(folder: Path, name: str, **parts: Any) -> Path:
    training = {"dataset": parts.pop("dataset"), "config": parts.pop("config")}
    path = folder / "manifest.json"
    path.write_text(json.dumps({"name": name, **parts, "training": training}), encoding="utf-8")
    return path


def expert_manifest(data: Path, work: Path) -> Path:
    """An update of about four packed sequences, however long the rows are."""
    from training_speed import write_model

    folder = work / "expert"
    folder.mkdir()
    write_model(SHAPE, work / SHAPE, data / "tok")
    shutil.copyfile(data / "corpus.jsonl", folder / "corpus.jsonl")
    parts: dict[str, Any] = {
        "base_model": {"name": str(work / SHAPE), "quantization": "none"},
        "dataset": {"path": "corpus.jsonl", "validation_split": 0.02},
        "config": EXPERT,
    }
    index = expert.prepare(write_manifest(folder, "expert-0.6b", **parts)).train.index
    rows = SEQUENCES_AN_UPDATE * index.examples / index.bins
    times = max(1, round(rows / ROWS_AT_ONCE))
    parts["config"] = {**EXPERT, "gradient_accumulation_steps": times}
    return write_manifest(folder, "expert-0.6b", **parts)


def character_manifest(text: Path, work: Path) -> Path:
    folder = work / "characters"
    folder.mkdir()
    shutil.copyfile(text, folder / "input.txt")
    return write_manifest(
        folder,
        "char-gpt",
        base_model={"name": "char-gpt", "architecture": {"dropout": 0.2}},
        dataset={"path": "input.txt"},
        config=NANOGPT,
    )


def climb(manifest: Path, to: Path, *, minutes: float) -> int:
    """`expert benchmark` as a person would call it."""
    command = [sys.executable, "-m", "expert", "benchmark", "-m", str(manifest), "--to", str(to)]
    began = time.perf_counter()
    done = subprocess.run([*command, "--minutes", f"{minutes:g}"], check=False)
    print(
        f"{to.name}: {time.perf_counter() - began:.0f} s, exit code {done.returncode}", flush=True
    )
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="without it there is no ladder of the expert")
    parser.add_argument("--text", type=Path, help="without it there is none of the character GPT")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--card", default="h200", help="how the files are named")
    parser.add_argument("--minutes", type=float, default=4.9, help="for each; from 5 on thorough")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="ladder-"))
    failed = 0
    if args.text:
        manifest = character_manifest(args.text, work)
        to = args.out / f"ladder-char-gpt-{args.card}.json"
        failed |= climb(manifest, to, minutes=args.minutes)
    if args.data:
        manifest = expert_manifest(args.data, work)
        to = args.out / f"ladder-expert-{args.card}.json"
        failed |= climb(manifest, to, minutes=args.minutes)
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
