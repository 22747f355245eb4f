"""`expert export --push`: uploads an exported folder to the hub as a single commit.

The token is that of the hub client: HF_TOKEN, or the one saved by `hf auth login`. After an
interruption the hub keeps uploaded files, which are not sent again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.errors import EXIT_UNAVAILABLE, Damaged, ExpertError
from expert.core.install import NAME
from expert.core.interrupts import Interrupted
from expert.core.publish import DONE, damage
from expert.core.rundir import RunFolder, weights_hash
from expert.core.secrets import redacted
from expert.core.stored_json import read_object_or_empty
from expert.core.text import shell_quoted
from expert.jobs.export.checks import CannotExport, export_refusal
from expert.jobs.export.exported import Exported
from expert.jobs.validate.saved_verdict import read_verdict

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from expert.run.stored.choose_checkpoint import Choice

EXPORT_RECORD = "export.json"
"""Records the run and the verdict of an export; checked before a push."""
RETRY_WAITS = (2.0, 8.0, 30.0)
"""Seconds before each retry if the hub fails or cannot be reached."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_LONGEST_WORDS = 300


class CannotPush(ExpertError):
    """The push is refused, by the hub or here; repeating it would not help."""


class HubUnavailable(ExpertError):
    """The hub cannot be reached, fails or is busy: the same command may work later."""

    exit_code = EXIT_UNAVAILABLE


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was pushed, and where."""

    repository: str
    url: str
    """Of the commit."""
    private: bool
    files: dict[str, int]
    """Bytes by name."""
    others: list[str]
    """Files in the repository that are not part of this export."""


def write_export_record(
    target: Path, folder: RunFolder, choice: Choice, done: Exported, more: Mapping[str, object]
) -> None:
    """Write the origin of an export and `more`, without any local path."""
    verdict = read_verdict(folder)
    judged = verdict if verdict is not None and not verdict.outdated else None
    record = {
        "expert": __version__,
        "run": folder.path.name,
        "checkpoint": done.checkpoint,
        "weights": weights_hash(choice.path),
        "kind": done.kind,
        "dtype": done.dtype,
        "gate": {
            "passed": judged.passed if judged is not None else None,
            "refused": export_refusal(judged) if judged is not None else "",
        },
        **more,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (target / EXPORT_RECORD).write_text(redacted(text) + "\n", encoding="utf-8")


def check_push(repository: str) -> HfApi:
    """The client of the hub; raises if a push would be refused, before minutes are spent on an
    export."""
    from huggingface_hub import HfApi, constants, get_token

    if not _REPOSITORY.fullmatch(repository):
        raise CannotPush(
            f"--push: {repository!r} is not the name of a repository  (write user/name or "
            "organisation/name)"
        )
    if constants.HF_HUB_OFFLINE:
        raise CannotPush("--push: HF_HUB_OFFLINE is set  (unset it to push)")
    if not get_token():
        raise CannotPush(
            "--push: there is no token for the hub  (set HF_TOKEN in the environment, or run hf "
            "auth login)"
        )
    api = HfApi(library_name=NAME, library_version=__version__)
    with _readable_errors(repository):
        api.whoami()
    return api


def check_export(folder: Path, *, allow_failed: bool) -> None:
    """Raise unless a folder is an unchanged export that passed its quality gate."""
    origin = read_object_or_empty(folder / EXPORT_RECORD)
    if not origin or not (folder / DONE).is_file():
        raise CannotPush(
            f"{folder}: is not an export: {EXPORT_RECORD} or {DONE} is missing  "
            "(make one with expert export RUN --to FOLDER)"
        )
    fault = damage(folder)
    if fault:
        raise Damaged(f"{folder}: {fault}  (export it again)")
    gate = origin.get("gate")
    refused = str(gate.get("refused") or "") if isinstance(gate, dict) else "it has no verdict"
    if refused and not allow_failed:
        raise CannotExport(
            f"{folder}: {refused}  (train longer, or push it anyway with --allow-failed)"
        )


def file_sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files of an export, by their names on the hub."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def push(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    allow_failed: bool = False,
    list_files: Callable[[dict[str, int]], None] = lambda files: None,
    tell: Callable[[str], None] = lambda what: None,
) -> Pushed:
    """Upload an exported folder in one commit; a new repository is private unless `public`. Files
    that are on the hub already are not sent again."""
    check_export(folder, allow_failed=allow_failed)
    files = file_sizes(folder)
    origin = read_object_or_empty(folder / EXPORT_RECORD)
    message = f"{origin.get('run', folder.name)}: {origin.get('checkpoint')}, {origin.get('kind')}"

    def asked(action: Callable[[], Any]) -> Any:
        with _readable_errors(repository):
            return _with_retries(action, tell=tell)

    try:
        api = check_push(repository)
        list_files(files)
        asked(lambda: api.create_repo(repository, private=not public, exist_ok=True))
        info = asked(lambda: api.model_info(repository))
        if info.private and public:
            raise CannotPush(
                f"{repository}: is private on the hub, and a push does not change that  (leave out "
                "--public, or change it on its page there)"
            )
        if not info.private and not public:
            raise CannotPush(
                f"{repository}: is public on the hub  (add --public, or name another repository)"
            )
        commit = asked(
            lambda: api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=[]
            )
        )
    except Interrupted as end:
        again = f"expert export {shell_quoted(folder)} --push {repository}"
        end.left = f"nothing was pushed; {again} continues"
        raise
    known = {file.rfilename for file in info.siblings or ()}
    return Pushed(
        repository=repository,
        url=str(commit.commit_url),
        private=not public,
        files=files,
        others=sorted(known - {*files, ".gitattributes"}),
    )


def _with_retries(action: Callable[[], Any], *, tell: Callable[[str], None]) -> Any:
    """The result of an action, retried if the hub fails or cannot be reached."""
    for wait in RETRY_WAITS:
        try:
            return action()
        except Exception as error:
            if not isinstance(_readable_error(error, ""), HubUnavailable):
                raise
            tell(f"the hub is unavailable, retrying in {wait:g} s")
            time.sleep(wait)
    return action()


@contextmanager
def _readable_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub and its client into readable ones."""
    try:
        yield
    except ExpertError:
        raise
    except Exception as error:
        worded = _readable_error(error, repository)
        if worded is None:
            raise
        raise worded from error


def _readable_error(error: BaseException, repository: str) -> ExpertError | None:
    """A readable error for one of the hub; None if it is not from the hub."""
    import httpx
    from huggingface_hub import constants

    again = "  (repeat the command: what was uploaded is not sent again)"
    cause: BaseException | None = error
    while cause is not None:  # the client wraps errors of an upload
        response: Any = getattr(cause, "response", None)
        code = getattr(response, "status_code", None)
        reason = redacted(str(getattr(cause, "server_message", "") or ""))[:_LONGEST_WORDS]
        reason = f": {reason}" if reason else ""
        refused = {
            401: "the hub does not accept the token (401)  (set HF_TOKEN to a valid one, or run hf "
            "auth login)",
            403: f"{repository}: the token may not write there (403){reason}  (give it write "
            "access, or name a repository of yours)",
            404: f"{repository}: there is no such account or repository on the hub, or the token "
            "may not see it (404)",
        }
        if code in refused:
            return CannotPush(refused[code])
        if code in (409, 412):
            return HubUnavailable(f"{repository}: has changed meanwhile ({code}){reason}{again}")
        if code == 429 or (code is not None and code >= 500):
            return HubUnavailable(f"the hub is unavailable ({code}){reason}{again}")
        if code is not None:
            return CannotPush(f"{repository}: the hub refused the push ({code}){reason}")
        if isinstance(cause, httpx.TransportError | ConnectionError | TimeoutError):
            why = redacted(str(cause))[:_LONGEST_WORDS] or type(cause).__name__
            return HubUnavailable(f"{constants.ENDPOINT} cannot be reached: {why}{again}")
        cause = cause.__cause__
    why = redacted(f"{type(error).__name__}: {error}")[:_LONGEST_WORDS]
    if isinstance(error, ValueError):  # such as a model card with invalid YAML
        return CannotPush(f"{repository}: the hub client refused the push: {why}")
    if isinstance(error, RuntimeError):  # from the library that uploads large files
        return HubUnavailable(f"{repository}: the upload failed: {why}{again}")
    return None
