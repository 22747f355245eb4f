"""Warnings about rows too long to be trained on completely, or at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expert.core.text import counted
from expert.data.records import DataError
from expert.planning.decisions import Remark

if TYPE_CHECKING:
    from expert.data.prepared import PreparedSplit
    from expert.planning.run_plan import RunPlan

MAX_LENGTH = "training.config.max_seq_length"
CUT_WARNING_SHARE = 0.05
"""Share of truncated rows from which there is a warning; every data set has a few long rows."""


class NoRowsLeft(DataError):
    """Every row of a split is left out."""


def left_out_warning(
    plan: RunPlan, name: str, unlearnt: int, rows: int, longest: int = 0, *, of: str = ""
) -> str:
    """A warning about rows left out because none of their tokens would be trained on; "" if there
    are none. `of`: the rows that were examined, if not all."""
    if not unlearnt:
        return ""
    share = unlearnt / max(1, rows)
    verb = "is" if unlearnt == 1 else "are"
    what = f"{name}: {unlearnt:,} of {of or counted(rows, 'row')} ({share:.0%}) {verb} left out"
    known = f" (the longest row has {longest:,} tokens)" if longest else ""
    return (
        f"{what}: the answer starts after max_seq_length {plan.data.max_seq_length}"
        f"{known}  (a larger training.config.max_seq_length; or overlong: split, which trains on "
        "the answers without what comes before them)"
    )


def remark_on_left_out(
    plan: RunPlan, unlearnt: int, rows: int, longest: int = 0, *, of: str = ""
) -> list[Remark]:
    """The same about training rows, as a remark on the plan."""
    text = left_out_warning(plan, "train", unlearnt, rows, longest, of=of)
    return [Remark.warning(MAX_LENGTH, text)] if text else []


def remarks_on_length(plan: RunPlan, *splits: PreparedSplit | None) -> list[Remark]:
    """Warnings about rows that packing left out, or truncated so that they lose the end of their
    answers."""
    texts: list[str] = []
    for each in filter(None, splits):
        over, rows, longest = each.index.overlong, each.rows, each.statistics.longest
        texts.append(left_out_warning(plan, each.name, over.unlearnt, rows, longest))
        limit, fix = f"max_seq_length {plan.data.max_seq_length}", f"(a larger {MAX_LENGTH})"
        cut = over.cut - over.unlearnt  # unlearnt rows were cut too, but have their own warning
        if cut >= CUT_WARNING_SHARE * max(1, rows):
            texts.append(
                f"{each.name}: {cut:,} of {rows:,} rows ({cut / rows:.0%}) are cut at {limit} and "
                f"lose the end of their answers (the longest row has {longest:,} tokens)  {fix}"
            )
        if plan.objective.loss and over.dropped:  # no pair is cut
            texts.append(
                f"{each.name}: {over.dropped:,} of {counted(rows, 'pair')} "
                f"({over.dropped / rows:.0%}) are left out: prompt and answers together are longer "
                f"than {limit} (the longest has {longest:,} tokens)  {fix}"
            )
    return [Remark.warning(MAX_LENGTH, text) for text in texts if text]


def require_rows(
    plan: RunPlan, split: PreparedSplit, drawn_from: PreparedSplit | None
) -> PreparedSplit:
    """The split; NoRowsLeft if none of its rows are left.

    `drawn_from`: the training rows, if this split was drawn from the same files.
    """
    dropped, unlearnt = split.index.overlong.dropped, split.index.overlong.unlearnt
    if split.index.bins or not (dropped or unlearnt):
        return split
    if unlearnt:
        text = left_out_warning(plan, split.name, unlearnt, split.rows, split.statistics.longest)
        # If training rows are left out as well, other rows would not help.
        if drawn_from is not None and not drawn_from.index.overlong.unlearnt:
            text += "; another training.config.seed or a larger validation_split draws other rows"
        raise NoRowsLeft(text)
    rows = "its only row is" if dropped == 1 else f"all of its {dropped} rows are"
    what = f"{rows} longer than max_seq_length {plan.data.max_seq_length}"
    fix = "training.config.overlong: cut, or a larger max_seq_length"
    raise NoRowsLeft(f"{split.name}: {what}, and overlong: drop leaves none  ({fix})")
