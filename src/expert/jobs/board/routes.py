"""All routes of the board. Pages are GETs; actions are POSTs that return the path to open next, or
a problem to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from expert.core.rundir import RunFolder
from expert.core.stored_json import read_object_or_empty
from expert.insight.page.comparison import comparison_section
from expert.insight.page.validation import SHOWN_CASES, Validated
from expert.jobs.board.actions import (
    ActionRefused,
    Jobs,
    StartedCommand,
    export_command,
    interrupt,
    resume_command,
    stop_run,
    trainer_of,
)
from expert.jobs.board.chat import Chat
from expert.jobs.board.folders import (
    BoardFolders,
    BoardItem,
    Kind,
    notes_in,
    read_notes,
    write_notes,
)
from expert.jobs.board.manifest_form import (
    make_expert,
    manifest_page,
    plan_html,
    remove_upload,
    rows_html,
    save_upload,
    set_options,
)
from expert.jobs.board.render import page
from expert.jobs.board.summaries import Summaries
from expert.jobs.board.views import ChatView, Hub, JobView, ListView, RunView, View
from expert.jobs.diagnose.diagnose import diagnose_run
from expert.jobs.serve.body import RequestError, read_body

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_COMPARED = 6
SHOWN_JOBS = 20
MAX_BODY_BYTES = 256 * 1024
BODY_SECONDS = 15.0
TRAINING = "training was started and may need the memory"


@dataclass
class Board:
    """The state that all pages share, as `request.app.state.board`."""

    places: BoardFolders
    read_only: bool = False
    summaries: Summaries = field(default_factory=Summaries)
    hub: Hub = field(default_factory=Hub)
    chat: Chat = field(default_factory=Chat)
    jobs: Jobs = field(default_factory=Jobs)

    def get(self, name: str, kind: Kind) -> BoardItem:
        found = self.places.get(name, kind)
        if found is None:
            raise RequestError(404, f"There is no such {kind} in the folders of this board.")
        return found


def make_board(folders: Sequence[Path], *, read_only: bool) -> Board:
    return Board(places=BoardFolders.of(folders), read_only=read_only)


def routes() -> list[Route]:
    return [
        Route("/", _list),
        Route("/live/runs", _live),
        Route("/live/{kind}/{id}", _live),
        Route("/run/{id}", _run),
        Route("/compare", _compare),
        Route("/start", _start),
        Route("/job/{id}", _job),
        Route("/new", _new),
        Route("/upload/rows", _upload, methods=["POST"]),
        Route("/manifest/{id}", _manifest),
        Route("/manifest/{id}/{action}", _of_manifest, methods=["POST"]),
        Route("/run/{id}/chat", _chat),
        Route("/run/{id}/{action}", _of_run, methods=["POST"]),
        Route("/job/{id}/stop", _stop_job, methods=["POST"]),
    ]


def _board(request: Request, *, writable: bool = False) -> Board:
    """The board; refused if it is read-only and the page would change something."""
    board: Board = request.app.state.board
    if writable and board.read_only:
        raise RequestError(403, "This board is read-only.")
    return board


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a POST."""
    return await read_body(request, most=MAX_BODY_BYTES, seconds=BODY_SECONDS)


def _job_of(request: Request) -> StartedCommand:
    job = _board(request).jobs.get(request.path_params["id"])
    if job is None:
        raise RequestError(404, "The board has no record of this command.")
    return job


# --- views ---------------------------------------------------------------------------------------


async def _view(request: Request, kind: str) -> View:
    """The view of this kind, of what the path names."""
    board, name = _board(request, writable=kind == "chat"), request.path_params.get("id", "")
    make: Callable[[], View]
    match kind:
        case "runs":
            make = partial(ListView, board.places, board.summaries, read_only=board.read_only)
        case "run":
            make = partial(RunView, board.get(name, "run"), board.summaries)
        case "chat":
            make = partial(ChatView, board.get(name, "run"), board.chat)
        case "job":
            make = partial(JobView, _job_of(request), board.places, read_only=board.read_only)
        case _:
            raise RequestError(404, "There is no such page.")
    return await board.hub.view(f"{kind} {name}", make)


async def _live(request: Request) -> Response:
    """The elements of a view that changed since a tab asked last."""
    view = await _view(request, request.path_params.get("kind", "runs"))
    return JSONResponse(view.changes_since(request.query_params.get("seen", "")))


# --- pages ---------------------------------------------------------------------------------------


async def _list(request: Request) -> Response:
    read_only, view = _board(request).read_only, await _view(request, "runs")
    return HTMLResponse(page("runs", "Runs", here="runs", read_only=read_only, view=view))


async def _run(request: Request) -> Response:
    board, view = _board(request), await _view(request, "run")
    found = board.get(request.path_params["id"], "run")
    state = (await run_in_threadpool(board.summaries.of, found)).state
    jobs = [job for job in board.jobs.all() if job.subject == found.id]
    html = page("run", found.name, read_only=board.read_only, found=found, view=view, state=state,
                notes=read_notes(found.path), jobs=jobs)  # fmt: skip
    return HTMLResponse(html)


async def _compare(request: Request) -> Response:
    """Several runs on the same axes, as `expert report --compare` shows them."""
    board, names = _board(request), list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(names) <= MAX_COMPARED:
        raise RequestError(400, f"Select 2 to {MAX_COMPARED} runs to compare.")

    def compared() -> str:
        runs = [board.get(name, "run") for name in names]
        section = comparison_section([diagnose_run(run.path) for run in runs])
        title = f"{len(runs)} runs compared"
        return page("compare", title, section=section, read_only=board.read_only, runs=runs)

    return HTMLResponse(await run_in_threadpool(compared))


async def _start(request: Request) -> Response:
    board = _board(request, writable=True)
    await asyncio.to_thread(board.places.search, now=True)
    manifests = sorted(board.places.of_kind("manifest"), key=lambda found: found.name)
    jobs = board.jobs.all()[:SHOWN_JOBS]
    return HTMLResponse(page("start", "Start", here="start", manifests=manifests, jobs=jobs))


async def _new(request: Request) -> Response:
    roots = _board(request, writable=True).places.roots
    return HTMLResponse(page("new", "New expert", here="new", roots=roots))


async def _manifest(request: Request) -> Response:
    found = _board(request, writable=True).get(request.path_params["id"], "manifest")
    return HTMLResponse(await run_in_threadpool(manifest_page, found))


async def _chat(request: Request) -> Response:
    """Two conversations and one input for both; the script does the rest."""
    view = await _view(request, "chat")
    found = _board(request).get(request.path_params["id"], "run")
    file = RunFolder(found.path).validation
    validated = Validated(await run_in_threadpool(read_object_or_empty, file))
    rows = [case for case in validated.cases if isinstance(case.get("prompt"), str)][:SHOWN_CASES]
    html = page("chat", f"Chat with {found.name}", found=found, view=view, rows=rows)
    return HTMLResponse(html)


async def _job(request: Request) -> Response:
    read_only, job, view = _board(request).read_only, _job_of(request), await _view(request, "job")
    html = page("job", f"{job.what} {job.about}", read_only=read_only, job=job, view=view)
    return HTMLResponse(html)


# --- actions -------------------------------------------------------------------------------------


async def _of_manifest(request: Request) -> Response:
    """The plan with the settings of the form, the rows as the model sees them, or a new run."""
    board, given = _board(request), await _body(request)
    found = board.get(request.path_params["id"], "manifest")
    match request.path_params["action"]:
        case "plan":
            return JSONResponse(await run_in_threadpool(plan_html, found.path, given))
        case "rows":
            return JSONResponse({"html": await run_in_threadpool(rows_html, found.path)})
        case "train":
            words = ["train", "--manifest", str(found.path), *set_options(given)]
            return await _started(board, "train", words, found)
    raise RequestError(404, "There is no such action.")


async def _started(board: Board, what: str, words: list[str], found: BoardItem) -> Response:
    """Start a command and open its page; training may need the memory of the chat."""
    job = await run_in_threadpool(board.jobs.start, what, words, found)
    if what == "train":
        await run_in_threadpool(board.chat.end, TRAINING)
    return JSONResponse({"go": f"/job/{job.id}"})


async def _upload(request: Request) -> Response:
    """Receive a data file and create an expert from it."""
    places, asked = _board(request).places, request.query_params
    roots = {str(number): root for number, root in enumerate(places.roots)}
    if (root := roots.get(asked.get("root", "0"))) is None:
        raise RequestError(400, "There is no such folder on this board.")
    rows = await save_upload(request.stream(), root, asked.get("file", ""))
    try:
        name, model = asked.get("name", ""), asked.get("model", "")
        manifest = await run_in_threadpool(make_expert, rows, root, name, model)
    finally:
        remove_upload(rows)
    await asyncio.to_thread(places.search, now=True)
    found = next((found for found in places.of_kind("manifest") if found.path == manifest), None)
    if found is None:  # in a folder that is not searched, such as "final"
        fix = f"train it with expert train --manifest {manifest}"
        raise ActionRefused(f"{manifest} was created in a folder that is not searched  ({fix})")
    return JSONResponse({"go": f"/manifest/{found.id}"})


async def _of_run(request: Request) -> Response:
    board, given = _board(request), await _body(request)
    found, what = board.get(request.path_params["id"], "run"), request.path_params["action"]
    run = found.path
    match what:
        case "stop":
            await run_in_threadpool(stop_run, run)
            return JSONResponse({"done": "Stopping: the run finishes its step and saves."})
        case "resume":
            words = await run_in_threadpool(resume_command, run)
            return await _started(board, "train", words, found)
        case "validate":
            base = ["--baseline", "base"] if given.get("base") is True else []
            return await _started(board, what, ["validate", "--expert", str(run), *base], found)
        case "export":
            words = export_command(found, merged=given.get("merged") is True)
            return await _started(board, what, words, found)
        case "notes":
            tags = given.get("tags")
            split = [word.strip() for word in tags.split(",")] if isinstance(tags, str) else tags
            notes = notes_in({"tags": split, "note": given.get("note")})
            await run_in_threadpool(write_notes, run, notes)
            return JSONResponse({"go": f"/run/{found.id}"})
        case "load":
            # For chat; on the CPU while a run is training on this machine.
            runs = board.places.of_kind("run")
            training = [one.name for one in runs if trainer_of(RunFolder(one.path))]
            await run_in_threadpool(board.chat.load, found, next(iter(training), ""))
            return JSONResponse({})
        case "ask":  # streams the answer; it ends with the request
            events = board.chat.answer(found, given)
            return StreamingResponse(events, media_type="text/event-stream")
    raise RequestError(404, "There is no such action.")


async def _stop_job(request: Request) -> Response:
    await _body(request)
    await run_in_threadpool(interrupt, _job_of(request).holder)
    return JSONResponse({"done": "Stopping."})
