"""The ladder of a benchmark as bars."""

from __future__ import annotations

from expert.insight.ladder.ladder import MARKS, STAND, Ladder, SettingResult
from expert.insight.ladder.table import COLUMNS, headline, how_measured, table_rows
from expert.insight.page.blocks import Bar, Bars, Figure, Folded, Grid, Lines, Section, Words
from expert.insight.page.facts import RunFacts

_LEFT = ("setting", "")
HOW = " The last was measured against the baseline; those below are gains multiplied."


def ladder_section(ladder: Ladder, run: RunFacts | None = None) -> Section:
    """Every setting as a bar; those that were left out stand back, with the reason."""
    by_gain = ladder.is_held_against_baseline
    bars = Bars(bars=tuple(_bar(setting, by_gain=by_gain) for setting in ladder.rungs))
    figure = Figure(
        name="ladder",
        title=f"{'Times the baseline' if by_gain else 'Tokens a second'}, setting by setting",
        chart=bars,
        look=f"Grey settings were left out; the reason is below their names.{HOW * by_gain}",
        wide=True,
    )
    numbers = tuple(name for name in COLUMNS if name not in _LEFT)
    table = Grid(columns=COLUMNS, rows=tuple(table_rows(ladder)), numbers=numbers)
    how = Lines(lines=tuple(("plain", line.replace("`", "")) for line in how_measured(ladder)))
    return Section(
        name="ladder",
        title="The ladder",
        inside=(
            *_beside_the_run(ladder, run),
            figure,
            Folded(title="The ladder in numbers, and how it was measured", inside=(table, how)),
        ),
    )


def _beside_the_run(ladder: Ladder, run: RunFacts | None) -> list[Words]:
    """What it came to, and why the run was not as fast, as far as it is known; a page that is about
    the ladder alone begins with that."""
    if run is None:
        return []
    words, rate = Words(text=f"{headline(ladder)}."), run.tokens_per_second
    return [words, *_of_the_run(ladder, run, rate)] if rate is not None else [words]


def _of_the_run(ladder: Ladder, run: RunFacts, rate: float) -> list[Words]:
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


def _bar(setting: SettingResult, *, by_gain: bool) -> Bar:
    """As long as the setting is fast against the baseline: rates are of different times, and a host
    that was busy in one of them makes a better setting look slower."""
    marked = setting.status not in STAND
    if setting.measured is None:
        word = MARKS[setting.status][1]
        note = setting.because or word
        return Bar(name=setting.name, amount=None, words=word or "–", note=note, marked=marked)
    rate, gain = setting.measured.tokens_per_second, setting.gain
    worth = f"{gain:.2f}×" if gain is not None else ""
    if setting.status == "no difference":
        worth = "no difference measured"
    parts = [worth, f"{rate:,.0f} tokens/s" if by_gain else ""]
    note = setting.because if marked else " · ".join(part for part in parts if part)
    amount = setting.cumulative if by_gain else rate
    words = f"{amount:.2f}×" if by_gain else f"{rate:,.0f}"
    return Bar(name=setting.name, amount=amount, words=words, note=note, marked=marked)
