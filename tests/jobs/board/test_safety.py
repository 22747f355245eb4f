"""Only permitted requests are answered; all others get 4xx and change nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.board.routes import MAX_BODY_BYTES
from expert.jobs.board.safety import POLICY, Guard
from tests.each import each
from tests.insight.pages import usual, write_run
from tests.jobs.board.board_client import ACTION, ORIGIN, TOKEN, BoardClient, contents

RUN = "demo-20260101-120000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("board")
    write_run(place / "runs" / RUN, usual())
    return place


@pytest.fixture(scope="module")
def browser(folder: Path) -> BoardClient:
    return BoardClient(folder)


PLACES = ("/", "/start", "/run/{id}", "/live/runs", "/live/run/{id}", "/Static/board.js",
          "/compare?run={id}&run={id}", "/job/x", "/nothing", "/run/{id}/chat",
          "/live/chat/{id}")  # fmt: skip
ACTIONS = ("/run/{id}/notes", "/run/{id}/stop", "/run/{id}/resume", "/run/{id}/validate",
           "/run/{id}/export", "/manifest/{id}/train", "/job/{id}/stop", "/run/{id}/load",
           "/run/{id}/ask")  # fmt: skip


def refused(answer: Any) -> None:
    assert answer.status_code == 401
    assert RUN not in answer.text
    assert "set-cookie" not in answer.headers


def test_nothing_is_shown_and_no_action_is_taken_without_the_token(folder, browser):
    before, stranger = contents(folder), BoardClient(folder, stranger=True)
    for place in PLACES:
        refused(stranger.get(place.format(id=browser.id_of(RUN))))
    for place in ACTIONS:
        refused(stranger.post(place.format(id=browser.id_of(RUN))))
    for given in ("", "x", TOKEN[:-1], TOKEN + "x", "ü"):
        answer = stranger.client.get("/", params={"token": given})
        refused(answer)
        assert "there is a new one at every start" in answer.text
    refused(stranger.get("/", headers={"cookie": "expert_board=abc"}))
    assert contents(folder) == before


def test_the_page_that_asks_for_the_token_has_its_style_and_nothing_else_does(folder):
    stranger = BoardClient(folder, stranger=True)
    asks = stranger.get("/")
    linked = [part.split('"')[0] for part in asks.text.split('href="')[1:]]
    assert any(place.endswith(".css") for place in linked)
    for place in linked:
        assert stranger.get(place).status_code == 200, place
    assert "there is a new one at every start" not in asks.text
    assert stranger.get("/static/../start").status_code != 200
    assert stranger.post("/static/board.css").status_code == 401


def test_the_token_becomes_a_cookie_that_no_script_reads_and_no_other_site_sends(folder):
    stranger = BoardClient(folder, stranger=True)
    answer = stranger.get(f"/start?a=b&token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert 'content="0;url=/start?a=b"' in answer.text
    assert TOKEN not in answer.text
    assert stranger.get("/").status_code == 200


@each("place", ["//evil.example/x", "/%09/evil.example/x", "/%5c/evil.example/x"])
def test_the_place_behind_the_token_stays_on_this_board(place, folder):
    answer = BoardClient(folder, stranger=True).get(f"{ORIGIN}{place}?token={TOKEN}")
    to = answer.text.partition("url=")[2]
    assert to.startswith(("/evil.example/x", "/%09/evil.example/x"))


@each("host", ["evil.example", "evil.example:7373", "127.0.0.1.evil.example", "localhost.evil",
               "10.0.0.1:7373", "", "[::2]:7373", "127.0.0.1@evil.example"])  # fmt: skip
def test_a_name_that_is_not_this_machines_is_refused(host, browser):
    assert browser.get("/", headers={"host": host}).status_code in (400, 421)


def test_accepted_host_names(browser):
    own = ("localhost:7373", "localhost:9000", "127.0.0.1", "127.0.0.2:80", "[::1]:7373")
    assert all(map(browser.guard.is_own_host, own))  # for tunnels
    guard = Guard(None, token="t", host="0.0.0.0", read_only=True)
    assert guard.is_own_host("192.168.1.5:7373")
    assert not guard.is_own_host("evil.example:7373")


@each("origin", ["http://evil.example", "null", "http://127.0.0.1:8888", "https://127.0.0.1:7374",
                 "http://localhost:7373", "file://"])  # fmt: skip
def test_a_request_of_another_site_is_refused_with_the_cookie_too(origin, folder, browser):
    before = contents(folder)
    place = f"/run/{browser.id_of(RUN)}/notes"
    assert browser.post(place, {"tags": "x"}, origin=origin).status_code == 403
    assert browser.get("/", headers={"origin": origin}).status_code == 403
    assert contents(folder) == before


JSON = {"content-type": "application/json"}
SOUND = b'{"tags": "x"}'


@each(("headers", "body", "status"), [
    # An action needs what only a page of the board sends.
    ({**JSON, "x-expert-board": "1"}, SOUND, 403),
    ({**JSON, "origin": ORIGIN}, SOUND, 403),
    ({**JSON, "origin": ORIGIN, "x-expert-board": "0"}, SOUND, 403),
    ({**JSON, **ACTION, "sec-fetch-site": "cross-site"}, SOUND, 403),
    ({**JSON, **ACTION, "sec-fetch-site": "same-site"}, SOUND, 403),
    # A body that is no JSON object
    ({**JSON, **ACTION}, b"[]", 400),
    ({**ACTION, "content-type": "text/plain"}, b"{}", 415),
])  # fmt: skip
def test_an_action_that_no_page_of_the_board_sends_is_refused(
    headers, body, status, folder, browser
):
    before = contents(folder)
    place = f"/run/{browser.id_of(RUN)}/notes"
    assert browser.client.post(place, content=body, headers=headers).status_code == status
    assert contents(folder) == before


def test_a_read_only_board_shows_runs_offers_nothing_and_takes_no_action(folder):
    before = contents(folder)
    browser = BoardClient(folder, read_only=True)
    for place in ACTIONS:
        assert browser.post(place.format(id=browser.id_of(RUN))).status_code == 403
    assert "data-action" not in browser.page(f"/run/{browser.id_of(RUN)}")
    assert browser.get("/start").status_code == 403
    assert contents(folder) == before


def test_other_methods_are_refused_and_no_preflight_lets_another_site_send_our_header(browser):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert browser.client.request(method, "/").status_code == 405
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = browser.client.options("/run/x/notes", headers=headers)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_body_that_is_too_long_is_refused_by_its_length_and_by_its_bytes(folder, browser):
    place = f"/run/{browser.id_of(RUN)}/notes"
    long = b"x" * (MAX_BODY_BYTES + 1)
    headers = {**ACTION, **JSON}
    assert browser.client.post(place, content=long, headers=headers).status_code == 413
    parts = (long[:100_000] for _ in range(4))  # chunked: without a Content-Length
    assert browser.client.post(place, content=parts, headers=headers).status_code == 413


@each("place", ["/", "/nothing", "/static/board.js", "/static/../server.py"])
def test_every_answer_forbids_inline_scripts_frames_and_other_sites(place, browser):
    headers = browser.get(place).headers
    assert headers["content-security-policy"] == POLICY
    assert "unsafe-inline" not in POLICY.split("script-src")[1].split(";")[0]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"


@each("place", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py",
                "/run/..%2f..%2fetc%2fpasswd", "/run/%2fetc", "/run/../../etc/passwd",
                "/job/..%2fx", "/live/run/..", "/run/" + "a" * 5000, "/run/%00"])  # fmt: skip
def test_no_address_leads_out_of_the_folders(place, browser):
    answer = browser.get(place)
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text
    assert "make_app" not in answer.text


def test_a_slow_body_times_out(monkeypatch, folder):
    monkeypatch.setattr("expert.jobs.board.routes.BODY_SECONDS", 0.01)
    browser = BoardClient(folder)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    cookie = f"expert_board={browser.guard.cookie}"
    told = {"host": "127.0.0.1:7373", "cookie": cookie, "content-type": "application/json"}
    headers = [(key.encode(), value.encode()) for key, value in {**told, **ACTION}.items()]
    scope = {"type": "http", "method": "POST", "path": f"/run/{browser.id_of(RUN)}/notes",
             "headers": headers, "query_string": b"", "http_version": "1.1"}  # fmt: skip
    asyncio.run(browser.guard(scope, receive, send))
    assert sent[0]["status"] == 408
