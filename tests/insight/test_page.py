"""The page of a run: what it shows, and what it leaves out with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import Verdict
from expert.insight.page.blocks import Folded, Page
from expert.insight.page.contents import ladder_page, make_page
from expert.insight.page.facts import UNKNOWN_LEARNING
from expert.insight.page.render import page_html
from expert.insight.page.sections.environment import FIRST_EDGE
from tests.each import each
from tests.insight.ladders import ladder, setting
from tests.insight.pages import (
    FIGURES,
    GPU_FIGURES,
    START,
    blocks_of,
    cards_of,
    check_harmless,
    data_event,
    figures_of,
    finished,
    grids_of,
    html_of,
    page_of,
    run_facts,
    some_ladder,
    started,
    step_event,
    text_of,
    usual,
    words_of,
    write_run,
)
from tests.jobs.trained_runs import finished as finished_run


def page_with(tmp_path: Path, events: list[dict[str, Any]] | None = None, **files: Any) -> Page:
    """The page of a run with these events, or of one that went well."""
    run = write_run(tmp_path / "run", usual() if events is None else events, **files)
    return page_of(run)


# --- what stands on it ---------------------------------------------------------------------------


def test_an_unknown_value_of_the_plan_has_its_reason_beside_it(tmp_path):
    unknown = {"path": "length.seconds", "value": None, "because": "unknown: nobody measured it"}
    page = page_with(tmp_path, plan={"expert": "demo", "decisions": [unknown]})
    [row] = grids_of(page, "plan")[0].rows
    assert row[:3] == ("length.seconds", "unknown", "nobody measured it")


def test_a_real_run_has_every_figure_of_a_cpu_its_data_and_its_hashes():
    page = page_of(finished_run("lora"))
    assert set(figures_of(page)) == FIGURES | {"row-lengths"}
    names = [section.name for section in page.sections]
    order = ["numbers", "learning", "speed", "time", "story", "kernels", "plan", "data"]
    assert [name for name in names if name in order] == order
    assert names[-1] == "environment"
    [hashes] = [grid for grid in grids_of(page, "environment") if "sha256" in grid.columns]
    listed = json.loads((finished_run("lora") / "final" / "DONE").read_text(encoding="utf-8"))
    assert {row[0]: row[2] for row in hashes.rows} == {n: f["sha256"] for n, f in listed.items()}
    assert page.kind
    assert "The run finished." in page.reasons


def test_a_cpu_run_shows_its_losses_its_plan_and_why_there_is_nothing_of_a_gpu(tmp_path: Path):
    page = page_with(tmp_path)
    assert not GPU_FIGURES & set(figures_of(page))
    assert not {"GPU utilization", "MFU", "Peak memory"} & set(cards_of(page))
    assert "GPU utilization: the run had no GPU" in words_of(page)
    assert "MFU: the peak of this processor is unknown" in words_of(page)
    chart: Any = figures_of(page)["loss"].chart
    assert [(line.name, line.look) for line in chart.series] == [
        ("logged loss", "faint"),
        ("training, smoothed", "line"),
        ("validation", "dots"),
    ]
    folded = [block.title for block in blocks_of(page) if isinstance(block, Folded)]
    assert "Kernels: device cpu" in folded
    assert "1 at their defaults or not used here" in folded
    first, defaults = grids_of(page, "plan")
    assert first.rows == (("kernels.device", "cpu", "no GPU", "machine"),)
    assert defaults.rows == (("optim.seed", "42", "the default", "preset"),)
    events = [{**event, "cpu_peak_memory_bytes": 3 * 2**29} for event in usual()]
    cards = cards_of(page_with(tmp_path, events))
    assert cards["Peak memory"].value == "1.5 GiB"


def test_a_gpu_run_has_utilisation_memory_and_power(tmp_path: Path):
    page = page_with(tmp_path, usual(gpu=True), gpu=True)
    assert set(figures_of(page)) >= FIGURES | GPU_FIGURES
    cards = cards_of(page)
    assert cards["GPU utilization"].value == "93 %"
    assert cards["MFU"].value == "40 %"
    assert cards["Peak memory"].value == "8.0 GiB"


@each(
    ("fields", "note"),
    [
        ({}, None),
        ({"throttled_power": 1.0, "throttled_heat": 0.0}, None),  # usual under full load
        ({"throttled_heat": 0.3}, "Throttled in up to 30 % of the samples."),
    ],
)
def test_a_clock_throttled_by_heat_is_drawn_and_a_steady_one_is_not(tmp_path, fields, note):
    events = [
        {**event, "sm_clock_mhz": 1700.0, **fields} if event["event"] == "step" else event
        for event in usual(gpu=True)
    ]
    clock = figures_of(page_with(tmp_path, events, gpu=True)).get("clock")
    assert (clock.note if clock is not None else None) == note


def test_the_loss_is_that_of_the_last_line_and_the_last_validation_is_named_where_it_is_worse(
    tmp_path: Path,
):
    lines = [step_event(number, loss=2.0 - number / 50) for number in range(1, 51)]
    evals = [
        {"event": "eval", "time": START + at, "step": at, "split": "validation", "loss": loss}
        for at, loss in ((20, 1.1), (50, 1.5))
    ]
    cards = cards_of(page_with(tmp_path, [started(), *lines, *evals]))
    assert (cards["Loss"].value, cards["Loss"].note) == (
        "1.0000",
        "last log line, at step 50, first 1.9800",
    )
    assert cards["Validation loss"].note.startswith("best, at step 20, last 1.5000")


def test_missing_numbers_are_never_shown_as_zero(tmp_path: Path):
    bare = [started(), {"event": "step", "step": 1, "time": START, "loss": "nan"}]
    page = page_with(tmp_path, bare)
    assert set(cards_of(page)) <= {"Duration", "Steps"}
    text = words_of(page)
    assert "loss: no finite loss was logged" in text
    assert "validation loss: nothing was evaluated" in text
    assert "tokens per second: no step was timed" in text


def test_a_repeated_step_is_drawn_once(tmp_path: Path):
    again = [step_event(n, loss=9.0) for n in range(5, 11)]
    back = {"event": "rolled_back", "time": START, "step": 4, "from_step": 10, "to_step": 4}
    events = [started(), *(step_event(n) for n in range(1, 11)), back, *again, finished(10)]
    page = page_with(tmp_path, events)
    chart: Any = figures_of(page)["loss"].chart
    points = chart.series[0].points
    assert [x for x, _ in points] == list(range(1, 11))
    assert {y for x, y in points if x >= 5} == {9.0}
    [told] = [row for grid in grids_of(page, "story") for row in grid.rows if "rolled back" in row]
    assert told[3] == "rolled back from step 10 to 4"


def test_a_pause_before_a_resume_takes_no_place_on_the_time_line(tmp_path: Path):
    day = 86_400.0
    events = [
        started(),
        {"event": "stopped", "time": START + 10, "step": 5, "reason": "signal"},
        {"event": "resumed", "time": START + day, "step": 5, "path": "x"},
        started(time=START + day),
        finished(9, time=START + day + 20),
    ]
    page = page_with(tmp_path, events)
    assert cards_of(page)["Duration"].value == "30 s"


def test_fallbacks_and_warnings_are_reported_with_their_reasons(tmp_path: Path):
    change = {"path": "batch.micro_batch", "value": 2, "because": "b", "source": "fallback"}
    fell = {"event": "fell_back", "time": START + 5, "step": 3, "failure": "OutOfMemory"}
    fell |= {"reason": "1 GiB too much", "changes": [change]}
    warned = {"event": "warning", "time": START + 6, "text": "the disk is nearly full"}
    page = page_with(tmp_path, [*usual()[:5], fell, warned, finished(9)])
    texts = [row[3] for grid in grids_of(page, "story") for row in grid.rows]
    assert "fell back: OutOfMemory: 1 GiB too much – batch.micro_batch = 2 (b)" in texts
    assert f"warning: {warned['text']}" in texts
    assert "No fallback" not in words_of(page)


def test_cases_without_an_oracle_are_shown_as_neither_right_nor_wrong(tmp_path: Path):
    cases = [{"id": str(n), "passed": passed} for n, passed in enumerate((True, False, None, None))]
    facts = {
        "accuracy": 0.5,
        "cases": cases,
        "wins": ["0"],
        "gate": {"passed": False, "reasons": ["2 of 4 cases have no oracle"]},
        "baseline": {"accuracy": 0.25},
    }
    text = html_of(write_run(tmp_path / "run", usual(), validation=facts))
    assert "Correct answers: 1" in text
    assert "2 answers not judged" in text
    assert "1 answers that the baseline got wrong" in text
    assert "The quality gate fails: 2 of 4 cases have no oracle." in text
    assert "25.0%" in text


# --- data ----------------------------------------------------------------------------------------


def test_the_edges_of_the_histogram_are_those_the_data_was_counted_with():
    from expert.data.tokens.statistics import EDGES

    assert [FIRST_EDGE << power for power in range(len(EDGES))] == list(EDGES)


def test_a_relative_data_folder_is_found_from_where_the_run_was_started(tmp_path: Path):
    data = tmp_path / "tokens-1"
    data.mkdir()
    counts = [0, 3, 0, 2] + [0] * 9
    facts = {"rows_in": 5, "documents": 5, "tokens": 200, "trainable_tokens": 50, "longest": 99}
    text = json.dumps({**facts, "histogram": counts, "dropped": {"too long": 2}})
    (data / "statistics.json").write_text(text, encoding="utf-8")
    (data / "rejects.jsonl").write_text('{"line": 7, "why": "<i>bad</i>"}\n', encoding="utf-8")
    run = write_run(tmp_path / "runs" / "run", [started(), data_event("tokens-1"), *usual()[1:]])
    page = page_of(run)
    chart: Any = figures_of(page)["row-lengths"].chart
    assert [(bar.name, bar.words) for bar in chart.bars] == [
        ("≤32", "3"),
        ("≤64", "0"),
        ("≤128", "2"),
    ]
    assert cards_of(page)["Tokens trained on"].note == "25.0% of all"
    assert cards_of(page)["Rows left out"].value == "2"
    assert "why: &lt;i&gt;bad&lt;/i&gt;" in page_html(page)


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
    assert page.verdict == (
        "90.0% of 20 answers correct (95 % interval 70.0% to 97.0%); baseline 10.0%; 4 "
        "of 20 cases were also in the training rows; without them 87.5% are correct; "
        "only 20 of 60 cases were judged."
    )
    assert page.reasons.startswith("Learning: The training loss fell from 2.1850 to 1.0075. ")
    assert " Speed: compute-bound. Good. " in page.reasons
    assert page.tone == "warning"
    card = cards_of(page)["Correct answers"]
    assert next(iter(cards_of(page))) == "Correct answers"
    assert (card.value, card.note) == ("90.0%", "70.0% to 97.0%")
    without = page_of(write_run(tmp_path / "other", usual()))
    assert "It is not validated yet: run expert validate." in without.reasons


# --- several runs, a ladder ----------------------------------------------------------------------


def test_compared_runs_share_their_axes_and_differ_in_a_table(tmp_path: Path):
    slow = [{**event, "seconds": 1.0} if event["event"] == "step" else event for event in usual()]
    changed = {"expert": "demo", "kernels": {"device": "cpu"}, "optim": {"learning_rate": 5e-5}}
    one = write_run(tmp_path / "runs" / "one", usual())
    two = write_run(tmp_path / "runs" / "two", slow, plan=changed)
    page = page_of(one, two, one)
    figures = figures_of(page)
    for name in ("loss-by-step", "loss-by-tokens", "loss-by-time", "evals-by-step"):
        chart: Any = figures[name].chart
        assert [line.name for line in chart.series] == ["one", "two", "one (2)"]
    by_time: Any = figures["loss-by-time"].chart
    assert [line.points[-1][0] for line in by_time.series] == [15.0, 30.0, 15.0]
    numbers, plans = grids_of(page, "comparison")
    rows = {row[0]: row[1:] for row in numbers.rows}
    assert rows["tokens per second, mean"] == ("2,000", "1,000", "0.50×", "2,000", "1.00×")
    assert ("optim.learning_rate", "0.0001", "5e-05", "0.0001") in plans.rows
    assert all(row[0] == "optim.learning_rate" for row in plans.rows)
    check_harmless(page_html(page))


def test_compared_runs_have_the_steps_and_tokens_that_their_own_pages_show(tmp_path: Path):
    def epoch(number: int, step: int) -> dict[str, Any]:
        return {"event": "epoch", "time": START + step, "step": step, "epoch": number, "tokens": 70}

    first = [started(total_steps=33), step_event(30, tokens=60), epoch(1, 33), finished(33)]
    longer = [
        *first,
        {"event": "resumed", "time": START + 86_400, "step": 33, "path": "x"},
        started(time=START + 86_400, total_steps=66),
        step_event(60, tokens=60, time=START + 86_410),
        {**epoch(2, 66), "time": START + 86_420},
        finished(66, time=START + 86_420),
    ]
    one, two = write_run(tmp_path / "one", first), write_run(tmp_path / "two", longer)
    rows = {row[0]: row[1:3] for row in grids_of(page_of(one, two), "comparison")[0].rows}
    assert rows["steps"] == ("33", "66")
    assert rows["tokens"] == ("70", "140")
    assert rows["duration, without pauses"] == ("33 s", "53 s")
    card = cards_of(page_of(two))["Steps"]
    assert (card.value, card.note) == ("66", "of 66, 2 epochs, 140 tokens")


def test_a_ladder_in_the_run_folder_is_drawn_as_bars(tmp_path: Path):
    page = page_with(tmp_path, ladder=json.loads(some_ladder().model_dump_json()))
    chart: Any = figures_of(page)["ladder"].chart
    assert [(bar.name, bar.words, bar.colour) for bar in chart.bars] == [
        ("baseline", "100", 1),
        ("<b>", "failed", 7),
    ]
    check_harmless(page_html(page))


def test_a_ladder_alone_makes_a_page_that_warns_in_doubt_and_tells_rates_from_ratios():
    page = ladder_page(some_ladder())
    check_harmless(page_html(page))
    assert page.verdict.startswith("demo on a card: 100 tokens/s")
    doubted = some_ladder().model_copy(update={"doubts": ["others used 1.4 of 2 cores"]})
    assert (page.tone, ladder_page(doubted).tone) == ("good", "warning")
    assert "noisy, do not trust: others used 1.4 of 2 cores" in page_html(ladder_page(doubted))
    settings = [
        setting("baseline", 100.0, cumulative=1.0),
        setting("packing", 250.0, cumulative=2.5),
    ]
    text = text_of(page_html(ladder_page(ladder(*settings))))
    assert "Speed relative to the baseline, by setting" in text
    assert "2.50×" in text


def test_a_verdict_with_warnings_names_them_instead_of_good(tmp_path: Path):
    run = run_facts(write_run(tmp_path / "run", usual()))
    verdict = Verdict(kind="compute-bound", sentence="compute-bound: good. The CPU computes.")
    slow = Finding(name="x", severity="warning", title="slower than before", evidence="", fix="")
    run = replace(run, verdict=verdict, learning=UNKNOWN_LEARNING)
    calm = make_page(replace(run, findings=()))
    warned = make_page(replace(run, findings=(slow,)))
    assert (calm.tone, calm.verdict) == ("good", "Good. The CPU computes.")
    assert (warned.tone, warned.verdict) == (
        "warning",
        "The CPU computes. To fix: slower than before.",
    )
