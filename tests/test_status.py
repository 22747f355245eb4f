"""STATUS.md says what was measured, to the letter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.insight.ladders import ladder, rung

ROOT = Path(__file__).parents[1]
COMMITTED = sorted((ROOT / "docs" / "benchmarks").glob("ladder-*.json"))


def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_status", ROOT / "docs" / "draw_status.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not COMMITTED, reason="no ladder has been committed yet")
def test_the_performance_section_is_what_the_measured_ladders_say():
    draw = drawing()
    text = (ROOT / "STATUS.md").read_text(encoding="utf-8")
    assert draw.status_with(text, draw.section(draw.ladders())) == text


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    draw = drawing()
    path = tmp_path / "ladder-x.json"
    made = ladder(rung("baseline", 100.0, cumulative=1.0), rung("packing", 250.0, cumulative=2.5))
    path.write_text(made.model_dump_json(), encoding="utf-8")
    section = draw.section(draw.ladders(tmp_path))
    before = f"# Status\n\nkept\n\n{draw.BEGIN}\nold numbers\n{draw.END}\n\nkept too\n"
    after = draw.status_with(before, section)
    assert "old numbers" not in after
    assert after.startswith("# Status\n\nkept\n\n")
    assert after.endswith("\n\nkept too\n")
    assert "- demo on Test CPU: 250 tokens/s, 2.5 times the baseline" in after
    assert "| packing | 250 |" in after
    assert draw.status_with(after, section) == after


def test_a_document_without_the_marks_is_not_touched():
    with pytest.raises(SystemExit, match=r"STATUS\.md has no place for it"):
        drawing().status_with("# Status\n", "numbers")
