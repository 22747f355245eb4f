"""Hand-written run folders for what a CPU run cannot show (a GPU, faults, hostile text), and
helpers that look into their pages."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from expert.insight.ladder import Ladder
from expert.insight.page.contents import make_page
from expert.insight.page.render import Page, page_html
from expert.jobs.diagnose.diagnose import diagnose_run
from expert.jobs.report import ladder_for
from tests.insight.ladders import ladder as made_ladder
from tests.insight.ladders import setting

GIB = 2**30
START = 1_800_000_000.0
GPU_FIGURES = {"utilisation", "memory", "power"}
FIGURES = {
    "loss",
    "accuracy",
    "rate",
    "gradient-norm",
    "throughput",
    "average-step",
    "whole-run",
}
"""The figures of every run with evaluations and timed steps."""
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "]]><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "../../../etc/passwd",
    "\u202eevil\u202c",
    "</style></title><b>",
    "a|b `c` [d](http://evil.example/x) <http://evil.example>",
    "\x00\x1b[31m\ud800",
)


def step_event(step: int, *, gpu: bool = False, **more: Any) -> dict[str, Any]:
    """A log line of a step that took half a second."""
    loss = 0.5 + 2 * math.exp(-step / 20)
    event = {
        "event": "step",
        "time": START + step,
        "step": step,
        "loss": loss,
        "rate": 1e-4,
        "grad_norm": 0.5,
        "tokens": 1000,
        "targets": 600,
        "examples": 4,
        "tokens_per_second": 2000.0,
        "samples_per_second": 8.0,
        "seconds": 0.5,
        "epoch": step / 100,
        "mfu": 0.4 if gpu else None,
        "time_data_wait": 0.01,
        "time_copy": 0.002,
        "time_forward": 0.15,
        "time_backward": 0.3,
        "time_optimizer": 0.02,
        "time_other": 0.02,
        "updates": 1,
    }
    if gpu:
        event |= {"gpu_utilization": 93.0, "gpu_memory_bytes": 9 * GIB, "power_watts": 300.0}
        event |= {"peak_reserved_bytes": 8 * GIB, "peak_allocated_bytes": 7 * GIB}
    return {**event, **more}


def eval_event(step: int) -> dict[str, Any]:
    facts = {"loss": 1.0, "perplexity": 2.7, "token_accuracy": 0.8, "split": "validation"}
    return {"event": "eval", "time": START + step, "step": step, "seconds": 0.3, **facts}


def started(**more: Any) -> dict[str, Any]:
    facts = {"expert": "demo", "model": "tiny", "device": "a card", "total_steps": 30}
    return {"event": "started", "time": START, "step": 0, **facts, **more}


def finished(step: int, **more: Any) -> dict[str, Any]:
    facts = {"loss": 0.8, "eval_loss": 1.0, "seconds": 15.0, "tokens_per_second": 1900.0}
    return {"event": "finished", "time": START + step, "step": step, **facts, **more}


def usual(steps: int = 30, *, gpu: bool = False) -> list[dict[str, Any]]:
    """The events of a run that went well."""
    lines = [step_event(number, gpu=gpu) for number in range(1, steps + 1)]
    return [started(), *lines, eval_event(steps), finished(steps)]


def write_run(
    folder: Path, events: Iterable[dict[str, Any]], *, gpu: bool = False, **files: Any
) -> Path:
    """A run folder with these events; `files` are its JSON files, named without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "expert": "demo",
        "kernels": {"device": "cuda" if gpu else "cpu"},
        "optim": {"learning_rate": 1e-4},
        "decisions": [
            {"path": "kernels.device", "value": "cpu", "because": "no GPU", "source": "machine"},
            {"path": "optim.seed", "value": 42, "because": "the default", "source": "preset"},
        ],
        "remarks": [],
    }
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    for name, content in {"plan": plan, **files}.items():
        if name == "validation" and isinstance(content, dict):
            content = {"weights": "", **content}  # about the present weights: there are none
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def page_of(folder: Path, *others: Path) -> Page:
    run = diagnose_run(folder)
    return make_page(run, ladder=ladder_for(run.record, None), others=[*map(diagnose_run, others)])


def html_of(folder: Path, *others: Path) -> str:
    return page_html(page_of(folder, *others))


def section_of(page: Page, name: str) -> str:
    [html] = [section.html for section in page.sections if section.name == name]
    return html


def charts_of(page: Page) -> dict[str, list[dict[str, Any]]]:
    found, name = {}, ""
    for section in page.sections:
        for _, attributes in Tags(section.html).found:
            name = attributes.get("id", name)
            if "data-chart" in attributes:
                lines = json.loads(attributes["data-chart"])["series"]
                found[name.removeprefix("figure-")] = lines
    return found


def figures_of(page: Page) -> set[str]:
    return set(re.findall(r'<figure id="figure-([^"]+)"', page_html(page)))


def cards_of(page: Page) -> dict[str, tuple[str, str]]:
    """Value and note of every number."""
    cards = r"<li><span>([^<]+)</span><b>([^<]*)</b>(?:<small>([^<]*)</small>)?</li>"
    found = re.findall(cards, "".join(section.html for section in page.sections))
    return {name: (value, note) for name, value, note in reversed(found)}


def rows_of(html: str) -> list[tuple[str, ...]]:
    """The cells of every row of its tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [tuple(map(unescape, row)) for row in cells if row]


class Tags(HTMLParser):
    """Every tag with its attributes, the text, and the unclosed tags."""

    EMPTY = ("meta", "br", "hr", "input", "link")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


ALLOWED = {"html", "head", "meta", "title", "style", "body", "header", "main", "nav", "footer"}
ALLOWED |= {"section", "h1", "h2", "h3", "p", "div", "span", "strong", "b", "i", "small", "a"}
ALLOWED |= {"figure", "figcaption", "ul", "li", "details", "summary", "pre", "script", "button"}
ALLOWED |= {"table", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd"}
PLACE = re.compile(r"(left|width):-?\d+\.\d\d%")


def check_harmless(html: str) -> Tags:
    """Only known tags, one script, whose hash the policy names, no event handlers or links, no
    styles but positions: nothing can load."""
    tags = Tags(html)
    assert tags.open == []
    assert {name for name, _ in tags.found} <= ALLOWED
    for name, attributes in tags.found:
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            assert key not in ("src", "srcset", "action", "xlink:href", "background", "srcdoc")
            assert key != "href" or re.fullmatch(r"#[a-z0-9-]+", value), value
            assert key != "style" or PLACE.fullmatch(value), value
            assert key != "data-chart" or json.loads(value)["series"]
    [sheet] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert "url(" not in sheet
    assert "@import" not in sheet
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [a["content"] for _, a in tags.found if "http-equiv" in a]
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; " in policy
    )
    return tags


def text_of(html: str) -> str:
    return " ".join(" ".join(Tags(html).texts).split())


def data_event(folder: str) -> dict[str, Any]:
    return {"event": "data", "time": START, "split": "train", "folder": folder, "hit": True}


def hostile_run(folder: Path, text: str) -> Path:
    """A run with this text in every text field."""
    events = [
        started(expert=text, model=text, device=text),
        {"event": "kernels", "time": START, "lines": [f"✓ {text}", text]},
        {**data_event(text), "because": text, "split": text},
        *(step_event(n) for n in range(1, 5)),
        {**eval_event(4), "split": text},
        {"event": "saved", "time": START, "path": text},
        {"event": "warning", "time": START, "text": text},
        {
            "event": "fell_back",
            "time": START,
            "failure": text,
            "reason": text,
            "changes": [{"path": text, "value": text}],
        },
        {"event": "not_finite", "time": START, "step": 2, "rows": [text]},
        {"event": "failed", "time": START + 9, "step": 4, "error": text},
    ]
    decision = {"path": f"kernels.{text}", "value": text, "because": text, "source": text}
    plan = {
        "expert": text,
        "model": {"name": text},
        "kernels": {"device": "cpu", text: text},
        "decisions": [decision, {**decision, "path": text}],
        "remarks": [{"kind": text, "path": text, "text": text}],
    }
    machine = {"gpus": [{"name": {"value": text}}], "cpu_model": {"value": text}}
    environment = {"versions": {text: text}, "machine": machine, "python": text}
    case = {"prompt": text, "expected": text, "answer": text, "passed": False}
    return write_run(
        folder,
        events,
        plan=plan,
        environment=environment,
        manifest={text: text},
        validation={"accuracy": 0.1, "cases": [case]},
    )


def some_ladder() -> Ladder:
    failed = setting("<b>", None, "failed", because="no <room>")
    return made_ladder(setting("baseline", 100.0), failed, card="a card", environment={})
