"""What there is to say of rows so long that nothing of them, or not all, would be learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expert.data.records import DataError
from expert.run.places import Doubt

if TYPE_CHECKING:
    from expert.data.feed.streaming import Stream
    from expert.planning.run_plan import RunPlan
    from expert.run.prepared import PreparedSplit


MAX_LENGTH = "training.config.max_seq_length"
CUT_IS_TOLD_FROM = 0.05
"""Share of rows that lose their end. A few long ones are in every data set."""


class NothingLeft(DataError):
    """A split of which every row is left out."""


def too_long_to_learn(
    plan: RunPlan, name: str, unlearnt: int, rows: int, longest: int = 0, *, of: str = ""
) -> str:
    """What there is to say of rows that are left out because nothing of them would be learnt; ""
    where there are none. `of`: which rows were looked at, where that is not all of them."""
    from expert.core.text import counted

    if not unlearnt:
        return ""
    share = unlearnt / max(1, rows)
    verb = "is" if unlearnt == 1 else "are"
    told = f"{name}: {unlearnt:,} of {of or counted(rows, 'row')} ({share:.0%}) {verb} left out"
    known = f" (the longest row has {longest:,} tokens)" if longest else ""
    return (
        f"{told}: nothing that is learnt comes before max_seq_length {plan.data.max_seq_length}"
        f"{known}  (a larger training.config.max_seq_length; or overlong: split, which learns the "
        "answers without what comes before them)"
    )


def cut_short(plan: RunPlan, split: PreparedSplit) -> str:
    """What there is to say of rows that lose their end, which is where their answers are."""
    over = split.index.overlong
    cut = over.cut - over.unlearnt  # those were cut, too, and are told of already
    share = cut / max(1, split.rows)
    if share < CUT_IS_TOLD_FROM:
        return ""
    return (
        f"{split.name}: {cut:,} of {split.rows:,} rows ({share:.0%}) lose their end, where answers "
        f"are, to max_seq_length {plan.data.max_seq_length} (the longest row has "
        f"{split.longest:,} tokens)  (a larger {MAX_LENGTH})"
    )


def doubts_of(plan: RunPlan, *splits: PreparedSplit | None, cut: bool = True) -> list[Doubt]:
    """What there is to say of rows that packing left out and, with `cut`, of those it cut."""
    told: list[str] = []
    for each in filter(None, splits):
        unlearnt = each.index.overlong.unlearnt
        told.append(too_long_to_learn(plan, each.name, unlearnt, each.rows, each.longest))
        told.append(cut_short(plan, each) if cut else "")
    return [Doubt(MAX_LENGTH, text) for text in told if text]


def doubts_of_stream(
    plan: RunPlan, stream: Stream, *splits: PreparedSplit | None
) -> tuple[str, ...]:
    """What there is to say of the first rows of a stream, and of the splits beside it."""
    rows = stream.first_rows
    of = f"the first {rows:,} rows"
    told = too_long_to_learn(plan, "train", stream.first_unlearnt, rows, of=of)
    return (*([told] if told else []), *(doubt.text for doubt in doubts_of(plan, *splits)))


def not_empty(
    plan: RunPlan, split: PreparedSplit, drawn_beside: PreparedSplit | None = None
) -> PreparedSplit:
    """Refuse a split of which no row is left: nothing could be learnt from or judged by it.

    `drawn_beside`: the training rows, where this split was drawn from the same files.
    """
    dropped, unlearnt = split.index.overlong.dropped, split.index.overlong.unlearnt
    if split.index.bins or not (dropped or unlearnt):
        return split
    if unlearnt:
        told = too_long_to_learn(plan, split.name, unlearnt, split.rows, split.longest)
        # Where training rows are left out as well, other rows would be no better.
        if drawn_beside is not None and not drawn_beside.index.overlong.unlearnt:
            told += "; another training.config.seed or a larger validation_split draws other rows"
        raise NothingLeft(told)
    rows = "its only row is" if dropped == 1 else f"all of its {dropped} rows are"
    raise NothingLeft(
        f"{split.name}: {rows} longer than max_seq_length {plan.data.max_seq_length}, and "
        "overlong: drop leaves none  (training.config.overlong: cut, or a larger max_seq_length)"
    )
