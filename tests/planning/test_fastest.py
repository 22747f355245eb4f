"""Micro-batches are as large as memory allows, and blocks are checkpointed for them if it pays."""

from __future__ import annotations

from expert.planning.choose.fastest import LITTLE_USED
from expert.planning.memory.fitting import even_split
from expert.planning.memory.memory import loss_chunk_for_budget, loss_chunk_rows
from tests.each import each
from tests.planning.planning import decision, long_run


def made(card="h200", model="Qwen3-0.6B", base=None, vram=None, **config):
    found = long_run(card, model, base=base, options={"vram": vram}, **config)
    assert found.batch.sequences_per_update == 16
    return found


def used(found) -> float:
    share: float = found.memory.peak_bytes / found.memory.budget_bytes
    return share


@each(
    ("card", "vram"),
    [
        *(("h200", vram) for vram in ("6GB", "8GB", "10GB", "12GB", "24GB")),
        *((card, None) for card in ("rtx-4060", "rtx-4080", "rtx-4090")),
    ],
)
def test_most_of_the_memory_is_used_where_a_step_has_more_rows(card, vram):
    found = made(card, vram=vram)
    assert found.fits
    assert 1 < found.batch.micro_batch < 16
    assert used(found) >= LITTLE_USED


def test_rows_that_would_be_padding_are_not_computed_to_fill_the_memory():
    """Three fit 12 GB, but 16 are six times three with two left over; four would need blocks
    checkpointed that cost more on a slow card than fewer passes save."""
    found = made("rtx-3060")
    assert "3 fit" in decision(found, "batch.micro_batch")[1]
    assert (found.batch.micro_batch, found.batch.accumulation) == (2, 8)
    splits = [even_split(16, most, on_gpu=True) for most in (3, 5, 7, 9)]
    assert splits == [(2, 8), (4, 4), (4, 4), (8, 2)]
    assert even_split(13, 5, on_gpu=True) == (5, 3)
    assert even_split(16, 7) == (6, 3)  # runs on a CPU keep their batches, and so their bits


def test_held_to_8_gb_more_than_one_sequence_is_computed_at_once_unless_written_otherwise():
    """With a micro-batch of one, 5.2 GB were used and the GPU was 45 % busy."""
    found = made(vram="8GB")
    rows = found.batch.micro_batch
    assert rows >= 2
    assert 0 < found.kernels.recomputed_blocks < 28
    told = f"as few blocks as needed to fit a micro-batch of {rows} in 8.0 GiB"
    assert decision(found, "kernels.checkpointing")[1] == told
    one = made(vram="8GB", micro_batch_size=1)
    assert (one.batch.micro_batch, one.kernels.recomputed_blocks) == (1, 0)
    # If nothing can be checkpointed, passes are captured: launches dominate.
    kept = made(vram="8GB", gradient_checkpointing=False)
    assert (kept.kernels.recomputed_blocks, kept.kernels.cuda_graphs, kept.fits) == (0, True, True)
    assert kept.batch.accumulation > 1
    whole = made()  # fits in one pass without checkpointing
    assert (whole.batch.micro_batch, whole.kernels.recomputed_blocks) == (16, 0)


def test_logits_take_a_small_part_of_a_small_card():
    words, gib = 151_936, 2**30
    chunks = [loss_chunk_for_budget(words, size * gib) for size in (4, 8, 16, 140)]
    assert chunks == [256, 512, 1024, None]
    assert loss_chunk_for_budget(65, 4 * gib) is None  # characters: fewer than the hidden states
    assert loss_chunk_rows(words, 512) == 512
    small, large = made("rtx-4060"), made()
    assert (small.kernels.loss_chunk, large.kernels.loss_chunk) == (512, None)
    assert small.memory.parts["loss"] < large.memory.parts["loss"] / 3
