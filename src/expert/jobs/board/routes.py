"""All routes of the board. Pages are GETs; actions are POSTs that return the path to open next, or
a problem to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from expert.core.rundir import RunFolder
from expert.jobs.board.actions import (
    ActionRefused,
    export_command,
    interrupt,
    resume_command,
    stop_run,
    trainer_of,
)
from expert.jobs.board.board import Board, board_of, body_of, stream
from expert.jobs.board.chat import serve_request
from expert.jobs.board.notes import notes_in, read_notes, write_notes
from expert.jobs.board.views.chat_page import ChatView, chat_page, chats_page
from expert.jobs.board.views.job_pages import JobView, job_page, start_page
from expert.jobs.board.views.list_page import ListView, list_page, newest_first
from expert.jobs.board.views.manifest_page import (
    manifest_page,
    manifest_values,
    plan_html,
    rows_html,
    set_options,
)
from expert.jobs.board.views.new_page import make_expert, new_page, remove_upload, save_upload
from expert.jobs.board.views.run_page import RunView, compare_page, run_page, run_tools
from expert.jobs.serve.body import RequestError
from expert.run.stored.choose_checkpoint import states

if TYPE_CHECKING:
    from starlette.requests import Request

Opening = tuple[str, Callable[[], Any]]
"""The key of a view, and how to create it."""
MAX_COMPARED = 6
TRAINING = "training was started and may need the memory"


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
        Route("/manifest/{id}/plan", _plan, methods=["POST"]),
        Route("/manifest/{id}/rows", _rows, methods=["POST"]),
        Route("/manifest/{id}/train", _train, methods=["POST"]),
        Route("/run/{id}/notes", _notes, methods=["POST"]),
        Route("/chat", _chats),
        Route("/run/{id}/chat", _chat),
        Route("/run/{id}/load", _load, methods=["POST"]),
        Route("/run/{id}/ask", _ask, methods=["POST"]),
        Route("/run/{id}/{action}", _act, methods=["POST"]),
        Route("/job/{id}/stop", _stop_job, methods=["POST"]),
    ]


# --- pages ---------------------------------------------------------------------------------------


async def _live(request: Request) -> Response:
    kind = request.path_params.get("kind", "runs")
    if kind not in VIEWS:
        raise RequestError(404, "There is no such page.")
    return await stream(request, *VIEWS[kind](request))


async def _list(request: Request) -> Response:
    board = board_of(request)
    view = await board.hub.view(*_runs(request))
    return HTMLResponse(list_page(view, read_only=board.read_only))


def _runs(request: Request) -> Opening:
    board = board_of(request)
    make = partial(ListView, board.places, board.summaries, read_only=board.read_only)
    return "runs", make


async def _run(request: Request) -> Response:
    board = board_of(request)
    view = await _view(board, request.path_params["id"])
    found = view.found
    state = (await run_in_threadpool(board.summaries.of, found)).state
    tools = [] if board.read_only else run_tools(found, state, board.jobs.of(found.id))
    html = run_page(view, read_notes(found.path), tools, read_only=board.read_only)
    return HTMLResponse(html)


def _run_view(request: Request) -> Opening:
    board = board_of(request)
    found = board.found(request, "run")
    return f"run {found.id}", partial(RunView, found, board.summaries)


async def _compare(request: Request) -> Response:
    board = board_of(request)
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(names) <= MAX_COMPARED:
        raise RequestError(400, f"Select 2 to {MAX_COMPARED} runs to compare.")
    views = [await _view(board, name) for name in names]
    html = await run_in_threadpool(compare_page, views, read_only=board.read_only)
    return HTMLResponse(html)


async def _view(board: Board, name: str) -> RunView:
    """The view of a run, after searching for new runs."""
    await asyncio.to_thread(board.places.search)
    found = board.get(name, "run")
    view = await board.hub.view(f"run {name}", partial(RunView, found, board.summaries))
    assert isinstance(view, RunView)
    return view


async def _start(request: Request) -> Response:
    board = _writable_board(request)
    await asyncio.to_thread(board.places.search, now=True)
    return HTMLResponse(start_page(board.places.manifests(), board.jobs.all()))


async def _new(request: Request) -> Response:
    board = _writable_board(request)
    return HTMLResponse(new_page(board.places.roots))


async def _manifest(request: Request) -> Response:
    found = _writable_board(request).found(request, "manifest")
    written = await run_in_threadpool(manifest_values, found.path)
    return HTMLResponse(manifest_page(found, written))


async def _chats(request: Request) -> Response:
    board = _writable_board(request)
    await asyncio.to_thread(board.places.search)
    return HTMLResponse(await run_in_threadpool(_runs_to_chat_with, board))


def _runs_to_chat_with(board: Board) -> str:
    runs = [run for run in board.places.runs() if states(RunFolder(run.path))]
    return chats_page(sorted(map(board.summaries.of, runs), key=newest_first))


async def _chat(request: Request) -> Response:
    board = _writable_board(request)
    view = await board.hub.view(*_chat_view(request))
    return HTMLResponse(chat_page(board.found(request, "run"), view))


def _chat_view(request: Request) -> Opening:
    board = _writable_board(request)
    found = board.found(request, "run")
    return f"chat {found.id}", partial(ChatView, found, board.chat)


def _writable_board(request: Request) -> Board:
    """The board; Refused if it is read-only."""
    board = board_of(request)
    if board.read_only:
        raise RequestError(403, "This board is read-only.")
    return board


async def _job(request: Request) -> Response:
    board = board_of(request)
    view = await board.hub.view(*_job_view(request))
    return HTMLResponse(job_page(view, read_only=board.read_only))


def _job_view(request: Request) -> Opening:
    board = board_of(request)
    job = board.jobs.get(request.path_params["id"])
    if job is None:
        raise RequestError(404, "The board has no record of this command.")
    return f"job {job.id}", partial(JobView, job, board.places, read_only=board.read_only)


VIEWS = {"runs": _runs, "run": _run_view, "job": _job_view, "chat": _chat_view}


# --- actions -------------------------------------------------------------------------------------


async def _train(request: Request) -> Response:
    board, given = board_of(request), await body_of(request)
    found = board.found(request, "manifest")
    words = ["train", "--manifest", str(found.path), *set_options(given)]
    job = await run_in_threadpool(board.jobs.start, "train", words, found)
    await run_in_threadpool(board.chat.end, TRAINING)
    return JSONResponse({"go": f"/job/{job.id}"})


async def _plan(request: Request) -> Response:
    given = await body_of(request)
    found = board_of(request).found(request, "manifest")
    return JSONResponse(await run_in_threadpool(plan_html, found.path, given))


async def _rows(request: Request) -> Response:
    await body_of(request)
    found = board_of(request).found(request, "manifest")
    return JSONResponse({"html": await run_in_threadpool(rows_html, found.path)})


async def _upload(request: Request) -> Response:
    """Receive a data file and create an expert from it."""
    places, asked = board_of(request).places, request.query_params
    try:
        root = places.roots[int(asked.get("root", "0"))]
    except (ValueError, IndexError):
        raise RequestError(400, "There is no such folder on this board.") from None
    rows = await save_upload(request.stream(), root, asked.get("file", ""))
    try:
        name, model = asked.get("name", ""), asked.get("model", "")
        manifest = await run_in_threadpool(make_expert, rows, root, name, model)
    finally:
        remove_upload(rows)
    await asyncio.to_thread(places.search, now=True)
    found = next((found for found in places.manifests() if found.path == manifest), None)
    if found is None:  # in a folder that is not searched, such as "final"
        raise ActionRefused(
            f"{manifest} was created, but the board does not search that folder  (train it with "
            f"expert train --manifest {manifest})"
        )
    return JSONResponse({"go": f"/manifest/{found.id}"})


async def _act(request: Request) -> Response:
    board = board_of(request)
    given = await body_of(request)
    found = board.found(request, "run")
    run, what = found.path, request.path_params["action"]
    match what:
        case "stop":
            await run_in_threadpool(stop_run, run)
            return JSONResponse({"done": "Stopping: the run finishes its step and saves."})
        case "resume":
            what, words = "train", await run_in_threadpool(resume_command, run)
        case "validate":
            base = ["--baseline", "base"] if given.get("base") is True else []
            words = ["validate", "--expert", str(run), *base]
        case "export":
            words = export_command(found, merged=given.get("merged") is True)
        case _:
            raise RequestError(404, "There is no such action.")
    job = await run_in_threadpool(board.jobs.start, what, words, found)
    if what == "train":
        await run_in_threadpool(board.chat.end, TRAINING)
    return JSONResponse({"go": f"/job/{job.id}"})


async def _load(request: Request) -> Response:
    """Load a run for chat; on the CPU while a run is training on this machine."""
    board = board_of(request)
    await body_of(request)
    found = board.found(request, "run")

    def load() -> None:
        training = [run.name for run in board.places.runs() if trainer_of(RunFolder(run.path))]
        board.chat.load(found, next(iter(training), ""))

    await run_in_threadpool(load)
    return JSONResponse({})


async def _ask(request: Request) -> Response:
    """Stream the answer to a message; it ends with the request."""
    board = board_of(request)
    question = serve_request(await body_of(request))
    events = board.chat.answer(board.found(request, "run"), question)
    return StreamingResponse(events, media_type="text/event-stream")


async def _notes(request: Request) -> Response:
    board = board_of(request)
    given = await body_of(request)
    found = board.found(request, "run")
    tags = given.get("tags")
    words = [word.strip() for word in tags.split(",")] if isinstance(tags, str) else tags
    notes = notes_in({"tags": words, "note": given.get("note")})
    await run_in_threadpool(write_notes, found.path, notes)
    return JSONResponse({"go": f"/run/{found.id}"})


async def _stop_job(request: Request) -> Response:
    job = board_of(request).jobs.get(request.path_params["id"])
    await body_of(request)
    if job is None:
        raise RequestError(404, "The board has no record of this command.")
    await run_in_threadpool(interrupt, job.holder)
    return JSONResponse({"done": "Stopping."})
