"""How many packed sequences make a step, before and after the rows are counted."""

from __future__ import annotations

from dataclasses import replace

from expert.planning.choose.sequences import concatenation_of, packing_of
from expert.planning.memory.memory import captured_gradient_bytes
from expert.planning.memory.workload import CAPTURED_WIDTHS, workload_of
from expert.planning.run_plan import RunPlan
from expert.planning.survey import PackedRows, Survey
from tests.each import each
from tests.planning.planning import decision, plan
from tests.planning.planning import own_blocks as manifest


@each(
    ("rows", "mean", "longest", "length", "packing"),
    [
        # Sequences keep their length if whole ones hold the rows of a step.
        (64, 100, 900, 1024, (6, 1024, None)),
        (8, 2000, 2048, 2048, (8, 2048, None)),
        # Otherwise they are shorter: 16 · 22 / 0.99 = 355.6, to a multiple of 8.
        (16, 22, 40, 1024, (1, 360, None)),
        (16, 22, 0, 1024, (1, 360, None)),  # the longest row is not known
        (9, 29, 29, 256, (2, 152, None)),  # rows that are all alike leave gaps
        (16, 22, 900, 1024, (1, 904, 16)),  # a long row forces long sequences with few rows
        (1, 20, 40, 512, (1, 40, 1)),
    ],
)
def test_sequences_hold_the_rows_of_a_step(rows, mean, longest, length, packing):
    assert packing_of(rows, mean=mean, longest=longest, length=length) == packing


def test_rows_that_continue_in_the_next_sequence_make_steps_of_the_rows_asked_for():
    assert concatenation_of(64, mean=100, length=1024) == (6, 1024, None)
    assert concatenation_of(16, mean=25, length=1024) == (1, 400, None)
    assert concatenation_of(16, mean=100, length=1024) == (2, 800, None)
    assert concatenation_of(1, mean=5000, length=1024) == (5, 1024, None)  # 2 % off


def packed(fill: float) -> Survey:
    """Very many rows, 8 per sequence of 2,048 positions."""
    rows = PackedRows(8_000_000, 1_000_000, 2048, fill, tokens=int(1_000_000 * 2048 * fill))
    return Survey(8_000_000, int(2048e6 * fill), "prepared rows", "prepared", 2048, rows)


def test_full_sequences_are_compiled_to_one_width_and_half_empty_ones_laid_end_to_end():
    full = plan(manifest({"batch_size": 8}), survey=packed(0.97))
    assert (full.kernels.compile, full.data.flat, full.data.trim) == (True, False, False)
    assert decision(full, "data.trim")[1] == "compiled blocks need a fixed batch width"
    large = manifest(
        {"batch_size": 128, "use_cuda_graphs": False}, base_models=[{"name": "Llama-3.1-8B"}]
    )
    made = plan(large, "h200", survey=packed(0.5))  # compiled 1.2 times as fast, half of it empty
    assert (made.kernels.compile, made.data.flat, made.data.trim) == (False, True, False)
    assert (
        "(sequences are 50% full, compiled batches of one width)"
        in decision(made, "kernels.compile")[1]
    )


def test_sequences_that_micro_batches_lack_are_not_computed():
    """7 sequences of a step in four micro-batches of 2: one in eight would be empty."""
    asked = {"fused_blocks": True, "use_cuda_graphs": False}
    base = [{"name": "Llama-3.1-8B", "quantization": "int4"}]

    def of(rows: int) -> RunPlan:
        given = manifest({**asked, "batch_size": rows}, base_models=base)
        return plan(given, "rtx-4090", survey=packed(0.99))

    uneven, even = of(56), of(64)
    assert (uneven.batch.micro_batch, uneven.batch.accumulation, uneven.data.flat) == (2, 4, True)
    assert decision(uneven, "data.flat")[1] == "micro-batches are 87% full"
    assert (even.batch.micro_batch, even.batch.accumulation, even.data.flat) == (2, 4, False)


def test_captured_sequences_with_much_padding_are_laid_end_to_end_in_a_few_widths():
    captured = {"batch_size": 8, "torch_compile": False, "use_cuda_graphs": True}
    flat = plan(manifest(captured), survey=packed(0.4))
    assert (flat.kernels.cuda_graphs, flat.data.flat, flat.data.trim) == (True, True, False)
    assert "40% full" in decision(flat, "data.flat")[1]
    others = ({"attention": "sdpa"}, {"torch_compile": True}, {"adapter_type": "full"})
    for fixed, fill in ((captured, 0.9), *((captured | other, 0.4) for other in others)):
        assert not plan(manifest(fixed), survey=packed(fill)).data.flat
    wide = workload_of(flat)
    one = replace(wide, widths=1)
    of_others = 2 * (CAPTURED_WIDTHS - 1) * 2 * wide.trainable_parameters
    assert captured_gradient_bytes(wide) - captured_gradient_bytes(one) == of_others


def test_steps_of_long_and_short_rows_are_captured_where_launching_takes_longer():
    """Ten rows in five sequences: with one width 2.4 times as much would be computed."""
    rows = PackedRows(10_000, 5_000, 2048, 0.41, tokens=int(5_000 * 2048 * 0.41))
    survey = Survey(10_000, 4_280_000, "prepared rows", "prepared", 2048, rows)
    made = plan(manifest({"batch_size": 10, "fused_blocks": "auto"}), "h200", survey=survey)
    assert (made.kernels.cuda_graphs, made.data.flat) == (True, True)


def test_without_boundaries_it_is_the_fill_that_decides():
    config = {"batch_size": 8, "torch_compile": False, "use_cuda_graphs": False}
    for fill, trims in ((0.97, False), (0.8, True)):
        made = plan(manifest(config | {"attention": "sdpa"}), survey=packed(fill))
        assert (made.data.trim, made.data.flat) == (trims, False)
        by_boundaries = plan(manifest(config), survey=packed(fill))
        assert (by_boundaries.data.trim, by_boundaries.data.flat) == (False, trims)
    recorded = plan(manifest(config | {"use_cuda_graphs": True}), survey=packed(0.97))
    assert decision(recorded, "data.trim")[:2] == (False, "CUDA graphs need a fixed width")
    flex = plan(manifest(config | {"attention": "flex"}), "h200", survey=packed(0.5))
    assert flex.kernels.attention == "flex"
    assert decision(flex, "data.trim")[:2] == (False, "FlexAttention is compiled for a fixed width")
    # Before rows are packed only a CPU trims.
    assert plan(manifest(), None).data.trim
    assert not plan(manifest({"packing": False}), None).data.trim
    assert not plan(manifest({"torch_compile": False}), "rtx-4090").data.trim


def on_cpu(**config):
    data = manifest({"max_seq_length": 1024, "batch_size": 128, **config})
    length = min(data["training"]["config"]["max_seq_length"], 8192)
    rows = PackedRows(6000, 900, length, 0.98, tokens=int(900 * length * 0.98))
    survey = Survey(6000, 879 * length, "prepared rows", "prepared", length - 24, rows)
    return plan(data, None, survey=survey if config.get("packing", True) is True else None)


def test_a_cpu_computes_no_larger_micro_batch_than_its_caches_like():
    made = on_cpu()
    assert (made.batch.sequences_per_update, made.batch.micro_batch) == (19, 4)
    assert (made.batch.accumulation, made.batch.eval_batch) == (5, 4)
    because = "a CPU is fastest with about 4,096 tokens per micro-batch"
    assert decision(made, "batch.micro_batch")[1] == because
    assert on_cpu(max_seq_length=100_000).batch.eval_batch == 1
    assert on_cpu(micro_batch_size=16).batch.micro_batch == 16
    assert on_cpu(packing=False, batch_size=8).batch.micro_batch == 8
    assert decision(on_cpu(max_seq_length=8192), "batch.micro_batch")[:2] == (1, because)


# --- a step by its tokens ------------------------------------------------------------------------


def counted(rows: int, tokens: int) -> Survey:
    return Survey(rows, tokens, "lines counted")


def test_tokens_of_a_step_become_rows_by_their_mean_length():
    made = plan(manifest({"batch_tokens": 4096}), survey=counted(1000, 128_000))
    value, because, source = decision(made, "batch.examples_per_update")
    assert (value, because, source) == (32, "batch_tokens 4,096, 128 tokens per row", "manifest")
    assert made.batch.tokens_per_step == 4096
    assert made.batch.sequences_per_update == 2  # of 2,048
    twice = {"batch_tokens": 4096, "gradient_accumulation_steps": 2}
    made = plan(manifest(twice), survey=counted(1000, 128_000))
    assert (made.batch.examples_per_update, made.batch.tokens_per_step) == (64, 8192)
    cut = {"batch_tokens": 4096, "max_seq_length": 512}  # long rows are truncated
    assert plan(manifest(cut), survey=counted(100, 300_000)).batch.examples_per_update == 8
    made = plan(manifest({"batch_tokens": 4096}), survey=packed(0.5))
    assert made.batch.examples_per_update == 32  # 8 to 1,024 tokens
    assert made.batch.sequences_per_update == 4


def test_rows_of_unknown_length_are_planned_as_long_ones_and_reported_to_be():
    made = plan(manifest({"batch_tokens": 4096}), survey=Survey(None, None, "not there"))
    assert made.batch.examples_per_update == 2
    told = [r.text for r in made.remarks if r.path == "batch.tokens_per_step"]
    assert len(told) == 1
    assert "their length is not known yet (not there); a run counts them first" in told[0]


CARDS = ("rtx-3060", "rtx-4090", "l40s", "a100", "h200", None)


def asking_for(rows: int, card: str | None, *, exact: bool = True, **config):
    """An 8B model with 4 packed sequences per step and a requested micro-batch of `rows`."""
    packed = PackedRows(6000, 1500, 2048, 0.99, tokens=int(1500 * 2048 * 0.99))
    survey = Survey(6000, 3_000_000, "prepared rows", "prepared", 2000, packed if exact else None)
    name = "Qwen3-0.6B" if card is None else "Llama-3.1-8B"
    data = manifest(
        {"batch_size": 16, "max_seq_length": 2048, "micro_batch_size": rows, **config},
        base_models=[{"name": name}],
    )
    return plan(data, card, survey=survey)


@each("card", CARDS)
def test_a_micro_batch_larger_than_a_step_is_planned_as_what_a_step_has(card):
    asked, fitting = asking_for(32, card), asking_for(4, card)
    assert asked.batch.sequences_per_update == 4
    assert (asked.batch.micro_batch, asked.batch.accumulation) == (4, 1)
    assert (asked.memory, asked.kernels, asked.fits) == (
        fitting.memory,
        fitting.kernels,
        fitting.fits,
    )
    because = "a whole step; micro_batch_size 32 is more"
    assert decision(asked, "batch.micro_batch") == (4, because, "manifest")
    # Before rows are counted, memory is planned for the expected sequences.
    asked, fitting = asking_for(32, card, exact=False), asking_for(4, card, exact=False)
    assert asked.batch.micro_batch == 32  # a step may turn out larger than estimated
    assert asked.batch.sequences_per_update == fitting.batch.sequences_per_update
    assert (asked.memory, asked.kernels) == (fitting.memory, fitting.kernels)
    config = {"packing": False, "batch_size": 3}
    padded, three = (plan(manifest({**config, "micro_batch_size": n}), card) for n in (64, 3))
    assert (padded.batch.micro_batch, padded.memory) == (3, three.memory)


# --- an evaluation -------------------------------------------------------------------------------


def test_an_evaluation_batch_is_rows_whether_they_are_packed_or_not():
    made = on_cpu(eval_batch_size=32)
    value, because, source = decision(made, "batch.eval_batch")
    assert (value, source) == (5, "manifest")
    assert because == "eval_batch_size 32 is rows, about 6.7 per sequence"
    assert on_cpu(eval_batch_size=32, packing=False).batch.eval_batch == 32
