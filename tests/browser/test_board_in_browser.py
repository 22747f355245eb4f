"""The board in a real browser: every page, a run by clicks alone, two tabs, a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from expert.core.rundir import RunFolder
from expert.jobs.board.actions import trainer_of
from tests.browser.boards import browser, click, find, needs_browser, said, served, until
from tests.insight.pages import started, step_event, usual, write_run

pytestmark = needs_browser
ONE, TWO = "one-20260101-120000", "two-20260101-120000"
ROWS = "".join(
    json.dumps({"prompt": f"Is {number} a number?", "response": "yes"}) + "\n"
    for number in range(150)
)


def two_runs(folder: Path) -> Path:
    write_run(folder / "runs" / ONE, usual(gpu=True), gpu=True)
    write_run(folder / "runs" / TWO, usual(20, gpu=True), gpu=True)
    return folder


@contextmanager
def ended(work: Path):
    """Runs that pages started outlive everything, a test that fails too."""
    try:
        yield
    finally:
        for lock in work.rglob(".lock"):
            if (trainer := trainer_of(RunFolder(lock.parent))) is not None:
                os.kill(trainer.pid, signal.SIGKILL)


def overflow(driver) -> int:
    """Pixels by which a page is wider than its window."""
    root = "document.documentElement"
    return int(driver.execute_script(f"return {root}.scrollWidth - {root}.clientWidth"))


def test_every_page_is_whole_on_a_screen_and_on_a_phone_light_and_dark(tmp_path):
    folder = two_runs(tmp_path / "work")
    inks = set()
    with served(folder) as board:
        for width, dark in ((1280, False), (390, True)):
            with browser(tmp_path / f"profile{width}", width=width, dark=dark) as driver:
                driver.get(board.url)
                find(driver, "#connection", "live")
                assert "token" not in driver.current_url
                inks.add(driver.execute_script("return getComputedStyle(document.body).color"))
                places = [one.get_attribute("href") for one in
                          driver.find_elements("css selector", "tr.run a")]  # fmt: skip
                assert len(places) == 2
                ids = [place.rpartition("/")[2] for place in places]
                base = board.url.partition("/?")[0]
                more = [
                    f"{base}/compare?run={ids[0]}&run={ids[1]}",
                    f"{base}/start",
                ]
                for place in (f"{base}/", *places, *more):
                    driver.get(place)
                    find(driver, "main h1")
                    assert overflow(driver) <= 0, place
                    assert said(driver) == [], place
                    figures = driver.find_elements("css selector", "figure canvas")
                    assert all(one.size["width"] > 10 for one in figures if one.is_displayed())
                driver.get(places[0])
                assert len(driver.find_elements("css selector", "figure")) >= 7
    assert len(inks) == 2


def test_runs_are_filtered_compared_and_tagged_with_the_keyboard(tmp_path):
    from selenium.webdriver.common.keys import Keys

    folder = two_runs(tmp_path / "work")
    with served(folder) as board, browser(tmp_path / "profile") as driver:
        driver.get(board.url)
        find(driver, "tr.run", ONE)
        driver.find_element("tag name", "body").send_keys("/")
        field = driver.switch_to.active_element
        assert field.get_attribute("id") == "filter"
        field.send_keys("two")
        until(lambda: len([a for a in driver.find_elements("css selector", "tr.run")
                           if a.is_displayed()]) == 1, "one run", driver)  # fmt: skip
        field.send_keys(Keys.BACKSPACE * 3)
        for box in driver.find_elements("css selector", "tr.run input"):
            box.send_keys(Keys.SPACE)
        click(driver, "#compare", "Compare 2")
        find(driver, "#figure-loss-by-step")
        driver.get(board.url)
        click(driver, "tr.run a", ONE)
        click(driver, ".notes summary")
        driver.find_element("name", "tags").send_keys("keep, <i>x</i>")
        driver.find_element("name", "note").send_keys("the good one")
        click(driver, ".notes button", "Save")
        find(driver, ".notes .tag", "<i>x</i>")
        driver.get(board.url)
        find(driver, "tr.run .tag", "keep")
        find(driver, "tr.run .note", "the good one")
        assert said(driver) == []


def test_two_tabs_follow_a_run_and_outlive_a_restart_of_the_server(tmp_path):
    run = write_run(tmp_path / "work" / ONE, [started(), *(step_event(n) for n in range(1, 6))])
    lock = {"pid": os.getpid(), "host": os.uname().nodename, "since": "", "process": ""}
    (run / ".lock").write_text(json.dumps(lock), encoding="utf-8")

    def log(step: int, **more) -> None:
        with (run / "events.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(step_event(step, **more)) + "\n")

    with browser(tmp_path / "profile") as driver:
        with served(tmp_path / "work", token="t" * 30) as board:
            port = board.port
            driver.get(board.url)
            click(driver, "tr.run a", ONE)
            find(driver, "#connection", "live")
            first = driver.current_window_handle
            place = driver.current_url
            driver.switch_to.new_window("window")
            driver.get(place)
            log(6, loss=0.7777)
            find(driver, "#status", "0.7777")
            driver.switch_to.window(first)
            find(driver, "#status", "0.7777")
            assert board.stop() == 130
        find(driver, "#connection", "lost")
        log(7, loss=0.6666)
        with served(tmp_path / "work", token="t" * 30, port=port):
            find(driver, "#connection", "live")
            find(driver, "#status", "0.6666")
        find(driver, "#connection", "lost")
        with served(tmp_path / "work", port=port):  # another token
            find(driver, "#connection", "restarted")


def test_from_an_empty_folder_to_an_exported_expert_by_clicks_stopped_and_resumed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS, encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    with ended(work), served(work) as board, browser(tmp_path / "profile") as driver:
        driver.get(board.url)
        click(driver, "a.button", "Start a run")
        click(driver, "a.button", "Create one from a data file")
        find(driver, "input[type=file]").send_keys(str(rows))
        assert find(driver, "input[name=name]").get_attribute("value") == "rows"
        click(driver, "button", "Create the expert")
        find(driver, "#plan .cards", "45")  # steps: 5 epochs of 9
        assert overflow(driver) <= 0
        field = find(driver, "input[name='training.config.epochs']")
        field.clear()
        field.send_keys("4")
        find(driver, "#plan .cards", "36")
        field = find(driver, "input[name='training.config.batch_size']")
        field.clear()
        field.send_keys("many")
        find(driver, "#plan pre", "batch_size")
        field.clear()
        field.send_keys("16")
        find(driver, "#plan .cards", "36")
        find(driver, "#rows pre", "Is 0 a number?")
        click(driver, ".fields summary")
        field = find(driver, "textarea[name='training.config.lr_scheduler_kwargs']")
        field.send_keys("min_lr: soon")
        find(driver, "textarea[aria-invalid=true]")
        find(driver, "#plan pre", "lr_scheduler_kwargs")
        field.clear()
        field.send_keys("min_lr: 1e-6")
        find(driver, "textarea[name='training.config.lr_scheduler_kwargs'][aria-invalid=false]")
        field = find(driver, "input[name='training.config.logging_steps']")
        field.clear()
        field.send_keys("1")
        find(driver, "#plan .cards", "36")
        assert said(driver) == []
        click(driver, "button", "Start training")
        click(driver, "a.button", "Open the run")
        find(driver, "#figure-loss")
        click(driver, "button", "Stop")
        driver.switch_to.alert.accept()
        find(driver, "#status .pill", "stopped")
        assert said(driver) == []
        stopped_at = int(find(driver, "#status .fact b").text.partition(" ")[0].replace(",", ""))
        # Killing the board does nothing to a run that it resumes.
        click(driver, "button", "Resume")
        find(driver, "#job .pill", "running")
        click(driver, "a.button", "Open the run")
        find(driver, "#status .pill", "running")
        board.stop(signal.SIGKILL)
        with served(work) as second:
            driver.get(second.url)
            click(driver, "tr.run a")
            find(driver, "#status .pill", "finished")
            until(lambda: driver.find_elements("css selector", "#story"), "the story", driver)
            assert "resumed" in driver.find_element("id", "story").text
            assert stopped_at > 0
            click(driver, "button", "Validate")
            find(driver, "#job .pill", "finished")
            click(driver, "a.button", "Open the run")
            find(driver, "#validation h2", "Validation")
            click(driver, "button", "Export adapter")
            find(driver, "#job .pill", "finished")
            assert (work / "exports").is_dir()
            # Not what the page of the killed board said.
            assert [text for text in said(driver) if f":{board.port}/" not in text] == []


def test_an_expert_and_its_base_answer_beside_each_other(tmp_path):
    from selenium.webdriver.common.keys import Keys

    work = tmp_path / "work"
    work.mkdir()
    (work / "rows.jsonl").write_text(ROWS, encoding="utf-8")
    words = ["new", "demo", "--from", "rows.jsonl", "--model", "tiny"]
    more = ["--manifest", "demo", "--set", "training.config.max_steps=4"]
    for command in (words, ["train", *more, "--output", "runs"]):
        subprocess.run([sys.executable, "-m", "expert", *command], cwd=work, check=True)

    def answers(name: str) -> list[str]:
        found = driver.find_elements("css selector", f"#talk-{name} .theirs small")
        return [one.text for one in found if one.text]

    with served(work) as board, browser(tmp_path / "profile", width=390, dark=True) as driver:
        driver.get(board.url)
        click(driver, "nav a", "Chat")
        click(driver, "tr.run a", "demo-")
        find(driver, "#status .pill", "ready")
        field = find(driver, "textarea")
        field.send_keys("Is <b>7</b>", Keys.SHIFT, Keys.ENTER, Keys.NULL, "a number?", Keys.ENTER)
        for name in ("expert", "base"):
            assert find(driver, f"#talk-{name} .mine").text == "Is <b>7</b>\na number?"
            until(partial(answers, name), "an answer", driver)
            assert driver.find_elements("css selector", f"#talk-{name} b") == []
        click(driver, "#chat summary", "Settings")
        find(driver, "input[name=max_tokens]").send_keys("3")
        field.send_keys("Again?", Keys.ENTER)
        until(lambda: answers("base")[1:] and answers("expert")[1:], "second answers", driver)
        assert "3 tokens" in answers("base")[1]
        find(driver, "input[name=max_tokens]").send_keys("000")
        find(driver, "input[name=temperature]").send_keys("2")
        field.send_keys("And on and on?", Keys.ENTER)
        click(driver, "#halt")
        until(lambda: answers("base")[2:] == answers("expert")[2:] == ["stopped"], "stop", driver)
        click(driver, "#anew")
        assert driver.find_elements("css selector", ".said") == []
        assert overflow(driver) <= 0
        assert said(driver) == []
        assert board.stop() == 130
