"""Text of a run stays text on its page: nothing in it runs or loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.each import each
from tests.insight.pages import (
    HOSTILE,
    check_harmless,
    hostile_run,
    html_of,
    markdown_of,
    usual,
    write_run,
)


@pytest.mark.fault(29)
@each("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text_on_the_page(tmp_path: Path, text: str):
    plain = check_harmless(html_of(hostile_run(tmp_path / "a", "harmless")))
    tags = check_harmless(html_of(hostile_run(tmp_path / "b", text)))
    assert [name for name, _ in tags.found] == [name for name, _ in plain.found]
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b\ud800]", "".join(tags.texts))
    "".join(tags.texts).encode("utf-8")


@pytest.mark.fault(29)
@each("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text_in_markdown(tmp_path: Path, text: str):
    plain = markdown_of(hostile_run(tmp_path / "a", "harmless")).splitlines()
    lines = markdown_of(hostile_run(tmp_path / "b", text)).splitlines()
    assert len(lines) == len(plain)
    for line, harmless in zip(lines, plain, strict=True):
        cells = re.sub(r"\\.", "", line)
        assert cells.count("|") == re.sub(r"\\.", "", harmless).count("|")
        assert cells.count("`") == harmless.count("`")
        assert not set(cells) & set("<>[")
        assert "://" not in line
        assert "javascript:" not in line


@pytest.mark.fault(29)
def test_a_hostile_folder_name_stays_text(tmp_path: Path):
    folder = tmp_path / "runs" / "<script>alert(1)< script>'\"`|-20260101-000000"
    check_harmless(html_of(write_run(folder, usual())))


@pytest.mark.fault(29)
def test_the_policy_of_the_page_lets_nothing_load(tmp_path: Path):
    tags = check_harmless(html_of(write_run(tmp_path / "run", usual())))
    [policy] = [
        a["content"] for _, a in tags.found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert "script-src" not in policy
