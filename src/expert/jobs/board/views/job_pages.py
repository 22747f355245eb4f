"""The start page with all manifests, and the page of a job with its output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from expert.core.errors import EXIT_MEANINGS
from expert.core.rundir import holder_of
from expert.core.text import visible
from expert.insight.page.markup import Markup, escape, tag
from expert.jobs.board.actions import StartedCommand, launcher_of
from expert.jobs.board.folders import BoardFolders, BoardItem
from expert.jobs.board.live import View
from expert.jobs.board.views.layout import button, live, page, pill, title_row

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOWN_LINES = 300
SHOWN_JOBS = 20
TONES = {"running": "note", "finished": "good", "failed": "error", "ended": "plain"}


class JobView(View):
    """State and output of a job, and its run."""

    def __init__(self, job: StartedCommand, places: BoardFolders, *, read_only: bool) -> None:
        super().__init__()
        self.job = job
        self._read_only = read_only
        self._places = places
        self._run: BoardItem | None = None
        self._is_complete = False

    def refresh(self) -> dict[str, str]:
        if self._is_complete:
            return {}
        # Its exit code is recorded a moment after the process has ended.
        self._is_complete = self.job.state in ("finished", "failed")
        if self._run is None:
            self._run = self._find_run()
        lines = output_lines(self.job.output())
        return {"job": self._head(), "log": log_html(lines), "order": "job log"}

    def _head(self) -> Markup:
        job = self.job
        link = None
        if self._run is not None:
            link = tag("a", "Open the run", href=f"/run/{self._run.id}", class_="button")
        elif job.state != "running":
            link = tag("a", "Runs", href="/", class_="button")
        stop = None
        if job.state == "running" and not self._read_only:
            stop = button("Stop", f"/job/{job.id}/stop", data_confirm="Stop this command?")
        meaning = EXIT_MEANINGS.get(job.exit_code or 0, "") if job.exit_code else ""
        return tag(
            "div",
            tag("div", pill(job.state, TONES[job.state], data_state=job.state),
                tag("span", meaning, class_="soft"), link, stop, class_="row", role="status"),
            id="job",
        )  # fmt: skip

    def _find_run(self) -> BoardItem | None:
        """The run that the job was started for, or that its process has locked."""
        self._places.search()
        for run in self._places.runs():
            holder = holder_of(run.path / ".lock")
            is_own = holder is not None and launcher_of(holder).pid == self.job.holder.pid
            if run.id == self.job.subject or is_own:
                return run
        return None


def job_page(view: View, *, read_only: bool) -> str:
    assert isinstance(view, JobView)
    job = view.job
    return page(
        f"{job.what} {job.about}",
        tag("p", tag("a", "Runs", href="/"), f" / {job.what}", class_="crumbs"),
        title_row(f"{job.what} {job.about}"),
        tag("p", job.words, class_="code"),
        live(view, f"/live/job/{job.id}"),
        read_only=read_only,
    )


def start_page(manifests: Sequence[BoardItem], jobs: Sequence[StartedCommand]) -> str:
    """All manifests with a start button, and earlier jobs."""
    cards = [
        tag(
            "article",
            tag("div", tag("h2", found.name), tag("small", f"{found.where}/{found.path.name}"),
                class_="who"),
            tag("div", tag("a", "Plan and settings", href=f"/manifest/{found.id}"),
                button("Start training", f"/manifest/{found.id}/train", class_="primary"),
                class_="row"),
            class_="card run short",
        )
        for found in sorted(manifests, key=lambda found: found.name)
    ]  # fmt: skip
    if not cards:
        link = tag("a", "Create one from a data file", href="/new", class_="button")
        text = "There is no manifest in these folders yet."
        cards = [tag("div", tag("p", text), link, class_="card empty")]
    lines = [
        tag("li", pill(job.state, TONES[job.state]),
            tag("a", f"{job.what} {job.about}", href=f"/job/{job.id}"),
            tag("small", job.holder.since), class_="row")
        for job in jobs[:SHOWN_JOBS]
    ]  # fmt: skip
    earlier = [tag("h2", "Started here"), tag("ul", *lines, class_="plain")] if lines else []
    return page("Start", title_row("Start"), *cards, *earlier, here="start")


def output_lines(text: str) -> list[str]:
    """The last lines of terminal output, without control sequences."""
    plain = _CONTROL.sub("", text)
    lines = [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]
    return [visible(line) for line in lines if line.strip()][-SHOWN_LINES:]


def log_html(lines: Sequence[str], name: str | None = "log") -> Markup:
    text = Markup("\n".join(escape(line) for line in lines) or "No output yet.")
    return tag("pre", text, id=name, class_="log", tabindex="0", aria_label="output")
