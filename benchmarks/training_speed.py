"""Tokens a second of `expert.train` with nothing set, and of TRL beside it, on real rows.

    python benchmarks/training_speed.py --data FOLDER --out FILE [--only TEXT ...] [--peers [N]]
        [--unsloth FOLDER] [--steps 60] [--planned 2000] [--models FOLDER] [--list]

FOLDER of --data holds corpus.jsonl (a `text` column) and tok/ (a tokenizer). Models have random
weights of real shapes. Every case is a whole run through the product: manifest, plan, prepared
tokens, the loop, events. It is planned as one of --planned steps, since a plan may compile more for
a longer run, and stopped after --steps, as by Ctrl-C. Rates leave out the first half; tokens are
real ones, padding does not count. With --peers TRL (peer_trl.py) follows each case at once, on the
same rows, tokens a step and card, in each way that is listed, or the first N, and so does Unsloth
(peer_unsloth.py) where --unsloth names a folder of its packages; the best of them is compared.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory_cases import SHAPES, SIZES, TINY
from surroundings import environment
from transformers import AutoModelForCausalLM

import expert
from expert.core.events import read_events
from expert.core.files import write_text_atomically
from expert.jobs.train import train
from expert.model import adapters
from expert.parallel.group import Group

LORA = {"adapter_type": "lora", "rank": 16, "alpha": 32}
DORA = {"adapter_type": "dora", "rank": 14, "alpha": 28}
FULL = {"adapter_type": "full", "learning_rate": 2e-5}
COMPILED = {**LORA, "torch_compile": True, "attention": "flex"}
BEST = ("--liger --compile", "--liger")
"""Of TRL, the likelier to be the fastest first."""
OF_EXPERTS = ("--experts --liger",)
PEER_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """A run of ours, and the ways in which TRL is given the same."""

    name: str
    shape: str
    rows: int
    """Sequences of 2048 tokens a step."""
    settings: dict[str, Any]
    peers: tuple[str, ...] = ()
    base: str = "none"
    vram: str | None = None
    """Held to the memory of a smaller card."""
    unsloth: tuple[str, ...] = ()
    """The same for Unsloth."""
    special: dict[str, bool] = field(default_factory=dict)


def _held(flags: str, gigabytes: int, *micro: str) -> tuple[str, ...]:
    return tuple(f"{flags} --liger --memory {gigabytes} {each}" for each in micro)


CASES = [
    Case("0.6b lora", "qwen3-0.6b", 16, LORA, BEST, unsloth=("",)),
    Case("8b lora", "llama-8b", 8, LORA, BEST, unsloth=("",)),
    Case("1b lora", "llama-1b", 16, LORA, BEST, unsloth=("",)),
    Case("8b lora fp8", "llama-8b", 8, LORA, base="fp8"),
    Case("0.6b full", "qwen3-0.6b", 16, FULL, ("--full --liger --compile", "--full --liger")),
    Case("1b full", "llama-1b", 16, FULL, ("--full --liger --compile", "--full --liger")),
    Case(
        "8b lora nf4 in 24GB",
        *("llama-8b", 8, LORA),
        _held("--nf4", 24, "--micro 8 --recompute", "--micro 2 --recompute", "--micro 1"),
        base="int4",
        vram="24GB",
        unsloth=("--nf4 --memory 24 --micro 2 --recompute",),
    ),
    Case(
        "8b lora nf4 in 16GB",
        *("llama-8b", 8, LORA),
        _held("--nf4", 16, "--micro 8 --recompute", "--micro 2 --recompute"),
        base="int4",
        vram="16GB",
        unsloth=("--nf4 --memory 16 --micro 2 --recompute",),
    ),
    Case(
        "0.6b lora in 8GB",
        *("qwen3-0.6b", 16, LORA),
        _held("", 8, "--micro 8 --recompute", "--micro 4 --recompute", "--micro 1"),
        vram="8GB",
        unsloth=("--memory 8 --micro 4 --recompute",),
    ),
    Case(
        "0.6b dora nf4",
        *("qwen3-0.6b", 16, DORA, ("--dora --nf4 --rank 14 --liger",)),
        base="int4",
        unsloth=("--dora --nf4 --rank 14",),
    ),
    Case(
        "8b dora nf4",
        *("llama-8b", 8, DORA, ("--dora --nf4 --rank 14 --liger --micro 4",)),
        base="int4",
        unsloth=("--dora --nf4 --rank 14 --micro 4",),
    ),
]
SIDE_CASES = [  # measured where they are named
    Case("gemma 3 1b lora", "gemma-3-1b", 16, LORA, BEST),
    Case("gemma 3 4b lora", "gemma-3-4b", 8, LORA, BEST),
    Case("phi-4-mini lora", "phi-4-mini", 8, LORA, BEST),
    Case("smollm3 3b lora", "smollm3-3b", 8, LORA, BEST),
    Case("qwen3-30b-a3b 8 layers lora", "qwen3-moe-5b", 8, LORA, OF_EXPERTS),
    Case("tiny lora", "tiny", 2, LORA),
    # What a choice of ours gains or costs.
    Case("0.6b with flex", "qwen3-0.6b", 16, {**LORA, "attention": "flex"}),
    Case("0.6b compiled", "qwen3-0.6b", 16, COMPILED),
    Case("0.6b compiled, layer by layer", "qwen3-0.6b", 16, {**COMPILED, "fused_blocks": False}),
    Case("0.6b compiled, PEFT's sum", "qwen3-0.6b", 16, COMPILED, special={"as_peft": True}),
    Case("0.6b in a group of one", "qwen3-0.6b", 16, COMPILED, special={"grouped": True}),
    Case("8b compiled", "llama-8b", 8, COMPILED),
    Case("8b lora int8", "llama-8b", 8, LORA, base="int8"),
    Case("8b lora in 32GB", "llama-8b", 8, LORA, vram="32GB"),
]


def write_model(shape: str, folder: Path, tokenizer: Path) -> None:
    """Random weights of a real shape, with the tokenizer of the data."""
    if folder.exists():
        return
    family, *sizes = SHAPES["qwen3-0.6b" if shape == "tiny" else shape]
    sizes_of = dict(zip(SIZES, sizes, strict=True))
    if shape == "tiny":
        sizes_of = {**sizes_of, **TINY, "vocab_size": sizes_of["vocab_size"]}
    config = family(
        **sizes_of,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.work / case.name.replace(" ", "-")
    folder.mkdir(parents=True)
    write_manifest(case, folder, args)
    index = expert.prepare(folder / "manifest.json").train.index
    examples = round(case.rows * index.examples / index.bins)

    def stop_at_the_end(done: int) -> None:
        if done == args.steps:
            os.kill(os.getpid(), signal.SIGINT)

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of the case before
    began = time.perf_counter()
    with (
        added_by_peft() if case.special.get("as_peft") else nullcontext(),
        a_group_of_one() if case.special.get("grouped") else nullcontext() as group,
    ):
        done = train(
            folder / "manifest.json",
            overrides=(f"training.config.batch_size={examples}",),
            vram=case.vram,
            group=group,
            progress=stop_at_the_end,
        )
    seconds = time.perf_counter() - began
    facts = facts_of(done.folder)
    shutil.rmtree(folder)
    gc.collect()
    torch.cuda.empty_cache()
    told = {"case": case.name, "shape": case.shape, "base": case.base, "vram": case.vram}
    return {**told, "settings": case.settings, "seconds": seconds, **facts}


def write_manifest(case: Case, folder: Path, args: argparse.Namespace) -> None:
    model = model_of(case.shape, args)
    manifest = {
        "name": "speed",
        "base_model": {"name": str(model), "quantization": case.base},
        "training": {
            "dataset": {"path": "corpus.jsonl", "validation_split": 0},
            "config": {
                "max_seq_length": 2048,
                "train_on_prompt": True,
                "batch_size": case.rows,  # made the rows that fill so many sequences later
                "max_steps": args.planned,
                "logging_steps": 5,
                "learning_rate": 2e-4,
                "lr_scheduler": "constant",
                "warmup_steps": 0,
                "save_strategy": "no",
                "trackers": [],
                "epochs": 10_000,
                **case.settings,
            },
        },
    }
    shutil.copyfile(args.data / "corpus.jsonl", folder / "corpus.jsonl")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def model_of(shape: str, args: argparse.Namespace) -> Path:
    folder: Path = (args.models or args.work / "models").resolve() / shape
    write_model(shape, folder, args.data / "tok")
    return folder


def run_peers(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each way by itself in a process: what does not fit ends there."""
    found = [run_peer("peer_trl.py", flags, case, args) for flags in case.peers[: args.peers]]
    if args.unsloth:
        found += [run_peer("peer_unsloth.py", flags, case, args) for flags in case.unsloth]
    return found


def run_peer(program: str, flags: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    file = args.work / f"peer-{time.time_ns()}.json"
    given = ["--data", args.data, "--model", model_of(case.shape, args), "--out", file]
    given += ["--rows", case.rows, "--steps", min(args.steps, 30), *flags.split()]
    command = [sys.executable, str(Path(__file__).parent / program), *map(str, given)]
    environ = dict(os.environ)
    if program == "peer_unsloth.py":
        environ["PYTHONPATH"] = f"{args.unsloth.resolve()}:{environ.get('PYTHONPATH', '')}"
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    try:
        ended = subprocess.run(command, env=environ, timeout=PEER_SECONDS, **options)
        error = ended.stderr[-1500:]
    except subprocess.TimeoutExpired:
        error = f"not done after {PEER_SECONDS} s"
    if file.exists():
        return {"flags": flags, **json.loads(file.read_text(encoding="utf-8"))}
    return {"peer": program, "flags": flags, "error": error}


@contextmanager
def added_by_peft() -> Iterator[None]:
    """LoRA is added to a product that is rounded already, as PEFT does it."""
    settle, adapters.replace_lora_layers = (
        adapters.replace_lora_layers,
        lambda wrapped, adapter: None,
    )
    try:
        yield
    finally:
        adapters.replace_lora_layers = settle


@contextmanager
def a_group_of_one() -> Iterator[Group]:
    """Everything that many ranks do, over NCCL and gloo, with one."""
    address = "tcp://127.0.0.1:29511"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    try:
        yield Group(is_distributed=True)
    finally:
        dist.destroy_process_group()


def facts_of(folder: Path) -> dict[str, Any]:
    """Medians over the second half of the step lines."""
    events = list(read_events(folder / "events.jsonl"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]

    def median(key: str) -> float | None:
        values = [event[key] for event in late if event.get(key) is not None]
        return statistics.median(values) if values else None

    phases = {key: median(key) for key in late[-1] if key.startswith("time_")}
    return {
        "tokens_per_second": median("tokens_per_second"),
        "mfu": median("mfu"),
        "data_wait": median("data_wait"),
        "gpu_utilization": median("gpu_utilization"),
        "power_watts": median("power_watts"),
        "peak_reserved_bytes": late[-1].get("peak_reserved_bytes"),
        "most_card_bytes": max(event.get("gpu_memory_bytes") or 0 for event in steps),
        "most_process_bytes": max(event.get("gpu_process_memory_bytes") or 0 for event in steps),
        "memory": [event for event in events if event["event"] == "memory"],
        "syncs": [event for event in events if event["event"] == "syncs"],
        "ran_dry": median("ran_dry"),
        "recompiles": late[-1].get("recompiles"),
        "batch": plan["batch"],
        "kernels": plan["kernels"],
        "recomputed_blocks": plan["kernels"]["recomputed_blocks"],
        "planned_bytes": plan["memory"]["peak_bytes"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "tokens_per_update": late[-1]["tokens"] / late[-1]["updates"],
        "step_phases": phases,
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
    }


def line_of(result: dict[str, Any]) -> str:
    """A case as a line of a table in Markdown."""
    rates = [peer["tokens_per_second"] for peer in result.get("peers", []) if "error" not in peer]
    best = max(rates, default=None)
    own = result.get("tokens_per_second")
    cells = [result["case"], f"{own:,.0f}" if own else result.get("error", "")[:60]]
    whose = [
        peer["peer"]
        for peer in result.get("peers", [])
        if best and peer.get("tokens_per_second") == best
    ]
    cells.append(f"{best:,.0f} {whose[0]}" if best else "")
    cells.append(f"{own / best:.2f}x" if own and best else "")
    memory = [result.get("peak_reserved_bytes")]
    memory += [
        peer["peak_reserved_bytes"]
        for peer in result.get("peers", [])
        if peer.get("tokens_per_second") == best and best
    ]
    cells.append(" / ".join(f"{value / 2**30:.1f}" for value in memory if value))
    cells.append(f"{result['last_loss']:.3f}" if own else "")
    return f"| {' | '.join(cells)} |"


def keep(results: list[dict[str, Any]], file: Path) -> None:
    record = {"environment": environment(), "results": results}
    write_text_atomically(file, json.dumps(record, indent=2) + "\n")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=Path, help="where the models are kept for other runs")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--planned", type=int, default=2000)
    ways = {"nargs": "?", "type": int, "const": 9, "default": 0}
    parser.add_argument("--peers", **ways, help="TRL after each case, in its first N ways")
    parser.add_argument("--unsloth", type=Path, help="folder of its packages; it runs after TRL")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    args = parser.parse_args()
    if not args.list and not (args.data and args.out):
        parser.error("--data and --out are needed")
    args.work = Path(tempfile.mkdtemp(prefix="speed-"))
    return args


def main() -> None:
    # Ignored in what a shell starts in the background, and cases end by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = asked()
    chosen = CASES
    if args.only:
        every = [*CASES, *SIDE_CASES]
        chosen = [case for case in every if any(text in case.name for text in args.only)]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return
    results: list[dict[str, Any]] = []
    print("| case | tokens/s | best peer | | GiB reserved | loss at the end |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in chosen:
        try:
            results.append(run_case(case, args))
        except Exception as error:  # noqa: BLE001 - the other cases are still worth measuring
            results.append({"case": case.name, "error": f"{type(error).__name__}: {error}"[:2000]})
        keep(results, args.out)
        if (args.peers and case.peers) or (args.unsloth and case.unsloth):
            results[-1]["peers"] = run_peers(case, args)
            keep(results, args.out)
        print(line_of(results[-1]), flush=True)


if __name__ == "__main__":
    main()
