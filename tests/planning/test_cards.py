"""The table of cards is physically plausible, and a name finds its card or nothing."""

from __future__ import annotations

import pytest

from expert.planning.machine.cards import CARDS, Card, card_by_nvml_name, find_card
from tests.each import each

every_card = each("card", CARDS, ids=lambda card: card.slug)
MIB = 2**20


def peaks_of(card: Card) -> tuple[float | None, ...]:
    return (card.bf16_tflops, card.fp16_tflops, card.tf32_tflops, card.fp8_tflops)


@every_card
def test_every_row_is_physically_possible_and_found_by_its_names(card: Card):
    bf16, fp16, tf32, fp8 = peaks_of(card)
    if card.capability < (8, 0):
        assert bf16 is tf32 is None
        assert fp16 is not None
    else:  # known all together or not at all
        of_generation = peaks_of(card)[: 3 if card.capability < (8, 9) else 4]
        assert len({peak is not None for peak in of_generation}) == 1
    if card.capability < (8, 9):
        assert fp8 is None
    if bf16 is not None:
        assert fp16 == bf16
        # The data sheets round: L40S is the furthest off, 183 of 362 here and 733 below.
        assert tf32 == pytest.approx(bf16 / 2, rel=0.012)
        assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.015)
    assert 4 <= card.memory_gib <= 288
    assert card.bandwidth_gbs is None or 100 < card.bandwidth_gbs <= 8000
    # FLOP per byte: 26 (P100) to 453 (RTX 5000 Ada); a sparse figure of a large card falls out.
    if fp16 is not None and card.bandwidth_gbs is not None:
        assert 20 < fp16 * 1000 / card.bandwidth_gbs < 500
    assert find_card(card.slug) is card
    assert find_card(card.slug.upper().replace("-", " ")) is card
    for name in card.nvml_names:
        assert card_by_nvml_name(name, round(card.memory_gib * 2**30)) is card


@each(
    ("typed", "slug"),
    [
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4080 super", "rtx-4080-super"),
        ("a6000", "rtx-a6000"),
        ("RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("rtx pro 6000 blackwell", "rtx-pro-6000"),
        ("Tesla T4", "t4"),
        ("h100-80gb", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("4090 laptop", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        # A bare name means the smallest memory, and a size picks its own.
        ("a100", "a100-40gb"),
        ("4060 ti", "rtx-4060-ti-8gb"),
        ("A100 80GB", "a100-80gb"),
        # Unknown or ambiguous names are never guessed.
        *((typed, None) for typed in ("", "rtx", "nvidia", "4095")),
        *((typed, None) for typed in ("gtx 4090", "rtx 6000", "4090 ti")),
    ],
)
def test_the_usual_ways_to_type_a_card_find_it(typed, slug):
    found = find_card(typed)
    assert (found and found.slug) == slug


def test_a_laptop_gpu_is_never_taken_for_the_desktop_card():
    laptops = [card for card in CARDS if "laptop" in card.slug]
    assert len(laptops) >= 10
    for card in laptops:
        assert all(name.endswith(" Laptop GPU") for name in card.nvml_names)
        assert peaks_of(card) == (None, None, None, None)
    # With as much memory as the desktop card, only the name distinguishes them.
    found = card_by_nvml_name("NVIDIA GeForce RTX 4060 Laptop GPU", 8188 * MIB)
    assert found.slug == "rtx-4060-laptop"
    assert card_by_nvml_name("NVIDIA GeForce RTX 2080 Laptop GPU", 8192 * MIB) is None


@each(
    ("nvml_name", "mib", "slug"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("GeForce RTX 2080 Ti", 11019, "rtx-2080-ti"),
        ("NVIDIA H200", 143771, "h200"),
        # A slice, a modified or an unknown card is not in the table.
        ("NVIDIA H200", 71885, None),
        ("NVIDIA GeForce RTX 4090", 49140, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, None),
        ("NVIDIA GeForce RTX 9999", 24564, None),
    ],
)
def test_one_driver_name_with_two_sizes_is_distinguished_by_memory(nvml_name, mib, slug):
    found = card_by_nvml_name(nvml_name, mib * MIB)
    assert (found and found.slug) == slug
