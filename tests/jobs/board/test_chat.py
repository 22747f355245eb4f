"""Chat with an expert and its base: `expert serve` as a child process of the board."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.board import chat
from expert.jobs.board.actions import FOLDER, interrupt
from expert.jobs.sample.sample import sample
from tests.each import each
from tests.insight.pages import usual, write_run
from tests.jobs.board.boards import Asked, contents, running
from tests.jobs.runs import until
from tests.jobs.trained_runs import finished
from tests.warm import python
from tests.wording import wording

EMPTY = "empty-20260101-120000"
HELLO = [{"role": "user", "content": "say red 1"}]


def state(asked: Asked, name: str) -> str:
    place = asked.id_of(name)
    return asked.board.chat.state(asked.board.places.found[place])[0]


def child_of(asked: Asked) -> Any:
    assert asked.board.chat._child is not None
    return asked.board.chat._child


def answered(asked: Asked, name: str, **given: Any) -> tuple[str, list[str]]:
    """The text of an answer, and the errors in it."""
    told = asked.post(f"/run/{asked.id_of(name)}/ask", {"messages": HELLO, **given})
    assert told.status_code == 200, told.text
    lines = [line[6:] for line in told.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    pieces = [c["delta"].get("content", "") for e in events for c in e.get("choices", ())]
    return "".join(pieces), [e["error"]["message"] for e in events if "error" in e]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat")
    run = finished("lora")
    shutil.copytree(run, place / run.name)
    write_run(place / EMPTY, usual(2))
    return place


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Asked]:
    asked = Asked(folder)
    name = finished("lora").name
    before = contents(folder)
    assert state(asked, name) == "none"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python())
        assert asked.post(f"/run/{asked.id_of(name)}/load").status_code == 200
    assert state(asked, name) == "loading"
    until(lambda: state(asked, name) != "loading")
    assert state(asked, name) == "ready", child_of(asked).output
    yield asked
    child = child_of(asked)
    child.process.stdin.close()  # as the system does when the board is killed
    until(lambda: not child.is_running)
    until(lambda: not child._log.parent.exists())
    assert contents(folder) == before  # neither the run nor anything next to it changed


def test_expert_and_base_answer_as_they_do_alone(loaded):
    name = finished("lora").name
    (alone,) = sample(finished("lora"), ["say red 1"], device="cpu").samples
    assert answered(loaded, name, model="expert") == (alone.text, [])
    text, problems = answered(loaded, name, model="base", temperature=1.5, seed=1)
    assert (bool(text), problems) == (True, [])
    drawn = {"model": "expert", "temperature": 1.5, "max_tokens": 4, "seed": 3}
    assert answered(loaded, name, **drawn) == answered(loaded, name, **drawn)
    assert answered(loaded, name, **drawn) != answered(loaded, name, **{**drawn, "seed": 4})


def test_the_page_names_both_conversations_and_offers_what_can_be_set(loaded):
    page = loaded.page(f"/run/{loaded.id_of(finished('lora').name)}/chat")
    for part in ('role="log"', 'aria-label="Conversation with the expert"', 'data-state="ready"',
                 'name="temperature"', 'name="max_tokens"', 'name="seed"'):  # fmt: skip
        assert part in page
    chats = loaded.page("/chat")
    assert finished("lora").name in chats
    assert EMPTY not in chats  # it has no checkpoint to chat with


def test_the_port_of_the_child_answers_nobody_without_its_token(loaded):
    import httpx

    child = child_of(loaded)
    place = f"{child.address}/v1/chat/completions"
    assert httpx.post(place, json={}, trust_env=False).status_code == 401
    page = loaded.page(f"/run/{loaded.id_of(finished('lora').name)}/chat")
    assert child.token not in page + " ".join(child.process.args)


def test_a_conversation_that_fills_the_context_is_told_in_the_words_of_serve(loaded):
    long = [{"role": "user", "content": "red " * 40_000}]
    _, problems = answered(loaded, finished("lora").name, model="expert", messages=long)
    assert "context" in problems[0]


@each("given", [
    {"model": "other"}, {"model": "expert", "messages": []}, {"model": "expert", "messages": "x"},
    {"model": "expert", "messages": [{"role": "tool", "content": "x"}]},
    {"model": "expert", "messages": [{"role": "user", "content": "x", "name": "y"}]},
    {"model": "expert", "messages": HELLO * 201},
])  # fmt: skip
def test_what_the_page_has_no_field_for_is_refused(given, loaded):
    place = f"/run/{loaded.id_of(finished('lora').name)}/ask"
    assert loaded.post(place, {"messages": HELLO, **given}).status_code == 400


@each("setting", [{"temperature": 9}, {"max_tokens": 0}, {"seed": "x"}])
def test_a_setting_out_of_bounds_is_told_in_the_words_of_serve(setting, loaded):
    _, problems = answered(loaded, finished("lora").name, model="expert", **setting)
    assert next(iter(setting)) in problems[0]


def test_a_run_without_an_expert_says_so_and_leaves_the_other_loaded(loaded):
    answer = loaded.post(f"/run/{loaded.id_of(EMPTY)}/load")
    assert answer.status_code == 409
    assert answer.json()["problem"] == wording("no-expert-yet", name=EMPTY)
    assert state(loaded, finished("lora").name) == "ready"
    assert state(loaded, EMPTY) == "other"
    assert answered(loaded, EMPTY, model="expert") == ("", [wording("expert-not-loaded")])


def test_a_read_only_board_does_not_chat(folder):
    asked = Asked(folder, read_only=True)
    place = f"/run/{asked.id_of(EMPTY)}"
    assert asked.get("/chat").status_code == asked.get(f"{place}/chat").status_code == 403
    assert asked.post(f"{place}/load").status_code == asked.post(f"{place}/ask").status_code == 403
    assert "/chat" not in asked.page(place)


# --- how a child ends ----------------------------------------------------------------------------


SLEEPS = "import time; print('serving http://127.0.0.1:1/v1', flush=True); time.sleep(600)"


@pytest.fixture
def asleep(folder, monkeypatch) -> Iterator[Asked]:
    """A board whose child process loads nothing and reports that it is ready."""
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **how: real([sys.executable, "-c", SLEEPS], **how)
    )
    asked = Asked(folder)
    yield asked
    asked.board.chat.end()


def load(asked: Asked, name: str) -> chat.ServeProcess:
    assert asked.post(f"/run/{asked.id_of(name)}/load").status_code == 200
    until(lambda: state(asked, name) == "ready")
    found: chat.ServeProcess = child_of(asked)
    return found


def test_models_that_nobody_asks_are_unloaded(asleep, monkeypatch):
    monkeypatch.setattr(chat, "UNUSED_SECONDS", 1.0)
    name = finished("lora").name
    child = load(asleep, name)
    until(lambda: not child.is_running)
    assert wording("chat-idle") in asleep.page(f"/run/{asleep.id_of(name)}/chat")


def test_another_run_takes_the_place_and_the_end_of_the_board_ends_it(asleep, folder):
    name, other = finished("lora").name, "other-20260101-120000"
    shutil.copytree(folder / name, folder / other)
    first = load(asleep, name)
    assert load(asleep, name) is first
    second = load(asleep, other)
    assert not first.is_running
    assert state(asleep, name) == "other"
    assert answered(asleep, other, model="expert") == ("", [wording("expert-was-unloaded")])
    (folder / "expert").mkdir()
    (folder / "expert" / "manifest.yaml").write_text("name: x\n", encoding="utf-8")
    asleep.post(f"/manifest/{asleep.id_of('expert', 'manifest')}/train")
    (job,) = asleep.board.jobs.all()
    interrupt(job.holder)
    until(lambda: job.exit_code is not None)
    assert not second.is_running
    second = load(asleep, other)
    with running(asleep.board):
        pass
    until(lambda: not second.is_running)
    for name in (other, "expert", FOLDER):
        shutil.rmtree(folder / name)


def test_what_serve_says_where_it_cannot_load_is_shown(folder):
    asked, name = Asked(folder), "broken-20260101-120000"
    shutil.copytree(folder / finished("lora").name, folder / name)
    (folder / name / "plan.json").write_text("{}", encoding="utf-8")
    asked.post(f"/run/{asked.id_of(name)}/load")
    until(lambda: state(asked, name) == "failed")
    page = asked.page(f"/run/{asked.id_of(name)}/chat")
    assert "plan.json" in page
    assert wording("other-bytes-than-written") in page
    shutil.rmtree(folder / name)
