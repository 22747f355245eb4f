"""The result of a benchmark as bars."""

from __future__ import annotations

from expert.core.text import counted
from expert.insight.ladder.ladder import KEPT_STATUSES, MARKS, Ladder, SettingResult
from expert.insight.ladder.table import COLUMNS, headline, how_measured, table_rows
from expert.insight.page.blocks import Bar, Bars, Figure, Folded, Grid, Lines, PageSection, Words
from expert.insight.page.facts import RunFacts

_LEFT = ("setting", "")


def ladder_section(ladder: Ladder, run: RunFacts | None = None) -> PageSection:
    """Every setting as a bar; left-out settings are grey, with the reason."""
    by_gain = ladder.is_compared_with_baseline
    figure = Figure(
        name="ladder",
        title=f"{'Speed relative to the baseline' if by_gain else 'Tokens per second'}, by setting",
        chart=Bars(bars=tuple(_bar(setting, by_gain=by_gain) for setting in ladder.rungs)),
        note="Grey settings were left out, for the reason below their names.",
        wide=True,
    )
    numbers = tuple(name for name in COLUMNS if name not in _LEFT)
    table = Grid(columns=COLUMNS, rows=tuple(table_rows(ladder)), numbers=numbers)
    how = Lines(lines=tuple(("plain", line.replace("`", "")) for line in how_measured(ladder)))
    details = Folded(title="Numbers, and how they were measured", inside=(table, how))
    # A page about the benchmark alone already starts with the headline.
    words = [] if run is None else [Words(text=f"{headline(ladder)}."), *_of_the_run(ladder, run)]
    return PageSection(name="ladder", title="Benchmark", inside=(*words, figure, details))


def _of_the_run(ladder: Ladder, run: RunFacts) -> list[Words]:
    """The speed of the run itself, and on a CPU why it may differ: the number of threads."""
    if run.tokens_per_second is None:
        return []
    text = f"This run: {run.tokens_per_second:,.0f} tokens/s"
    event = next(iter(reversed(run.record.of("threads"))), {})
    threads, on_ladder = event.get("threads"), ladder.environment.get("threads")
    if not run.on_gpu and isinstance(threads, int):
        text += f", with {counted(threads, 'thread')}"
        text += f" ({event['because']})" if event.get("because") else ""
        text += f"; the benchmark had {on_ladder}" if isinstance(on_ladder, int) else ""
    return [Words(text=f"{text}.", tone="note")]


def _bar(setting: SettingResult, *, by_gain: bool) -> Bar:
    """Its length is the speed relative to the baseline: rates were measured at different times, and
    a busy host makes a better setting look slower."""
    colour = 1 if setting.status in KEPT_STATUSES else 7
    if setting.measured is None:
        word = MARKS[setting.status][1]
        note = setting.because or word
        return Bar(name=setting.name, amount=None, words=word, note=note, colour=colour)
    rate, gain = setting.measured.tokens_per_second, setting.gain
    worth = f"{gain:.2f}×" if gain is not None else ""
    if setting.status == "no difference":
        worth = "no measurable difference"
    parts = [worth, f"{rate:,.0f} tokens/s" if by_gain else ""]
    note = setting.because if colour == 7 else " · ".join(part for part in parts if part)
    amount = setting.cumulative if by_gain else rate
    words = f"{amount:.2f}×" if by_gain else f"{rate:,.0f}"
    return Bar(name=setting.name, amount=amount, words=words, note=note, colour=colour)
