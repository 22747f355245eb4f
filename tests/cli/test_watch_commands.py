"""`expert watch` as a person runs it."""

from __future__ import annotations

import json

from expert.jobs.board.folders import BoardFolders
from expert.jobs.board.summaries import Summaries
from tests.jobs.trained_runs import finished
from tests.run.test_status import NO_SUCH_PID, STARTED, STEP, a_run


def facts_of(run, folder) -> dict[str, str]:
    """The table of --once."""
    rows = run("watch", str(folder), "--once").out.splitlines()
    return {k: v.strip() for k, v in (line.split("  ", 1) for line in rows if "  " in line)}


def test_speed_and_memory_of_a_run_on_this_cpu_are_shown_by_every_kind_of_watching(run):
    folder = str(finished("lora"))
    [line] = [one for one in run("watch", folder).out.splitlines() if one.startswith("step 6/6 ")]
    assert " it/s  " in line
    assert " RAM" in line
    assert "GPU" not in line
    facts = facts_of(run, folder)
    assert (facts["state"], facts["fallbacks"]) == ("finished", "none")
    assert facts["peak memory"].endswith("B RAM")
    found = json.loads(run("watch", folder, "--json").out)
    assert found["steps_per_second"] > 0
    assert found["cpu_peak_memory_bytes"] > 100_000_000
    assert (found["gpu_utilization"], found["gpu_peak_memory_bytes"]) == (None, None)


def test_a_run_has_one_loss_and_one_speed_wherever_it_is_shown(run, tmp_path):
    folder = finished("lora")
    facts, last = facts_of(run, folder), run("watch", str(folder)).out
    assert f"loss {facts['loss']}" in last.partition("finished in")[2]
    assert f"{facts['tokens/s']} tok/s" in last.partition("finished in")[2]
    found = BoardFolders.of([folder.parent])
    found.search()
    listed = next(one for one in found.of_kind("run") if one.path == folder.resolve())
    shown = Summaries().of(listed).numbers
    assert (shown["loss"], shown["tokens/s"]) == (facts["loss"], facts["tokens/s"])
    run("report", str(folder), "--to", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    for name, value in (("Loss", facts["loss"]), ("Tokens per second", facts["tokens/s"])):
        assert f"<li><span>{name}</span><b>{value}</b>" in page


def test_a_torn_file_of_a_dead_run_is_shown_as_far_as_it_goes(run, tmp_path):
    folder = a_run(tmp_path / "r", STARTED, STEP, pid=NO_SUCH_PID)
    with folder.events.open("a", encoding="utf-8") as stream:
        stream.write('{"event": "step", "st')
    ran = run("watch", str(tmp_path / "r"))
    assert ran.code == 0
    assert ran.out.splitlines()[-3] == "step 4/9  loss 1.5000  lr 1.0e-03"
    assert ran.out.splitlines()[-2].startswith("the trainer ended without a final event")
    go_on = f"resume with: expert train --manifest FILE --resume {tmp_path / 'r'}"
    assert ran.out.splitlines()[-1] == go_on
    assert run("watch", str(tmp_path / "r"), "--once").out.splitlines()[-1] == go_on
    found = json.loads(run("watch", str(tmp_path / "r"), "--json").out)
    assert (found["state"], found["step"], found["loss"]) == ("gone", 4, 1.5)


def test_a_stopped_run_is_shown_with_the_command_that_resumes_wherever_it_was_moved(run, tmp_path):
    home = tmp_path / "moved"
    stopped = {"event": "stopped", "time": 3.0, "step": 4, "reason": "signal", "exit_code": 130}
    started = {**STARTED, "manifest": "/gone/fruit/manifest.yaml"}
    folder = a_run(home / "runs" / "r", started, STEP, stopped)
    plan = {"watch": {"output_dir": "/gone/fruit/runs"}}
    folder.plan.write_text(json.dumps(plan), encoding="utf-8")
    (home / "manifest.yaml").write_text("name: demo\n", encoding="utf-8")
    ran = run("watch", str(folder.path))
    command = f"expert train --manifest {home / 'manifest.yaml'} --resume {folder.path}"
    assert ran.out.splitlines()[-1] == f"resume with: {command}"
