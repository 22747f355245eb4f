"""Hostile requests get 4xx within limits of memory and time, and change nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from expert.answer import engine as answer_engine
from expert.answer import steps as answer_steps
from expert.core.errors import ExpertError
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.sandbox import SandboxedTemplate
from expert.jobs.serve import listen
from expert.jobs.serve.app import Limits
from expert.jobs.serve.serve import MIN_TOKEN_LENGTH, TOKEN, _token, log_line
from tests.data.template.chat_templates import CHATML
from tests.each import each
from tests.jobs.runs import until
from tests.jobs.serve.served import Served, served
from tests.jobs.trained_runs import finished

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
FINE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "x"}],
}


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    limits = Limits(body_bytes=20_000, body_seconds=0.5)
    with served(f"demo={finished('lora')}", limits=limits) as found:
        yield found


def sent(
    here: Served, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=20)
    text = json.dumps(body) if isinstance(body, dict) else body
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, text, {**JSON, **given})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content)


def still_fine(here: Served) -> None:
    assert sent(here, "POST", CHAT, FINE)[0] == 200
    until(lambda: sent(here, "GET", "/health")[1]["running"] == 0)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation is slow, and no token ends an answer."""
    advance = answer_steps.FixedSteps.advance

    def slowly(self: Any, tokens: Any, live: Any = ()) -> None:
        time.sleep(0.02)
        advance(self, tokens, live)

    monkeypatch.setattr(answer_steps.FixedSteps, "advance", slowly)
    monkeypatch.setattr(answer_engine, "end_tokens", lambda encoder, template: [])


@each(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.:8000"}, 403),
        ({"Host": "LOCALHOST:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
    ids=str,
)
def test_pages_of_other_sites_and_other_names_of_this_machine_are_refused(here, headers, status):
    found, body = sent(here, "POST", CHAT, FINE, **headers)
    assert found == status
    assert status == 200 or body["error"]["message"]


@each(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        (b"\xff\xfe", 400),
        ("[" * 9_000 + "]" * 9_000, 400),
        ('{"temperature": NaN}', 400),
        ('{"seed": ' + "9" * 5_000 + "}", 400),
        ('{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ({**FINE, "seed": 10**30}, 400),
        ({**FINE, "max_tokens": 10**12}, 400),
        ({**FINE, "messages": [[]]}, 400),
        ({**FINE, "messages": [{"role": "user", "content": {"a": 1}}]}, 400),
        ({**FINE, "model": "../../etc/passwd"}, 404),
        ({**FINE, "tools": [{"type": "function", "function": {"name": 1}}]}, 400),
        ("x" * 20_001, 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_not_requests_are_refused(here, body, status):
    found, answer = sent(here, "POST", CHAT, body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@each(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_other_addresses_are_refused_in_the_same_shape(here, method, path, status):
    found, answer = sent(here, method, path)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")


def test_after_all_of_that_answers_are_as_before_and_refusals_are_logged_without_raw_bytes(here):
    still_fine(here)
    before = len(here.entries)
    sent(here, "POST", CHAT, {**FINE, "model": "\x1b[2Jred\n\u202e"})
    sent(here, "GET", "/%1b%5b2J")
    lines = [log_line(entry, here.engine) for entry in here.until_logged(before + 2)[before:]]
    assert [line[:3] for line in lines] == ["404", "404"]
    assert all(line.isprintable() for line in lines)


def raw(here: Served, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", here.port), timeout=20)
    connection.sendall(data)
    return connection


def head(length: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_a_body_that_does_not_come_is_given_up_and_one_that_is_too_long_is_not_read(here):
    with raw(here, head(1000) + b'{"model"') as connection, connection.makefile("rb") as answer:
        assert b" 408 " in answer.read(), "which ends: the connection is closed"
    with raw(here, head(10**12)) as connection:
        assert b" 413 " in connection.recv(1000)
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with raw(here, chunked + b"ffff\r\n" + b"x" * 0xFFFF) as connection:
        assert b" 413 " in connection.recv(1000)
    still_fine(here)
    size = 200_000  # ten times what is allowed
    with raw(here, head(size)) as connection:  # it sends all before it listens
        for _ in range(10):
            connection.sendall(b"x" * (size // 10))
            time.sleep(0.01)
        assert b" 413 " in connection.recv(1000)
    with raw(here, b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 70_000) as connection:
        assert b" 400 " in connection.recv(1000)


def test_connections_whose_request_does_not_come_are_closed(monkeypatch):
    monkeypatch.setattr(listen, "HEADER_SECONDS", 0.3)
    with served(f"demo={finished('lora')}") as here:
        starts = [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"] * 10
        slow = [raw(here, start) for start in starts]
        for byte in (b"X", b"-"):  # a byte now and then does not help
            time.sleep(0.1)
            for connection in slow[1:]:
                connection.sendall(byte)
        still_fine(here)
        for connection in slow:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            connection.close()
        until(lambda: not here.server.server_state.connections)


def test_more_connections_than_there_is_room_for_are_refused(here, monkeypatch):
    monkeypatch.setattr(here.server.config, "limit_concurrency", 3)
    waiting = [raw(here, b"") for _ in range(3)]
    until(lambda: len(here.server.server_state.connections) >= 3)
    with raw(here, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert b" 503 " in connection.recv(1000)
    for one in waiting:
        one.close()
    until(lambda: not here.server.server_state.connections)
    still_fine(here)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_answer(here, stream, endless):
    before = len(here.entries)
    body = json.dumps({**FINE, "stream": stream, "max_tokens": 400}).encode()
    connection = raw(here, head(len(body)) + body)
    until(lambda: here.engine.running == 1)
    connection.close()
    until(lambda: here.engine.running == 0)
    entry = here.until_logged(before + 1)[-1]
    assert entry.note == "the client left"


def test_an_answer_that_takes_too_long_is_ended(endless):
    limits = Limits(answer_seconds=0.3)
    with served(f"demo={finished('lora')}", limits=limits) as here:
        long = {**FINE, "max_tokens": 500}
        assert sent(here, "POST", CHAT, long)[0] == 504
        with pytest.raises(openai.APIError) as failed:
            list(here.client.chat.completions.create(**long, stream=True))
        assert failed.value.code == "timeout"
        until(lambda: here.engine.running == 0)


# --- prompts that take long to write --------------------------------------------------------------


ENDLESS = (
    "{% if messages[0].content == 'x' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)


def with_template(here: Served, source: str) -> None:
    template = ChatTemplate(source + CHATML, eos="<|im_end|>")
    object.__setattr__(here.engine.models["demo"], "template", template)


def writing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prompt"]


def test_a_long_conversation_is_rendered_once(monkeypatch):
    rendered, render = list[int](), SandboxedTemplate.render

    def counted(self: Any, messages: Any, **variables: Any) -> str:
        rendered.append(len(messages))
        return str(render(self, messages, **variables))

    with served(f"demo={finished('lora')}") as here:
        with_template(here, "")
        monkeypatch.setattr(SandboxedTemplate, "render", counted)
        turns = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(501)]
        assert sent(here, "POST", CHAT, {**FINE, "messages": turns})[0] == 400
        assert rendered.count(501) == 1
        assert len(rendered) < 12, "the others are of the template itself, and done once"
        rendered.clear()
        assert sent(here, "POST", CHAT, {**FINE, "messages": turns[:301]})[0] == 400
        assert rendered == [301]


@pytest.mark.parametrize("how", ["left", "late", "stopped"])
def test_a_prompt_that_is_being_written_ends_with_its_request(how, monkeypatch):
    monkeypatch.setattr(listen, "GRACE", 0.2)
    limits = Limits(answer_seconds=1 if how == "late" else 60)
    with served(f"demo={finished('lora')}", limits=limits) as here:
        with_template(here, ENDLESS)
        body = json.dumps(FINE).encode()
        with raw(here, head(len(body)) + body) as connection:
            until(lambda: bool(writing()))
            if how == "left":
                connection.close()
            elif how == "late":
                assert b" 504 " in connection.recv(1000)
            else:
                here.server.should_exit = True
            until(lambda: not writing(), 8)


# --- tokens ---------------------------------------------------------------------------------------


def test_with_a_token_nothing_is_answered_without_it():
    token = "a-token-of-some-length"
    limits = Limits(token=token, loopback=False)
    with served(f"demo={finished('lora')}", limits=limits) as here:
        for path in ("/health", "/v1/models", "/nothing"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
                status, answer = sent(here, "GET", path, **given)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            here.client.models.list()
        client = here.client.with_options(api_key=token)
        assert client.chat.completions.create(**FINE).choices[0].message.content is not None


def test_other_machines_always_need_a_token():
    assert _token("", "127.0.0.1") == _token("", "localhost") == _token("", "::1") == ("", "")
    made = {_token("", host)[0] for host in ("0.0.0.0", "192.168.1.7", "::", "example.org")}
    assert len({token for token in made if len(token) > MIN_TOKEN_LENGTH}) == 4
    long = "x" * MIN_TOKEN_LENGTH
    assert _token(long, "0.0.0.0") == _token(long, "127.0.0.1") == (long, "")
    for given in ("short", "with a blank in the middle", "ünïcödé-of-some-length"):
        with pytest.raises(ExpertError, match=TOKEN):
            _token(given, "0.0.0.0")
