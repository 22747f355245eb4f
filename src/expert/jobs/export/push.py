"""`expert export --push`: uploads an exported folder to the hub as a single commit.

The token is that of the hub client: HF_TOKEN, or the one saved by `hf auth login`. After an
interruption the hub keeps uploaded files, which are not sent again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.errors import EXIT_UNAVAILABLE, Damaged, ExpertError
from expert.core.install import NAME
from expert.core.interrupts import Interrupted
from expert.core.publish import DONE, damage
from expert.core.secrets import redacted
from expert.core.stored_json import read_object_or_empty
from expert.core.text import counted, gib, shell_quoted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

EXPORT_RECORD = "export.json"
"""Records the run and the verdict of an export; checked before a push."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class CannotPush(ExpertError):
    """The push is refused, by the hub or here; repeating it would not help."""


class HubUnavailable(ExpertError):
    """The hub cannot be reached, fails or is busy: the same command may work later."""

    exit_code = EXIT_UNAVAILABLE


def check_push(repository: str) -> HfApi:
    """The client of the hub; raises if a push would be refused, before minutes are spent on an
    export."""
    from huggingface_hub import HfApi, constants, get_token

    why = ""
    if not _REPOSITORY.fullmatch(repository):
        why = f"{repository!r} is not the name of a repository  (write user/name)"
    elif constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set  (unset it to push)"
    elif not get_token():
        why = "there is no token for the hub  (set HF_TOKEN, or run hf auth login)"
    if why:
        raise CannotPush(f"--push: {why}")
    api = HfApi(library_name=NAME, library_version=__version__)
    with _readable_errors(repository):
        api.whoami()
    return api


def check_export(folder: Path, *, allow_failed: bool) -> dict[str, Any]:
    """The record of an export; raises unless it is unchanged and passed its quality gate."""
    origin = read_object_or_empty(folder / EXPORT_RECORD)
    if not origin or not (folder / DONE).is_file():
        what = f"is not an export: {EXPORT_RECORD} or {DONE} is missing"
        raise CannotPush(f"{folder}: {what}  (make one with expert export RUN --to FOLDER)")
    if fault := damage(folder):
        raise Damaged(f"{folder}: {fault}  (export it again)")
    gate = origin.get("gate")
    refused = str(gate.get("refused") or "") if isinstance(gate, dict) else "it has no verdict"
    if refused and not allow_failed:
        raise ExpertError(f"{folder}: {refused}  (train longer, or push with --allow-failed)")
    return dict(origin)


def push(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    allow_failed: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Upload an exported folder in one commit, whose address is the `url` of the result; a new
    repository is private unless `public`. Files that are on the hub already are not sent again.
    `tell` receives the list of files first."""
    origin = check_export(folder, allow_failed=allow_failed)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    message = f"{origin.get('run', folder.name)}: {origin.get('checkpoint')}, {origin.get('kind')}"
    try:
        api = check_push(repository)
        for name, size in files.items():
            tell(f"  {gib(size):>10}  {name}")
        total = f"{counted(len(files), 'file')}, {gib(sum(files.values()))}"
        tell(f"uploading {total} to {repository} ({'public' if public else 'private'}) …")
        with _readable_errors(repository):
            api.create_repo(repository, private=not public, exist_ok=True)
            if api.model_info(repository).private is public:
                is_now, option = ("private", "leave out") if public else ("public", "add")
                what = f"{repository}: is {is_now} on the hub, and a push does not change that"
                raise CannotPush(f"{what}  ({option} --public, or name another repository)")
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=[]
            )
    except Interrupted as end:
        again = f"expert export {shell_quoted(folder)} --push {repository}"
        end.left = f"nothing was pushed; {again} continues"
        raise
    url = str(commit.commit_url)
    return {"repository": repository, "url": url, "private": not public, "files": files}


@contextmanager
def _readable_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub and its client into one line: what the hub refuses with a status of
    4xx is CannotPush, everything else may work later."""
    import httpx

    try:
        yield
    except ExpertError:
        raise
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not hasattr(cause, "response"):
            cause = cause.__cause__  # the client wraps errors of an upload
        status = getattr(getattr(cause, "response", None), "status_code", None)
        why = getattr(cause, "server_message", None) or str(cause) or type(cause).__name__
        why = redacted(" ".join(f"{f'{status}, ' if status else ''}{why}".split()))[:300]
        changed_or_busy = status in (409, 412, 429)
        if isinstance(error, ValueError) or (status and status < 500 and not changed_or_busy):
            fix = "the token of HF_TOKEN or hf auth login must be valid and may write there"
            raise CannotPush(f"{repository}: the hub refused the push: {why}  ({fix})") from error
        what = f"the hub cannot be reached or is unavailable: {why}"
        fix = "repeat the command: what was uploaded is not sent again"
        raise HubUnavailable(f"{repository}: {what}  ({fix})") from error
