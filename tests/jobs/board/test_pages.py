"""The pages of normal runs and of hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from expert.core.errors import ExpertError
from expert.core.links import LinkRefused
from expert.insight.page.comparison import comparison_section
from expert.jobs.board import summaries as reading
from expert.jobs.board import views
from expert.jobs.board.app import warning_about
from expert.jobs.board.folders import MAX_TAGS, NOTES_FILE, BoardFolders, Notes, read_notes
from expert.jobs.board.render import part
from expert.jobs.board.routes import make_board
from expert.jobs.board.summaries import EventReader
from expert.jobs.board.views import Hub, RunView, View
from expert.jobs.diagnose.diagnose import diagnose_run
from tests.each import each
from tests.insight.pages import (
    HOSTILE,
    START,
    Tags,
    eval_event,
    hostile_run,
    started,
    step_event,
    text_of,
    usual,
    write_run,
)
from tests.jobs.board.board_client import BoardClient

ONE, TWO = "one-20260101-120000", "two-20260101-120000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / ONE, usual(gpu=True), gpu=True)
    write_run(tmp_path / "runs" / TWO, [started(), step_event(1), step_event(2)])
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "manifest.yaml").write_text("name: x\n", encoding="utf-8")
    return tmp_path


def test_the_list_shows_every_run_in_a_table_with_what_was_changed(folder):
    page = BoardClient(folder).page("/")
    text = text_of(page)
    for word in (ONE, TWO, "finished", "killed", "1,900"):
        assert word in text
    assert page.count('class="run" data-state') == 2
    assert "1 finished, 1 killed" in text
    browser = BoardClient(folder)
    told = browser.get("/live/runs").json()
    assert set(told["parts"]) > {"counts", "order"}
    assert browser.get(f"/live/runs?seen={told['seen']}").json() == {**told, "parts": {}}


def test_the_table_shows_the_settings_in_which_runs_differ_and_their_answers(tmp_path):
    judged = {"accuracy": 0.9, "gate": {"passed": True, "reasons": []}}
    for name, rate, validation in ((ONE, 0.5, judged), (TWO, 0.25, None)):
        run = write_run(tmp_path / name, usual(), validation=validation)
        config = {"learning_rate": rate, "epochs": 3, "output_dir": str(tmp_path / name)}
        (run / "manifest.json").write_text(json.dumps({"training": {"config": config}}))
    text = text_of(BoardClient(tmp_path).page("/"))
    assert "learning_rate=0.5 90.0% ✓" in text
    assert "learning_rate=0.25 –" in text
    assert "epochs=" not in text
    assert "output_dir=" not in text


def test_pages_are_compressed(folder):
    browser = BoardClient(folder)
    assert browser.get("/").headers["content-encoding"] == "gzip"
    assert browser.get("/static/uplot.js").headers["content-encoding"] == "gzip"


def test_an_empty_folder_offers_to_start_a_run(tmp_path):
    browser = BoardClient(tmp_path)
    page = browser.page("/")
    assert str(tmp_path) in page
    assert 'class="button"' in page
    assert 'class="button"' not in BoardClient(tmp_path, read_only=True).page("/")
    many = "&".join(f"run={n}" for n in range(9))
    for query in ("", "?run=x", "?run=x&run=x", "?run=a&run=b", f"?{many}"):
        assert browser.get(f"/compare{query}").status_code in (400, 404)


def test_a_run_shows_the_sections_of_its_report_and_its_status(folder):
    browser = BoardClient(folder)
    page = browser.page(f"/run/{browser.id_of(ONE)}")
    for name in ("numbers", "learning", "speed", "time", "story", "plan", "findings"):
        assert f'<section id="{name}"' in page or f'id="{name}"' in page, name
    for figure in ("loss", "throughput", "utilisation", "memory", "power", "average-step"):
        assert f'id="figure-{figure}"' in page
    assert 'data-state="finished"' in page
    assert 'role="progressbar"' in page
    text = text_of(page.partition('id="sections"')[2].partition("</nav>")[0])
    assert "Loss Findings Key numbers Learning Speed Where the time went What happened" in text


def test_the_comparison_is_that_of_the_report(folder):
    browser = BoardClient(folder)
    page = browser.page(f"/compare?run={browser.id_of(ONE)}&run={browser.id_of(TWO)}")
    runs = [diagnose_run(folder / "runs" / name) for name in (ONE, TWO)]
    assert part("section", comparison_section(runs)) in page


@each("text", HOSTILE)
def test_hostile_text_stays_text_on_every_page(text, tmp_path):
    name = re.sub(r"[/\x00\ud800]", "", text)[:40].strip(".") or "x"
    run = hostile_run(tmp_path / "runs" / f"{name}-20260101-120000", text)
    (run / NOTES_FILE).write_text(json.dumps({"tags": [text[:40]], "note": text}), encoding="utf-8")
    write_run(tmp_path / "runs" / TWO, usual())
    browser = BoardClient(tmp_path)
    one, two = browser.id_of(run.name), browser.id_of(TWO)
    for place in (
        "/",
        f"/run/{one}",
        f"/compare?run={one}&run={two}",
        "/start",
        f"/run/{one}/chat",
    ):
        harmless(browser.page(place))


def harmless(html: str) -> None:
    """No event handler, no script but the board's, no link to another site."""
    tags = Tags(html)
    assert tags.open == []
    for name, attributes in tags.found:
        assert name not in ("iframe", "object", "embed", "style", "base", "img", "image", "use")
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            assert key != "src" or re.fullmatch(r"/static/[a-z.]+", value)
            assert key != "href" or re.match(r"/(?!/)|#|data:,$", value), value
            assert key != "style" or re.fullmatch(r"[a-z0-9.:;%-]+", value)
    assert all(attributes.get("src") for name, attributes in tags.found if name == "script")


# --- folders -------------------------------------------------------------------------------------


def test_links_hidden_folders_checkpoints_and_deep_ones_are_not_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_run(elsewhere / "secret-20260101-120000", usual())
    (folder / "linked").symlink_to(elsewhere)
    (folder / "runs" / "secret-20260101-120001").symlink_to(elsewhere / "secret-20260101-120000")
    for place in (".cache", "checkpoints", "a/b/c/d/e/f/g"):  # these are not searched either
        write_run(folder / place / "hidden-20260101-120000", usual(2))
    places = BoardFolders.of([folder])
    places.search()
    assert sorted(run.name for run in places.of_kind("run")) == [ONE, TWO]


def test_a_run_that_became_a_link_is_not_shown_any_more(folder, tmp_path_factory):
    elsewhere = write_run(tmp_path_factory.mktemp("elsewhere") / "x", usual())
    browser = BoardClient(folder)
    name = browser.id_of(ONE)
    os.rename(folder / "runs" / ONE, folder / "gone")
    (folder / "runs" / ONE).symlink_to(elsewhere)
    assert browser.get(f"/run/{name}").status_code == 404
    assert browser.post(f"/run/{name}/notes", {"tags": "x"}).status_code == 404
    assert not (elsewhere / NOTES_FILE).exists()


def test_a_run_with_a_link_inside_says_so_and_shows_nothing_of_it(folder):
    (folder / "passwd").write_text("secret", encoding="utf-8")
    events = folder / "runs" / ONE / "events.jsonl"
    events.unlink()
    events.symlink_to(folder / "passwd")
    browser = BoardClient(folder)
    page = browser.page(f"/run/{browser.id_of(ONE)}")
    assert "events.jsonl: is a link" in page
    assert 'data-state="unreadable"' in page


# --- notes ---------------------------------------------------------------------------------------


def test_tags_and_notes_are_kept_beside_the_run_within_limits_and_shown(folder):
    browser = BoardClient(folder)
    place = f"/run/{browser.id_of(ONE)}"
    before = (folder / "runs" / ONE / "plan.json").read_bytes()
    answer = browser.post(f"{place}/notes", {"tags": "keep,  <b>bold</b> ,keep,", "note": "a\nb"})
    assert answer.json() == {"go": place}
    assert read_notes(folder / "runs" / ONE) == Notes(("keep", "<b>bold</b>"), "a\nb")
    assert (folder / "runs" / ONE / "plan.json").read_bytes() == before
    page = browser.page(place)
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<b>bold" not in page
    tags = ",".join(f"{n}" * 99 for n in range(50))
    browser.post(f"{place}/notes", {"tags": tags, "note": "x" * 99_999})
    notes = read_notes(folder / "runs" / ONE)
    assert (len(notes.tags), max(map(len, notes.tags)), len(notes.text)) == (MAX_TAGS, 40, 4_000)


# --- live ----------------------------------------------------------------------------------------


class Counted(View):
    """A view whose elements a test sets."""

    now: ClassVar[dict[str, str]] = {"a": "<p>1</p>", "order": "a"}

    def elements(self) -> dict[str, str]:
        return self.now


def test_two_tabs_get_what_changed_and_a_new_server_sends_everything(monkeypatch):
    monkeypatch.setattr(views, "TICK_SECONDS", 0.0)

    async def both() -> None:
        hub = Hub()
        view = await hub.view("x", Counted)
        before = str(view.seen)
        assert view.changes_since("7")["parts"] == {"a": "<p>1</p>", "order": "a"}
        assert view.changes_since(before) == {"seen": before, "parts": {}}
        monkeypatch.setattr(Counted, "now", {"a": "<p>2</p>", "order": "a"})
        assert await hub.view("x", Counted) is view  # one view, however many tabs
        for _ in range(2):
            assert view.changes_since(before)["parts"] == {"a": "<p>2</p>"}
        monkeypatch.setattr(views, "KEPT_SECONDS", -1.0)
        assert await hub.view("x", Counted) is not view  # nobody asked for it any more

    asyncio.run(asyncio.wait_for(both(), 20))


def test_a_run_that_continues_sends_its_new_numbers(folder):
    browser = BoardClient(folder)
    found = browser.board.places.get(browser.id_of(TWO), "run")
    lock = {"pid": os.getpid(), "host": os.uname().nodename, "since": "", "process": ""}
    (found.path / ".lock").write_text(json.dumps(lock), encoding="utf-8")
    view = RunView(found, browser.board.summaries)
    view.refresh()
    assert 'data-state="running"' in view.html("status")
    with (found.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(step_event(3, loss=0.125, time=START + 3)) + "\n")
    view._status_pace._next = view._report_pace._next = 0.0
    second = view.elements()
    assert "0.1250" in second["status"]
    assert {"status", "verdict", "learning", "speed", "time"} <= set(second)


def test_a_fix_has_a_button_that_copies_the_change(folder):
    clipped = [step_event(n, grad_norm=9.0) for n in range(1, 101)]
    plan = {"kernels": {"device": "cpu"}, "optim": {"max_grad_norm": 1.0}}
    write_run(folder / "runs" / "slow-20260101-120000", [started(), *clipped], plan=plan)
    browser = BoardClient(folder)
    page = browser.page(f"/run/{browser.id_of('slow-20260101-120000')}")
    assert 'id="finding-always-clipped"' in page
    assert 'data-action="copy" data-copy="training:\n  config:\n    max_grad_norm:' in page


def test_a_missing_folder_is_an_error_and_a_public_host_a_warning(tmp_path):
    with pytest.raises(ExpertError) as error:
        make_board([tmp_path / "none"], read_only=False)
    assert f"{tmp_path / 'none'}: there is no such folder  (" in str(error.value)
    assert warning_about("127.0.0.1") == warning_about("localhost") == ""
    assert warning_about("0.0.0.0").startswith(
        "0.0.0.0 is not loopback: anyone with the token can start programs here"
    )


# --- events are read from where the last read ended ----------------------------------------------


def written(path: Path, events: list[dict[str, Any]], mode: str = "w") -> Path:
    with path.open(mode, encoding="utf-8") as stream:
        stream.write("".join(json.dumps(event) + "\n" for event in events))
    return path


def shortened(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without log lines that another one follows."""
    kinds = [event["event"] for event in events[1:]] + [""]
    pairs = zip(events, kinds, strict=True)
    return [event for event, following in pairs if (event["event"], following) != ("step",) * 2]


def test_an_incomplete_line_is_read_later(tmp_path):
    path = written(tmp_path / "events.jsonl", [started()])
    line = json.dumps(step_event(1)).encode()
    reader = EventReader(path)
    with path.open("ab") as stream:
        stream.write(line[:20])
    reader.read_new()
    assert len(reader.events) == 1
    with path.open("ab") as stream:
        stream.write(line[20:] + b"\n")
    reader.read_new()
    assert reader.events[-1] == step_event(1)
    reader.read_new()


def test_a_truncated_or_replaced_file_is_read_again(tmp_path):
    path = written(tmp_path / "events.jsonl", usual(9))
    reader = EventReader(path)
    reader.read_new()
    written(path, usual(3))
    reader.read_new()
    assert reader.events == shortened(usual(3))
    written(tmp_path / "other", usual(4)).replace(path)
    reader.read_new()
    assert reader.events == shortened(usual(4))


def test_damaged_lines_missing_files_and_links(tmp_path):
    EventReader(tmp_path / "none").read_new()
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "started"}\nnot json\n\n{"event": 5}\n')
    reader = EventReader(path)
    reader.read_new()
    assert [event["event"] for event in reader.events] == ["started"]
    assert reader.damaged == 2
    # A line that is too long is dropped.
    path.write_bytes(b"x" * (reading.MAX_LINE_BYTES + 2))
    reader = EventReader(path)
    reader.read_new()
    assert reader.damaged == 1
    reader.read_new()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkRefused):
        EventReader(path).read_new()


@each("chunk", [500, 5_000, 2**23])
def test_of_log_lines_in_a_row_the_last_is_kept(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "CHUNK", chunk)
    events = [started()]
    for step in range(1, 301):
        events += [step_event(step)] + ([eval_event(step)] if step % 100 == 0 else [])
    reader = EventReader(written(tmp_path / "events.jsonl", [*events, step_event(301)]))
    reader.read_new()
    assert reader.events == shortened([*events, step_event(301)])
    written(reader.path, [step_event(302)], "a")
    reader.read_new()
    assert reader.events == shortened([*events, step_event(302)])
