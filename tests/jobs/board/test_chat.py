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
from tests.insight.pages import usual, write_run
from tests.jobs.board.board_client import BoardClient, contents, running
from tests.jobs.runs import until
from tests.jobs.trained_runs import finished

EMPTY = "empty-20260101-120000"
HELLO = [{"role": "user", "content": "say red 1"}]


def state(browser: BoardClient, name: str) -> str:
    place = browser.id_of(name)
    return browser.board.chat.state(browser.board.places.found[place])[0]


def child_of(browser: BoardClient) -> Any:
    assert browser.board.chat._child is not None
    return browser.board.chat._child


def answered(browser: BoardClient, name: str, **given: Any) -> tuple[str, list[str]]:
    """The text of an answer, and the errors in it."""
    told = browser.post(f"/run/{browser.id_of(name)}/ask", {"messages": HELLO, **given})
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
def loaded(folder: Path) -> Iterator[BoardClient]:
    browser = BoardClient(folder)
    name = finished("lora").name
    before = contents(folder)
    assert state(browser, name) == "none"
    assert browser.post(f"/run/{browser.id_of(name)}/load").status_code == 200
    assert state(browser, name) == "loading"
    until(lambda: state(browser, name) != "loading")
    assert state(browser, name) == "ready", child_of(browser).output
    yield browser
    child = child_of(browser)
    browser.board.chat.end()
    assert not child.is_running
    until(lambda: not child._log.parent.exists())
    assert contents(folder) == before  # neither the run nor anything next to it changed


def test_chat_gives_the_answers_of_expert_sample(loaded):
    name = finished("lora").name
    (alone,) = sample(finished("lora"), ["say red 1"], device="cpu").samples
    assert answered(loaded, name, model="expert") == (alone.text, [])
    text, problems = answered(loaded, name, model="base", temperature=1.5, seed=1)
    assert (bool(text), problems) == (True, [])
    drawn = {"model": "expert", "temperature": 1.5, "max_tokens": 4, "seed": 3}
    assert answered(loaded, name, **drawn) == answered(loaded, name, **drawn)
    assert answered(loaded, name, **drawn) != answered(loaded, name, **{**drawn, "seed": 4})


def test_the_child_process_requires_its_token(loaded):
    import httpx

    child = child_of(loaded)
    place = f"{child.address}/v1/chat/completions"
    assert httpx.post(place, json={}, trust_env=False).status_code == 401
    page = loaded.page(f"/run/{loaded.id_of(finished('lora').name)}/chat")
    assert child.token not in page + " ".join(child.process.args)


def test_the_page_offers_validated_rows_with_what_was_expected_as_text(tmp_path):
    write_run(tmp_path / EMPTY, usual(2))
    cases = [{"prompt": "say <b>red</b> 1", "expected": "red"}, {"prompt": ["damaged"]}]
    text = json.dumps({"cases": cases})
    (tmp_path / EMPTY / "validation.json").write_text(text, encoding="utf-8")
    browser = BoardClient(tmp_path)
    page = browser.page(f"/run/{browser.id_of(EMPTY)}/chat")
    assert 'value="say &lt;b&gt;red&lt;/b&gt; 1" data-expected="red"' in page
    assert page.count("data-expected") == 1


def test_a_run_without_an_expert_says_so_and_leaves_the_other_loaded(loaded):
    answer = loaded.post(f"/run/{loaded.id_of(EMPTY)}/load")
    assert answer.status_code == 409
    assert answer.json()["problem"] == f"{EMPTY} has not saved a checkpoint yet"
    assert state(loaded, finished("lora").name) == "ready"
    assert state(loaded, EMPTY) == "other"
    assert answered(loaded, EMPTY, model="expert") == ("", ["The expert is not loaded."])


def test_a_read_only_board_does_not_chat(folder):
    browser = BoardClient(folder, read_only=True)
    place = f"/run/{browser.id_of(EMPTY)}"
    assert browser.get(f"{place}/chat").status_code == 403
    for action in ("load", "ask"):
        assert browser.post(f"{place}/{action}").status_code == 403
    assert "/chat" not in browser.page(place)


# --- how a child ends ----------------------------------------------------------------------------


SLEEPS = "import time; print('serving http://127.0.0.1:1/v1', flush=True); time.sleep(600)"


@pytest.fixture
def asleep(folder, monkeypatch) -> Iterator[BoardClient]:
    """A board whose child process loads nothing and reports that it is ready."""
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **how: real([sys.executable, "-c", SLEEPS], **how)
    )
    browser = BoardClient(folder)
    yield browser
    browser.board.chat.end()


def load(browser: BoardClient, name: str) -> chat.ServeProcess:
    assert browser.post(f"/run/{browser.id_of(name)}/load").status_code == 200
    until(lambda: state(browser, name) == "ready")
    found: chat.ServeProcess = child_of(browser)
    return found


def test_idle_models_are_unloaded(asleep, monkeypatch):
    monkeypatch.setattr(chat, "IDLE_SECONDS", 1.0)
    name = finished("lora").name
    child = load(asleep, name)
    until(lambda: not child.is_running)
    assert "Unloaded: no question for 1.0 s." in asleep.page(f"/run/{asleep.id_of(name)}/chat")


def test_loading_another_run_or_stopping_the_board_unloads_models(asleep, folder):
    name, other = finished("lora").name, "other-20260101-120000"
    shutil.copytree(folder / name, folder / other)
    first = load(asleep, name)
    assert load(asleep, name) is first
    second = load(asleep, other)
    assert not first.is_running
    assert state(asleep, name) == "other"
    ended = ["The expert was unloaded, or its process ended."]
    assert answered(asleep, other, model="expert") == ("", ended)
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


def test_a_failed_load_shows_the_output_of_serve(folder):
    browser, name = BoardClient(folder), "broken-20260101-120000"
    shutil.copytree(folder / finished("lora").name, folder / name)
    (folder / name / "plan.json").write_text("{}", encoding="utf-8")
    browser.post(f"/run/{browser.id_of(name)}/load")
    until(lambda: state(browser, name) == "failed")
    page = browser.page(f"/run/{browser.id_of(name)}/chat")
    assert "plan.json" in page
    assert "changed after it was written" in page
    shutil.rmtree(folder / name)
