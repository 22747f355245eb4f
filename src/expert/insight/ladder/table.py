"""The ladder of a benchmark in words: a sentence, a table, and how it was measured."""

from __future__ import annotations

from expert.insight.ladder.ladder import MARKS, Ladder, RungResult, outcome

COLUMNS: tuple[str, ...] = (
    *("rung", "tokens/s", "±", "gain", "in all", "rows/s"),
    *("GPU", "memory", "MFU", "epoch", "loss", "off by", ""),
)


def table_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """Every rung as one row of text in the order of COLUMNS."""
    return [_row(rung) for rung in ladder.rungs]


def _row(rung: RungResult) -> tuple[str, ...]:
    name, why = f"{MARKS[rung.status][0]} {rung.name}", outcome(rung)
    seen = rung.measured
    if seen is None:
        return (name, *("–",) * (len(COLUMNS) - 2), why)
    return (
        name,
        f"{seen.tokens_per_second:,.0f}",
        f"{seen.spread / seen.tokens_per_second:.1%}",
        gain_words(rung) or "–",
        f"{rung.cumulative:.2f}x" if rung.cumulative is not None else "–",
        f"{seen.samples_per_second:,.1f}",
        f"{seen.gpu_utilization:.0f} %" if seen.gpu_utilization is not None else "–",
        f"{seen.peak_memory_bytes / 2**30:.2f} GiB" if seen.peak_memory_bytes else "–",
        f"{seen.mfu:.1%}" if seen.mfu is not None else "–",
        _time(seen.seconds_per_epoch),
        f"{seen.loss:.4f}" if seen.loss is not None else "–",
        _off_by(rung),
        why,
    )


def gain_words(rung: RungResult) -> str:
    """`1.24x ±0.03`; without the spread where nobody has measured it; empty where there is none."""
    if rung.gain is None:
        return ""
    spread = f" ±{rung.paired.spread:.2f}" if rung.paired is not None else ""
    return f"{rung.gain:.2f}x{spread}"


def _off_by(rung: RungResult) -> str:
    """How far the loss is off, and how far it may be; a footnote tells of one held to itself."""
    if rung.tolerance is None:
        return "–"
    if rung.own_difference is not None:
        return f"itself {rung.own_difference:+.2%}* (±{rung.tolerance:.1%})"
    if rung.loss_difference is None:
        return "–"
    return f"{rung.loss_difference:+.2%} (±{rung.tolerance:.1%})"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def headline(ladder: Ladder) -> str:
    """One sentence: what the ladder came to."""
    won = ladder.winner
    if won is None or won.measured is None:
        return f"{ladder.name} on {ladder.card}: nothing could be measured"
    rate = f"{won.measured.tokens_per_second:,.0f} tokens/s"
    times = f", {_times_as_fast(ladder)}" if ladder.times_as_fast else ""
    doubt = "; not to be relied on" if ladder.doubts else ""
    return f"{ladder.name} on {ladder.card}: {rate}{times}{_losses(ladder)}{doubt}"


def _losses(ladder: Ladder) -> str:
    """What is known of the losses of those that stayed: that they are those of the rung below, or
    where the weights cannot be, that each gives its own weights the loss they have."""

    def all_of(rungs: list[RungResult]) -> str:
        return "the rung" if len(rungs) == 1 else f"all {len(rungs)} rungs"

    seen = [rung for rung in ladder.kept if rung.loss_difference is not None]
    own = [rung for rung in seen if rung.own_difference is not None]
    same = [rung for rung in seen if rung.own_difference is None]
    right = "computes its own" if len(own) == 1 else "compute their own"
    if own and same:
        which = f"{all_of(same)} that can be compared"
        return f"; the loss agrees on {which}, and {len(own)} more {right} right"
    if own:
        return f"; {all_of(own)} that stayed {right} loss right"
    return f"; the loss agrees on {all_of(same)} that stayed" if same else ""


def _times_as_fast(ladder: Ladder) -> str:
    assert ladder.times_as_fast is not None
    direct = ladder.against_baseline
    if direct is not None and direct.difference == "none":
        return f"not to be told from the baseline ({direct.words})"
    least, most = (f"{times:.1f}" for times in ladder.times_as_fast)
    return f"{least if least == most else f'{least} to {most}'} times the baseline"


def as_markdown(ladder: Ladder, *, level: int = 1) -> str:
    """The ladder as a document: sentence, table, and how it was measured."""
    rows = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 2), "---"), *table_rows(ladder)]
    table = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    facts = [f"- {line}" for line in how_measured(ladder)]
    title = f"{'#' * level} {_cell(ladder.name)}: {_cell(ladder.model)} on {_cell(ladder.card)}"
    return "\n".join([title, "", f"{_cell(headline(ladder))}.", "", *table, "", *facts, ""])


def how_measured(ladder: Ladder) -> list[str]:
    """What a reader must know to believe the table, or to make it again."""
    versions = ladder.environment.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    first = next((rung.measured for rung in ladder.rungs if rung.measured), None)
    learnt = first.updates_learnt if first else 0
    return [
        *(f"not to be relied on: {doubt}" for doubt in ladder.doubts),
        f"{ladder.date}, `{ladder.command}`, expert {ladder.version}, {', '.join(named)}",
        f"{ladder.dataset}: {ladder.training_rows:,} rows, {ladder.examples_per_update} to an "
        f"update on every rung, at most {ladder.max_seq_length} tokens each; {ladder.adapter}",
        "tokens/s: real tokens (no padding), median over windows of updates after warm-up, clock "
        "stopped outside the steps; ± is the distance of the quartiles. Rungs were measured at "
        "different minutes: what one is worth is its gain, not the difference of two rates",
        *_how_gained(ladder),
        f"loss: {ladder.held_out_rows:,} held-out rows ({ladder.held_out_tokens:,} tokens) after "
        f"{learnt} updates from the same start, evaluated in one way; off by: from the last rung "
        "below that stayed, in brackets what is allowed",
        *_held_to_themselves(ladder),
        *_surroundings(ladder),
        *ladder.notes,
    ]


def _how_gained(ladder: Ladder) -> list[str]:
    """How gains came about; results of format 1 know of one way only."""
    if not any(rung.paired for rung in ladder.rungs):
        return ["gain: from the last rung below that stayed, measured before it; in all: from the "
                "baseline, measured first"]  # fmt: skip
    lines = [
        "gain: the median of pairs of windows, this rung and the last below that stayed timed in "
        "turns, so that rates of different minutes are not compared; ± is the distance of the "
        "quartiles. Inside it (twice it where pairs are fewer than five), within 2 %, or where "
        "pairs contradict each other, no difference is told"
    ]
    apart = [rung.name for rung in ladder.rungs if rung.paired and rung.paired.how != "in turns"]
    if apart:
        lines.append(f"one after the other, as memory holds not both: {', '.join(apart)}")
    direct = ladder.against_baseline
    if direct is None:
        return [*lines, "in all: the gains of the rungs that were faster, multiplied; what won was "
                "not held against the baseline itself"]  # fmt: skip
    how = f"{len(direct.ratios)} pairs, {direct.words}"
    return [
        *lines,
        "in all: the gains of the rungs that were faster, multiplied; of the one that won it was "
        f"measured directly against the baseline at the end ({direct.how}, {how})",
    ]


def _held_to_themselves(ladder: Ladder) -> list[str]:
    """A footnote for the rungs whose losses cannot be those of the rungs below, by the reason."""
    reasons: dict[str, list[RungResult]] = {}
    for rung in ladder.rungs:
        if rung.own_difference is not None:
            reasons.setdefault(rung.tolerance_because.partition(":")[0], []).append(rung)
    return [_footnote(why, rungs) for why, rungs in reasons.items()]


def _footnote(why: str, rungs: list[RungResult]) -> str:
    names = ", ".join(rung.name for rung in rungs)
    most = max((abs(rung.own_difference or 0.0) for rung in rungs), default=0.0)
    seen = [r.measured.clumping for r in rungs if r.measured and r.measured.clumping is not None]
    mixed = ""
    if seen:
        mixed = (
            f", and whether the rows of a step are mixed: their mean length varies {max(seen):.2f} "
            "times as much as that of rows drawn at random"
        )
    return (
        f"* {names}: {why}, so the weights are others than those below, and their losses cannot be "
        "held against each other. What is checked is whether they compute right: the same weights "
        "have one loss computed as the rung trains and another computed as all rungs are judged, "
        f"at most {most:.2%} apart{mixed}"
    )


def _surroundings(ladder: Ladder) -> list[str]:
    """Threads, and what neighbours took of the cores."""
    seen = [rung.measured for rung in ladder.rungs if rung.measured]
    used = [one.others for one in seen if one.others is not None]
    cores = next((one.cores for one in seen if one.cores), None)
    if not used or not cores:
        return []
    threads = next((one.threads for one in seen if one.threads), None)
    own = f"{threads} thread{'s' if threads != 1 else ''} on " if threads else ""
    return [
        f"{own}{cores} cores; others used {min(used):.1f} to {max(used):.1f} of them, rung by rung"
    ]


def _cell(text: str) -> str:
    """Text that stays inside its cell, whatever a name holds."""
    plain = " ".join(text.replace("|", "\\|").split())
    return plain.replace("<", "&lt;")
