"""Many processes train what one would: the same rows, the same losses, one run folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from expert.core.world import World
from expert.jobs.train import train
from expert.planning.memory.shards import checkpoint_bytes
from expert.planning.memory.workload import Workload
from expert.planning.models.known_models import find_known_model
from expert.run.open import open_run
from tests.jobs.runs import base_model, events_of, losses_of, run, saved_steps, write_expert
from tests.parallel.ranks import fine, ranks, trained

# Sums of float32 in another order. With three ranks the largest difference of any kind of run below
# was 1.9e-7 of a loss, three steps of float32; ten times that.
CLOSE = 2e-6
KNOWN = find_known_model("Llama-3.1-8B")
assert KNOWN is not None
LLAMA = KNOWN.shape


@pytest.fixture(scope="module")
def base() -> Path:
    return base_model(layers=2)


def numbers_of(folder: Path) -> list[float]:
    losses = losses_of(folder)
    return [float.fromhex(losses[step]) for step in sorted(losses)]


def norms_of(folder: Path) -> list[float]:
    return [event["grad_norm"] for event in events_of(folder, "step")]


def final_weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in (folder / "final").rglob("*.safetensors"):
        found |= load_file(file)
    assert found
    return found


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, fused": {"fused_blocks": True},
    "int4, sharded": {"distributed": "sharded", "quantization": "int4"},
    "full, sharded": {"distributed": "sharded", "adapter_type": "full", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(kind, base, tmp_path):
    config = {"epochs": 1, "micro_batch_size": 2, **KINDS[kind]}
    alone = run(write_expert(tmp_path / "one", base, config)).folder
    manifest = write_expert(tmp_path / "two", base, config)
    together = fine(ranks(2, trained, manifest, {}))[0]
    assert numbers_of(together) == pytest.approx(numbers_of(alone), rel=CLOSE)
    # Adam forgives gradients that are all too large or too small; their norm does not. It is a sum
    # of squares of rounded gradients.
    assert norms_of(together) == pytest.approx(norms_of(alone), rel=1e-4)
    expected, weights = final_weights(alone), final_weights(together)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.sub(expected[name]).abs().max() < 1e-4, name


def test_one_process_trains_with_its_weights_in_the_memory_of_the_host(base, tmp_path):
    config = {"epochs": 1, "micro_batch_size": 2, "adapter_type": "full", "learning_rate": 1e-3}
    alone = run(write_expert(tmp_path / "one", base, config)).folder
    opened = open_run(write_expert(tmp_path / "two", base, config))
    values = {"parallel.engine": "sharded", "parallel.offload": True}
    plan = opened.plan.with_values(values, "asked", "machine")
    offloaded = train(replace(opened, plan=plan)).folder
    assert numbers_of(offloaded) == pytest.approx(numbers_of(alone), rel=CLOSE)


def kept_of(world: World, manifest: Path) -> dict[str, int]:
    """Bytes of each group that a rank holds while checkpoint and final weights are written."""
    from expert.run.build import Built
    from expert.run.session import checkpoints
    from expert.training.checkpoint import bytes_needed

    kept: dict[str, int] = {}
    whole = Built.whole

    def size(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def saving_checkpoint(groups: Any) -> int:
        kept.update({group: size(named.values()) for group, named in groups.items()})
        return bytes_needed(groups)

    def saving_final(self: Any) -> Any:
        loaded = whole(self)
        kept["final"] = size({id(tensor): tensor for tensor in loaded.weights.values()}.values())
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "bytes_needed", saving_checkpoint)
        patch.setattr(Built, "whole", saving_final)
        trained(world, manifest, {})
    return kept


def test_what_is_gathered_of_spread_weights_is_held_by_the_first_rank_alone(base, tmp_path):
    config = {"adapter_type": "full", "distributed": "sharded", "max_steps": 1, "save_steps": 1}
    first, second = fine(ranks(2, kept_of, write_expert(tmp_path, base, config)))
    work = Workload(shape=LLAMA, rows=1, row_tokens=1, adapter="full", engine="sharded")
    each = checkpoint_bytes(work) // LLAMA.parameters
    weights = first["final"] // 4
    # Every tensor also has the number of its steps.
    assert first["model"] + first["optimizer"] == pytest.approx(each * weights, rel=1e-3)
    assert second == {"model": 0, "optimizer": 0, "final": 0}


@pytest.mark.parametrize(
    ("engine", "resumed_by"),
    [
        ("sharded", 3),
        pytest.param("replicated", 1, marks=pytest.mark.slow),
        pytest.param("replicated", 3, marks=pytest.mark.slow),
        pytest.param("sharded", 1, marks=pytest.mark.slow),
        pytest.param("sharded", 4, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_ranks_is_resumed_by_another_number(resumed_by, engine, base, tmp_path):
    config = {"epochs": 1, "micro_batch_size": 2, "save_steps": 2, "distributed": engine}
    if engine == "sharded":
        config |= {"adapter_type": "full", "learning_rate": 1e-3}
    manifest = write_expert(tmp_path, base, config)
    folder = fine(ranks(2, trained, manifest, {}))[0]
    whole = numbers_of(folder)
    for later in saved_steps(folder)[1:]:
        shutil.rmtree(folder / "checkpoints" / f"step-{later:06d}")
    shutil.rmtree(folder / "final")
    fine(ranks(resumed_by, trained, manifest, {"resume": str(folder)}))
    assert len(events_of(folder, "step")) == 2 * len(whole) - 2
    assert numbers_of(folder) == pytest.approx(whole, rel=CLOSE)


EVERY_KIND: dict[str, dict[str, Any]] = {
    "lora, packed": {},
    "lora, padded": {"packing": False},
    "lora, in order of length": {"packing": False, "group_by_length": True},
    "dora": {"adapter_type": "dora"},
    "dora on int8": {"adapter_type": "dora", "quantization": "int8"},
    "dora on int8, fused": {"adapter_type": "dora", "quantization": "int8", "fused_blocks": True},
    "ia3": {"adapter_type": "ia3", "rank": None},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "full": {"adapter_type": "full", "learning_rate": 1e-3},
    # Its workers would be processes of a process that was not made to have any.
    "streamed": {"dataset": {"streaming": True}, "max_steps": 6, "dataloader_num_workers": 0},
    "recomputed": {"gradient_checkpointing": True},
    "soft prompts": {"soft": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("engine", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_of_run_is_the_same_in_worlds_of_one_to_four(kind, engine, size, base, tmp_path):
    config: dict[str, Any] = {"epochs": 1, "micro_batch_size": 1, **EVERY_KIND[kind]}
    more: dict[str, Any] = {"dataset": config.pop("dataset", {})}
    if config.pop("soft", False):
        more["soft_prompts"] = [{"name": "task", "num_tokens": 4, "init_method": "random"}]
    alone = run(write_expert(tmp_path / "one", base, config, **more)).folder
    manifest = write_expert(tmp_path / "two", base, {**config, "distributed": engine}, **more)
    together = fine(ranks(size, trained, manifest, {}))[0]
    assert numbers_of(together) == pytest.approx(numbers_of(alone), rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ["replicated", "sharded"])
def test_a_character_model_is_the_same_in_a_larger_world(engine, size, tmp_path):
    text = "the quick brown fox jumps over the lazy dog. " * 60
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    shape = {"layers": 2, "heads": 2, "width": 32, "block_size": 32, "dropout": 0.0}
    more: dict[str, Any] = {
        "model": {"architecture": shape, "prompt_template": None},
        "dataset": {"path": str(tmp_path / "text.txt")},
    }
    config = {"adapter_type": "full", "max_steps": 5, "micro_batch_size": 2, "rank": None}

    def manifest(folder: str, engine: str) -> Path:
        own = {**config, "max_seq_length": None, "distributed": engine}
        return write_expert(tmp_path / folder, "char-gpt", own, **more)

    alone = run(manifest("one", "auto")).folder
    together = fine(ranks(size, trained, manifest("two", engine), {}))[0]
    assert numbers_of(together) == pytest.approx(numbers_of(alone), rel=CLOSE)
