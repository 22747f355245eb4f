"""What a plan is made for, and presets held to the memory model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from expert.planning.draft import Kept
from expert.planning.machine.machine import Fact
from expert.planning.machine.target import UnknownTarget, choose_target
from expert.planning.models.presets import char_gpt_batch, verdicts
from tests.each import each
from tests.planning.planning import GIB, gpu, machine, manifest, plan
from tests.wording import wording

CHARACTER_MODEL = {
    "name": "bard",
    "base_models": [{"name": "char-gpt"}],
    "training": {"dataset": {"path": "shakespeare"}},
}


def test_a_named_card_leaves_the_driver_its_share():
    found = choose_target(machine(), gpu="rtx-4090")
    assert found.budget_bytes == pytest.approx(0.97 * 23.99 * GIB, rel=1e-3)
    assert found.budget_because == "97% of GeForce RTX 4090's 24.0 GiB"


def test_memory_can_be_limited_on_a_named_card():
    found = choose_target(machine(), gpu="h200", vram="16GB")
    assert (found.budget_bytes, found.budget_because) == (16 * GIB, "--vram")


def test_memory_alone_makes_a_card_nobody_knows():
    found = choose_target(machine(), vram="16 GiB")
    assert (found.device, found.card, found.capability) == ("cuda", None, None)


@pytest.mark.parametrize(
    ("vram", "words"), [("16GB", "16 GiB"), ("1.5GB", "1.5 GiB"), ("100MB", "100 MiB")]
)
def test_a_card_nobody_knows_is_called_by_its_memory(vram, words):
    assert choose_target(machine(), vram=vram).name == wording("a-card-with", words=words)


def test_this_machine_s_card_is_planned_with_what_is_free():
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), held_gib=4))
    found = choose_target(here)
    assert found.budget_bytes == 20 * GIB
    assert found.card.slug == "rtx-4090"


def test_the_cpu_can_be_asked_for_beside_a_card():
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)))
    found = choose_target(here, device="cpu")
    assert (found.device, found.budget_bytes) == ("cpu", 48 * GIB)


def test_a_card_we_do_not_know_keeps_its_capability_and_no_peaks():
    here = machine(gpu("NVIDIA Secret 9000", 40, (9, 9)))
    found = choose_target(here)
    assert found.card is None
    assert found.capability == (9, 9)


def test_a_misspelt_card_is_refused_with_the_nearest():
    with pytest.raises(UnknownTarget) as caught:
        choose_target(machine(), gpu="rtx-4095")
    text = str(caught.value)
    assert text.startswith(wording("no-such-card-in-table"))
    assert "rtx-4090" in text


def test_nonsense_for_a_card_points_to_the_list():
    with pytest.raises(UnknownTarget, match=wording("see-expert-machine")):
        choose_target(machine(), gpu="toaster")


@each("text", ["16", "many", "0GB", "-4GB", ""])
def test_a_memory_size_that_is_none_is_refused(text):
    with pytest.raises(UnknownTarget) as caught:
        choose_target(machine(), vram=text)
    expected = wording("not-memory-size-such", text=text)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("card", "rows"),
    [("rtx-4070", 96), ("rtx-3080-12gb", 96), ("rtx-4080-super", 128), ("rtx-4090", 192)],
)
def test_the_character_model_s_batch_is_the_one_its_guide_gives(card, rows):
    made = plan(CHARACTER_MODEL, card)
    assert made.batch.examples_per_update == rows
    assert made.batch.micro_batch == rows
    assert made.fits


@pytest.mark.parametrize("held", [0, 6, 12])
def test_the_character_model_s_batch_does_not_depend_on_who_else_is_on_the_card(held):
    beside = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), held_gib=held))
    assert plan(CHARACTER_MODEL, None, machine=beside).batch.examples_per_update == 192


def test_the_character_model_s_batch_does_not_depend_on_the_free_memory_of_a_cpu():
    full = replace(machine(), ram_available_bytes=Fact(2 * GIB, "test"))
    batches = [plan(CHARACTER_MODEL, None, machine=each).batch for each in (machine(), full)]
    assert {batch.examples_per_update for batch in batches} == {192}


def test_a_run_that_is_resumed_beside_others_keeps_its_base_unquantised():
    large = manifest(base_models=[{"name": "Llama-3.1-8B"}])
    card = partial(gpu, "NVIDIA GeForce RTX 4090", 24, (8, 9))
    first = plan(large, None, machine=machine(card()))
    beside = machine(card(held_gib=12))
    assert first.model.quantization == "none"
    assert plan(large, None, machine=beside).model.quantization == "int4"
    again = plan(large, None, machine=beside, kept=Kept(quantization="none"))
    assert again.model.quantization == "none"
    assert not again.fits, "that is told, and nothing else is computed in silence"


def test_the_batch_presets_have_no_gap():
    assert [char_gpt_batch(gib * GIB)[0] for gib in (1, 13, 14, 19, 20, 140)] == [
        *(96, 96, 128, 128, 192, 192)
    ]


def test_presets_say_where_they_hold_and_where_they_do_not():
    found = {(v.card.slug, v.preset.model, v.preset.work.rows): v for v in verdicts()}
    assert found[("rtx-4080-super", "char-gpt", 128)].holds
    assert found[("rtx-4080-super", "char-gpt", 256)].holds  # said to be too much for 16 GB
    small = found[("rtx-4090", "Qwen3-0.6B", 16)]
    assert not small.holds
    assert small.words().startswith(wording("does-not-hold"))
    assert small.words().endswith(wording("rows-at-once-fit"))
    assert not found[("rtx-5090", "Llama-3.1-8B", 32)].holds


def test_an_8b_model_runs_unquantised_on_a_32_gb_card_as_its_guide_says():
    made = plan(manifest(base_models=[{"name": "Llama-3.1-8B"}]), "rtx-5090")
    assert (made.model.quantization, made.kernels.checkpointing) == ("none", "none")
