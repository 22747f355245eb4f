"""`expert serve` from its first line to its end by a signal."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from expert.answer import engine as answer_engine
from expert.answer import steps as answer_steps
from expert.jobs.serve import listen
from tests.cli.running import Ran, Runner
from tests.jobs.runs import until
from tests.jobs.trained_runs import finished

ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "say cat 1"}]}


def served(run: Runner, act: Callable[[Any], None], *words: str) -> tuple[int, Ran]:
    """Serve, which has the main thread, until a client has acted; the port, and what was shown."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]

    def is_up() -> bool:
        with socket.socket() as found:
            return found.connect_ex(("127.0.0.1", port)) == 0

    def wait_and_act() -> None:
        until(is_up, 120)
        place = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=place, api_key="-", max_retries=0, timeout=60)
        try:
            act(client)
        finally:
            client.close()
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    ran = run("serve", *words, "--port", str(port))
    thread.join()
    return port, ran


def test_serve_prints_its_address_an_example_and_a_line_per_request(run):
    found: list[Any] = []

    def ask(client: Any) -> None:
        found.append(client.chat.completions.create(**ASKED))

    port, ran = served(run, ask, str(finished("lora")), "--device", "cpu")
    assert ran.code == 143
    assert found[0].choices[0].message.content
    assert ran.err.endswith("stopped by SIGTERM: nothing is served any more\n")
    lines = ran.out.splitlines()
    assert lines[0] == f"serving http://127.0.0.1:{port}/v1"
    assert any(line.startswith("curl http://127.0.0.1:") for line in lines)
    assert any(line.startswith("openai.OpenAI(") and 'api_key="-"' in line for line in lines)
    assert "  200  demo  " in lines[-1]


def test_running_answers_are_cut_after_a_while(run, monkeypatch):
    monkeypatch.setattr(listen, "GRACE", 0.3)
    monkeypatch.setattr(answer_engine, "end_tokens", lambda encoder, template: [])
    advance = answer_steps.FixedSteps.advance

    def slowly(self: Any, tokens: Any, live: Any = ()) -> None:
        time.sleep(0.05)
        advance(self, tokens, live)

    monkeypatch.setattr(answer_steps.FixedSteps, "advance", slowly)
    said: list[str | None] = []

    def ask(client: Any) -> None:
        stream = client.chat.completions.create(**ASKED, stream=True, max_tokens=30)
        try:
            for chunk in stream:
                if not said:
                    os.kill(os.getpid(), signal.SIGINT)
                said.append(chunk.choices[0].finish_reason)
        except openai.APIError as error:
            said.append(error.message)

    _, ran = served(run, ask, f"demo={finished('lora')}", "--device", "cpu", "-q")
    assert ran.code in (130, 143)  # the helper's own signal may be the second
    assert said[-1] == "the server was stopped"


def test_the_generated_token_is_printed_for_other_machines(run, monkeypatch):
    monkeypatch.delenv("EXPERT_SERVE_TOKEN", raising=False)
    codes: list[int] = []

    def ask(client: Any) -> None:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        codes.append(401)

    _, ran = served(run, ask, str(finished("lora")), "--host", "0.0.0.0")
    assert codes == [401]
    (made,) = [line for line in ran.out.splitlines() if line.startswith("export EXPERT_SERVE_")]
    assert len(made.partition("=")[2]) >= 32
    assert 'api_key=os.environ["EXPERT_SERVE_TOKEN"]' in ran.out


def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(run, tmp_path):
    assert run("serve", str(tmp_path)).code == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run("serve", str(finished("lora")), "--port", str(port))
    assert ran.code == 2
    assert f"port {port} is in use by another program" in ran.err
    assert "loading" not in ran.err
