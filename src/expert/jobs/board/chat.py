"""The model behind the chat page: `expert serve` as a child process on a local port, with a token
that only the board has. One run at a time; it ends when unused for a while, and with the board,
even if that is killed."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from expert.core.files import open_regular
from expert.core.rundir import RunFolder
from expert.core.text import duration
from expert.jobs.board.actions import TAIL_BYTES, ActionRefused, spawn
from expert.jobs.board.folders import BoardItem
from expert.parallel.launch import FOLLOWED
from expert.run.stored.choose_checkpoint import FINAL, states

FIELDS = ("model", "messages", "temperature", "max_tokens", "seed")
IDLE_SECONDS = 15 * 60.0
"""The models are unloaded after this long without a question, to free GPU memory."""
ANSWER_SECONDS = 300
MOST_WAITING = 16
_ADDRESS = re.compile(r"^serving (http://127\.0\.0\.1:\d+)/v1$", re.MULTILINE)
State = Literal["none", "other", "loading", "ready", "failed"]


class ServeProcess:
    """`expert serve` of one run; `note`: a remark for the page, or ""."""

    def __init__(self, found: BoardItem, note: str, words: list[str]) -> None:
        self.found, self.note = found, note
        self.token = secrets.token_urlsafe(24)
        self.used = time.monotonic()
        self.ended_because = ""
        self._last_output = ""
        self._folder = tempfile.TemporaryDirectory(prefix="expert-chat-")
        self._log = Path(self._folder.name) / "log"
        more = {"EXPERT_SERVE_TOKEN": self.token, FOLLOWED: str(os.getpid())}
        with self._log.open("wb") as log:
            self.process = spawn(words, log, **more)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def output(self) -> str:
        """The beginning of its log, with its address."""
        try:
            with open_regular(self._log) as log:
                return log.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:  # it has ended
            return self._last_output

    @property
    def address(self) -> str:
        """Its URL; "" while it loads."""
        match = _ADDRESS.search(self.output)
        return match[1] if match else ""

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, because: str) -> None:
        """Terminate it; kill it after 3 seconds."""
        self.ended_because = self.ended_because or because
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _watch(self) -> None:
        """End it when unused, and keep its output."""
        while self.is_running:
            if time.monotonic() - self.used > IDLE_SECONDS:
                self.end(f"no question for {duration(IDLE_SECONDS)}")
            time.sleep(0.2)
        self._last_output = self.output
        self._folder.cleanup()


class Chat:
    """The run loaded for chat, if any."""

    def __init__(self) -> None:
        self._child: ServeProcess | None = None
        self._lock = threading.Lock()

    def load(self, found: BoardItem, training: str = "") -> None:
        """Load a run and its base in place of any other run; on the CPU if `training` names a run
        that is training on this machine."""
        saved = states(RunFolder(found.path))
        if not saved:
            raise ActionRefused(f"{found.name} has not saved a checkpoint yet")
        note = f"On the CPU, because {training} is training on this machine." if training else ""
        words = ["serve", f"expert={found.path}", "--with-base", "--port", "0", "--quiet"]
        words += ["--queue", str(MOST_WAITING), "--time-limit", str(ANSWER_SECONDS)]
        words += [] if saved[-1] == FINAL else ["--checkpoint", saved[-1]]
        words += ["--device", "cpu"] if training else []
        with self._lock:
            child = self._child
            if child is not None and child.is_running:
                if child.found.id == found.id:
                    return
                child.end(f"{found.name} was loaded instead")
            self._child = ServeProcess(found, note, words)

    def end(self, because: str = "the board ended") -> None:
        with self._lock:
            if self._child is not None and self._child.is_running:
                self._child.end(because)

    def state(self, found: BoardItem) -> tuple[State, str, str]:
        """The state of a run, a sentence about it, and the server's output."""
        child = self._child
        if child is None or (child.found.id != found.id and not child.is_running):
            return "none", "Not loaded.", ""
        if child.found.id != found.id:
            return "other", f"{child.found.name} is loaded; loading this run unloads it.", ""
        if child.is_running:
            if child.address:
                return "ready", child.note, child.output
            return "loading", f"Loading the expert and its base. {child.note}", child.output
        if child.ended_because:
            return "failed", f"Unloaded: {child.ended_because}.", ""
        return "failed", "expert serve ended:", child.output

    async def answer(self, found: BoardItem, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The server's events as they arrive; problems are events, too. The server checks the
        fields of the question."""
        import httpx

        child = self._child
        if child is None or child.found.id != found.id or not (address := child.address):
            yield _problem("The expert is not loaded.")
            return
        question = {key: body[key] for key in FIELDS if body.get(key) is not None}
        question |= {"stream": True, "stream_options": {"include_usage": True}}
        place, head = f"{address}/v1/chat/completions", {"authorization": f"Bearer {child.token}"}
        patience = httpx.Timeout(10.0, read=ANSWER_SECONDS + 60.0)
        child.used = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=patience) as client,
                client.stream("POST", place, json=question, headers=head) as answer,
            ):
                if answer.status_code != 200:
                    try:
                        text = str(json.loads(await answer.aread())["error"]["message"])
                    except (ValueError, KeyError, TypeError):
                        text = "The expert did not answer."
                    yield _problem(text)
                    return
                async for part in answer.aiter_bytes():
                    child.used = time.monotonic()
                    yield part
        except httpx.HTTPError:
            yield _problem("The expert was unloaded, or its process ended.")


def _problem(text: str) -> bytes:
    return f"data: {json.dumps({'error': {'message': text}})}\n\n".encode()
