"""What one rank of many holds: the real sharded engine as rank 0 of 2, 4, 8 and 64, on one card.

torch's fake process group plays the other ranks: its collectives return at once, so memory and
computing are real, and only the communication is missing. Weights are never filled, and losses
mean nothing.

    python benchmarks/shards_memory.py --out shards-memory-h200.json [--only TEXT]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from surroundings import environment
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from expert.core.world import World
from expert.data.feed.batches import BatchCounts
from expert.data.feed.feed import Batch
from expert.model.adapters import add_adapter, saved_weights
from expert.model.attention import IMPLEMENTATIONS, register_attention
from expert.model.blocks import checkpoint_blocks, find_blocks
from expert.model.load import LoadedModel, _trainable
from expert.parallel.group import Group
from expert.parallel.sharded import LocalShards, Sharded, shard, sharding_for
from expert.planning.memory.memory import estimate
from expert.planning.memory.workload import Workload
from expert.planning.models.shapes import shape_from_config
from expert.planning.run_plan import AdapterPlan, KernelPlan, ModelPlan, OptimPlan
from expert.training.learner import OptimizerLearner
from expert.training.objectives.next_token import NextToken
from expert.training.step import forward_backward

SHAPES: dict[str, Any] = {
    "llama-8b": (LlamaConfig, 32, 4096, 14336, 32, 8, 128256),
    "qwen2.5-32b": (Qwen2Config, 64, 5120, 27648, 40, 8, 152064),
    "tiny": (LlamaConfig, 2, 64, 128, 4, 2, 512),
    "llama-70b": (LlamaConfig, 80, 8192, 28672, 64, 8, 128256),
}
CUDA = torch.cuda.is_available()
ROW = 2048 if CUDA else 16
BF16 = torch.bfloat16 if CUDA else torch.float32  # a CPU may emulate it, for minutes
CASES = [
    ("llama-8b", "lora", (2, 4, 8, 64), 4),
    ("llama-8b", "full", (2, 4, 8, 64), 4),
    ("qwen2.5-32b", "lora", (2, 4, 8, 64), 2),
    ("llama-70b", "lora", (2, 4, 8, 64), 2),
]
if not CUDA:  # to try the script
    CASES = [("tiny", "lora", (2, 8), 2), ("tiny", "full", (2, 8), 2)]
ATTENTION = "flash" if CUDA else "sdpa"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OneOfMany(Group):
    """The first rank of a world whose other ranks say nothing."""

    def __init__(self, world: World) -> None:
        super().__init__(world, is_distributed=False)

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        return [numbers] * self.world.size


def config_of(name: str) -> Any:
    family, layers, hidden, ffn, heads, kv_heads, vocab = SHAPES[name]
    return family(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        use_cache=False,
    )


def loaded_on_meta(name: str, adapter: str) -> LoadedModel:
    config = config_of(name)
    kernels = KernelPlan(
        device="cuda",
        precision="bf16",
        loss_scaling=False,
        tf32=True,
        attention=ATTENTION,
        fused_loss=True,
        compile=False,
        compile_mode="default",
        compile_backend="inductor",
        checkpointing="full",
        recomputed_blocks=None,
        cudnn_benchmark=False,
    )
    plan = AdapterPlan(
        type=adapter,
        rank=16 if adapter == "lora" else None,
        alpha=32.0 if adapter == "lora" else None,
        dropout=0.0,
        target_modules=LINEARS if adapter == "lora" else None,
        feedforward_modules=[],
        soft_prompts=[],
        trainable_parameters=None,
    )
    model = ModelPlan(
        name=name,
        place="folder",
        location="",
        revision=None,
        parameters=None,
        architecture=None,
        quantization="none",
        prompt_template=None,
    )
    register_attention()
    dtype = torch.float32 if adapter == "full" else BF16
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            config, attn_implementation=IMPLEMENTATIONS[ATTENTION], dtype=dtype
        )
        blocks = find_blocks(base)
        module = add_adapter(base, plan, quantization="none", dtype=BF16, total_steps=10, seed=0)
    module.train()
    return LoadedModel(
        plan=model,
        adapter=plan,
        kernels=kernels,
        folder=None,
        module=module,
        decoder=base.get_decoder(),
        soft_prompts=None,
        trainable=_trainable(module, None),
        weights=saved_weights(module, plan),
        blocks=list(blocks),
    )


def batch_of(rows: int, vocab: int, device: torch.device) -> Batch:
    places = rows * ROW
    tokens = torch.randint(3, vocab, (rows, ROW), dtype=torch.int32, device=device)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    positions = torch.arange(ROW, dtype=torch.int32, device=device).repeat(rows, 1)
    wanted = torch.arange(places, dtype=torch.int32, device=device)
    wanted = wanted[wanted % ROW != ROW - 1]
    filler = torch.full((rows,), places - 1, dtype=torch.int32, device=device)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        boundaries=torch.arange(0, places + 1, ROW, dtype=torch.int32, device=device),
        soft_mask=None,
        target_places=torch.cat([wanted, filler]),
        counts=BatchCounts(len(wanted), places, rows),
        longest=ROW,
        whole_rows=True,
        bins=(),
    )


def measured(name: str, adapter: str, ranks: int, rows: int) -> dict[str, Any]:
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    world = World(rank=0, size=ranks, local_rank=0, local_size=ranks)
    _forget_peaks()
    try:
        return _measured(name, adapter, world, rows, device)
    finally:
        gc.collect()
        dist.destroy_process_group()
        _forget_peaks()


def allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def _forget_peaks() -> None:
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _spread(name: str, adapter: str, world: World, device: torch.device) -> Sharded:
    """The engine of one rank, with empty weights that are spread over all of them."""
    loaded = loaded_on_meta(name, adapter)
    sharding = sharding_for(world, device)
    full = adapter == "full"
    over_ranks = partial(shard, sharding=sharding, gathered_as=BF16 if full else None)
    loaded = loaded.spread(over_ranks, device)
    loaded.module.to_empty(device=device)
    loaded = replace(
        loaded,
        trainable=_trainable(loaded.module, None),
        weights=saved_weights(loaded.module, loaded.adapter),
    )
    parts = LocalShards(loaded.trainable, sharding)
    with torch.no_grad():
        for _, own in parts.named:
            own.zero_()
    checkpoint_blocks(loaded.blocks, len(loaded.blocks))
    optim = OptimPlan(
        optimizer="adamw_torch_fused",
        learning_rate=1e-4,
        scheduler="constant",
        scheduler_options={},
        warmup_steps=0,
        warmup_ratio=None,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        epsilon=1e-8,
        max_grad_norm=1.0,
        seed=0,
    )
    learner = OptimizerLearner(parts.named, optim, device=device, total_norm=parts.total_norm)
    return Sharded(
        loaded,
        learner,
        group=OneOfMany(world),
        shards=parts,
        device=device,
        autocast=BF16 if full and CUDA else None,
    )


def _step_seconds(engine: Sharded, batch: Batch) -> list[float]:
    """Of four steps; the peaks are those of the last ones."""
    seconds = []
    for step in range(4):
        if step < 2:
            _forget_peaks()
        began = time.perf_counter()
        for _ in range(2):
            forward_backward(engine, NextToken(), batch, divisor=2 * batch.targets)
        engine.step(step=step + 1, rate=1e-4, max_norm=1.0)
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def _measured(
    name: str, adapter: str, world: World, rows: int, device: torch.device
) -> dict[str, Any]:
    before = allocated()
    engine = _spread(name, adapter, world, device)
    resting = allocated() - before
    seconds = _step_seconds(engine, batch_of(rows, config_of(name).vocab_size, device))
    shape = shape_from_config(config_of(name).to_dict())
    work = Workload(
        shape=shape,
        rows=rows,
        row_tokens=ROW,
        adapter=adapter,
        recomputed_blocks=shape.layers,
        compiled=False,
        engine="sharded",
        shards=world.size,
    )
    planned = estimate(work)
    peak = (torch.cuda.max_memory_allocated() if CUDA else 0) - before
    return {
        "shape": name,
        "adapter": adapter,
        "ranks": world.size,
        "tokens": rows * ROW,
        "resting_bytes": resting,
        "peak_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved() if CUDA else 0,
        "planned_bytes": planned.allocated,
        "planned_over_measured": planned.allocated / max(1, peak),
        "planned_parts": dict(planned),
        "seconds_a_step": sorted(seconds[1:])[1],
        "tokens_per_second": 2 * rows * ROW / sorted(seconds[1:])[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    found = []
    for name, adapter, worlds, rows in CASES:
        for ranks in worlds:
            if args.only not in f"{name} {adapter} {ranks}":
                continue
            try:
                record = measured(name, adapter, ranks, rows)
            except Exception as error:  # noqa: BLE001 - the other cases are still measured
                record = {"shape": name, "adapter": adapter, "ranks": ranks, "error": repr(error)}
            found.append(record)
            shown = {k: v for k, v in record.items() if k != "planned_parts"}
            print(json.dumps(shown), flush=True)
            args.out.write_text(
                json.dumps({"environment": environment(), "cases": found}, indent=1)
            )


if __name__ == "__main__":
    main()
