"""The page of a run: its report, updated live."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.core.text import counted, times
from expert.insight.findings.finding import Finding
from expert.insight.page.blocks import Figure, Page, PageSection, Words
from expert.insight.page.contents import STATES, make_page
from expert.insight.page.facts import RunFacts
from expert.insight.page.html import section_html
from expert.insight.page.markup import Markup, tag
from expert.insight.page.sections.comparison import comparison_section
from expert.insight.page.sections.curves import learning_section, speed_sections
from expert.insight.record import RunRecord, record_of
from expert.insight.step.anatomy import dissect
from expert.jobs.board.actions import StartedCommand
from expert.jobs.board.folders import BoardItem
from expert.jobs.board.live import Throttle, View
from expert.jobs.board.notes import Notes
from expert.jobs.board.reader import EventReader
from expert.jobs.board.summaries import Summaries, Summary
from expert.jobs.board.views.layout import (
    button,
    fact,
    live,
    page,
    pill,
    progress_bar,
    state_pill,
    title_row,
)
from expert.jobs.diagnose.diagnose import diagnose_record
from expert.jobs.report import facts_of

STATUS_SHARE, CURVES_SHARE, WHOLE_SHARE = 0.0015, 0.0025, 0.0015
"""Shares of a core for the numbers on top, the curves, and the diagnosis with the rest."""
LEAST_SECONDS = 2.0
SKIPPED = (
    "This run is long: a point of a curve represents several log lines, and sums are estimates. "
    "expert report reads every line."
)
FIRST_SECTIONS = ("verdict", "learning", "findings", "validation", "speed", "time", "story")
"""Sections shown first: curves before tables."""


class RunView(View):
    """The sections of a run, rendered again when events are new and their pace allows it."""

    def __init__(self, found: BoardItem, summaries: Summaries) -> None:
        super().__init__()
        self.found = found
        self.folder = RunFolder(found.path)
        self._summaries = summaries
        self._reader = EventReader(self.folder.events)
        self._status = Throttle(STATUS_SHARE)
        self._curves = Throttle(CURVES_SHARE, LEAST_SECONDS)
        self._whole = Throttle(WHOLE_SHARE, LEAST_SECONDS)
        self._shown: tuple[object, ...] = ()
        self._drawn_whole: object = None
        self._drawn_last: object = None
        """The last events shown by the whole page and by the curves."""

    def refresh(self) -> dict[str, str]:
        try:
            return self._refreshed()
        except (ExpertError, OSError) as error:
            section = PageSection(name="problem", title="This run cannot be read",
                                  inside=(Words(text=str(error), tone="error"),))  # fmt: skip
            status = tag("div", state_pill("unreadable"), id="status")
            return {"problem": section_html(section), "order": "problem", "status": status}

    def _refreshed(self) -> dict[str, str]:
        parts: dict[str, str] = {}
        if not self.parts:
            self.folder.refuse_unsafe_files()
        if not self._status.due():
            return parts
        if not self.parts:
            self._summaries.of(self.found)  # reads all of a long run, once
        summary: Summary = self._status.run(lambda: self._summaries.of(self.found))
        if summary.problem:
            raise ExpertError(summary.problem)
        parts["status"] = _status(summary)
        self._reader.read_new()
        mark = (summary.state, self._validation_time())
        last = self._reader.events[-1] if self._reader.events else None
        if mark != self._shown or (self._whole.due() and self._drawn_whole is not last):
            parts |= self._whole.run(self._all)
            self._shown, self._drawn_whole = mark, last
            self._drawn_last = last
            self._curves.run(lambda: None)
        elif self._curves.due() and self._drawn_last is not last:
            parts |= self._curves.run(self._figures)
            self._drawn_last = last
        return parts

    def _validation_time(self) -> object:
        """Changes when the run is validated."""
        try:
            return self.folder.validation.lstat().st_mtime_ns
        except OSError:
            return None

    def record(self) -> RunRecord:
        return record_of(self.folder, tuple(self._reader.events), self._reader.damaged)

    def _figures(self) -> dict[str, str]:
        record = self.record()
        run = RunFacts(record=record, anatomy=dissect(record), state="running")
        return {s.name: section_html(s) for s in (learning_section(run), *speed_sections(run))}

    def _all(self) -> dict[str, str]:
        diagnosis = diagnose_record(self.record())
        made = make_page(facts_of(diagnosis))
        parts = {"verdict": _verdict(made, sampled=self._reader.sampled)}
        for section in made.sections:
            if section.name == "findings":
                parts[section.name] = findings_html(diagnosis.findings)
            else:
                parts[section.name] = section_html(section)
        order = sorted(
            parts,
            key=lambda name: (
                FIRST_SECTIONS.index(name) if name in FIRST_SECTIONS else len(FIRST_SECTIONS)
            ),
        )
        titles = {section.name: section.title for section in made.sections}
        links = [tag("a", titles[name], href=f"#{name}") for name in order if name in titles]
        label = "sections of this run"
        nav = tag("nav", *links, id="sections", class_="sections", aria_label=label)
        return {**parts, "sections": nav, "order": " ".join(order)}


def run_page(view: RunView, notes: Notes, tools: Sequence[object], *, read_only: bool) -> str:
    """The page of a run; `tools`: its buttons."""
    name = view.found.name
    return page(
        name,
        tag("p", tag("a", "Runs", href="/"), f" / {view.found.where}", class_="crumbs"),
        title_row(name, *tools),
        Markup(view.html("status")),
        _notes(view.found, notes, read_only=read_only),
        Markup(view.html("sections")),
        live(view, f"/live/run/{view.found.id}"),
        read_only=read_only,
    )


def run_tools(found: BoardItem, state: str, jobs: Sequence[StartedCommand]) -> list[Markup]:
    """Buttons for the state of a run; the script shows others when it changes."""
    at = f"/run/{found.id}"

    def tool(words: str, action: str, states: str, **more: str) -> Markup:
        hidden = None if state in states.split() else ""
        return button(words, f"{at}/{action}", data_for=states, hidden=hidden, **more)

    sure = "Stop this run? It finishes its step and saves a checkpoint; resume continues after it."
    ended = "finished stopped"
    base, merged = '{"base": true}', '{"merged": true}'
    tools = [
        tool("Stop", "stop", "running", data_confirm=sure),
        tool("Resume", "resume", "stopped failed gone", class_="primary"),
        tool("Validate", "validate", ended),
        tool("Validate against the base", "validate", ended, data_body=base),
        tool("Export adapter", "export", ended),
        tool("Export merged", "export", ended, data_body=merged),
    ]
    running = [job for job in jobs if job.state == "running"]
    links = [tag("a", f"{job.what} is running", href=f"/job/{job.id}") for job in running]
    chat = tag("a", "Chat", href=f"{at}/chat", class_="button")
    return [chat, *tools, *links]


def compare_page(views: Sequence[RunView], *, read_only: bool) -> str:
    """Several runs on the same axes, like `expert report --compare`."""
    runs = [facts_of(diagnose_record(view.record())) for view in views]
    links = [tag("a", view.found.name, href=f"/run/{view.found.id}", class_="tag")
             for view in views]  # fmt: skip
    section = comparison_section(runs)
    first = [block for block in section.inside if isinstance(block, Words | Figure)]
    rest = [block for block in section.inside if block not in first]
    return page(
        "Compare",
        tag("p", tag("a", "Runs", href="/"), " / compare", class_="crumbs"),
        tag("div", tag("h1", f"{counted(len(runs), 'run')} compared"), class_="title"),
        tag("div", *links, class_="row"),
        section_html(replace(section, inside=(*first, *rest))),
        read_only=read_only,
    )


def _status(summary: Summary) -> Markup:
    """State, numbers and progress of the run."""
    status = summary.status
    assert status is not None
    facts = [fact(name, value) for name, value in summary.numbers.items()
             if name != "best validation"]  # fmt: skip
    because = tag("span", status.because, class_="soft") if status.because else None
    fallbacks = None
    if status.fallbacks:
        words = f"{counted(len(status.fallbacks), 'fallback')}: {status.fallbacks[-1]}"
        fallbacks = tag("p", tag("a", words, href="#story"), class_="words tone-warning")
    model = f"{status.model} on {status.device}" if status.model else ""
    return tag(
        "div",
        tag("div", state_pill(summary.state), tag("span", model, class_="soft"), because,
            class_="row", role="status"),
        fallbacks,
        tag("div", *facts, class_="facts"),
        progress_bar(summary.progress, "progress"),
        id="status",
    )  # fmt: skip


def _verdict(made: Page, *, sampled: bool) -> Markup:
    reasons = made.reasons.replace(STATES["running"], "").strip()  # the page is live
    return tag(
        "div",
        tag("span", made.kind, class_="kind") if made.kind else None,
        tag("strong", made.verdict),
        tag("p", reasons, class_="reasons") if reasons else None,
        tag("p", SKIPPED, class_="reasons") if sampled else None,
        class_=f"verdict tone-{made.tone}",
        id="verdict",
    )


def findings_html(findings: Sequence[Finding]) -> Markup:
    """Findings, worst first; fixes that change the manifest can be copied."""
    grid = tag("div", *map(_finding, findings), class_="grid")
    return tag("section", tag("h2", "Findings"), grid, id="findings")


def _finding(one: Finding) -> Markup:
    gain = tag("span", f"expected gain {times(one.gain)}", class_="tag") if one.gain else None
    change = manifest_change(one.overrides)
    copy = None
    if change:
        copy = button("Copy the manifest change", "copy", data_copy=change, class_="small")
    fix = tag("p", tag("b", "Fix: "), one.fix, class_="fix") if one.fix else None
    shown = tag("pre", change) if change else None
    return tag(
        "div",
        tag("div", pill(one.severity, one.severity), tag("h3", one.title), gain, class_="row"),
        tag("p", one.evidence),
        tag("p", one.consequence, class_="soft") if one.consequence else None,
        fix, shown, copy,
        class_=f"card finding tone-{one.severity}",
        id=f"finding-{one.name}",
    )  # fmt: skip


def manifest_change(overrides: Sequence[str]) -> str:
    """`--set` overrides as YAML for the manifest."""
    import yaml

    tree: dict[str, Any] = {}
    for one in overrides:
        path, _, value = one.partition("=")
        *above, leaf = path.split(".")
        here = tree
        for key in above:
            here = here.setdefault(key, {})
        try:
            here[leaf] = json.loads(value)
        except ValueError:
            here[leaf] = value
    return yaml.safe_dump(tree, sort_keys=False).strip() if tree else ""


def _notes(found: BoardItem, notes: Notes, *, read_only: bool) -> Markup | None:
    tags = [tag("span", one, class_="tag") for one in notes.tags]
    text = tag("p", notes.text, class_="note") if notes.text else None
    if read_only:
        return tag("div", *tags, text, class_="notes") if tags or text else None
    form = tag(
        "form",
        tag("label", "Tags", tag("input", name="tags", value=", ".join(notes.tags),
                                 placeholder="baseline, keep", autocomplete="off")),
        tag("label", "Note", tag("textarea", notes.text, name="note", rows="3")),
        tag("button", "Save"),
        data_action=f"/run/{found.id}/notes",
    )  # fmt: skip
    summary = tag("summary", "Tags and notes ", *tags)
    return tag("details", summary, text, form, class_="notes")
