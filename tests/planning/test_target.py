"""The target of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from expert.core.errors import ExpertError
from expert.planning.choose.sequences import char_gpt_batch
from expert.planning.draft import ResumedChoices
from expert.planning.machine.machine import Fact
from expert.planning.machine.target import choose_target
from tests.each import each
from tests.planning.planning import GIB, gpu, machine, manifest, plan

CHARACTER_MODEL = {
    "name": "bard",
    "base_models": [{"name": "char-gpt"}],
    "training": {"dataset": {"path": "shakespeare"}},
}


def test_a_card_by_its_name_or_its_memory():
    found = choose_target(machine(), gpu="rtx-4090")
    assert found.budget_bytes == pytest.approx(0.97 * 23.99 * GIB, rel=1e-3)  # the driver's share
    assert found.budget_because == "97% of GeForce RTX 4090's 24.0 GiB"
    found = choose_target(machine(), gpu="h200", vram="16GB")
    assert (found.budget_bytes, found.budget_because) == (16 * GIB, "--vram")
    for vram, words in (("16 GiB", "16 GiB"), ("1.5GB", "1.5 GiB"), ("100MB", "100 MiB")):
        found = choose_target(machine(), vram=vram)
        assert (found.device, found.card, found.capability) == ("cuda", None, None)
        assert found.name == f"a card with {words}"


def test_this_machine_s_card_is_planned_with_what_is_free_or_its_cpu():
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), held_gib=4))
    found = choose_target(here)
    assert (found.budget_bytes, found.card.slug) == (20 * GIB, "rtx-4090")
    cpu = choose_target(here, device="cpu")
    assert (cpu.device, cpu.budget_bytes) == ("cpu", 48 * GIB)
    unknown = choose_target(machine(gpu("NVIDIA Secret 9000", 40, (9, 9))))
    assert (unknown.card, unknown.capability) == (None, (9, 9))


def test_a_misspelt_card_is_refused_with_the_nearest():
    with pytest.raises(ExpertError) as caught:
        choose_target(machine(), gpu="rtx-4095")
    text = str(caught.value)
    assert text.startswith("--gpu rtx-4095: no such card in the table  (did you mean ")
    assert "rtx-4090" in text
    with pytest.raises(ExpertError, match=r"\(see: expert machine --cards\)"):
        choose_target(machine(), gpu="toaster")


@each("text", ["16", "many", "0GB", "-4GB", ""])
def test_an_invalid_memory_size_is_refused(text):
    with pytest.raises(ExpertError) as caught:
        choose_target(machine(), vram=text)
    expected = f'--vram: {text!r} is not a memory size such as "16GB" or "900MiB"'
    assert str(caught.value) == expected


def test_the_character_model_s_batch_is_the_one_its_guide_gives_whoever_uses_the_machine():
    for card, rows in (("rtx-4070", 96), ("rtx-3080-12gb", 96), ("rtx-4080-super", 128)):
        made = plan(CHARACTER_MODEL, card)
        assert (made.batch.examples_per_update, made.batch.micro_batch) == (rows, rows)
        assert made.fits
    card = partial(gpu, "NVIDIA GeForce RTX 4090", 24, (8, 9))
    full = replace(machine(), ram_available_bytes=Fact(2 * GIB, "test"))
    for here in (*(machine(card(held_gib=held)) for held in (0, 6, 12)), machine(), full):
        assert plan(CHARACTER_MODEL, None, machine=here).batch.examples_per_update == 192
    sizes = (1, 13, 14, 19, 20, 140)
    assert [char_gpt_batch(gib * GIB)[0] for gib in sizes] == [96, 96, 128, 128, 192, 192]


def test_a_run_that_is_resumed_beside_others_keeps_its_base_unquantised():
    large = manifest(base_models=[{"name": "Llama-3.1-8B"}])
    card = partial(gpu, "NVIDIA GeForce RTX 4090", 24, (8, 9))
    first = plan(large, None, machine=machine(card()))
    beside = machine(card(held_gib=12))
    assert first.model.quantization == "none"
    assert plan(large, None, machine=beside).model.quantization == "int4"
    again = plan(large, None, machine=beside, kept=ResumedChoices(quantization="none"))
    assert again.model.quantization == "none"
    assert not again.fits, "that is told, and nothing else is computed in silence"
