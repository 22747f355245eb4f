"""A board in a process of its own, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium with its driver here (apt-get install chromium chromium-driver)",
    ),
]
WAIT_SECONDS = 120.0


class Served:
    """`expert board` as a user starts it."""

    def __init__(self, *folders: Path, token: str = "", port: int = 0, read_only: bool = False):
        more = ["--read-only"] if read_only else []
        command = [sys.executable, "-m", "expert", "board", *map(str, folders), *more]
        env = {**os.environ, **({"EXPERT_BOARD_TOKEN": token} if token else {})}
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.partition("/?")[0].rpartition(":")[2])

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def served(*folders: Path, **how: Any) -> Iterator[Served]:
    board = Served(*folders, **how)
    try:
        yield board
    finally:
        if board.process.poll() is None:
            board.stop(signal.SIGKILL)


@contextmanager
def browser(profile: Path, *, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """Chromium through selenium; nothing it says on its console is lost."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    flags = ["--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={profile}", f"--window-size={width},900"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")  # it refuses root otherwise
    for flag in flags:
        options.add_argument(flag)
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def find(driver: Any, selector: str, containing: str = "") -> Any:
    """The first element that is shown and holds the text, once it is there."""
    from selenium.common.exceptions import StaleElementReferenceException

    def found() -> Any:
        for one in driver.find_elements("css selector", selector):
            try:
                if one.is_displayed() and containing in (one.text or ""):
                    return one
            except StaleElementReferenceException:  # replaced by a newer one meanwhile
                return None
        return None

    return until(found, f"{selector} with {containing!r}", driver)


def until(found: Callable[[], Any], what: str, driver: Any = None) -> Any:
    ends = time.monotonic() + WAIT_SECONDS
    while True:
        result = found()
        if result:
            return result
        if time.monotonic() > ends:
            shown = driver.find_element("tag name", "body").text[:1500] if driver else ""
            raise AssertionError(f"waited for {what}\n{shown}")
        time.sleep(0.1)


def click(driver: Any, selector: str, containing: str = "") -> None:
    """Click as a person does; an element that was replaced meanwhile is looked for again."""
    from selenium.common.exceptions import StaleElementReferenceException

    for _ in range(20):
        try:
            found = find(driver, selector, containing)
            driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
            found.click()
            return
        except StaleElementReferenceException:
            continue
    raise AssertionError(f"{selector} does not stay")


def said(driver: Any) -> list[str]:
    """What the console holds: errors of scripts, refusals of the policy, failed requests."""
    return [entry["message"] for entry in driver.get_log("browser")]
