"""The numbers in STATUS.md are those of the records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.each import each
from tests.insight.ladders import ladder, setting
from tests.test_generated_documents import drawing

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def test_the_performance_section_is_what_the_records_say():
    draw = drawing("draw_status")
    text = (ROOT / "STATUS.md").read_text(encoding="utf-8")
    assert draw.status_with(text, draw.made()) == text, "run .venv/bin/python docs/draw_status.py"


def test_a_record_that_is_not_there_leaves_its_part_out(tmp_path):
    draw = drawing("draw_status")
    assert draw.made(tmp_path) == ""
    name = "data-preparation.json"
    shutil.copy(BENCHMARKS / name, tmp_path / name)
    ladder_file(tmp_path / "ladder-x.json")
    made = draw.made(tmp_path)
    assert "| sql |" in made
    assert "| ✓ packing | 250 |" in made
    assert "H200" not in made


def ladder_file(path: Path) -> None:
    made = ladder(
        setting("baseline", 100.0, cumulative=1.0), setting("packing", 250.0, cumulative=2.5)
    )
    path.write_text(made.model_dump_json(), encoding="utf-8")


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    draw = drawing("draw_status")
    ladder_file(tmp_path / "ladder-x.json")
    section = draw.section(draw.ladders(tmp_path))
    before = f"# Status\n\nkept\n\n{draw.BEGIN}\nold numbers\n{draw.END}\n\nkept too\n"
    after = draw.status_with(before, section)
    assert "old numbers" not in after
    assert after.startswith("# Status\n\nkept\n\n")
    assert after.endswith("\n\nkept too\n")
    assert "- demo on Test CPU: 250 tokens/s, 2.5 times the baseline" in after
    assert "| ✓ packing | 250 |" in after
    assert draw.status_with(after, section) == after


def test_a_document_without_the_marks_is_not_touched():
    with pytest.raises(SystemExit, match=r"STATUS\.md has no place for it"):
        drawing("draw_status").status_with("# Status\n", "numbers")


@each("record", sorted(BENCHMARKS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_tells_nothing_of_the_folders_it_was_made_in(record):
    found = re.findall(r"(?:/tmp|/root|/home|/work|/Users)/[^\s\"]*", record.read_text("utf-8"))
    assert found == []


def test_what_the_gate_says_is_what_was_judged():
    status = (ROOT / "STATUS.md").read_text(encoding="utf-8")
    part = status.partition("## What the gate says")[2].partition("\n## ")[0]
    record = json.loads((BENCHMARKS / "experts-h200.json").read_text(encoding="utf-8"))
    rows = {line.split(" ")[1]: line for line in part.splitlines() if line.startswith("| ")}
    given = {
        one["pair"].partition(",")[0]: one["optimised"]["judged"]
        for one in record["results"]
        if one["pair"].endswith(", given")
    }
    assert set(given) == {"json", "sql", "cypher"}
    for name, judged in given.items():
        seen = judged["rows"]
        length = seen["tokens"] / seen["examples"]
        cells = [cell.strip() for cell in rows[name].split("|")]
        assert cells[2] == f"{100 * judged['right']:.1f} %"
        assert cells[3] == f"{100 * seen['token_accuracy']:.1f} %"
        assert cells[4] == f"{length:.0f}"
    lengths = {name: one["rows"]["tokens"] / one["rows"]["examples"] for name, one in given.items()}
    assert f"{100 * 0.95 ** (1 / lengths['sql']):.1f} % of tokens" in rows["sql"]
    assert f"{100 * 0.95 ** (1 / lengths['json']):.2f} % of tokens" in rows["json"]
    cypher = given["cypher"]
    assert (
        "{without_oracle} of 400 cases cannot be judged".format(
            without_oracle=cypher["without_oracle"]
        )
        in rows["cypher"]
    )
    judged_cases = cypher["passed"] + cypher["failed"]
    assert f"of the {judged_cases} judged ones {cypher['passed']} are right" in rows["cypher"]


def test_a_ladder_on_random_weights_says_that_it_tells_nothing_about_quality():
    """With random weights the initial loss is that of guessing among all tokens."""
    random = []
    for path in BENCHMARKS.glob("ladder-*.json"):
        ladder = json.loads(path.read_text(encoding="utf-8"))
        baseline = ladder["rungs"][0]["measured"]
        if baseline and baseline["loss"] and baseline["loss"] > 8:
            random.append(path.name)
            assert any("random weights" in note for note in ladder["notes"]), path.name
    assert random == ["ladder-expert-h200.json"]
    for name in ("docs/SPEED.md", "STATUS.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert "random" in text
        assert "nothing about how well an expert of that size answers" in text, name


def test_a_setup_without_make_is_that_of_make():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"-m pip install .*?(-c constraints\.txt -e '\.\[dev\]')", makefile)
    assert found is not None
    arguments = found[1].replace("'", '"')
    text = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    assert "python -m venv .venv\n.venv\\Scripts\\python -m pip install " + arguments in text
    assert "never run" in text or "Nobody has run Expert on Windows" in text
