"""Exports are pushed complete, private, and only where allowed; the hub's client is a stand-in."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from expert.core.errors import EXIT_DAMAGED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE, Damaged
from expert.core.hashed import write_hashed
from expert.core.interrupts import Interrupted
from expert.core.rundir import weights_hash
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.export.push import EXPORT_RECORD, CannotPush, HubUnavailable, check_push, push
from tests.cli.running import Runner
from tests.each import each
from tests.jobs.trained_runs import exported, finished

NAME, TOKEN = "anna/colours", "hf_standin0123456789abcdef"
URL = f"https://hub/{NAME}/commit/1"


@dataclass
class Hub:
    """Stands in for `huggingface_hub.HfApi`; `faults` are raised by the methods they name."""

    asked: list[str] = field(default_factory=list)
    repositories: dict[str, bool] = field(default_factory=dict)
    """Whether each is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, BaseException] = field(default_factory=dict)

    def _begin(self, what: str) -> None:
        self.asked.append(what)
        if what in self.faults:
            raise self.faults[what]

    def whoami(self) -> None:
        self._begin("whoami")

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self._begin("create_repo")
        assert exist_ok
        self.repositories.setdefault(name, private)

    def model_info(self, name: str) -> Any:
        self._begin("model_info")
        return SimpleNamespace(private=self.repositories[name])

    def upload_folder(self, *, folder_path: Path, **asked: Any) -> Any:
        self._begin("upload_folder")
        assert (asked["repo_id"], asked["ignore_patterns"]) == (NAME, [])
        for path in (path for path in folder_path.rglob("*") if path.is_file()):
            self.files[path.relative_to(folder_path).as_posix()] = path.read_bytes()
        return SimpleNamespace(commit_url=URL)


@pytest.fixture
def hub(monkeypatch) -> Hub:
    from huggingface_hub import constants

    made = Hub()
    client = type("HfApi", (), {"__new__": lambda cls, **_: made})
    monkeypatch.setattr("huggingface_hub.HfApi", client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of an export without a verdict of the gate."""
    return Path(shutil.copytree(exported("lora").folder, tmp_path / "out"))


def test_every_file_is_listed_and_uploaded_and_no_file_names_a_folder_of_this_machine(hub, out):
    told: list[str] = []
    done = push(out, NAME, tell=told.append)
    assert (done["url"], done["private"], hub.repositories) == (URL, True, {NAME: True})
    own = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert own == hub.files
    assert done["files"] == {name: len(data) for name, data in own.items()}
    assert all(any(name in line for line in told[:-1]) for name in own)
    assert told[-1].endswith(f"to {NAME} (private) …")
    place = str(finished("lora").parent).encode()
    assert [name for name, data in own.items() if name.endswith("json") and place in data] == []


@each("public, words", [(True, "is private on the hub"), (False, r"is public .* \(add --public")])
def test_a_repository_is_made_and_stays_as_visible_as_asked(hub, out, public, words):
    assert push(out, NAME, public=not public)["private"] is public
    assert hub.repositories.pop(NAME) is public
    hub.repositories[NAME] = public
    with pytest.raises(CannotPush, match=words):
        push(out, NAME, public=public)
    hub.repositories.clear()


def test_an_export_that_failed_its_gate_is_not_pushed_unless_allowed(hub, tmp_path):
    run = Path(shutil.copytree(finished("lora"), tmp_path / "run"))
    gate = {"passed": False, "reasons": ["accuracy 12 %, at least 95 % asked"]}
    failed = {"weights": weights_hash(run / "final"), "checkpoint": "final", "gate": gate}
    write_hashed(run / "validation.json", json.dumps(failed))
    export(run, tmp_path / "out", device="cpu", allow_failed=True)
    with pytest.raises(CannotExport, match="the quality gate failed: accuracy 12 %"):
        push(tmp_path / "out", NAME)
    assert hub.asked == []
    push(tmp_path / "out", NAME, allow_failed=True)
    assert hub.files


def test_changed_exports_other_folders_and_other_names_are_refused_before_the_hub_is_asked(
    hub, out, monkeypatch, tmp_path
):
    from huggingface_hub import constants

    for missing in (EXPORT_RECORD, "DONE"):
        (out / missing).rename(tmp_path / "aside")
        with pytest.raises(CannotPush, match="is not an export: "):
            push(out, NAME)
        (tmp_path / "aside").rename(out / missing)
    for name in ("colours", "anna/", "anna/a/b", "../x", "anna/colours now"):
        with pytest.raises(CannotPush, match="is not the name of a repository"):
            check_push(name)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CannotPush, match=r"there is no token for the hub  \(set HF_TOKEN"):
        push(out, NAME)
    card = out / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    with pytest.raises(Damaged, match="README"):
        push(out, NAME)
    assert hub.asked == []


def http_error(status: int) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx.Request("POST", "https://hub")
    response = httpx.Response(status, request=request)
    return HfHubHTTPError("", response=response, server_message=f"told to fail {TOKEN}")


def wrapped(error: Exception) -> Exception:
    """As the client wraps errors of an upload."""
    outer = RuntimeError("Error while uploading 'x' to the Hub.")
    outer.__cause__ = error
    return outer


@each(
    ("where", "error", "kind", "words"),
    [
        ("whoami", http_error(401), CannotPush, "refused the push: 401, told to fail"),
        ("create_repo", http_error(403), CannotPush, "refused the push: 403, told to fail"),
        ("upload_folder", http_error(404), CannotPush, "refused the push: 404"),
        ("upload_folder", http_error(409), HubUnavailable, "unavailable: 409"),
        ("upload_folder", http_error(429), HubUnavailable, "unavailable: 429"),
        ("create_repo", http_error(503), HubUnavailable, r"unavailable: 503.*repeat the command"),
        ("upload_folder", wrapped(http_error(400)), CannotPush, "refused the push: 400"),
        ("upload_folder", wrapped(http_error(500)), HubUnavailable, "unavailable: 500"),
        ("upload_folder", RuntimeError("xet broke"), HubUnavailable, "unavailable: xet broke"),
        ("upload_folder", ValueError("invalid YAML"), CannotPush, "invalid YAML"),
        ("model_info", httpx.ConnectError("no route"), HubUnavailable, "unavailable: no route"),
    ],
)
def test_hub_errors_are_readable_and_show_no_token(hub, out, where, error, kind, words):
    hub.faults = {where: error}
    with pytest.raises(kind, match=words) as raised:
        push(out, NAME)
    assert TOKEN not in str(raised.value)
    assert hub.files == {}


def test_an_interrupted_push_says_how_to_continue(hub, out):
    hub.faults = {"upload_folder": Interrupted(2)}
    with pytest.raises(Interrupted) as ended:
        push(out, NAME)
    assert ended.value.left.startswith("nothing was pushed; expert export ")


def test_the_command_lists_the_files_pushes_them_and_prints_the_commit(
    hub, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    run, to = Runner(capsys, monkeypatch), tmp_path / "out"
    words = ("export", str(finished("lora")), "--to", str(to), "--device", "cpu", "--push", NAME)
    ran = run(*words)
    assert (ran.code, ran.err) == (EXIT_OK, "")
    assert URL in ran.out
    assert all(name in ran.out for name in hub.files)
    assert TOKEN not in ran.out
    again = run("export", str(to), "--push", NAME, "--json")
    assert json.loads(again.out)["pushed"]["repository"] == NAME
    hub.faults = {"whoami": http_error(503)}
    assert run("export", str(to), "--push", NAME).code == EXIT_UNAVAILABLE
    hub.faults = {"whoami": http_error(403)}
    assert run(*words[:3], str(tmp_path / "more"), "--push", "carol/x").code == EXIT_USAGE
    (to / "README.md").write_text("other", encoding="utf-8")
    assert run("export", str(to), "--push", NAME).code == EXIT_DAMAGED
