"""Rows to sequences: how long, packed or not, and how many make an update."""

from __future__ import annotations

from expert.core.errors import ExpertError
from expert.planning.decisions import Ledger, Source
from expert.planning.presets import char_gpt_batch
from expert.planning.situation import Situation

DEFAULT_EXAMPLES_PER_UPDATE = 16
DEFAULT_LENGTH = 2048
# Best-fit packing over a shuffled window fills 99.1-99.9 % of a sequence.
PACKED_FILL = 0.99


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
        because = "no padding, documents kept apart, rows per update unchanged"
        ledger.settle("data.packing", packing, because, "preset")
    else:
        ledger.settle("data.packing", packing, "set in the manifest", "manifest")
    packed = packing != "none"
    if packed:
        ledger.settle("data.group_by_length", False, "packing leaves no padding", "machine")
    elif config.group_by_length == "auto":
        because = "rows of one length pad each other least"
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
) -> tuple[int, int | None]:
    """Rows per update, the number that never changes, and the sequences they fill."""
    config = now.config
    times = config.gradient_accumulation_steps
    source: Source = "preset"
    if config.batch_size != "auto":
        rows, because, source = config.batch_size, "batch_size", "manifest"
    elif now.is_char_model:
        rows, because = char_gpt_batch(now.target.budget_bytes)
    else:
        rows = DEFAULT_EXAMPLES_PER_UPDATE
        because = "how a model learns does not depend on the card"
    if times > 1:
        because, source = f"{rows} × gradient_accumulation_steps {times}", "manifest"
    examples = rows * times
    ledger.settle("batch.examples_per_update", examples, because, source)
    path = "batch.sequences_per_update"
    if not packed:
        ledger.settle(path, examples, "a row is a sequence", "machine")
        return examples, examples
    mean = now.survey.mean_tokens
    if mean is None:
        ledger.unknown(path, f"row lengths are not known: {now.survey.because}")
        return examples, None
    # A row that is cut fills one sequence at most; one that is split fills several.
    size = mean if now.config.overlong == "split" else min(mean, length)
    per_sequence = PACKED_FILL * length / size
    if now.config.overlong != "split":
        per_sequence = max(1.0, per_sequence)
    sequences = max(1, round(examples / per_sequence))
    because = f"{examples} rows, about {per_sequence:.1f} to a sequence ({now.survey.because})"
    ledger.settle(path, sequences, because, "machine")
    return examples, sequences
