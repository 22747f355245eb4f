"""Exports are pushed complete, private, and only where allowed; against a stand-in of the hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expert.core.errors import EXIT_DAMAGED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE, Damaged
from expert.core.hashed import write_hashed
from expert.core.publish import damage
from expert.core.rundir import weights_hash
from expert.jobs.export import push as pushing
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.export.push import EXPORT_RECORD, CannotPush, HubUnavailable, check_push, push
from tests.cli.running import Runner
from tests.each import each
from tests.jobs.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.jobs.trained_runs import exported, finished

NAME = "anna/colours"
# The hub client passes files to httpx in a deprecated way.
# After an error its threads may still be sending to closed connections.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with hub_stand_in() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(pushing, "RETRY_WAITS", (0.0, 0.0))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of an export without a verdict of the gate."""
    return Path(shutil.copytree(exported("lora").folder, tmp_path / "out"))


def failing(run: Path) -> str:
    found = {
        "weights": weights_hash(run / "final"),
        "checkpoint": "final",
        "gate": {"passed": False, "reasons": ["accuracy 12 %, at least 95 % asked"]},
    }
    return json.dumps(found)


# --- what arrives --------------------------------------------------------------------------------


def test_the_repository_has_every_file_of_the_export_and_verifies(hub, out, tmp_path):
    listed: list[dict[str, int]] = []
    done = push(out, NAME, list_files=listed.append)
    there = hub.repositories[NAME]
    assert there.private
    assert done.url == f"{hub.url}/{NAME}/commit/{there.commits[-1]}"
    assert len(there.commits) == 1
    assert listed == [done.files]
    assert done.files == {name: len(data) for name, data in there.files.items()}
    downloaded = tmp_path / "downloaded"
    for name, data in there.files.items():
        (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
        (downloaded / name).write_bytes(data)
    assert damage(downloaded) == ""
    assert {*there.files} == {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    texts = [data for name, data in there.files.items() if name.endswith("json")]
    assert [text for text in texts if str(finished("lora").parent).encode() in text] == []


@each(
    ("public", "words"),
    [
        (True, "is private on the hub, and a push does not change that"),
        (False, r"is public on the hub  \(add --public"),
    ],
)
def test_a_repository_is_made_and_stays_as_visible_as_asked(hub, out, public, words):
    assert push(out, NAME, public=not public).private is public
    assert hub.repositories[NAME].private is public
    with pytest.raises(CannotPush, match=words):
        push(out, NAME, public=public)
    hub.repositories.clear()


def test_a_second_push_sends_only_what_changed_and_names_files_of_others(hub, out):
    push(out, NAME)
    hub.repositories[NAME].files["notes.txt"] = b"by hand"
    hub.asked.clear()
    done = push(out, NAME)
    assert done.others == ["notes.txt"]
    assert not [asked for asked in hub.asked if asked.startswith("PUT") or "commit/main" in asked]
    assert done.url.endswith(hub.repositories[NAME].commits[-1])


# --- what is refused -----------------------------------------------------------------------------


def test_an_export_that_failed_its_gate_is_not_pushed_unless_allowed(hub, tmp_path):
    run = Path(shutil.copytree(finished("lora"), tmp_path / "run"))
    write_hashed(run / "validation.json", failing(run))
    export(run, tmp_path / "out", device="cpu", allow_failed=True)
    with pytest.raises(CannotExport, match="the quality gate failed: accuracy 12 %"):
        push(tmp_path / "out", NAME)
    assert hub.asked == []
    push(tmp_path / "out", NAME, allow_failed=True)
    assert hub.repositories[NAME].commits


def test_an_export_that_was_changed_is_not_pushed(hub, out):
    card = out / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    with pytest.raises(Damaged, match="README"):
        push(out, NAME)
    assert hub.asked == []


@each("missing", [EXPORT_RECORD, "DONE"])
def test_another_folder_is_not_pushed(hub, tmp_path, out, missing):
    (out / missing).rename(out.parent / "aside")
    with pytest.raises(CannotPush, match="is not an export: "):
        push(out, NAME)
    (out.parent / "aside").rename(out / missing)


@each("name", ["colours", "anna/", "anna/a/b", "../x", "anna/colours now"])
def test_a_name_that_is_no_repository_is_refused_before_anything_else(hub, name):
    with pytest.raises(CannotPush, match="is not the name of a repository"):
        check_push(name)
    assert hub.asked == []


def test_without_a_token_nothing_is_asked(hub, out, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CannotPush, match=r"there is no token for the hub  \(set HF_TOKEN"):
        push(out, NAME)
    assert hub.asked == []


# --- what goes wrong -----------------------------------------------------------------------------


@each(
    ("where", "status", "kind", "words"),
    [
        ("whoami", 401, CannotPush, r"the hub does not accept the token \(401\)"),
        ("repos/create", 403, CannotPush, r"anna/colours: the token may not write there \(403\)"),
        ("preupload", 403, CannotPush, r"anna/colours: the token may not write there \(403\)"),
        (
            "commit/main",
            404,
            CannotPush,
            "anna/colours: there is no such account or repository on the hub",
        ),
        ("commit/main", 409, HubUnavailable, r"anna/colours: has changed meanwhile \(4"),
        ("commit/main", 412, HubUnavailable, r"anna/colours: has changed meanwhile \(4"),
        ("commit/main", 503, HubUnavailable, r"the hub is unavailable \(5"),
        ("repos/create", 500, HubUnavailable, r"the hub is unavailable \(5"),
        ("commit/main", 413, CannotPush, r"anna/colours: the hub refused the push \(4"),
        ("large/", 400, CannotPush, r"anna/colours: the hub refused the push \(4"),
    ],
)
def test_hub_errors_are_readable(hub, out, where, status, kind, words):
    hub.repositories.clear()
    hub.objects.clear()
    hub.faults[:] = [(where, status)] * 9  # more often than it retries
    with pytest.raises(kind, match=words):
        push(out, NAME)
    assert all(not there.commits for there in hub.repositories.values())
    hub.faults.clear()


@each("where", ["repos/create", "api/models/anna/colours$", "commit/main"])
def test_temporary_hub_errors_are_retried(hub, out, where):
    hub.repositories.clear()
    hub.faults[:] = [(where, 503)]
    said: list[str] = []
    push(out, NAME, tell=said.append)
    assert "the hub is unavailable, retrying in" in said[0]
    assert len(hub.repositories[NAME].commits) == 1


def test_an_unreachable_hub_is_a_readable_error(hub, out, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnavailable, match=r"http://127.0.0.1:9 cannot be reached: "):
        push(out, NAME)


# --- the command ---------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "expert", "export", *words]


def environment(hub: Hub) -> dict[str, str]:
    more = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    return {**os.environ, **more, "HF_HUB_OFFLINE": "0", "COLUMNS": "400"}


def test_the_command_lists_the_files_pushes_them_and_prints_the_commit(
    hub, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    run, to = Runner(capsys, monkeypatch), tmp_path / "out"
    words = ("export", str(finished("lora")), "--to", str(to), "--device", "cpu", "--push", NAME)
    ran = run(*words)
    assert (ran.code, ran.err) == (EXIT_OK, "")
    assert f"{hub.url}/{NAME}/commit/{hub.repositories[NAME].commits[-1]}" in ran.out
    assert all(name in ran.out for name in hub.repositories[NAME].files)
    assert TOKEN not in ran.out
    again = run("export", str(to), "--push", NAME, "--json")
    assert json.loads(again.out)["pushed"]["repository"] == NAME
    hub.faults[:] = [("whoami", 503)] * 9
    assert run("export", str(to), "--push", NAME).code == EXIT_UNAVAILABLE
    hub.faults.clear()
    (to / "README.md").write_text("other", encoding="utf-8")
    assert run("export", str(to), "--push", NAME).code == EXIT_DAMAGED
    refused = run(*words[:3], str(tmp_path / "more"), "--push", "carol/x")
    assert refused.code == EXIT_USAGE


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is of POSIX")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_a_push_that_was_broken_off_commits_nothing_and_continues(hub, out, number):
    with subprocess.Popen(
        command(str(out), "--push", NAME),
        env=environment(hub),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:

        def end(what: str) -> bool:
            if "commit/main" not in what:
                return False
            process.send_signal(number)
            process.wait()
            return True

        hub.unanswered = end
        told = process.stderr.read()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert "Traceback" not in told
    if number == signal.SIGINT:
        assert "nothing was pushed; expert export " in told
    hub.unanswered = lambda what: False
    assert hub.repositories[NAME].commits == []
    sent = [asked for asked in hub.asked if asked.startswith("PUT")]
    assert sent
    hub.asked.clear()
    push(out, NAME)
    assert not [asked for asked in hub.asked if asked.startswith("PUT")]
    assert len(hub.repositories[NAME].commits) == 1
