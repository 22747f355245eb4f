"""The report in a real browser: nothing is asked for, nothing fails, every figure is to be seen.

Another page looks at it: it shows the report in a frame, measures what lies in there, and writes
that down where `--dump-dom` finds it.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from expert.jobs.report import report
from tests.browser.boards import CHROMIUM
from tests.insight.pages import (
    HOSTILE,
    hostile_run,
    some_ladder,
    usual,
    write_run,
)
from tests.jobs.trained_runs import finished as finished_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no Chromium here: nothing was looked at (apt-get install chromium)",
    ),
]
PHONE, SCREEN = 390, 1280
LOOK = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="seen"></pre>
<iframe id="page" src="{address}" width="{width}" height="900"></iframe>
<script>
const size = element => {{
  const box = element.getBoundingClientRect();
  return [box.width, box.height];
}};
document.getElementById("page").addEventListener("load", event => {{
  const view = event.target.contentWindow, page = view.document;
  document.getElementById("seen").textContent = JSON.stringify({{
    title: page.title,
    figures: [...page.querySelectorAll("figure")].map(figure => ({{
      name: figure.id,
      size: size(figure),
      drawings: [...figure.querySelectorAll("canvas, .bars, .wide-bar")].map(size),
    }})),
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    width: page.documentElement.scrollWidth,
    ink: view.getComputedStyle(page.body).color,
    scripts: page.scripts.length,
  }});
}});
</script>"""


@dataclass(frozen=True)
class Seen:
    """What a browser saw of a page."""

    facts: dict[str, Any]
    console: list[str]


def chromium(profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    usual_flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions"]
    usual_flags += ["--disable-background-networking", "--disable-component-update"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        usual_flags.append("--no-sandbox")  # it refuses root otherwise
    command = [CHROMIUM, *usual_flags, f"--user-data-dir={profile}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def look(page: Path, place: Path, *, width: int = SCREEN, dark: bool = False) -> Seen:
    """Open the page from the disk, as wide as that."""
    place.mkdir(exist_ok=True)
    watcher = place / "watcher.html"
    watcher.write_text(LOOK.format(address=page.resolve().as_uri(), width=width), encoding="utf-8")
    flags = ["--allow-file-access-from-files", "--enable-logging=stderr"]
    flags += ["--virtual-time-budget=5000", f"--window-size={SCREEN + 100},1000"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = chromium(place / "profile", *flags, "--dump-dom", watcher.as_uri())
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[:500]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(json.loads(html.unescape(found[1])), console)


def check(seen: Seen, figures: tuple[str, ...], *, width: int) -> None:
    """All figures are there and can be seen; nothing was asked for, said or cut off."""
    assert seen.console == []
    assert seen.facts["requests"] == []
    assert seen.facts["scripts"] == 1
    assert [figure["name"] for figure in seen.facts["figures"]] == [f"figure-{n}" for n in figures]
    for figure in seen.facts["figures"]:
        assert min(figure["size"]) > 50, figure
        assert figure["drawings"], figure
        assert all(min(size) > 10 for size in figure["drawings"]), figure
    assert seen.facts["width"] <= width


@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_the_page_of_a_real_run_is_whole_on_a_screen_and_on_a_phone(tmp_path, width):
    folder = shutil.copytree(finished_run("lora"), tmp_path / "run")
    written = report(folder)
    assert len(written.figures) == 7
    check(look(written.html, tmp_path / "look", width=width), written.figures, width=width)


def test_every_kind_of_figure_is_seen_side_by_side_with_another_run(tmp_path):
    one = write_run(tmp_path / "one", usual(gpu=True), gpu=True)
    two = write_run(tmp_path / "two", usual(20, gpu=True), gpu=True)
    (one / "ladder.json").write_text(some_ladder().model_dump_json(), encoding="utf-8")
    written = report(one, compare=[two])
    assert {"ladder", "memory", "power", "loss-by-step"} <= set(written.figures)
    check(look(written.html, tmp_path / "look", width=PHONE), written.figures, width=PHONE)


def test_hostile_text_neither_runs_nor_loads_anything(tmp_path):
    text = " ".join(HOSTILE)
    written = report(hostile_run(tmp_path / "run", text))
    seen = look(written.html, tmp_path / "look")
    check(seen, written.figures, width=SCREEN)
    assert "<script>alert(1)</script>" in seen.facts["title"]


# --- the look itself -----------------------------------------------------------------------------


class Asked(BaseHTTPRequestHandler):
    """Answers nothing and keeps what was asked for."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Not a word on standard error."""


@pytest.fixture
def server():
    Asked.paths.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_policy_stops_what_got_around_the_escaping(tmp_path, server):
    written = report(write_run(tmp_path / "run", usual()))
    page = written.html.read_text(encoding="utf-8")
    smuggled = f'<img src="{server}/bad.png" onerror="document.title=1">'
    smuggled += f'<script>document.title=2</script><iframe src="{server}/frame"></iframe>'
    assert "</main>" in page
    written.html.write_text(page.replace("</main>", f"{smuggled}</main>"), encoding="utf-8")
    seen = look(written.html, tmp_path / "look")
    assert seen.facts["title"] not in ("1", "2")
    assert Asked.paths == []
    assert seen.console, "the browser says what it refused"
