"""Incomplete and damaged runs have a page, and odd values do no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert.insight.page.render import page_html
from tests.each import each
from tests.insight.pages import (
    check_harmless,
    figures_of,
    finished,
    html_of,
    page_of,
    section_of,
    started,
    step_event,
    text_of,
    usual,
    write_run,
)


def test_a_run_that_was_killed_has_a_page_even_before_its_first_step(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [started()]))
    assert "No step was logged" in section_of(page, "loss")
    assert (page.kind, page.verdict) == ("killed", "The run ended before its first step.")
    assert "Speed: unknown." in page.reasons
    page = page_of(write_run(tmp_path / "run", usual()[:-1]))
    assert "ended without a message" in page.reasons
    assert page.tone == "error"


def test_damaged_files_are_reported_and_the_rest_is_shown(tmp_path: Path):
    run = write_run(tmp_path / "run", usual())
    with (run / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("not json\n[1, 2]\n" + '{"event": "step", "step": 31, "lo')
    (run / "plan.json").write_text("{", encoding="utf-8")
    page = page_of(run)
    assert "damaged-files" in section_of(page, "findings")
    text = text_of(page_html(page))
    assert "2 damaged lines of events.jsonl" in text
    assert "plan.json is missing or damaged" in text
    assert "environment.json is missing or damaged" in text
    assert "loss" in figures_of(page)


@each(
    "odd",
    [
        {"step": "x"},
        {"step": None},
        {"step": int("9" * 400)},
        {"loss": "nan", "grad_norm": "inf", "targets": []},
        {"time": "yesterday"},
        {"tokens": -5, "seconds": 0, "updates": 0},
        {"event": ["step"]},
        {"time_forward": {}, "gpu_utilization": "x"},
        {"loss": 1e308, "mfu": 1e308, "seconds": 1e308},
        {"event": "feed", "kind": 3},
        {"event": "rolled_back", "from_step": "a"},
    ],
    ids=lambda odd: "-".join(odd),
)
def test_odd_values_in_events_do_no_harm(tmp_path: Path, odd: dict[str, Any]):
    events = [started(), step_event(1), {**step_event(2), **odd}, step_event(3), finished(3)]
    check_harmless(html_of(write_run(tmp_path / "run", events)))


def test_every_kind_of_event_may_be_empty(tmp_path: Path):
    kinds = "data eval saved fell_back rolled_back not_finite spike warning resumed rejected"
    kinds += " took_best finished stopped failed kernels compiled loaded feed epoch log_failed"
    events = [{"event": kind} for kind in ("started", *kinds.split())]
    check_harmless(html_of(write_run(tmp_path / "run", events)))


@each(
    "value",
    [
        *([], 3, "x", {}, {"kernels": 1, "decisions": [1, {"path": 3}]}),
        *({"kernels": 5, "decisions": 7, "remarks": "x", "memory": {"parts": [1]}},),
        *({"machine": {"gpus": [3, {"name": 1}], "cores_available": 2}},),
        *({"accuracy": "x", "cases": "y"}, {"cases": [1, None]}),
    ],
)
def test_json_files_of_another_shape_do_no_harm(tmp_path: Path, value: Any):
    files = dict.fromkeys(("plan", "environment", "manifest", "validation"), value)
    check_harmless(html_of(write_run(tmp_path / "run", usual(), **files)))


def test_a_long_run_stays_a_small_file(tmp_path: Path):
    events = [started(), *(step_event(n, gpu=True) for n in range(1, 5_001)), finished(5_000)]
    html = html_of(write_run(tmp_path / "run", events, gpu=True))
    assert len(html) < 400_000  # 100,000 lines gave 260 kB; the size does not grow with them
