"""A benchmark in words: a sentence, a table, and how it was measured."""

from __future__ import annotations

from expert.core.text import counted
from expert.insight.ladder.ladder import MARKS, Ladder, SettingResult, outcome

COLUMNS: tuple[str, ...] = (
    *("setting", "tokens/s", "±", "gain", "in all", "rows/s"),
    *("GPU", "memory", "MFU", "epoch", "loss", "off by", ""),
)


def table_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """One row of text per setting, in the order of COLUMNS."""
    return [_row(setting) for setting in ladder.rungs]


def _row(setting: SettingResult) -> tuple[str, ...]:
    name, why = f"{MARKS[setting.status][0]} {setting.name}", outcome(setting)
    seen = setting.measured
    if seen is None:
        return (name, *("–",) * (len(COLUMNS) - 2), why)
    return (
        name,
        f"{seen.tokens_per_second:,.0f}",
        f"{seen.spread / seen.tokens_per_second:.1%}",
        gain_words(setting) or "–",
        f"{setting.cumulative:.2f}x" if setting.cumulative is not None else "–",
        f"{seen.samples_per_second:,.1f}",
        f"{seen.gpu_utilization:.0f} %" if seen.gpu_utilization is not None else "–",
        f"{seen.peak_memory_bytes / 2**30:.2f} GiB" if seen.peak_memory_bytes else "–",
        f"{seen.mfu:.1%}" if seen.mfu is not None else "–",
        _time(seen.seconds_per_epoch),
        f"{seen.loss:.4f}" if seen.loss is not None else "–",
        _off_by(setting),
        why,
    )


def gain_words(setting: SettingResult) -> str:
    """`1.24x ±0.03`; without the spread in older results; empty if there is no gain."""
    if setting.gain is None:
        return ""
    spread = f" ±{setting.paired.spread:.2f}" if setting.paired is not None else ""
    return f"{setting.gain:.2f}x{spread}"


def _off_by(setting: SettingResult) -> str:
    """How far the loss is off, and the tolerance; a footnote explains starred values."""
    if setting.tolerance is None:
        return "–"
    if setting.own_difference is not None:
        return f"itself {setting.own_difference:+.2%}* (±{setting.tolerance:.1%})"
    if setting.loss_difference is None:
        return "–"
    return f"{setting.loss_difference:+.2%} (±{setting.tolerance:.1%})"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def headline(ladder: Ladder) -> str:
    """The result in one sentence."""
    won = ladder.winner
    if won is None or won.measured is None:
        return f"{ladder.name} on {ladder.card}: nothing could be measured"
    rate = f"{won.measured.tokens_per_second:,.0f} tokens/s"
    times = f", {_speedup_words(ladder)}" if ladder.speedup_range else ""
    doubt = "; not to be trusted" if ladder.doubts else ""
    return f"{ladder.name} on {ladder.card}: {rate}{times}{_losses(ladder)}{doubt}"


def _losses(ladder: Ladder) -> str:
    """Whether the kept settings' losses agree with the one below or, where the weights cannot be
    the same, whether each computes its own loss correctly."""

    def all_of(settings: list[SettingResult]) -> str:
        return "the setting" if len(settings) == 1 else f"all {len(settings)} settings"

    seen = [setting for setting in ladder.kept if setting.loss_difference is not None]
    own = [setting for setting in seen if setting.own_difference is not None]
    same = [setting for setting in seen if setting.own_difference is None]
    right = "computes its own" if len(own) == 1 else "compute their own"
    if own and same:
        which = f"{all_of(same)} that can be compared"
        return f"; the loss agrees on {which}, and {len(own)} more {right} right"
    if own:
        return f"; {all_of(own)} that stayed {right} loss right"
    return f"; the loss agrees on {all_of(same)} that stayed" if same else ""


def _speedup_words(ladder: Ladder) -> str:
    assert ladder.speedup_range is not None
    direct = ladder.against_baseline
    if direct is not None and direct.difference == "none":
        return f"no measured difference from the baseline ({direct.words})"
    least, most = (f"{times:.1f}" for times in ladder.speedup_range)
    return f"{least if least == most else f'{least} to {most}'} times the baseline"


def as_markdown(ladder: Ladder, *, level: int = 1) -> str:
    """The benchmark as a document: sentence, table, and how it was measured."""
    rows = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 2), "---"), *table_rows(ladder)]
    table = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    facts = [f"- {line}" for line in how_measured(ladder)]
    title = f"{'#' * level} {_cell(ladder.name)}: {_cell(ladder.model)} on {_cell(ladder.card)}"
    return "\n".join([title, "", f"{_cell(headline(ladder))}.", "", *table, "", *facts, ""])


def how_measured(ladder: Ladder) -> list[str]:
    """What a reader needs to trust the table, or to reproduce it."""
    versions = ladder.environment.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    first = next((setting.measured for setting in ladder.rungs if setting.measured), None)
    learnt = first.updates_learnt if first else 0
    return [
        *(f"not to be trusted: {doubt}" for doubt in ladder.doubts),
        f"{ladder.date}, `{ladder.command}`, expert {ladder.version}, {', '.join(named)}",
        f"{ladder.dataset}: {ladder.training_rows:,} rows, {ladder.examples_per_update} a step in "
        f"every setting, at most {ladder.max_seq_length} tokens each; {ladder.adapter}",
        "tokens/s: real tokens (no padding), median over windows of steps after warm-up, clock "
        "stopped outside the steps; ± is the distance of the quartiles. Settings were measured at "
        "different times: compare their gains, not their rates",
        *_how_gains_were_measured(ladder),
        f"loss: {ladder.held_out_rows:,} held-out rows ({ladder.held_out_tokens:,} tokens) after "
        f"{learnt} steps from the same start, evaluated in the same way; off by: from the last "
        "setting before it that was kept, in brackets the tolerance",
        *_own_loss_footnotes(ladder),
        *_host_load(ladder),
        *ladder.notes,
    ]


def _how_gains_were_measured(ladder: Ladder) -> list[str]:
    """How gains were measured; format 1 knew one way only."""
    if not any(setting.paired for setting in ladder.rungs):
        return ["gain: over the last kept setting, measured before it; in all: over the baseline, "
                "measured first"]  # fmt: skip
    lines = [
        "gain: the median of pairs of windows, this setting and the last kept one timed in turns, "
        "so that rates of different minutes are not compared; ± is the distance of the quartiles. "
        "Inside it (twice it with fewer than five pairs), within 2 %, or where pairs contradict "
        "each other, no difference is reported"
    ]
    apart = [
        setting.name
        for setting in ladder.rungs
        if setting.paired and setting.paired.how != "in turns"
    ]
    if apart:
        lines.append(f"one after the other, as memory does not hold both: {', '.join(apart)}")
    direct = ladder.against_baseline
    if direct is None:
        return [*lines, "in all: the gains of the faster settings, multiplied; the best was not "
                "compared with the baseline directly"]  # fmt: skip
    how = f"{len(direct.ratios)} pairs, {direct.words}"
    return [
        *lines,
        "in all: the gains of the faster settings, multiplied; the best was compared with the "
        f"baseline directly at the end ({direct.how}, {how})",
    ]


def _own_loss_footnotes(ladder: Ladder) -> list[str]:
    """Footnotes, by reason, for settings whose losses cannot match the setting below."""
    reasons: dict[str, list[SettingResult]] = {}
    for setting in ladder.rungs:
        if setting.own_difference is not None:
            reasons.setdefault(setting.tolerance_because.partition(":")[0], []).append(setting)
    return [_footnote(why, settings) for why, settings in reasons.items()]


def _footnote(why: str, settings: list[SettingResult]) -> str:
    names = ", ".join(setting.name for setting in settings)
    most = max((abs(setting.own_difference or 0.0) for setting in settings), default=0.0)
    seen = [r.measured.clumping for r in settings if r.measured and r.measured.clumping is not None]
    mixed = ""
    if seen:
        mixed = (
            f", and whether the rows of a step are mixed: their mean length varies {max(seen):.2f} "
            "times as much as that of rows drawn at random"
        )
    return (
        f"* {names}: {why}, so the weights differ from those of the setting below, and the losses "
        "cannot be compared. Checked instead: the loss of the same weights, computed as the "
        "setting trains and as all settings are judged, differs by at most "
        f"{most:.2%}{mixed}"
    )


def _host_load(ladder: Ladder) -> list[str]:
    """Threads, and how many cores other processes used."""
    seen = [setting.measured for setting in ladder.rungs if setting.measured]
    used = [one.others for one in seen if one.others is not None]
    cores = next((one.cores for one in seen if one.cores), None)
    if not used or not cores:
        return []
    threads = next((one.threads for one in seen if one.threads), None)
    own = f"{counted(threads, 'thread')} on " if threads else ""
    return [f"{own}{cores} cores; other processes used {min(used):.1f} to {max(used):.1f} of them"]


def _cell(text: str) -> str:
    """Text that stays inside its table cell, whatever a name contains."""
    plain = " ".join(text.replace("|", "\\|").split())
    return plain.replace("<", "&lt;")
