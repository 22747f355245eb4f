"""The expert that pages talk to: `expert serve` as a child on a port of this machine, with a token
that only the board has. One at a time; it ends when it is not asked for a while, and with the
board, however that ends."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from expert.core.files import open_regular
from expert.core.rundir import RunFolder
from expert.core.text import duration
from expert.jobs.board.actions import TAIL_BYTES, NotDone, environment
from expert.jobs.board.places import Found
from expert.jobs.board.safety import Refused
from expert.parallel.launch import PARENT_PIPE
from expert.run.stored.choose_checkpoint import FINAL, states

NAMES = ("expert", "base")
"""What the child calls the two that answer."""
SETTINGS = ("temperature", "max_tokens", "seed")
UNUSED_SECONDS = 15 * 60.0
"""Without a question for so long, the models are unloaded: they hold memory of the card."""
ANSWER_SECONDS = 300
MOST_WAITING = 16
MOST_MESSAGES = 200
_ADDRESS = re.compile(r"^serving (http://127\.0\.0\.1:\d+)/v1$", re.MULTILINE)
State = Literal["none", "other", "loading", "ready", "failed"]


@dataclass
class Child:
    """`expert serve` of one run."""

    found: Found
    note: str
    """What is to be said of how it was started."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    used: float = field(default_factory=time.monotonic)
    ended_because: str = ""
    _last_output: str = ""

    def start(self, words: list[str]) -> None:
        # Its standard input is closed when the board has ended, and then it ends itself.
        more = {"EXPERT_SERVE_TOKEN": self.token, PARENT_PIPE: "0"}
        self._folder = tempfile.TemporaryDirectory(prefix="expert-chat-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "expert", *words], stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, env={**environment(), **more}, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """The beginning of what it wrote, where its address is."""
        try:
            with open_regular(self._log) as log:
                return log.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:  # it has ended
            return self._last_output

    @property
    def address(self) -> str:
        """Where it answers; "" while it loads."""
        told = _ADDRESS.search(self.output)
        return told[1] if told else ""

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, because: str) -> None:
        """Give answers under way a moment, then end it."""
        self.ended_because = self.ended_because or because
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def watch(self) -> None:
        """In a thread: end it when it is not used, and keep its last words."""
        while self.is_running:
            if time.monotonic() - self.used > UNUSED_SECONDS:
                self.end(f"it was not asked anything for {duration(UNUSED_SECONDS)}")
            time.sleep(0.2)
        self._last_output = self.output
        self._folder.cleanup()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Chat:
    """The one run that is loaded, if any."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()

    def load(self, found: Found, training: str = "") -> None:
        """Load a run and its base, unless they are; another run makes room. `training`: a run that
        trains on this machine meanwhile, from which no memory of its card is taken."""
        there = states(RunFolder(found.path))
        if not there:
            raise NotDone(f"{found.name} has no expert yet: it has saved nothing")
        note = f"It computes on the CPU: {training} trains on this machine." if training else ""
        words = ["serve", f"{NAMES[0]}={found.path}", "--with-base", "--port", "0", "--quiet"]
        words += ["--queue", str(MOST_WAITING), "--time-limit", str(ANSWER_SECONDS)]
        words += [] if there[-1] == FINAL else ["--checkpoint", there[-1]]
        words += ["--device", "cpu"] if training else []
        with self._lock:
            child = self._child
            if child is not None and child.is_running:
                if child.found.id == found.id:
                    return
                child.end(f"{found.name} was loaded instead")
            self._child = child = Child(found, note)
            child.start(words)
        threading.Thread(target=child.watch, daemon=True).start()

    def end(self, because: str = "the board ended") -> None:
        with self._lock:
            if self._child is not None and self._child.is_running:
                self._child.end(because)

    def state(self, found: Found) -> tuple[State, str, str]:
        """How a run stands here, in a word, in a sentence, and what the server wrote."""
        child = self._child
        if child is None or (child.found.id != found.id and not child.is_running):
            return "none", "Not loaded.", ""
        if child.found.id != found.id:
            return "other", f"{child.found.name} is loaded; loading this run ends that.", ""
        if child.is_running:
            if child.address:
                return "ready", child.note, child.output
            return "loading", f"Loading the expert and its base. {child.note}", child.output
        if child.ended_because:
            return "failed", f"Unloaded: {child.ended_because}.", ""
        return "failed", "expert serve has ended:", child.output

    async def answer(self, found: Found, question: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The server's events as they come; what goes wrong is one, too."""
        import httpx

        child = self._child
        if child is None or child.found.id != found.id or not (address := child.address):
            yield _problem("The expert is not loaded.")
            return
        place, head = f"{address}/v1/chat/completions", {"authorization": f"Bearer {child.token}"}
        patience = httpx.Timeout(10.0, read=ANSWER_SECONDS + 60.0)
        child.used = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=patience) as client,
                client.stream("POST", place, json=question, headers=head) as answer,
            ):
                if answer.status_code != 200:
                    yield _problem(_words(await answer.aread()))
                    return
                async for part in answer.aiter_bytes():
                    child.used = time.monotonic()
                    yield part
        except httpx.HTTPError:
            yield _problem("The expert was unloaded, or its process ended.")


def question_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a page sent, as `expert serve` takes it; the rest is for that to judge."""
    messages = given.get("messages")
    if given.get("model") not in NAMES:
        raise Refused(400, "model: expected expert or base")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        raise Refused(400, f"messages: expected 1 to {MOST_MESSAGES} of them")
    for one in messages:
        said = isinstance(one, dict) and set(one) == {"role", "content"}
        if not said or one["role"] not in ("user", "assistant"):
            raise Refused(400, "messages: expected turns of user and assistant")
    settings = {key: given[key] for key in SETTINGS if given.get(key) is not None}
    return {
        "model": given["model"],
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings,
    }


def _problem(text: str) -> bytes:
    return f"data: {json.dumps({'error': {'message': text}})}\n\n".encode()


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "The expert gave no answer."
