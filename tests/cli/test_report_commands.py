"""`expert report` as a person runs it."""

from __future__ import annotations

import json
import shutil

from tests.insight.pages import FIGURES, usual, write_run
from tests.jobs.trained_runs import finished as finished_run


def test_a_report_is_written_into_the_run_and_the_verdict_is_reported(run, tmp_path):
    folder = shutil.copytree(finished_run("lora"), tmp_path / "runs" / "demo-20260101-000000")
    ran = run("report", str(folder))
    assert ran.code == 0, ran.err
    learning, verdict, *_, wrote = ran.out.splitlines()
    assert learning.startswith("learning: The validation loss fell from ")
    assert "-bound: " in verdict or verdict.startswith("unknown: ")
    size = (folder / "report.html").stat().st_size
    assert wrote == f"✓ wrote {folder / 'report.html'}  ({size / 1024:.0f} KiB, 7 figures)"
    assert not list(folder.glob(".report*"))


def test_a_report_goes_to_the_folder_named_and_a_folder_of_runs_means_its_newest(run, tmp_path):
    write_run(tmp_path / "runs" / "demo-20250101-000000", usual(3))
    newest = write_run(tmp_path / "runs" / "demo-20260101-000000", usual(4))
    ran = run("report", str(tmp_path / "runs"), "--to", str(tmp_path / "out"), "--json")
    reported = json.loads(ran.out)
    assert reported["run"] == str(newest)
    assert reported["html"] == str(tmp_path / "out" / "report.html")
    assert reported["html_bytes"] == (tmp_path / "out" / "report.html").stat().st_size
    assert reported["state"] == "finished"
    assert reported["verdict"]["kind"] == "compute-bound"
    assert set(reported["figures"]) == FIGURES
    assert not (newest / "report.html").exists()


def test_a_name_that_ends_in_html_is_that_of_the_page(run, tmp_path):
    folder = write_run(tmp_path / "run", usual(3))
    (folder / "plan.json").unlink()  # its events are enough
    ran = run("report", str(folder), "--to", str(tmp_path / "out" / "mine.html"), "--json")
    reported = json.loads(ran.out)
    assert reported["html"] == str(tmp_path / "out" / "mine.html")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.html"]
    # A report makes room for a newer one.
    assert run("report", str(folder), "--to", str(tmp_path / "out" / "mine.html")).code == 0
    (tmp_path / "old.html").mkdir()  # a folder is a folder, whatever its name
    ran = run("report", str(folder), "--to", str(tmp_path / "old.html"), "--json")
    assert json.loads(ran.out)["html"] == str(tmp_path / "old.html" / "report.html")


def test_what_cannot_be_reported_or_written_is_refused_with_the_reason(run, tmp_path):
    folder = write_run(tmp_path / "run", usual(4))
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for words, reported in (
        (("--to", str(tmp_path / "file")), "cannot write a report"),
        (("--ladder", str(folder / "plan.json")), "not a result of expert benchmark"),
        ((str(folder),), "give one run; compare with others by --compare RUN"),
    ):
        ran = run("report", str(folder), *words)
        assert ran.code == 2
        assert reported in ran.err
