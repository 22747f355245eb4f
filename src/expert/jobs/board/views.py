"""The live pages: the list of runs, a run, a command, the chat. Each gives the elements of its page
that may have changed."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from expert.core.errors import EXIT_MEANINGS, ExpertError
from expert.core.rundir import RunFolder, holder_of
from expert.core.text import visible
from expert.insight.page.contents import STATES, make_page
from expert.jobs.board.actions import StartedCommand, launcher_of
from expert.jobs.board.chat import Chat
from expert.jobs.board.folders import MAX_FOLDERS, BoardFolders, BoardItem, read_notes
from expert.jobs.board.render import part
from expert.jobs.board.summaries import Summaries, changed, newest_first
from expert.jobs.diagnose.diagnose import diagnose_run

LIST_SHARE, STATUS_SHARE, REPORT_SHARE = 1 / 300, 0.0015, 0.005
"""Shares of a core for the list of runs, for the numbers on top of a run, and for its report."""
LEAST_SECONDS = 2.0
SHOWN_LINES = 300
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


TICK_SECONDS = 1.0
KEPT_SECONDS = 20.0
"""Views that no tab asks for are dropped after this long."""


class Throttle:
    """Keeps repeated work below a share of one core: slow work is done less often."""

    def __init__(self, share: float, least: float = TICK_SECONDS) -> None:
        self._share, self._least, self._next = share, least, 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def run(self, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return work()
        finally:
            took = time.thread_time() - began
            self._next = time.monotonic() + max(self._least, took / self._share)


class View:
    """HTML elements of one page by id. The page shows those listed in `order`, and others if it has
    an element with that id."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, str]] = {}
        """Each element with the time of its last change, which a restarted server exceeds."""
        self.used = time.monotonic()
        self._next_refresh = 0.0
        self._lock = threading.Lock()

    def elements(self) -> dict[str, str]:
        """Elements that may have changed, at first all."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Make the elements again, at most once a second; called in a thread, for every tab."""
        with self._lock:
            if time.monotonic() < self._next_refresh:
                return
            now, parts = time.time_ns(), dict(self.parts)
            for name, html in self.elements().items():
                if name not in parts or parts[name][1] != html:
                    parts[name] = (now, html)
            self.parts = parts  # replaced as a whole: other tabs read it meanwhile
            self._next_refresh = time.monotonic() + TICK_SECONDS

    def html(self, name: str) -> str:
        return self.parts[name][1] if name in self.parts else ""

    @property
    def seen(self) -> int:
        """The time of the last change: a page made now shows all elements."""
        return max((at for at, _ in self.parts.values()), default=0)

    def changes_since(self, seen: str) -> dict[str, Any]:
        """The elements that changed since `seen`, and what to ask for next; text, because a script
        would round the number."""
        known, parts = int(seen) if seen.isdigit() else 0, self.parts
        fresh = {name: html for name, (at, html) in parts.items() if at > known}
        return {"seen": str(max((at for at, _ in parts.values()), default=0)), "parts": fresh}


class Hub:
    """The views that tabs show."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}

    async def view(self, key: str, make: Callable[[], View]) -> View:
        """The view of that key, with its elements as they are now."""
        now = time.monotonic()
        for name, view in list(self.views.items()):
            if now - view.used > KEPT_SECONDS:
                del self.views[name]
        if key not in self.views:
            self.views[key] = make()
        view = self.views[key]
        view.used = now
        await asyncio.to_thread(view.refresh)
        return view


# --- pages ---------------------------------------------------------------------------------------


class ListView(View):
    """One row per run, running ones first, then the newest."""

    def __init__(self, places: BoardFolders, summaries: Summaries, *, read_only: bool) -> None:
        super().__init__()
        self._places, self._summaries, self._read_only = places, summaries, read_only
        self._pace = Throttle(LIST_SHARE)

    def elements(self) -> dict[str, str]:
        if not self.parts:
            return self._rows()  # reads all runs, once
        return self._pace.run(self._rows) if self._pace.due() else {}

    def _rows(self) -> dict[str, str]:
        self._places.search()
        found = self._places.of_kind("run")
        self._summaries.forget({run.path for run in found})
        runs = sorted(map(self._summaries.of, found), key=newest_first)
        settings = changed(runs)
        parts = {f"run-{run.found.id}": part("row", run, read_notes(run.found.path),
                                             settings[run.found.id])
                 for run in runs}  # fmt: skip
        count = Counter("killed" if run.state == "gone" else run.state for run in runs)
        words = [f"{number} {state}" for state, number in count.most_common()]
        if self._places.is_truncated:
            words.append(f"only the first {MAX_FOLDERS:,} folders were searched")
        order = " ".join(parts) or "nothing"
        if not runs:
            parts["nothing"] = part("nothing", self._places.roots, self._read_only)
        return {**parts, "counts": part("counts", ", ".join(words)), "order": order}


class RunView(View):
    """The report of a run, made again when events are new and its pace allows it."""

    def __init__(self, found: BoardItem, summaries: Summaries) -> None:
        super().__init__()
        self.found = found
        self.folder = RunFolder(found.path)
        self._summaries = summaries
        self._status_pace = Throttle(STATUS_SHARE)
        self._report_pace = Throttle(REPORT_SHARE, LEAST_SECONDS)
        self._shown: tuple[object, ...] = ()
        """State, validation and last event of the report as it was made."""

    def elements(self) -> dict[str, str]:
        if not self._status_pace.due():
            return {}
        try:
            if not self.parts:
                self.folder.refuse_unsafe_files()
                self._summaries.of(self.found)  # reads all of a long run, once
            summary = self._status_pace.run(lambda: self._summaries.of(self.found))
            if summary.problem:
                raise ExpertError(summary.problem)
            parts = {"status": part("status", summary)}
            validated = self.folder.validation
            written = validated.lstat().st_mtime_ns if validated.exists() else None
            now = (summary.state, written, summary.status and summary.status.last_event)
            if now[:2] != self._shown[:2] or (self._report_pace.due() and now != self._shown):
                parts |= self._report_pace.run(self._report)
                self._shown = now
        except (ExpertError, OSError) as error:
            problem = part("problem", str(error))
            return {"problem": problem, "order": "problem", "status": part("unreadable")}
        return parts

    def _report(self) -> dict[str, str]:
        made = make_page(diagnose_run(self.found.path))
        live = made.reasons.replace(STATES["running"], "").strip()  # "as of when it was made"
        made = replace(made, reasons=live)
        parts = {"verdict": part("verdict", made)}
        parts |= {section.name: part("section", section) for section in made.sections}
        order = " ".join(parts)
        return {**parts, "sections": part("sections", made.sections), "order": order}


class JobView(View):
    """State and output of a command, and its run."""

    def __init__(self, job: StartedCommand, places: BoardFolders, *, read_only: bool) -> None:
        super().__init__()
        self.job, self._places, self._read_only = job, places, read_only
        self._run: BoardItem | None = None

    def elements(self) -> dict[str, str]:
        self._run = self._run or self._find_run()
        meaning = EXIT_MEANINGS.get(self.job.exit_code or 0, "") if self.job.exit_code else ""
        head = part("job", self.job, self._run, meaning, self._read_only)
        log = part("log", output_lines(self.job.output()), "log")
        return {"job": head, "log": log, "order": "job log"}

    def _find_run(self) -> BoardItem | None:
        """The run that the job was started for, or that its process has locked."""
        self._places.search()
        for run in self._places.of_kind("run"):
            holder = holder_of(run.path / ".lock")
            is_own = holder is not None and launcher_of(holder).pid == self.job.holder.pid
            if run.id == self.job.subject or is_own:
                return run
        return None


class ChatView(View):
    """Whether the expert and its base are loaded."""

    def __init__(self, found: BoardItem, chat: Chat) -> None:
        super().__init__()
        self._found, self._chat = found, chat

    def elements(self) -> dict[str, str]:
        state, words, output = self._chat.state(self._found)
        status = part("chat", self._found, state, words, output_lines(output))
        return {"status": status, "order": "status"}


def output_lines(text: str) -> list[str]:
    """The last lines of terminal output, without control sequences."""
    plain = _CONTROL.sub("", text)
    lines = [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]
    return [visible(line) for line in lines if line.strip()][-SHOWN_LINES:]
