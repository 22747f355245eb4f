"""Rows to sequences: how long, packed or not, and how many make an update."""

from __future__ import annotations

import math
from typing import NamedTuple

from expert.core.errors import ExpertError
from expert.planning.decisions import Ledger, Source
from expert.planning.models.presets import char_gpt_batch
from expert.planning.situation import KEPT, Situation
from expert.planning.survey import sequences_for

DEFAULT_EXAMPLES_PER_UPDATE = 16
DEFAULT_LENGTH = 2048
# Packing over a shuffled window fills 97.0-99.97 % of a sequence that holds three rows or more.
PACKED_FILL = 0.99
ROWS_OFF = 0.05
"""How far the rows of an update may be from those asked for, on average, before sequences are made
shorter: whole sequences hold whole numbers of rows only by chance."""
FULL_ENOUGH = 0.9
"""Where less is full, batches of a card vary in width: memory is planned for the widest."""
LENGTHS_OF = 8
"""Sequences are multiples of so many tokens long, as tensor cores like it."""


class Packing(NamedTuple):
    """Sequences of an update, and what goes into one of them."""

    sequences: int
    length: int
    """Places in a sequence; the limit for rows, or less."""
    most_rows: int | None
    """Rows that a sequence may hold at most; None: as many as fit."""


def packing_of(examples: int, *, mean: float, longest: float, length: int) -> Packing:
    """Sequences that hold as many rows as an update has, on average, as far as that can be told by
    a mean; `longest` is 0 where it is not known. Rows that are there are tried out instead.

    A sequence of `length` holds as many rows as fill it. Where no whole number of such sequences
    comes near to the rows asked for, one more of them is taken, each shorter; where a long row
    does not let it be shorter, it holds fewer rows instead, and the rest of it stays empty.
    Otherwise 16 short rows in sequences of 1024 became 45.
    """
    alike = 0 < longest <= mean * (1 + ROWS_OFF)  # nothing shorter closes the gaps
    exact = examples / max(1.0, length // longest if alike else PACKED_FILL * length / mean)
    sequences = max(1, round(exact))
    if abs(sequences / exact - 1) <= ROWS_OFF:
        return Packing(sequences, length, None)
    sequences = math.ceil(exact)
    wanted = examples * mean / (PACKED_FILL * sequences)
    if alike:
        wanted = math.ceil(examples / sequences) * longest
    least = LENGTHS_OF * math.ceil(max(wanted, longest) / LENGTHS_OF)
    holds_more = least > wanted * (1 + ROWS_OFF)
    most = math.ceil(examples / sequences) if holds_more else None
    return Packing(sequences, min(length, least), most)


def concatenation_of(examples: int, *, mean: float, length: int) -> Packing:
    """The same of rows that go on in the next sequence where one is full: nothing stays empty, and
    no row is too long for a shorter sequence."""
    exact = max(examples * mean / length, 1e-9)
    sequences = max(1, round(exact))
    if abs(sequences / exact - 1) <= ROWS_OFF:
        return Packing(sequences, length, None)
    sequences = math.ceil(exact)
    places = LENGTHS_OF * math.ceil(examples * mean / sequences / LENGTHS_OF)
    return Packing(sequences, min(length, places), None)


def settle_widths(now: Situation, ledger: Ledger, *, packed: bool, fixed: str) -> None:
    """Whether batches are as wide as their fullest sequence; `fixed` says why that cannot be."""
    path, known = "data.trim", now.survey.packed
    if not packed:
        because = "blocks are equally long" if now.is_char_model else "padded to the longest anyway"
        ledger.settle(path, False, because, "machine")
    elif not now.on_gpu:
        ledger.settle(path, True, "a CPU computes no faster for equal widths", "machine")
    elif fixed:
        ledger.settle(path, False, fixed, "machine")
    elif known is None:
        ledger.settle(path, False, "how full sequences are is not known yet", "machine")
    else:
        because = f"sequences are {known.fill:.0%} full"
        ledger.settle(path, known.fill < FULL_ENOUGH, because, "machine")


class NoRoomForText(ExpertError):
    """Soft prompts that fill the whole of a sequence."""


def settle_sequences(now: Situation, ledger: Ledger) -> tuple[int, bool]:
    """Sequence length and packing; returns the length and whether rows are packed."""
    if now.is_char_model:
        return _settle_blocks(now, ledger), False
    length = _settle_length(now, ledger)
    _refuse_prompts_without_room(now, length)
    config = now.config
    kinds = {True: "best-fit", False: "none", "auto": "best-fit"}
    packing = kinds.get(config.packing) or str(config.packing)
    if config.packing == "auto":
        because = "several rows to a sequence, documents kept apart, rows per update unchanged"
        ledger.settle("data.packing", packing, because, "preset")
    else:
        ledger.settle("data.packing", packing, "set in the manifest", "manifest")
    packed = packing != "none"
    if packed:
        ledger.settle("data.group_by_length", False, "packing leaves little padding", "machine")
    elif config.group_by_length == "auto":
        because = "the rows of a step are random, its micro-batches of similar length"
        ledger.settle("data.group_by_length", True, because, "preset")
    else:
        now.pass_on(ledger, "data.group_by_length", "group_by_length")
    return length, packed


def _refuse_prompts_without_room(now: Situation, length: int) -> None:
    """A length that the manifest leaves open is known only now."""
    tokens = sum(prompt.tokens for prompt in now.manifest.soft_prompts)
    if tokens >= length:
        raise NoRoomForText(
            f"soft_prompts: {tokens} tokens leave no room for text in sequences of {length}  (use "
            "fewer tokens, or a larger training.config.max_seq_length)"
        )


def _settle_blocks(now: Situation, ledger: Ledger) -> int:
    """The character model reads a corpus in blocks of its own size."""
    assert now.resolved.shape is not None
    length = now.resolved.shape.context
    path = "data.max_seq_length"
    ledger.settle(path, length, "block_size of the character model", "manifest")
    if now.config.max_seq_length not in ("auto", length):
        ledger.supersede(path, f"max_seq_length: block_size {length} decides")
    ledger.settle("data.packing", "none", "a corpus is cut into blocks", "machine")
    if now.config.packing not in ("auto", False):
        ledger.supersede("data.packing", "packing: a corpus is cut into full blocks anyway")
    ledger.settle("data.group_by_length", False, "all blocks are equally long", "machine")
    return length


def _settle_length(now: Situation, ledger: Ledger) -> int:
    asked, path = now.config.max_seq_length, "data.max_seq_length"
    context = now.resolved.shape.context if now.resolved.shape else 0
    if asked == "auto":
        length = min(DEFAULT_LENGTH, context or DEFAULT_LENGTH)
        because = "the usual length" if length == DEFAULT_LENGTH else "the model's context"
        ledger.settle(path, length, because, "preset")
        return length
    ledger.settle(path, asked, "set in the manifest", "manifest")
    if context and asked > context:
        ledger.warn(path, f"longer than the {context} positions the model was trained on")
    return asked


def settle_update(
    now: Situation, ledger: Ledger, *, length: int, packed: bool
) -> tuple[int, int | None, int]:
    """Rows per update, the number that never changes, the sequences they fill, and the places that
    memory is planned for in each: all of them while nobody knows the longest row."""
    config = now.config
    times = config.gradient_accumulation_steps
    source: Source = "preset"
    if config.batch_tokens is None:
        ledger.settle("batch.tokens_per_step", None, "rows are counted", "preset")
    if config.batch_tokens is not None:
        rows, because, source = _rows_of_tokens(now, ledger, config.batch_tokens, length)
    elif config.batch_size != "auto":
        rows, because, source = config.batch_size, "batch_size", "manifest"
    elif now.kept.examples_per_update and now.kept.examples_per_update % times == 0:
        rows, because = now.kept.examples_per_update // times, KEPT
    elif now.is_char_model:
        rows, because = char_gpt_batch(now.target.total_bytes)
    else:
        rows = DEFAULT_EXAMPLES_PER_UPDATE
        because = "how a model learns does not depend on the card"
    if times > 1:
        because, source = f"{rows} × gradient_accumulation_steps {times}", "manifest"
    examples = rows * times
    ledger.settle("batch.examples_per_update", examples, because, source)
    path, long = "batch.sequences_per_update", "data.sequence_length"
    if not packed:
        ledger.settle(path, examples, "a row is a sequence", "machine")
        ledger.settle(long, length, "rows are cut to it", "machine")
        return examples, examples, length
    mean = now.survey.mean_tokens
    if mean is not None:
        mean /= now.parts_of_a_row(length)
    if mean is None:
        ledger.unknown(path, f"row lengths are not known: {now.survey.because}")
        ledger.settle(long, length, "max_seq_length; shorter for short rows", "machine")
        return examples, None, length
    made = _packing(now, examples, mean, length)
    rows_each = max(1.0, PACKED_FILL * made.length / mean)
    if made.most_rows is not None:
        rows_each = examples / made.sequences
    if now.survey.packed is not None:
        rows_each = now.survey.packed.rows_each
    because = f"{examples} rows, about {rows_each:.1f} to a sequence ({now.survey.because})"
    if now.survey.packed is not None:
        because = f"{because}, {now.survey.packed.fill:.0%} full"
    ledger.settle(path, made.sequences, because, "machine")
    because = "max_seq_length"
    if made.length < length:
        hold = "1 holds" if made.sequences == 1 else f"{made.sequences} hold"
        because = f"so that {hold} {examples} rows on average"
    ledger.settle(long, made.length, because, "machine")
    known = now.survey.longest_tokens is not None
    return examples, made.sequences, made.length if known else length


def rows_of_tokens(tokens: int, mean: float) -> int:
    """As many rows as hold so many tokens by their mean length."""
    return max(1, round(tokens / max(1.0, mean)))


def _rows_of_tokens(
    now: Situation, ledger: Ledger, tokens: int, length: int
) -> tuple[int, str, Source]:
    """The rows of a step where the manifest gives its tokens: the same for every step."""
    path, packed = "batch.tokens_per_step", now.survey.packed
    ledger.settle(path, tokens * now.config.gradient_accumulation_steps, "batch_tokens", "manifest")
    mean = float(length) if now.is_char_model else now.survey.mean_tokens
    if packed is not None:
        mean = packed.length * packed.fill / packed.rows_each
    elif mean is not None:
        # A row is cut to the length of a sequence, or trained on in parts.
        mean = min(mean / now.parts_of_a_row(length), length)
    if mean is None:
        text = f"batch_tokens {tokens:,} is {max(1, tokens // length)} rows or more: how long they "
        ledger.warn(path, f"{text}are is not known yet ({now.survey.because}); a run counts first")
        return max(1, tokens // length), f"batch_tokens {tokens:,} of the longest rows", "manifest"
    because = f"batch_tokens {tokens:,}, {mean:.0f} tokens to a row"
    return rows_of_tokens(tokens, mean), because, "manifest"


def _packing(now: Situation, examples: int, mean: float, length: int) -> Packing:
    """As the rows were packed, or will be as far as they are known."""
    known = now.survey.packed
    if known is not None:
        sequences = sequences_for(examples, rows=known.rows, sequences=known.sequences)
        return Packing(sequences, known.length, None)
    soft = sum(prompt.tokens for prompt in now.manifest.soft_prompts)
    if now.config.packing == "concat":
        return concatenation_of(examples, mean=mean + soft, length=length)
    mean = min(mean + soft, length)
    long = now.survey.longest_tokens
    longest = 0 if long is None else min(long + soft, length)
    return packing_of(examples, mean=mean, longest=longest, length=length)
