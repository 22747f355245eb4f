"""How many packed sequences make an update, as far as a plan can tell before rows are counted."""

from __future__ import annotations

import pytest

from expert.planning.choose.sequences import concatenation_of, packing_of
from expert.planning.survey import PackedRows, Survey
from tests.each import each
from tests.planning.planning import decision, plan
from tests.planning.planning import own_blocks as manifest
from tests.wording import wording


def test_sequences_keep_their_length_where_whole_ones_hold_the_rows():
    assert packing_of(64, mean=100, longest=900, length=1024) == (6, 1024, None)
    assert packing_of(8, mean=2000, longest=2048, length=2048) == (8, 2048, None)


def test_sequences_are_shorter_where_one_holds_more_rows_than_a_step():
    made = packing_of(16, mean=22, longest=40, length=1024)
    assert made == (1, 360, None)  # 16 · 22 / 0.99 = 355.6, to a multiple of 8


def test_a_longest_row_that_is_not_known_changes_nothing():
    assert packing_of(16, mean=22, longest=0, length=1024) == (1, 360, None)


def test_rows_that_are_all_alike_leave_gaps():
    assert packing_of(9, mean=29, longest=29, length=256) == (2, 152, None)


def test_a_long_row_keeps_sequences_long_and_rows_few():
    assert packing_of(16, mean=22, longest=900, length=1024) == (1, 904, 16)


def test_a_step_of_one_row_is_one_row():
    assert packing_of(1, mean=20, longest=40, length=512) == (1, 40, 1)


def test_rows_that_continue_in_the_next_sequence_make_steps_of_the_rows_asked_for():
    assert concatenation_of(64, mean=100, length=1024) == (6, 1024, None)
    assert concatenation_of(16, mean=25, length=1024) == (1, 400, None)
    assert concatenation_of(16, mean=100, length=1024) == (2, 800, None)
    assert concatenation_of(1, mean=5000, length=1024) == (5, 1024, None)  # 2 % off


def packed(fill: float) -> Survey:
    """Very many rows, 8 to a sequence of 2,048 places."""
    rows = PackedRows(rows=8_000_000, sequences=1_000_000, length=2048, fill=fill)
    return Survey(8_000_000, int(2048e6 * fill), "prepared rows", "prepared", 2048, rows)


def test_sequences_that_stay_half_empty_are_not_compiled_and_laid_end_to_end():
    large = manifest(
        {"batch_size": 128, "use_cuda_graphs": False}, base_models=[{"name": "Llama-3.1-8B"}]
    )
    made = plan(large, "h200", survey=packed(0.5))  # compiled 1.2 times as fast, half of it empty
    assert (made.kernels.compile, made.data.flat, made.data.trim) == (False, True, False)
    assert wording("half-full-of-one-width") in decision(made, "kernels.compile")[1]
    assert "50% full" in decision(made, "batch.sequences_per_update")[1]


def test_full_sequences_are_compiled_and_all_of_one_width():
    made = plan(manifest({"batch_size": 8}), survey=packed(0.97))
    assert (made.kernels.compile, made.data.flat, made.data.trim) == (True, False, False)
    assert decision(made, "data.trim")[1] == wording("compiled-blocks-want-one")


@pytest.mark.parametrize(("fill", "trims"), [(0.97, False), (0.8, True)])
def test_without_boundaries_it_is_the_fill_that_decides(fill, trims):
    config = {"batch_size": 8, "torch_compile": False, "use_cuda_graphs": False}
    made = plan(manifest(config | {"attention": "sdpa"}), survey=packed(fill))
    assert (made.data.trim, made.data.flat) == (trims, False)
    by_boundaries = plan(manifest(config), survey=packed(fill))
    assert (by_boundaries.data.trim, by_boundaries.data.flat) == (False, trims)
    recorded = plan(manifest(config | {"use_cuda_graphs": True}), survey=packed(fill))
    assert decision(recorded, "data.trim")[:2] == (False, wording("recorded-passes-have-one"))


@pytest.mark.parametrize(
    ("card", "config", "trims"),
    [
        (None, {}, True),
        (None, {"packing": False}, False),
        ("rtx-4090", {"torch_compile": False}, False),
    ],
)
def test_before_rows_are_packed_only_a_cpu_trims(card, config, trims):
    assert plan(manifest(config), card).data.trim is trims


def on_cpu(**config):
    data = manifest({"max_seq_length": 1024, "batch_size": 128, **config})
    rows = PackedRows(rows=6000, sequences=900, length=1024, fill=0.98)
    survey = Survey(6000, 900_000, "prepared rows", "prepared", 1000, rows)
    packed = config.get("packing", True) is True
    return plan(data, None, survey=survey if packed else None)


def test_a_cpu_computes_no_larger_micro_batch_than_its_caches_like():
    made = on_cpu()
    assert (made.batch.sequences_per_update, made.batch.micro_batch) == (19, 4)
    assert (made.batch.accumulation, made.batch.eval_batch) == (5, 4)
    because = wording("cpu-fastest-with-about")
    assert decision(made, "batch.micro_batch")[1] == because
    assert on_cpu(max_seq_length=100_000).batch.eval_batch == 1


def test_what_the_manifest_says_is_the_micro_batch_on_a_cpu_too():
    made = on_cpu(micro_batch_size=16, eval_batch_size=32)
    assert (made.batch.micro_batch, made.batch.eval_batch) == (16, 32)


def test_rows_that_are_padded_go_at_once_as_far_as_they_fit():
    assert on_cpu(packing=False, batch_size=8).batch.micro_batch == 8


def test_flex_attention_has_one_width():
    config = {"batch_size": 8, "torch_compile": False, "attention": "flex"}
    made = plan(manifest(config), "h200", survey=packed(0.5))
    assert made.kernels.attention == "flex"
    assert decision(made, "data.trim")[:2] == (False, wording("flexattention-compiled-for-one"))


def test_a_sequence_longer_than_a_cpu_likes_goes_alone_for_that_reason():
    rows = PackedRows(rows=6000, sequences=900, length=8192, fill=0.98)
    survey = Survey(6000, 7_000_000, "prepared rows", "prepared", 8000, rows)
    data = manifest({"max_seq_length": 8192, "batch_size": 128})
    value, because, _ = decision(plan(data, None, survey=survey), "batch.micro_batch")
    assert (value, because) == (1, wording("cpu-fastest-with-about"))


# --- a step by its tokens ------------------------------------------------------------------------


def counted(rows: int, tokens: int) -> Survey:
    return Survey(rows, tokens, "lines counted")


def test_tokens_of_a_step_become_rows_by_their_mean_length():
    made = plan(manifest({"batch_tokens": 4096}), survey=counted(1000, 128_000))
    value, because, source = decision(made, "batch.examples_per_update")
    assert (value, because, source) == (32, wording("tokens-to-a-row"), "manifest")
    assert made.batch.tokens_per_step == 4096
    assert made.batch.sequences_per_update == 2  # of 2,048


def test_tokens_of_a_step_are_multiplied_by_accumulation():
    config = {"batch_tokens": 4096, "gradient_accumulation_steps": 2}
    made = plan(manifest(config), survey=counted(1000, 128_000))
    assert (made.batch.examples_per_update, made.batch.tokens_per_step) == (64, 8192)


def test_rows_longer_than_a_sequence_count_as_much_as_is_left_of_them():
    config = {"batch_tokens": 4096, "max_seq_length": 512}
    assert plan(manifest(config), survey=counted(100, 300_000)).batch.examples_per_update == 8


def test_rows_that_were_packed_say_what_a_sequence_holds():
    made = plan(manifest({"batch_tokens": 4096}), survey=packed(0.5))
    assert made.batch.examples_per_update == 32  # 8 to 1,024 tokens
    assert made.batch.sequences_per_update == 4


def test_rows_of_unknown_length_are_planned_as_long_ones_and_reported_to_be():
    made = plan(manifest({"batch_tokens": 4096}), survey=Survey(None, None, "not there"))
    assert made.batch.examples_per_update == 2
    told = [r.text for r in made.remarks if r.path == "batch.tokens_per_step"]
    assert len(told) == 1
    assert wording("how-long-not-known") in told[0]


CARDS = ("rtx-3060", "rtx-4090", "l40s", "a100", "h200", None)


def asking_for(rows: int, card: str | None, *, exact: bool = True, **config):
    """An 8B model with 4 packed sequences to a step, and so many of them asked for at once."""
    packed = PackedRows(rows=6000, sequences=1500, length=2048, fill=0.99)
    survey = Survey(6000, 3_000_000, "prepared rows", "prepared", 2000, packed if exact else None)
    name = "Qwen3-0.6B" if card is None else "Llama-3.1-8B"
    data = manifest(
        {"batch_size": 16, "max_seq_length": 2048, "micro_batch_size": rows, **config},
        base_models=[{"name": name}],
    )
    return plan(data, card, survey=survey)


@each("card", CARDS)
def test_a_micro_batch_larger_than_a_step_has_are_planned_as_what_a_step_has(card):
    asked, fitting = asking_for(32, card), asking_for(4, card)
    assert asked.batch.sequences_per_update == 4
    assert (asked.batch.micro_batch, asked.batch.accumulation) == (4, 1)
    assert asked.memory == fitting.memory
    assert asked.kernels == fitting.kernels
    assert asked.fits == fitting.fits
    because = wording("all-step-manifests-more")
    assert decision(asked, "batch.micro_batch") == (4, because, "manifest")


@each("card", CARDS)
def test_memory_is_that_of_the_expected_sequences_while_rows_are_not_counted(card):
    asked, fitting = asking_for(32, card, exact=False), asking_for(4, card, exact=False)
    assert asked.batch.micro_batch == 32  # a step may come out longer than it was guessed
    assert asked.batch.sequences_per_update == fitting.batch.sequences_per_update
    assert asked.memory == fitting.memory
    assert asked.kernels == fitting.kernels


def test_blocks_are_recomputed_for_what_is_on_the_card_and_not_for_what_was_asked():
    asked = asking_for(32, "a100")
    assert asked.fits
    assert asked.kernels.recomputed_blocks == asking_for(4, "a100").kernels.recomputed_blocks
    assert (
        asked.kernels.recomputed_blocks
        < asking_for(32, "a100", batch_size=128).kernels.recomputed_blocks
    )


def test_rows_that_go_alone_are_planned_as_what_a_step_has_too():
    for card in ("rtx-3060", "rtx-4090", None):
        config = {"packing": False, "batch_size": 3}
        asked = plan(manifest({**config, "micro_batch_size": 64}), card)
        assert asked.batch.micro_batch == 3
        assert asked.memory == plan(manifest({**config, "micro_batch_size": 3}), card).memory
