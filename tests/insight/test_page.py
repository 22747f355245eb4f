"""The page of a run: what it shows, and what it leaves out with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import Verdict
from expert.insight.outcome import Outcome
from expert.insight.page.contents import ladder_page, make_page
from expert.insight.page.render import Page, page_html
from expert.jobs.diagnose.diagnose import diagnose_run
from tests.insight.ladders import ladder, setting
from tests.insight.pages import (
    FIGURES,
    GPU_FIGURES,
    START,
    cards_of,
    charts_of,
    check_harmless,
    data_event,
    figures_of,
    finished,
    html_of,
    page_of,
    rows_of,
    section_of,
    some_ladder,
    started,
    step_event,
    text_of,
    usual,
    write_run,
)
from tests.jobs.trained_runs import finished as finished_run


def page_with(tmp_path: Path, events: list[dict[str, Any]] | None = None, **files: Any) -> Page:
    run = write_run(tmp_path / "run", usual() if events is None else events, **files)
    return page_of(run)


def test_a_real_run_has_every_figure_of_a_cpu_its_data_and_its_hashes():
    page = page_of(finished_run("lora"))
    assert figures_of(page) == FIGURES
    names = [section.name for section in page.sections]
    order = ["numbers", "learning", "speed", "time", "story", "kernels", "plan", "data"]
    assert [name for name in names if name in order] == order
    assert names[-1] == "environment"
    rows = rows_of(section_of(page, "environment"))
    listed = json.loads((finished_run("lora") / "final" / "DONE").read_text(encoding="utf-8"))
    hashes = {row[0]: row[2] for row in rows if len(row) == 3}
    assert hashes == {name: facts["sha256"] for name, facts in listed.items()}
    assert "The run finished." in page.reasons


def test_a_cpu_run_shows_its_losses_its_plan_and_why_there_is_nothing_of_a_gpu(tmp_path: Path):
    page = page_with(tmp_path, [{**event, "smoothed_loss": 1.5} for event in usual()])
    assert not GPU_FIGURES & figures_of(page)
    assert not {"GPU utilization", "MFU", "Peak memory"} & set(cards_of(page))
    text = text_of(section_of(page, "numbers"))
    assert "GPU utilization: the run had no GPU" in text
    assert "MFU: the peak of this processor is unknown" in text
    assert [(line["name"], line["look"]) for line in charts_of(page)["loss"]] == [
        ("logged loss", "faint"),
        ("training, smoothed", "line"),
        ("validation", "dots"),
    ]
    plan = section_of(page, "plan")
    assert "<summary>Kernels: 1</summary>" in plan
    assert "<summary>1 at their defaults or not used here</summary>" in plan
    assert rows_of(plan) == [
        ("kernels.device", "cpu", "no GPU", "machine"),
        ("optim.seed", "42", "the default", "preset"),
    ]
    events = [{**event, "cpu_peak_memory_bytes": 3 * 2**29} for event in usual()]
    assert cards_of(page_with(tmp_path, events))["Peak memory"][0] == "1.5 GiB"
    unknown = {"path": "length.seconds", "value": None, "because": "unknown: nobody measured it"}
    page = page_with(tmp_path, plan={"expert": "demo", "decisions": [unknown]})
    [row] = rows_of(section_of(page, "plan"))
    assert row[:3] == ("length.seconds", "unknown", "nobody measured it")


def test_a_gpu_run_has_utilisation_memory_and_power(tmp_path: Path):
    page = page_with(tmp_path, usual(gpu=True), gpu=True)
    assert figures_of(page) >= FIGURES | GPU_FIGURES
    cards = cards_of(page)
    names = ("GPU utilization", "MFU", "Peak memory")
    assert [cards[name][0] for name in names] == ["93 %", "40 %", "8.0 GiB"]


def test_the_loss_is_the_end_of_the_curve_and_the_last_validation_is_named_where_it_is_worse(
    tmp_path: Path,
):
    lines = [step_event(n, loss=2.0 - n / 50, smoothed_loss=2.02 - n / 50) for n in range(1, 51)]
    evals = [
        {"event": "eval", "time": START + at, "step": at, "split": "validation", "loss": loss}
        for at, loss in ((20, 1.1), (50, 1.5))
    ]
    cards = cards_of(page_with(tmp_path, [started(), *lines, *evals]))
    assert cards["Loss"] == ("1.0200", "smoothed, at step 50")
    assert cards["Validation loss"][1].startswith("best, at step 20, last 1.5000")


def test_missing_numbers_are_never_shown_as_zero(tmp_path: Path):
    bare = [started(), {"event": "step", "step": 1, "time": START, "loss": "nan"}]
    page = page_with(tmp_path, bare)
    assert set(cards_of(page)) <= {"Duration", "Steps"}
    text = text_of(section_of(page, "numbers"))
    assert "Loss: no finite loss was logged" in text
    assert "Validation loss: nothing was evaluated" in text
    assert "Tokens per second: no step was timed" in text


def test_a_repeated_step_is_drawn_once_and_a_pause_takes_no_time(tmp_path: Path):
    again = [step_event(n, loss=9.0) for n in range(5, 11)]
    back = {"event": "rolled_back", "time": START, "step": 4, "from_step": 10, "to_step": 4}
    events = [started(), *(step_event(n) for n in range(1, 11)), back, *again, finished(10)]
    page = page_with(tmp_path, events)
    line = charts_of(page)["loss"][0]
    assert line["x"] == list(range(1, 11))
    assert set(line["y"][4:]) == {9.0}
    [told] = [row for row in rows_of(section_of(page, "story")) if "rolled back" in row]
    assert told[3] == "rolled back from step 10 to 4"
    day = 86_400.0
    events = [
        started(total_steps=33),
        {"event": "stopped", "time": START + 10, "step": 5, "reason": "signal"},
        {"event": "resumed", "time": START + day, "step": 5, "path": "x"},
        started(time=START + day, total_steps=66),
        step_event(60, time=START + day + 10, epoch=2),
        finished(66, time=START + day + 20, tokens=140),
    ]
    cards = cards_of(page_with(tmp_path, events))
    assert cards["Duration"][0] == "30 s"
    assert cards["Steps"] == ("66", "of 66, 2 epochs, 140 tokens")


def test_fallbacks_and_warnings_are_reported_with_their_reasons(tmp_path: Path):
    change = {"path": "batch.micro_batch", "value": 2, "because": "b", "source": "fallback"}
    fell = {"event": "fell_back", "time": START + 5, "step": 3, "failure": "OutOfMemory"}
    fell |= {"reason": "1 GiB too much", "changes": [change]}
    warned = {"event": "warning", "time": START + 6, "text": "the disk is nearly full"}
    story = section_of(page_with(tmp_path, [*usual()[:5], fell, warned, finished(9)]), "story")
    texts = [row[3] for row in rows_of(story)]
    assert "fell back: OutOfMemory: 1 GiB too much – batch.micro_batch = 2 (b)" in texts
    assert f"warning: {warned['text']}" in texts
    assert "No fallback" not in story


def test_cases_without_an_oracle_are_shown_as_neither_right_nor_wrong(tmp_path: Path):
    cases = [{"id": str(n), "passed": passed} for n, passed in enumerate((True, False, None, None))]
    facts = {
        "accuracy": 0.5,
        "cases": cases,
        "gate": {"passed": False, "reasons": ["2 of 4 cases have no oracle"]},
        "baseline": {"accuracy": 0.25},
    }
    text = html_of(write_run(tmp_path / "run", usual(), validation=facts))
    assert "1 correct answers" in text
    assert "2 answers not judged" in text
    assert "The quality gate fails: 2 of 4 cases have no oracle." in text
    assert "25.0%" in text


def test_a_relative_data_folder_is_found_from_where_the_run_was_started(tmp_path: Path):
    data = tmp_path / "tokens-1"
    data.mkdir()
    facts = {"rows_in": 5, "documents": 5, "tokens": 200, "trainable_tokens": 50, "longest": 99}
    text = json.dumps({**facts, "dropped": {"too long": 2}})
    (data / "statistics.json").write_text(text, encoding="utf-8")
    run = write_run(tmp_path / "runs" / "run", [started(), data_event("tokens-1"), *usual()[1:]])
    page = page_of(run)
    assert cards_of(page)["Tokens trained on"][1] == "25.0% of all"
    assert cards_of(page)["Rows left out"][0] == "2"


def test_a_page_shows_first_how_good_the_expert_is_and_then_how_fast_it_was_trained(tmp_path: Path):
    facts = {
        "accuracy": 0.9,
        "interval": [0.7, 0.97],
        "cases": [{"passed": True}] * 18 + [{"passed": False}] * 2,
        "gate": {"passed": False, "reasons": ["accuracy 90.0% is below 95.0%"]},
        "baseline": {"accuracy": 0.1},
        "learnt": {"cases": 4, "accuracy_of_others": 0.875},
        "partial": {"test_set": "rows", "of": 60},
    }
    page = page_with(tmp_path, validation=facts)
    assert page.kind == "gate fails"
    words = "90.0% of 20 answers correct (95 % interval 70.0% to 97.0%); baseline 10.0%; "
    assert page.verdict.startswith(words)
    assert "4 of 20 cases were also in the training rows; without them 87.5% are" in page.verdict
    assert page.verdict.endswith("; only 20 of 60 cases were judged.")
    assert page.reasons.startswith("Learning: The training loss fell from 2.1850 to 1.0075. ")
    assert " Speed: compute-bound. Good. " in page.reasons
    assert page.tone == "warning"
    assert next(iter(page.sections)).name == "loss"
    assert "<b>90.0%</b><small>70.0% to 97.0%</small>" in section_of(page, "validation")
    without = page_of(write_run(tmp_path / "other", usual()))
    assert "It is not validated yet: run expert validate." in without.reasons


# --- several runs, a ladder ----------------------------------------------------------------------


def test_compared_runs_share_their_axes_and_differ_in_a_table(tmp_path: Path):
    half = {"seconds": 1.0, "tokens_per_second": 1000.0}
    slow = [{**event, **half} if event["event"] == "step" else event for event in usual()]
    changed = {"expert": "demo", "kernels": {"device": "cpu"}, "optim": {"learning_rate": 5e-5}}
    one = write_run(tmp_path / "runs" / "one", usual())
    two = write_run(tmp_path / "runs" / "two", slow, plan=changed)
    page = page_of(one, two, one)
    charts = charts_of(page)
    for name in ("loss-by-step", "evals-by-step"):
        assert [line["name"] for line in charts[name]] == ["one", "two", "one (2)"]
    rows = {row[0]: row[1:] for row in rows_of(section_of(page, "comparison"))}
    assert rows["tokens per second"] == ("2,000", "1,000", "0.50×", "2,000", "1.00×")
    assert rows["optim.learning_rate"] == ("0.0001", "5e-05", "0.0001")
    check_harmless(page_html(page))


def test_a_ladder_is_drawn_as_bars_in_a_run_and_alone(tmp_path: Path):
    page = page_with(tmp_path, ladder=json.loads(some_ladder().model_dump_json()))
    assert "baseline 100 <b> no <room> failed" in text_of(section_of(page, "ladder"))
    check_harmless(page_html(page))
    page = ladder_page(some_ladder())
    check_harmless(page_html(page))
    assert page.verdict.startswith("demo on a card: 100 tokens/s")
    doubted = some_ladder().model_copy(update={"doubts": ["others used 1.4 of 2 cores"]})
    assert (page.tone, ladder_page(doubted).tone) == ("good", "warning")
    assert "noisy, do not trust: others used 1.4 of 2 cores" in page_html(ladder_page(doubted))
    settings = [setting(name, rate, cumulative=rate / 100)
                for name, rate in (("baseline", 100.0), ("packing", 250.0))]  # fmt: skip
    text = text_of(page_html(ladder_page(ladder(*settings))))
    assert "Speed relative to the baseline, by setting" in text
    assert "2.50×" in text


def test_a_verdict_with_warnings_names_them_instead_of_good(tmp_path: Path):
    run = diagnose_run(write_run(tmp_path / "run", usual()))
    verdict = Verdict(kind="compute-bound", sentence="compute-bound: good. The CPU computes.")
    slow = Finding(name="x", severity="warning", title="slower than before", evidence="", fix="")
    run = replace(run, verdict=verdict, learning=Outcome(kind="unknown", sentence=""))
    calm = make_page(replace(run, findings=()))
    warned = make_page(replace(run, findings=(slow,)))
    assert (calm.tone, calm.verdict) == ("good", "Good. The CPU computes.")
    said = "The CPU computes. To fix: slower than before."
    assert (warned.tone, warned.verdict) == ("warning", said)
