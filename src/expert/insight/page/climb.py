"""The ladder of a benchmark as bars."""

from __future__ import annotations

from expert.insight.ladder import MARKS, STAND, Ladder, RungResult
from expert.insight.ladder_table import COLUMNS, headline, how_measured, table_rows
from expert.insight.page.blocks import Bar, Bars, Figure, Folded, Grid, Lines, Section, Words
from expert.insight.page.facts import RunFacts

_LEFT = ("rung", "")


def ladder_section(ladder: Ladder, run: RunFacts | None = None) -> Section:
    """Every rung as a bar; those that were left out stand back, with the reason."""
    bars = Bars(bars=tuple(_bar(rung) for rung in ladder.rungs))
    figure = Figure(
        name="ladder",
        title="Tokens a second, rung by rung",
        chart=bars,
        look="Grey rungs were left out; the reason stands below their names.",
        wide=True,
    )
    numbers = tuple(name for name in COLUMNS if name not in _LEFT)
    table = Grid(columns=COLUMNS, rows=tuple(table_rows(ladder)), numbers=numbers)
    how = Lines(lines=tuple(("plain", line.replace("`", "")) for line in how_measured(ladder)))
    return Section(
        name="ladder",
        title="The ladder",
        inside=(
            Words(text=f"{headline(ladder)}."),
            *_beside_the_run(ladder, run),
            figure,
            Folded(title="The ladder in numbers, and how it was measured", inside=(table, how)),
        ),
    )


def _beside_the_run(ladder: Ladder, run: RunFacts | None) -> list[Words]:
    """Why the run was not as fast as the ladder, as far as it is known."""
    rate = run.tokens_per_second if run is not None else None
    if run is None or rate is None:
        return []
    text = f"The run itself: {rate:,.0f} tokens/s"
    told = next(iter(reversed(run.record.of("threads"))), {})
    threads, on_ladder = told.get("threads"), ladder.environment.get("threads")
    if run.on_gpu or not isinstance(threads, int):
        return [Words(text=f"{text}.", tone="note")]
    text += f", with {threads} {'thread' if threads == 1 else 'threads'}"
    text += f" ({told['because']})" if told.get("because") else ""
    if isinstance(on_ladder, int):
        text += f"; the ladder had {on_ladder}"
    return [Words(text=f"{text}.", tone="note")]


def _bar(rung: RungResult) -> Bar:
    rate = rung.measured.tokens_per_second if rung.measured is not None else None
    note = rung.because
    if rung.status in STAND:
        gains = [f"{rung.gain:.2f}×" if rung.gain is not None else ""]
        gains += [f"{rung.cumulative:.2f}× in all" if rung.cumulative is not None else ""]
        note = ", ".join(gain for gain in gains if gain)
    elif not note:
        note = MARKS[rung.status][1]
    words = f"{rate:,.0f}" if rate is not None else MARKS[rung.status][1] or "–"
    return Bar(name=rung.name, amount=rate, words=words, note=note, marked=rung.status not in STAND)
