"""The list of all runs: state, loss, tags and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from expert.insight.page.charts import sparkline
from expert.insight.page.markup import Markup, tag
from expert.jobs.board.folders import MAX_FOLDERS, BoardFolders
from expert.jobs.board.live import Throttle, View
from expert.jobs.board.notes import Notes, read_notes
from expert.jobs.board.summaries import Summaries, Summary
from expert.jobs.board.views.layout import (
    fact,
    live,
    page,
    progress_bar,
    state_pill,
    state_word,
    title_row,
)

SHARE = 1 / 300
"""Share of a core that the list may use."""
STATES = ("running", "finished", "stopped", "failed", "gone")


class ListView(View):
    """One card per run, running ones first, then the newest."""

    def __init__(self, places: BoardFolders, summaries: Summaries, *, read_only: bool) -> None:
        super().__init__()
        self._read_only = read_only
        self._places, self._summaries = places, summaries
        self._pace = Throttle(SHARE)

    def refresh(self) -> dict[str, str]:
        if not self.parts:
            return self._cards()  # reads all runs, once
        return self._pace.run(self._cards) if self._pace.due() else {}

    def _cards(self) -> dict[str, str]:
        self._places.search()
        found = self._places.runs()
        self._summaries.forget({run.path for run in found})
        runs = [(self._summaries.of(run), read_notes(run.path)) for run in found]
        runs.sort(key=lambda pair: newest_first(pair[0]))
        parts = {f"run-{run.found.id}": _card(run, notes) for run, notes in runs}
        order = " ".join(parts) or "nothing"
        if not runs:
            parts["nothing"] = _nothing(self._places, read_only=self._read_only)
        return {**parts, "counts": self._counts(run for run, _ in runs), "order": order}

    def _counts(self, runs: Iterable[Summary]) -> Markup:
        count = Counter(run.state for run in runs)
        words = [f"{number} {state_word(state)}" for state, number in count.most_common()]
        if self._places.is_truncated:
            words.append(f"only the first {MAX_FOLDERS:,} folders were searched")
        return tag("span", ", ".join(words), id="counts", class_="soft")


def list_page(view: View, *, read_only: bool) -> str:
    """The page of all runs; the script filters and compares."""
    states = [tag("option", "all states", value="")]
    states += [tag("option", state_word(s), value=s) for s in STATES]
    tools = tag(
        "div",
        tag("input", type="search", id="filter", placeholder="Filter: name, model, tag",
            aria_label="Filter runs by name, model or tag", autocomplete="off"),
        tag("select", *states, id="state", aria_label="Filter by state"),
        tag("button", "Compare", type="button", id="compare", disabled="",
            title="Select two runs or more"),
        class_="row tools",
    )  # fmt: skip
    counts = Markup(view.html("counts"))
    return page(
        "Runs", title_row("Runs", counts), tools, live(view, "/live/runs"),
        here="runs", read_only=read_only,
    )  # fmt: skip


def newest_first(run: Summary) -> tuple[bool, float, str]:
    """Sort key: running runs first, then by last event."""
    last = run.status.last_event if run.status is not None else None
    return (run.state != "running", -(last or 0.0), run.found.name)


def _card(run: Summary, notes: Notes) -> Markup:
    status, found = run.status, run.found
    words = [found.name, run.state, found.where, *notes.tags]
    if status is not None:
        words += [str(status.model or ""), str(status.device or ""), str(status.expert or "")]
    facts = [fact(name, value) if value else tag("span", class_="fact")
             for name, value in run.numbers.items() if name != "validation loss"]  # fmt: skip
    box = tag("input", type="checkbox", name="run", value=found.id,
              aria_label=f"Select {found.name} to compare")  # fmt: skip
    title = tag("a", found.name, href=f"/run/{found.id}")
    model = f"{status.model} on {status.device}" if status and status.model else found.where
    tags = [tag("span", name, class_="tag") for name in notes.tags]
    note = tag("small", notes.text.splitlines()[0], class_="note") if notes.text else None
    head = tag("div", box, tag("h2", title), class_="name")
    about = [tag("div", state_pill(run.state), tag("small", run.problem or model), class_="row")]
    if tags or note:
        about.append(tag("div", *tags, note, class_="row"))
    curve = sparkline(run.losses, f"loss of {found.name}")
    bar = progress_bar(run.progress, f"progress of {found.name}")
    return tag(
        "article", tag("div", head, *about, class_="who"), curve,
        tag("div", *facts, class_="facts"), bar,
        class_="run card", id=f"run-{found.id}", data_words=" ".join(words).lower(),
        data_state=run.state,
    )  # fmt: skip


def _nothing(places: BoardFolders, *, read_only: bool) -> Markup:
    where = ", ".join(str(root) for root in places.roots)
    text = f"No runs in {where} yet. New runs appear here automatically."
    link = None if read_only else tag("a", "Start a run", href="/start", class_="button")
    return tag("div", tag("p", text), link, id="nothing", class_="card empty")
