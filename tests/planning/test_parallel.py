"""Plans for several processes: the engine, each rank's share of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.planning.machine.machine import Fact
from expert.planning.memory.workload import workload_of
from expert.planning.run_plan import RunPlan
from expert.planning.survey import PackedRows, Survey
from tests.each import each
from tests.manifest.strategies import any_manifest
from tests.planning.planning import (
    GIB,
    asked,
    decision,
    gpu,
    machine,
    manifest,
    plan,
    remarks,
)

ROWS = Survey(20_000, 20_000 * 400, "test")
LLAMA = {"name": "Llama-3.1-8B"}
COUNTED = replace(ROWS, packed=PackedRows(20_000, 4_000, 1_900, 0.99, tokens=8_000_000))


def made(
    card: str | None = "rtx-4090", *, config: Any = None, base: Any = None, **options: Any
) -> RunPlan:
    data = manifest({"batch_size": 128, **(config or {})}, base_models=[base or LLAMA])
    return plan(data, card, **{"survey": ROWS, **options})


# --- the engine ----------------------------------------------------------------------------------


FULL, SHARDED = {"adapter_type": "full"}, {"distributed": "sharded"}
SMALL, UNKNOWN = {"name": "Qwen3-0.6B"}, {"name": "somebody/unheard-of"}


@each(
    ("card", "config", "options", "engine", "shards"),
    [
        ("rtx-4090", {}, {"ranks": 4}, "replicated", 1),
        ("h100", FULL, {"ranks": 8}, "sharded", 8),
        ("h100", FULL, {"ranks": 8, "base": SMALL}, "replicated", 1),
        # Each machine holds a copy if the model fits one machine.
        ("h100", FULL, {"ranks": 16, "nodes": 2}, "sharded", 8),
        ("rtx-4090", FULL, {"ranks": 16, "nodes": 4}, "sharded", 16),
        ("h200", FULL, {"ranks": 4, "nodes": 4}, "sharded", 4),
        # As in the manifest if the size is unknown.
        ("rtx-4090", {}, {"ranks": 4, "base": UNKNOWN}, "replicated", 1),
        ("rtx-4090", SHARDED, {"ranks": 4, "base": UNKNOWN}, "sharded", 4),
    ],
)
def test_the_engine_follows_what_fits(card, config, options, engine, shards):
    found = made(card, config=config, **options)
    assert (found.parallel.engine, found.parallel.shard_ranks) == (engine, shards)
    assert found.fits
    assert not found.parallel.offload


def test_one_process_is_single_and_an_engine_that_the_manifest_names_is_taken_for_several():
    parallel = made().parallel
    assert (parallel.engine, parallel.ranks, parallel.nodes) == ("single", 1, 1)
    for engine in ("replicated", "sharded"):
        found = made("h200", config={"distributed": engine}, ranks=2)
        assert decision(found, "parallel.engine") == asked(engine)
        found = made(config={"distributed": engine})
        assert found.parallel.engine == "single"
        [text] = [t for t in remarks(found, "superseded") if t.startswith("parallel.engine")]
        assert engine in text
    graphs = made("h200", config={**SHARDED, "use_cuda_graphs": True}, ranks=2)
    assert not graphs.kernels.cuda_graphs
    assert any(text.startswith("kernels.cuda_graphs") for text in remarks(graphs, "warning"))


def test_the_base_is_what_it_would_be_on_one_card_where_one_card_can():
    """Quantisation changes the results, so it must not depend on the number of cards."""
    for card, base in (("rtx-4090", {"name": "microsoft/phi-4"}), ("rtx-3060", LLAMA)):
        alone, several = made(card, base=base), made(card, base=base, ranks=4)
        assert several.model.quantization == alone.model.quantization == "int4"
        assert several.parallel.engine == "replicated"


# --- offload -------------------------------------------------------------------------------------


def test_full_fine_tuning_that_no_card_holds_is_offloaded_also_with_one():
    for ranks in (1, 2):
        found = made(config={"adapter_type": "full"}, ranks=ranks)
        assert (found.parallel.engine, found.parallel.offload) == ("sharded", True)
        assert found.fits
        assert found.parallel.host_bytes == 16 * 8_030_261_248
        told = remarks(found, "warning")
        assert any(text.startswith("parallel.offload") for text in told)
        assert any(text.startswith("parallel.host_bytes") for text in told)


@each(
    ("config", "card", "free_gib", "warned"),
    [
        (FULL, "H100", 48, True),
        (FULL, "H100", 88, True),
        (FULL, "H100", 91, False),  # 12 bytes for each of 8.03 G weights: 89.7 GiB
        (SHARDED, "H100", 4, False),  # adapters are small and whole on every rank
        (FULL, "4090", 200, True),  # beside 119.7 GiB of offloaded shards
        (FULL, "4090", 210, False),
    ],
)
def test_a_checkpoint_that_the_first_machine_cannot_gather_is_warned_of(
    config, card, free_gib, warned
):
    cards = [gpu("NVIDIA H100 80GB HBM3", 80, (9, 0))] * 8
    if card == "4090":
        cards = [gpu("NVIDIA GeForce RTX 4090", 24, (8, 9))]
    here = replace(machine(*cards), ram_available_bytes=Fact(free_gib * GIB, "test"))
    found = made(None, config=config, machine=here, ranks=len(cards))
    assert (found.parallel.engine, found.parallel.offload) == ("sharded", card == "4090")
    told = [
        text
        for text in remarks(found, "warning")
        if "rank 0 gathers a checkpoint in the memory of its machine" in text
    ]
    assert len(told) == warned
    if card == "H100":
        assert all(f"89.7 GiB, and {free_gib}.0 GiB" in text for text in told)


def test_nothing_is_offloaded_that_the_machine_has_no_room_for_or_that_cannot_be():
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)))  # and 48 GiB beside it
    found = made(None, config=FULL, machine=here)
    assert not found.fits
    assert found.parallel.engine == "single"
    for config in ({"distributed": "replicated"}, {"optim": "adamw_bnb_8bit"}):
        found = made(config={**FULL, **config})
        assert (found.parallel.offload, found.fits) == (False, False)


@pytest.mark.parametrize("asked", ["adamw_bnb_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize(
    ("card", "taken"), [("h200", "adamw_torch_fused"), (None, "adamw_torch")], ids=["GPU", "CPU"]
)
def test_an_8_bit_optimizer_is_replaced_if_all_weights_are_sharded(asked, card, taken):
    config = {"adapter_type": "full", "distributed": "sharded", "optim": asked}
    found = made(card, config=config, ranks=4)
    assert (found.parallel.engine, found.optim.optimizer) == ("sharded", taken)
    (text,) = remarks(found, "superseded")
    assert text.startswith(
        f"optim.optimizer: optim: {asked}: 8-bit state is quantised in blocks that "
        "cannot be sharded; "
    )
    assert found.memory == made(card, config={**config, "optim": taken}, ranks=4).memory


# --- each rank's share of a step -----------------------------------------------------------------


@given(any_manifest(), st.sampled_from(["rtx-4090", "h200", None]), st.sampled_from([2, 3, 4, 8]))
def test_rows_and_sequences_of_a_step_do_not_depend_on_the_ranks(data, card, ranks):
    alone, several = plan(data, card), plan(data, card, ranks=ranks)
    assert several.batch.examples_per_update == alone.batch.examples_per_update
    assert several.batch.sequences_per_update == alone.batch.sequences_per_update
    assert RunPlan.model_validate_json(several.model_dump_json()) == several
    paths = [d.path for d in several.decisions]
    assert len(paths) == len(set(paths))
    sequences = several.batch.sequences_per_update
    if several.batch.accumulation is not None and sequences is not None:
        share = -(-sequences // ranks)
        micro = several.batch.micro_batch
        assert several.batch.accumulation * micro >= share
        assert (several.batch.accumulation - 1) * micro < share
        if several.data.packing == "none":
            assert micro <= share


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 25, 32])
def test_counted_rows_are_divided_among_ranks(ranks):
    found = made("h200", ranks=ranks, survey=COUNTED)
    share = -(-26 // ranks)
    assert found.batch.sequences_per_update == 26
    assert (found.length.steps_per_epoch, found.length.total_steps) == (154, 462)
    assert found.batch.micro_batch <= share
    assert found.batch.accumulation == -(-share // found.batch.micro_batch)
    work = workload_of(found)
    assert work.rows <= share
    assert work.engine == found.parallel.engine
    assert found.fits
    streamed = made("h200", ranks=ranks, survey=Survey(None, None, "seen", step_sequences=10))
    assert streamed.batch.micro_batch <= -(-10 // ranks)


def test_too_few_sequences_for_the_ranks_are_reported_with_the_batch_that_fills_them():
    config = {"batch_size": 16}
    found = made("h200", config=config, ranks=8)
    assert found.batch.sequences_per_update == 3
    [told] = [t for t in remarks(found, "warning") if t.startswith("parallel.ranks")]
    assert "a step has 3 sequences for 8 ranks: 5 of them have nothing to compute" in told
    assert "batch_size: 43 (rows of a step) would fill them" in told
    filled = made("h200", config={"batch_size": 43}, ranks=8)
    assert not [t for t in remarks(filled, "warning") if t.startswith("parallel.ranks")]
    counted = replace(ROWS, packed=PackedRows(16, 9, 1_900, 0.99, tokens=8_000))
    settled = made("h200", config=config, ranks=8, survey=counted)
    assert not [t for t in remarks(settled, "warning") if t.startswith("parallel.ranks")]


def test_processes_on_a_cpu_get_a_plan():
    found = plan(manifest(), None, survey=ROWS, ranks=2)
    assert found.parallel.engine == "replicated"
    assert found.memory.budget_bytes == 24 * GIB
    sharded = plan(manifest({"distributed": "sharded"}), None, survey=ROWS, ranks=2)
    assert (sharded.parallel.engine, sharded.parallel.offload) == ("sharded", False)
