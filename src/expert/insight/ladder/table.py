"""A benchmark in words: a sentence, a table, and how it was measured."""

from __future__ import annotations

from expert.core.text import counted, duration
from expert.insight.ladder.ladder import MARKS, Ladder, SettingResult

COLUMNS: tuple[str, ...] = (
    *("setting", "tokens/s", "±", "gain", "in all", "rows/s"),
    *("GPU", "memory", "MFU", "epoch", "loss", "off by", ""),
)
UNKNOWN = "–"


def table_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """One row of text per setting, in the order of COLUMNS."""
    return [_row(setting) for setting in ladder.rungs]


def _row(setting: SettingResult) -> tuple[str, ...]:
    name, seen = f"{MARKS[setting.status][0]} {setting.name}", setting.measured
    if seen is None:
        return (name, *(UNKNOWN,) * (len(COLUMNS) - 2), setting.outcome)

    def written(form: str, value: float | None) -> str:
        return form.format(value) if value is not None else UNKNOWN

    off = written("{:+.2%}", setting.loss_difference)
    if setting.loss_difference is not None:
        bound = "*" if setting.tolerance is None else f" (±{setting.tolerance:.1%})"
        off += bound
    memory = seen.peak_memory_bytes
    return (
        name,
        f"{seen.tokens_per_second:,.0f}",
        f"{seen.relative_spread:.1%}",
        written("{:.2f}x", setting.gain),
        written("{:.2f}x", setting.cumulative),
        f"{seen.samples_per_second:,.1f}",
        written("{:.0f} %", seen.gpu_utilization),
        written("{:.2f} GiB", memory / 2**30 if memory else None),
        written("{:.1%}", seen.mfu),
        duration(seen.seconds_per_epoch),
        written("{:.4f}", seen.loss),
        off,
        setting.outcome,
    )


def result_line(result: SettingResult) -> str:
    """A setting as it is shown when it was measured."""
    seen = result.measured
    if seen is None:
        return f"  {result.name}: {result.outcome}"
    parts = [f"{seen.tokens_per_second:,.0f} tokens/s"]
    if result.gain is not None:
        parts.append(f"{result.gain:.2f}x")
        parts += [f"in all {result.cumulative:.2f}x"] if result.cumulative is not None else []
    if seen.loss is not None:
        parts.append(f"loss {seen.loss:.4f}")
    if result.because:
        parts.append(result.outcome)
    return f"  {result.name}: {', '.join(parts)}"


def headline(ladder: Ladder) -> str:
    """The result in one sentence."""
    won = ladder.winner
    if won is None or won.measured is None:
        return f"{ladder.name} on {ladder.card}: nothing could be measured"
    words = f"{ladder.name} on {ladder.card}: {won.measured.tokens_per_second:,.0f} tokens/s"
    if won.cumulative is not None:
        words += f", {won.cumulative:.1f} times the baseline"
    same = sum(setting.tolerance is not None for setting in ladder.kept)
    if same:
        words += f"; the loss agrees on {counted(same, 'kept setting')} that can be compared"
    return f"{words}; noisy, do not trust" if ladder.doubts else words


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
    drift = "the baseline was not measured again at the end"
    if ladder.drift is not None:
        drift = f"measured again at the end, the baseline's rate had changed by {ladder.drift:+.1%}"
    reasons: dict[str, list[str]] = {}
    for setting in ladder.rungs:
        if setting.loss_difference is not None and setting.tolerance is None:
            reasons.setdefault(setting.tolerance_because, []).append(setting.name)
    return [
        *(f"noisy, do not trust: {doubt}" for doubt in ladder.doubts),
        f"{ladder.date}, `{ladder.command}`, expert {ladder.version}, {', '.join(named)}",
        f"{ladder.dataset}: {ladder.training_rows:,} rows, {ladder.examples_per_update} a step in "
        f"every setting, at most {ladder.max_seq_length} tokens each; {ladder.adapter}",
        "tokens/s: real tokens (no padding), median over windows of steps after warm-up, one short "
        "run for each setting; ± is the distance of the quartiles",
        f"gain: over the last kept setting; in all: over the baseline; {drift}",
        f"loss: of the first {first.updates_learnt if first else 0} steps from the same start; off "
        "by: from the last kept setting, in brackets the tolerance",
        *(
            f"* {', '.join(names)}: {why}, so the weights differ and the loss is only shown"
            for why, names in reasons.items()
        ),
        *ladder.notes,
    ]


def _cell(text: str) -> str:
    """Text that stays inside its table cell, whatever a name contains."""
    return " ".join(text.replace("|", "\\|").split()).replace("<", "&lt;")
