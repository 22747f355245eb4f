"""Rows to sequences: their length, packing, and how many make a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.manifest.schema.kinds import PREFERENCES
from expert.planning.decisions import Source
from expert.planning.draft import KEPT, SET, PlanDraft

DEFAULT_EXAMPLES_PER_STEP = 16
DEFAULT_LENGTH = 2048
# Packing over a shuffled window fills 97.0-99.97 % of a sequence that holds three rows or more.
PACKED_FILL = 0.99
EVALUATED_TIME, LEAST_EVALUATED_ROWS = 0.1, 32
EVALUATION_SHARE = 1 / 3
"""Cost of evaluating as many rows as in a step: only the forward, the backward takes twice that."""
ROWS_TOLERANCE = 0.05
"""How far the mean rows of a step may be from the requested number before sequences are shortened:
whole sequences rarely hold exactly that many rows."""
MAX_PADDED_FILL = 0.97
"""Below this fill sequences are laid end to end: every new number of tokens costs 10 to 20 ms once,
while cuBLAS chooses its kernels (1.7 % of a run of 24 steps at 0.6B on an H200)."""
_CAPTURED_PADDING = 0.25
"""Padding of one row in a few widths that are captured; of n rows, less by the square root of n:
0.18 with 2 rows per pass, 0.11 with 5 and 0.06 with 16 (438 tokens on average, at most 2,048)."""
VARLEN_ATTENTION = ("flash", "flash4")
"""Kinds of attention that are given where documents begin, however rows are laid out."""
FULL_ENOUGH = 0.9
"""Below this fill batches vary in width: memory is planned for the widest."""
LENGTH_MULTIPLE = 8
"""Sequence lengths are multiples of this, which suits tensor cores."""


# Rows per step for the character GPT from this many GiB on, from its guide.
CHAR_BATCHES = ((20, 192), (14, 128), (0, 96))


class Packing(NamedTuple):
    """Sequences per step, and the contents of one."""

    sequences: int
    length: int
    """Positions in a sequence: max_seq_length or less."""
    most_rows: int | None
    """Most rows in a sequence; None: as many as fit."""


def packing_of(examples: int, *, mean: float, longest: float, length: int) -> Packing:
    """Sequences that hold the rows of a step on average, estimated from the mean length; `longest`
    is 0 if unknown. Once the rows are there, packing them is tried instead.

    A sequence of `length` holds as many rows as fit. If no whole number of such sequences comes
    close to the requested rows, one more is taken and all are shorter; if a long row prevents that,
    each holds fewer rows and is padded. Otherwise 16 short rows in sequences of 1024 became 45.
    """
    alike = 0 < longest <= mean * (1 + ROWS_TOLERANCE)  # no shorter rows fill the gaps
    exact = examples / max(1.0, length // longest if alike else PACKED_FILL * length / mean)
    sequences = max(1, round(exact))
    if abs(sequences / exact - 1) <= ROWS_TOLERANCE:
        return Packing(sequences, length, None)
    sequences = math.ceil(exact)
    wanted = examples * mean / (PACKED_FILL * sequences)
    if alike:
        wanted = math.ceil(examples / sequences) * longest
    least = LENGTH_MULTIPLE * math.ceil(max(wanted, longest) / LENGTH_MULTIPLE)
    holds_more = least > wanted * (1 + ROWS_TOLERANCE)
    most = math.ceil(examples / sequences) if holds_more else None
    return Packing(sequences, min(length, least), most)


def concatenation_of(examples: int, *, mean: float, length: int) -> Packing:
    """The same for rows that continue in the next sequence: no padding, and no row is too long for
    a shorter sequence."""
    exact = max(examples * mean / length, 1e-9)
    sequences = max(1, round(exact))
    if abs(sequences / exact - 1) <= ROWS_TOLERANCE:
        return Packing(sequences, length, None)
    sequences = math.ceil(exact)
    places = LENGTH_MULTIPLE * math.ceil(examples * mean / sequences / LENGTH_MULTIPLE)
    return Packing(sequences, min(length, places), None)


def settle_widths(draft: PlanDraft) -> None:
    """Whether the sequences of a batch lie end to end, or batches are trimmed to the fullest."""
    known, attention = draft.packed_rows, draft["kernels.attention"]
    fixed, fill, flat, trim = "", 1.0, False, False
    if draft["kernels.cuda_graphs"] and not captured_flat(draft, attention):
        fixed = "CUDA graphs need a fixed width"
    if attention == "flex":
        fixed = "FlexAttention is compiled for a fixed width"
    if draft["kernels.compile"]:
        fixed = "compiled blocks need a fixed batch width"
    because = fixed or "sequences are rows of a matrix for this attention"
    if not fixed and draft.packed and draft.on_gpu and attention in VARLEN_ATTENTION:
        because = "it is not known yet how full sequences are"
        if known is not None:
            passes = draft["batch.accumulation"]
            fill = known.fill
            fill *= occupied(draft, passes, draft["batch.micro_batch"]) if passes else 1.0
            flat = fill < MAX_PADDED_FILL
            because = f"micro-batches are {fill:.0%} full"
    draft.settle("data.flat", flat, because)
    if not draft.packed:
        because = "blocks are equally long" if draft.is_char_model else "padded to the longest row"
    elif flat:
        because = "there is no padding"
    elif not draft.on_gpu:
        trim, because = True, "a fixed width is no faster on a CPU"
    elif not fixed and known is not None:
        trim, because = known.fill < FULL_ENOUGH, f"sequences are {known.fill:.0%} full"
    else:
        because = fixed or "it is not known yet how full sequences are"
    draft.settle("data.trim", trim, because)


def occupied(draft: PlanDraft, passes: int, rows: int) -> float:
    """Share of the sequences of a step's `passes` micro-batches of `rows` that are there: 7/8 if 7
    sequences are computed in four micro-batches of 2."""
    sequences = draft["batch.sequences_per_update"]
    return min(1.0, sequences / (passes * rows * draft.cluster.ranks)) if sequences else 1.0


def captured_flat(draft: PlanDraft, attention: str) -> bool:
    """Whether uncompiled passes over rows laid end to end would be captured in a few widths: each
    keeps its gradients, which are small for adapters only."""
    known = draft.packed_rows
    narrow = attention in VARLEN_ATTENTION and draft.config.adapter_type != "full"
    if not narrow or not draft.packed or known is None:
        return False
    return known.fill < MAX_PADDED_FILL * captured_fill(draft["batch.examples_per_update"])


def captured_fill(rows: float) -> float:
    """The fill of `rows` rows of a pass end to end, in a few widths."""
    return 1 - _CAPTURED_PADDING / math.sqrt(max(1.0, rows))


def settle_sequences(draft: PlanDraft) -> None:
    """Sequence length and packing."""
    path = "data.max_seq_length"
    if draft.is_char_model:  # it reads a corpus in blocks of its context size
        assert draft.resolved.shape is not None
        length = draft.resolved.shape.context
        draft.settle(path, length, "block_size of the character model", "manifest")
        if draft.config.max_seq_length not in ("auto", length):
            draft.supersede(path, f"max_seq_length: block_size {length} decides")
        draft.settle("data.packing", "none", "a corpus is cut into blocks")
        if draft.config.packing not in ("auto", False):
            draft.supersede("data.packing", "packing: a corpus is cut into full blocks anyway")
        draft.settle("data.group_by_length", False, "all blocks are equally long")
        return
    context = draft.resolved.shape.context if draft.resolved.shape else 0
    default = min(DEFAULT_LENGTH, context or DEFAULT_LENGTH)
    because = "the usual length" if default == DEFAULT_LENGTH else "the model's context"
    length = int(draft.choose(path, "max_seq_length", default, because, "preset"))
    if context and length > context:
        draft.warn(path, f"longer than the {context} positions the model was trained on")
    tokens = draft.soft_tokens
    if tokens >= length:  # the manifest may have left the length open
        what = f"{tokens} tokens leave no room for text in sequences of {length}"
        fix = "use fewer tokens, or a larger training.config.max_seq_length"
        raise ExpertError(f"soft_prompts: {what}  ({fix})")
    if tokens and draft.resolved.shape is not None and draft.resolved.shape.widest_head:
        what = "this model has embeddings for every layer, which a soft prompt would need too"
        raise ExpertError(f"soft_prompts: {what}  (use an adapter)")
    asked = draft.config.packing
    if asked == "auto" or draft.config.method in PREFERENCES:
        because = "several rows to a sequence, documents kept apart, rows per step unchanged"
        draft.settle("data.packing", "best-fit", because, "preset")
    else:
        kinds = {"True": "best-fit", "False": "none"}
        draft.settle("data.packing", kinds.get(str(asked), asked), SET, "manifest")
    path = "data.group_by_length"
    if draft.packed:
        draft.settle(path, False, "packing leaves little padding")
    else:
        because = "rows of a step are random, those of a micro-batch of similar length"
        draft.choose(path, "group_by_length", True, because, "preset")


def settle_step(draft: PlanDraft) -> tuple[int | None, int]:
    """Rows per step, independent of card and memory. Returns the sequences they fill, and the
    positions in each that memory is planned for: all of them while the longest row is unknown."""
    examples = _settle_examples(draft)
    length, survey, known = draft["data.max_seq_length"], draft.survey, draft.survey.packed
    path, long = "batch.sequences_per_update", "data.sequence_length"
    if not draft.packed:
        draft.settle(path, examples, "one row per sequence")
        width = known.length if known is not None else length
        draft.settle(long, width, "rows are cut to it" if width == length else "the longest row")
        return examples, width
    if survey.mean_tokens is None and known is None:
        if survey.step_sequences is not None:
            draft.settle(path, survey.step_sequences, survey.because, "measurement")
        else:
            draft.unknown(f"row lengths are not known: {survey.because}", path)
        draft.settle(long, length, "max_seq_length; less if rows are short")
        return survey.step_sequences, length
    if known is not None:
        sequences, positions = known.step_sequences(examples), known.length
        rows_per_sequence = known.rows_per_sequence
    else:
        mean = (survey.mean_tokens or 0) / draft.parts_per_row(length)
        mean_here, longest = mean + draft.soft_tokens, survey.longest_tokens
        if draft.config.packing == "concat":
            packing = concatenation_of(examples, mean=mean_here, length=length)
        else:
            most = 0 if longest is None else min(longest + draft.soft_tokens, length)
            mean_here = min(mean_here, length)
            packing = packing_of(examples, mean=mean_here, longest=most, length=length)
        sequences, positions = packing.sequences, packing.length
        rows_per_sequence = max(1.0, PACKED_FILL * positions / mean)
        if packing.most_rows is not None:
            rows_per_sequence = examples / sequences
    because = f"{examples} rows, about {rows_per_sequence:.1f} per sequence ({survey.because})"
    draft.settle(path, sequences, because, "machine" if known is None else "measurement")
    because = f"{counted(sequences, 'sequence')} of this length hold {examples} rows on average"
    draft.settle(long, positions, because if positions < length else "max_seq_length")
    return sequences, length if survey.longest_tokens is None else positions


def evaluated_sequences(draft: PlanDraft) -> tuple[int, str] | None:
    """How many sequences hold the rows of eval_batch_size, and why; None for auto. Sequences of an
    evaluation have the full length."""
    asked, length = draft.config.eval_batch_size, draft["data.max_seq_length"]
    if asked == "auto" or not draft.packed:
        return None if asked == "auto" else (asked, SET)
    known, mean = draft.packed_rows, draft.survey.mean_tokens
    if known is not None:
        mean = known.length * known.fill / known.rows_per_sequence
    each = PACKED_FILL * length / min((mean or length) + draft.soft_tokens, length)
    rows = f"about {max(1, each):.1f} per sequence" if mean else "of unknown length"
    sequences = max(1, round(asked / max(1, each)))
    return sequences, f"eval_batch_size {asked} is rows, {rows}"


def steps_between_evaluations(draft: PlanDraft, strategy: str) -> int | None:
    """None: not known yet."""
    steps = draft.config.eval_steps
    if strategy == "epoch":
        steps = (draft["length.steps_per_epoch"] or 0) * draft.config.eval_every_epochs
    return min(filter(None, (steps, draft["length.total_steps"])), default=None)


def rows_to_evaluate(draft: PlanDraft, steps: int) -> int:
    """At most so many validation rows that evaluating takes a small share of the time of the steps
    before."""
    trained = steps * draft["batch.examples_per_update"]
    return max(LEAST_EVALUATED_ROWS, int(EVALUATED_TIME / EVALUATION_SHARE * trained))


def held_out_sequences(draft: PlanDraft) -> int | None:
    """How many sequences hold the rows that are evaluated; None if these are not a known share of
    the training rows."""
    data, known, config = draft.dataset, draft.survey, draft.config
    held_out = known.packed.held_out if known.packed is not None else None
    if data.tasks or data.test_path:
        return held_out
    if held_out is None and (draft.has_validation_file or not known.rows):
        return None
    length, most = int(draft["data.max_seq_length"]), config.eval_max_rows
    strategy = config.evaluation_strategy
    if strategy == "auto":
        strategy = "steps" if config.eval_steps else "epoch"
    steps = steps_between_evaluations(draft, strategy)
    rows = (
        math.inf if held_out is not None else math.ceil((known.rows or 0) * data.validation_split)
    )
    if most == "auto":
        most = None if steps is None else rows_to_evaluate(draft, steps)
    if most is not None:
        rows = min(rows, most)
    mean = min(draft.mean_document(length) + draft.soft_tokens, length)
    each = PACKED_FILL * length / mean if draft.packed else 1
    needed = held_out if math.isinf(rows) else math.ceil(rows / each) + draft.packed
    return needed if held_out is None or needed is None else min(held_out, needed)


def _settle_examples(draft: PlanDraft) -> int:
    config, kept = draft.config, draft.kept.examples_per_update
    times = config.gradient_accumulation_steps
    source: Source = "preset"
    if config.batch_tokens is None:
        draft.settle("batch.tokens_per_step", None, "steps are counted in rows", "preset")
    if config.batch_tokens is not None:
        rows, because = _rows_for_batch_tokens(draft, config.batch_tokens)
        source = "manifest"
    elif config.batch_size != "auto":
        rows, because, source = config.batch_size, "batch_size", "manifest"
    elif kept and kept % times == 0:
        rows, because = kept // times, KEPT
    elif draft.is_char_model:
        rows, because = char_gpt_batch(draft.target.total_bytes)
    else:
        rows, because = DEFAULT_EXAMPLES_PER_STEP, "the usual batch, the same on every card"
    if times > 1:
        because, source = f"{rows} × gradient_accumulation_steps {times}", "manifest"
    return int(draft.settle("batch.examples_per_update", rows * times, because, source))


def char_gpt_batch(memory_bytes: int) -> tuple[int, str]:
    """Rows per step for the character GPT, and why."""
    least, batch = next(pair for pair in CHAR_BATCHES if memory_bytes >= pair[0] * 2**30)
    words = f"from {least} GiB on" if least else "below 14 GiB"
    return batch, f"the character GPT's preset {words}"


def rows_of_tokens(tokens: int, mean: float) -> int:
    """The number of rows that hold this many tokens at their mean length."""
    return max(1, round(tokens / max(1.0, mean)))


def _rows_for_batch_tokens(draft: PlanDraft, tokens: int) -> tuple[int, str]:
    """The rows per step if the manifest gives tokens per step; the same for every step."""
    path, packed, length = "batch.tokens_per_step", draft.packed_rows, draft["data.max_seq_length"]
    times = draft.config.gradient_accumulation_steps
    draft.settle(path, tokens * times, "batch_tokens", "manifest")
    mean = float(length) if draft.is_char_model else draft.survey.mean_tokens
    if packed is not None:
        mean = packed.length * packed.fill / packed.rows_per_sequence
    elif mean is not None:
        # A row is truncated to the sequence length, or trained on in parts.
        mean = min(mean / draft.parts_per_row(length), length)
    if mean is None:
        least = max(1, tokens // length)
        text = f"batch_tokens {tokens:,} is at least {least} rows: their length is not known yet "
        draft.warn(path, f"{text}({draft.survey.because}); a run counts them first")
        return least, f"batch_tokens {tokens:,} of the longest rows"
    return rows_of_tokens(tokens, mean), f"batch_tokens {tokens:,}, {mean:.0f} tokens per row"
