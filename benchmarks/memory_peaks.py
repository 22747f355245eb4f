"""Peak GPU memory of plain training steps, one record per case, to calibrate a memory model.

Every case builds a fresh random-weight model of a real shape, trains three steps on one fixed
batch and frees everything. Step 1 creates the optimizer state and compiles; the peak is read over
steps 2 and 3, whole and per phase, and the bytes of weights, gradients and optimizer state are
summed from the tensors, so that activations can be told apart. A batch of T tokens is documents
of 100 to 2048 tokens laid end to end, or T / 2048 rows of one document each. All sizes are bytes.

    python benchmarks/memory_peaks.py --out memory_peaks.json [--only TEXT ...] [--shapes NAME ...]
    python benchmarks/memory_peaks.py --smoke --out smoke.json     # CPU, tiny, no memory read
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import logging
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from memory_cases import CASES, ROW, SHAPES, expected_seconds
from memory_models import arrange_blocks, quantise_blocks, random_model, with_adapter
from torch import nn

STARTED = time.perf_counter()
IGNORED = -100  # the label of a position without a loss


def document_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Between 100 and 2048 tokens, 450 on average, most of them short."""
    return np.clip(rng.lognormal(np.log(345), 0.77, count), 100, ROW).astype(np.int64)


def packed_batch(tokens: int, vocabulary: int, boundaries: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ends = document_lengths(rng, tokens // 100).cumsum()
    bounds = np.concatenate([[0], ends[ends < tokens], [tokens]])
    ids = rng.integers(3, vocabulary, tokens)
    labels = np.append(ids[1:], IGNORED)
    labels[bounds[1:] - 1] = IGNORED
    positions = np.arange(tokens) - np.repeat(bounds[:-1], np.diff(bounds))
    spare = 0 if boundaries == "tight" else int(boundaries) - len(bounds)
    padded = np.append(bounds, [tokens] * spare).astype(np.int32)
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "cu_seq_lens_q": padded}
    return {**inputs, "labels": labels}


def padded_batch(tokens: int, vocabulary: int, filled: bool) -> dict[str, np.ndarray]:
    rng, rows = np.random.default_rng(0), tokens // ROW
    lengths = np.full(rows, ROW) if filled else document_lengths(rng, rows)
    ids = rng.integers(3, vocabulary, (rows, ROW))
    labels = np.where(np.arange(ROW) < lengths[:, None] - 1, np.roll(ids, -1, 1), IGNORED)
    mask = {} if filled else {"attention_mask": (np.arange(ROW) < lengths[:, None]).astype(int)}
    return {"input_ids": ids, **mask, "labels": labels.reshape(-1)}


def nvml_used() -> int | None:
    """Bytes used on the first GPU, by everyone: the driver's word, also before a CUDA context."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used
    except Exception:  # noqa: BLE001 - no library, no driver, or a machine that hides it
        return None


class Gauge:
    """Reads the CUDA allocator. Without a GPU every reading is None."""

    def __init__(self, on: bool):
        self.on = on
        self.restart()

    def restart(self) -> None:
        self.phases: dict[str, dict[str, int]] = {}
        if self.on:
            torch.cuda.reset_peak_memory_stats()

    def note(self, phase: str) -> None:
        """Close a phase: its peaks so far, and what is still allocated at its end."""
        if self.on:
            peaks = {"peak": torch.cuda.max_memory_allocated()}
            peaks["peak_reserved"] = torch.cuda.max_memory_reserved()
            before = self.phases.get(phase, peaks)
            self.phases[phase] = {key: max(before[key], value) for key, value in peaks.items()}
            self.phases[phase]["end"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def highest(self, key: str = "peak") -> int | None:
        return max(phase[key] for phase in self.phases.values()) if self.on else None

    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated() if self.on else None

    def device(self) -> dict[str, Any]:
        """What the device holds now: used less reserved is the CUDA context and other processes."""
        if not self.on:
            return {}
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {"used": total - free, "reserved": reserved, "nvml": nvml_used()}


def quantisation_constants(model: nn.Module) -> Any:
    for module in model.modules():
        weight = module._parameters.get("weight")
        for owner in (weight, getattr(module, "state", None)):  # int8 moves them to the state
            yield from (getattr(owner, "SCB", None), getattr(owner, "CB", None))
        state = getattr(weight, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code, state.offset)
            yield from (state.state2.absmax, state.state2.code)


def tensor_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by purpose; a storage that several tensors share counts once, for the first."""
    parameters = list(model.parameters())
    purposes = {
        "trainable": [p for p in parameters if p.requires_grad],
        "frozen": [p for p in parameters if not p.requires_grad],
        "quantisation": quantisation_constants(model),
        "buffers": model.buffers(),
        "gradients": [p.grad for p in parameters],
        "optimizer": [v for state in optimizer.state.values() for v in state.values()],
    }
    totals, seen = dict.fromkeys(purposes, 0), set()
    for purpose, tensors in purposes.items():
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if torch.is_tensor(t)}
        new = storages.keys() - seen
        totals[purpose] = sum(storages[key].untyped_storage().nbytes() for key in new)
        seen |= new
    return totals


def loss_of(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "logits" or not hidden.is_cuda:
        return F.cross_entropy(head(hidden).float(), labels)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    output = LigerFusedLinearCrossEntropyFunction.apply(hidden, head.weight, labels)
    return output[0] if isinstance(output, tuple) else output


def build(job: dict[str, Any], tokens: int, args: argparse.Namespace) -> SimpleNamespace:
    torch.manual_seed(0)
    causal_lm = random_model(job, device=args.device, tiny=args.smoke)
    if job["base"] != "bf16":
        quantise_blocks(causal_lm, job["base"])
    full = job["adapter"].startswith("full")
    model = causal_lm if full else with_adapter(causal_lm, job["adapter"])
    arrange_blocks(causal_lm.model.layers, job, compiles=args.device == "cuda")
    trainable = [p for p in model.parameters() if p.requires_grad]
    vocabulary, attention = causal_lm.config.vocab_size, job["attention"]
    if attention == "varlen":
        batch = packed_batch(tokens, vocabulary, job["boundaries"])
    else:
        batch = padded_batch(tokens, vocabulary, filled=attention == "sdpa-flash")
    inputs = {key: torch.from_numpy(value).to(args.device) for key, value in batch.items()}
    run = SimpleNamespace(model=model, causal_lm=causal_lm, trainable=trainable, inputs=inputs)
    run.labels, run.loss, run.amp = inputs.pop("labels"), job["loss"], "-amp" in job["adapter"]
    if job["optimizer"] == "adam8bit":
        run.optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(trainable, lr=1e-4)
    else:
        run.optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
    return run


def train_step(run: SimpleNamespace, gauge: Gauge, record: dict[str, Any] | None = None) -> float:
    device = run.labels.device.type
    with torch.autocast(device, torch.bfloat16) if run.amp else contextlib.nullcontext():
        hidden = run.causal_lm.model(use_cache=False, **run.inputs).last_hidden_state
        gauge.note("forward")
        loss = loss_of(hidden.flatten(0, 1), run.causal_lm.lm_head, run.labels, run.loss)
    del hidden
    gauge.note("loss")
    loss.backward()
    gauge.note("backward")
    torch.nn.utils.clip_grad_norm_(run.trainable, 1.0, foreach=True)
    run.optimizer.step()
    gauge.note("optimizer")
    if record is not None:
        record["tensor_bytes"] = tensor_bytes(run.model, run.optimizer)
    run.optimizer.zero_grad(set_to_none=True)
    return loss.item()  # waits for the device


def measure(job: dict[str, Any], tokens: int, args: argparse.Namespace, record: dict) -> None:
    gauge = Gauge(args.device == "cuda")
    record["allocated_before"] = gauge.allocated()
    run = build(job, tokens, args)
    gauge.note("load")
    record.update(load_peak=gauge.highest(), allocated_after_load=gauge.allocated())
    record["trainable_parameters"] = sum(p.numel() for p in run.trainable)
    record["labelled_tokens"] = int((run.labels != IGNORED).sum())
    record["boundary_entries"] = len(run.inputs.get("cu_seq_lens_q", ()))
    if gauge.on:
        torch.cuda.empty_cache()  # what loading left over must not serve the steps

    gauge.restart()
    begin = time.perf_counter()
    train_step(run, gauge, record)
    record["first_step_seconds"] = time.perf_counter() - begin
    record["first_step_peak"] = gauge.highest()
    record["first_step_peak_reserved"] = gauge.highest("peak_reserved")
    gc.collect()
    record["static"] = gauge.allocated()

    gauge.restart()
    begin = time.perf_counter()
    record["losses"] = [train_step(run, gauge) for _ in range(2)]
    record["step_seconds"] = (time.perf_counter() - begin) / 2
    record.update(peak=gauge.highest(), peak_reserved=gauge.highest("peak_reserved"))
    record.update(phases=gauge.phases, device=gauge.device(), status="ok")
    if gauge.on:
        record["activation_bytes_per_token"] = (record["peak"] - record["static"]) / tokens


def measure_safely(job: dict[str, Any], tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case, whatever happens: a failure is a record too, and holds no memory."""
    record: dict[str, Any] = {**job, "tokens": tokens, "status": "error"}
    try:
        measure(job, tokens, args, record)
    except Exception as error:  # noqa: BLE001 - a case that fails is a result, with its reason
        if isinstance(error, torch.OutOfMemoryError):
            record.update(status="oom", peak_at_oom=torch.cuda.max_memory_allocated())
        record["error"] = f"{type(error).__name__}: {error}"[:3000]
        record["error_at"] = traceback.format_tb(error.__traceback__)[-1].strip()[:500]
        while error is not None:  # the frames of a traceback hold the model
            traceback.clear_frames(error.__traceback__)
            error.__traceback__, error = None, error.__cause__ or error.__context__
    counters = torch._dynamo.utils.counters
    record["graphs"] = counters["stats"]["unique_graphs"]
    record["graph_breaks"] = sum(counters["graph_break"].values())
    return record


def release(device: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # else they stay allocated into the next case
        torch.cuda.empty_cache()


def environment(device: str) -> dict[str, Any]:
    installed = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    packages = ("transformers", "peft", "liger-kernel", "bitsandbytes", "triton")
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.executable).name, *sys.argv],
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: installed.get(name, installed.get(name.replace("-", "_"))) for name in packages},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    if device == "cuda":
        facts["before_context"] = nvml_used()
        torch.zeros(1, device="cuda")
        torch.cuda.empty_cache()
        gpu = torch.cuda.get_device_properties(0)
        facts.update(after_context=Gauge(True).device(), gpu=gpu.name, gpu_memory=gpu.total_memory)
    return facts


def summary(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status']}: {record['error'].partition(chr(10))[0][:150]}"
    seconds = f"{record['step_seconds']:.3f} s/step, first {record['first_step_seconds']:.1f} s"
    if record["peak"] is None:
        return f"loss {record['losses'][-1]:.3f}, {seconds}"
    activations = f"{record['activation_bytes_per_token']:,.0f} B/token"
    static, peak = record["static"] / 2**30, record["peak"] / 2**30
    return f"static {static:.2f} peak {peak:.2f} GiB, {activations}, {seconds}"


def run_all(jobs: list[tuple[dict[str, Any], int]], args: argparse.Namespace) -> None:
    document: dict[str, Any] = {"environment": environment(args.device), "records": []}
    part = args.out.with_name(args.out.name + ".part")
    for number, (job, tokens) in enumerate(jobs, 1):
        tokens = min(tokens, 2 * ROW) if args.smoke else tokens
        if time.perf_counter() - STARTED + expected_seconds(job) > args.budget_seconds:
            record = {**job, "tokens": tokens, "status": "skipped", "error": "no time left"}
        else:
            record = measure_safely(job, tokens, args)
        document["records"].append(record)
        part.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(part, args.out)
        progress = f"{number}/{len(jobs)} {time.perf_counter() - STARTED:.0f}s"
        print(progress, job["name"], f"T={tokens}", summary(record), flush=True)
        release(args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("memory_peaks.json"))
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="part of a name")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--budget-seconds", type=float, default=480, help="stop in this time")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, eager blocks")
    args = parser.parse_args()
    args.device = "cpu" if args.smoke else "cuda"
    chosen = [job for job in CASES if job["shape"] in args.shapes]
    chosen = [job for job in chosen if any(text in job["name"] for text in args.only)]
    chosen.sort(key=lambda job: job["blocks"] == "compiled")  # the cheap ones first
    jobs = [(job, tokens) for job in chosen for tokens in job["tokens"]]
    total = sum(expected_seconds(job) for job, _ in jobs)
    print(f"{len(jobs)} cases, {total} s expected, {args.budget_seconds:.0f} s at most, in order:")
    print("\n".join(f"  {job['name']} T={', '.join(map(str, job['tokens']))}" for job in chosen))
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # int8 tells of every cast
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    run_all(jobs, args)


if __name__ == "__main__":
    main()
