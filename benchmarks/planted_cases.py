"""The cases of planted_faults.py: what is wrong with a run, and what its diagnosis should say."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from expert.data.feed import feed, loader
from expert.model.load import LoadedModel
from expert.training import checkpoint, evaluation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
            # Of the thread that sends batches: the others copy on streams of their own.
            # Cycles: about a second for an update; a tenth went by unnoticed beside it.
            if threading.current_thread().name == "expert-feed":
                torch.cuda._sleep(int(2e9))
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
        also=("padding-waste",),
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
        plant=lambda: slowed(loader, "padded_batch", 1.5),
        also=("padding-waste", "below-the-band"),
    ),
    Case(
        ".item() per micro-batch",
        "host-sync",
        # Whichever verdict: on an H200 these reads cost 1 % of an update, and the verdict says so.
        {"micro_batch_size": 4},
        plant=item_in_every_micro_batch,
        also=("small-micro-batch",),
    ),
    Case(
        "batch 1",
        "batch-1",
        {"batch_size": 1, "packing": False},
        ("launch-bound", "sync-bound"),
        sequences=None,
        also=("launch-bound", "below-the-band", "host-sync"),
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
        also=(*("launch-bound", "padding-waste", "too-few-workers", "host-sync"),),
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
        also=("below-the-band", "too-few-workers", "host-sync"),
    ),
    Case(
        "slow copies",
        "slow-copies",
        {"dataloader_pin_memory": False, "max_steps": 16},
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
        # This optimizer cannot skip a NaN by itself: the host reads whether there was one.
        also=("launch-bound", "below-the-band", "host-sync"),
    ),
    Case(
        "CPU beside a GPU",
        "gpu-unused",
        {"device": "cpu", "max_steps": 6, "max_seq_length": 256},
        shape="toy",
        sequences=4,
    ),
]
