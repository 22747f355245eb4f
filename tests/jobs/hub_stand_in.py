"""The part of the hub's HTTP interface that a push needs, on this machine: accounts, repositories,
large files by LFS, and commits. `faults` makes requests fail."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin0123456789abcdef"
LARGE = 1000
"""Files from this size on, in bytes, are uploaded by LFS."""


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """The contents of the stand-in, and the requests it received."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Methods and paths."""
    faults: list[tuple[str, int]] = field(default_factory=list)
    """Patterns of `METHOD path`, and the status that the next such request gets."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    unanswered: Callable[[str], bool] = lambda asked: False
    """Called with every request; True drops it without an answer."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, method: str) -> None:
        body = self._body()
        asked = f"{method} {self.path.partition('?')[0]}"
        self.hub.asked.append(asked)
        if self.hub.unanswered(asked):
            self.close_connection = True
            return None
        with self.hub.lock:  # several large files are uploaded in parallel
            fault = next((f for f in self.hub.faults if re.search(f[0], asked)), None)
            if fault is not None:
                self.hub.faults.remove(fault)
        if fault is not None:
            return self._send(fault[1], {"error": "told to fail"})
        if method != "PUT" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        for pattern, answer in _ROUTES.items():
            match = re.fullmatch(pattern, asked)
            if match:
                return self._send(*answer(self.hub, body, *match.groups()))
        return self._send(404, {"error": "not found"})

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        if status >= 400:
            self.send_header("X-Error-Message", str(answer.get("error")))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


Answer = tuple[int, Any]


def _create(hub: Hub, body: bytes) -> Answer:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] != "anna":
        return 403, {"error": "You don't have the rights to create a model under this namespace"}
    if name in hub.repositories:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
    hub.repositories[name] = Repository(asked.get("visibility") == "private")
    return 200, {"url": f"{hub.url}/{name}", "name": name}


def _info(hub: Hub, body: bytes, name: str) -> Answer:
    there = hub.repositories.get(name)
    if there is None:
        return 404, {"error": "Repository not found"}
    return 200, {
        "id": name,
        "private": there.private,
        "sha": there.commits[-1] if there.commits else "0" * 40,
        "siblings": [{"rfilename": file} for file in there.files],
    }


def _preupload(hub: Hub, body: bytes, name: str) -> Answer:
    def mode(file: dict[str, Any]) -> dict[str, Any]:
        there = hub.repositories[name].files.get(file["path"])
        large = file["size"] >= LARGE
        oid = None
        if there is not None:
            head = b"" if large else f"blob {len(there)}\0".encode()
            hashed = hashlib.sha256(there) if large else hashlib.sha1(head + there)
            oid = hashed.hexdigest()
        kind = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": kind, "shouldIgnore": False, "oid": oid}

    return 200, {"files": [mode(file) for file in json.loads(body)["files"]]}


def _batch(hub: Hub, body: bytes, name: str) -> Answer:
    def action(each: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": each["oid"], "size": each["size"]}
        if each["oid"] in hub.objects:
            return known
        return {**known, "actions": {"upload": {"href": f"{hub.url}/large/{each['oid']}"}}}

    return 200, {"transfer": "basic", "objects": [action(o) for o in json.loads(body)["objects"]]}


def _put(hub: Hub, body: bytes, oid: str) -> Answer:
    if hashlib.sha256(body).hexdigest() != oid:
        return 400, {"error": "other bytes than were announced"}
    hub.objects[oid] = body
    return 200, {}


def _commit(hub: Hub, body: bytes, name: str) -> Answer:
    there = hub.repositories[name]
    changed = dict(there.files)
    for line in body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            there.messages.append(value["summary"])
        elif item["key"] == "file":
            changed[value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                return 400, {"error": f"{value['path']} was never uploaded"}
            changed[value["path"]] = hub.objects[value["oid"]]
    there.files = changed
    there.commits.append(hashlib.sha1(body).hexdigest())
    url = f"{hub.url}/{name}/commit/{there.commits[-1]}"
    return 200, {"commitUrl": url, "commitOid": there.commits[-1]}


_REPO = r"([^/]+/[^/]+)"
_ROUTES: dict[str, Callable[..., Answer]] = {
    r"GET /api/whoami-v2": lambda hub, body: (200, {"type": "user", "name": "anna"}),
    r"POST /api/repos/create": _create,
    rf"GET /api/models/{_REPO}(?:/revision/main)?": _info,
    r"POST /api/validate-yaml": lambda hub, body: (200, {"errors": [], "warnings": []}),
    rf"POST /api/models/{_REPO}/preupload/main": _preupload,
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": _batch,
    r"PUT /large/([0-9a-f]+)": _put,
    rf"POST /api/models/{_REPO}/commit/main": _commit,
}


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """A hub with one user, anna, whose token is TOKEN."""
    hub = Hub()
    handler = type("Handler", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
