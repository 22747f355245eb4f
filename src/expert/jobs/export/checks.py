"""What is asked before an export loads anything: may it be, what will it be, can it be written."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.jobs.export.exported import Kind
from expert.jobs.validate.saved_verdict import read_verdict
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.choose_checkpoint import Choice

CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class CannotExport(ExpertError):
    """An export that makes no sense, or that would not say what the trained model says."""


def gate_remark(folder: RunFolder, choice: Choice, *, allow_failed: bool) -> str:
    """A remark on the run's validation, "" without one; CannotExport where its gate failed, or
    passed on too few cases. A verdict on other weights counts as none."""
    found, file = read_verdict(folder), folder.validation
    if found is None:
        return ""
    if found.outdated:
        return f"{file} {found.outdated}  (expert validate --expert {folder.path})"
    if found.passed is False:
        said = f"{file}: the quality gate failed: {found.reasons}"
        if not allow_failed:
            raise CannotExport(
                f"{said}  (train longer, validate another checkpoint with expert validate "
                "--checkpoint, or export it anyway with --allow-failed)"
            )
        return said
    if found.is_too_small:
        said = f"{file}: the quality gate passed on only {found.cases} of {found.of} cases"
        if found.rows != found.cases:
            said += f", from {counted(found.rows or 0, 'row')}"
        if not allow_failed:
            raise CannotExport(
                f"{said}  (validate them all with expert validate --expert {folder.path}, or "
                "export it anyway with --allow-failed)"
            )
        return said
    judged = found.checkpoint
    if judged and judged != choice.name:
        done = (
            f"the quality gate was passed by {judged}"
            if found.passed
            else f"{judged} was validated"
        )
        return (
            f"{done}, and {choice.name} is exported  (validate it with expert validate --expert "
            f"{folder.path})"
        )
    return ""


def settle_kind(plan: RunPlan, asked: str | None, dtype: str | None) -> Kind:
    """What the export will be; what the run cannot give is refused."""
    if plan.adapter.type == "full":
        if asked is not None:
            flag = f"--{asked}"
            raise CannotExport(
                f"{flag}: all weights were trained, there is no adapter  (leave {flag} out)"
            )
        if dtype is not None and plan.model.name == CHAR_GPT:
            raise CannotExport(
                "--dtype: the character model is float32, as it was trained  (leave --dtype out)"
            )
        return "model"
    if asked == "merged":
        if plan.adapter.type == "none":
            raise CannotExport(
                "--merged: soft prompts cannot be merged into weights  (export them with --adapter)"
            )
        return "merged"
    if dtype is not None:
        raise CannotExport(
            "--dtype: an adapter is exported as it was trained  (use --dtype with --merged)"
        )
    return "adapter"


def refuse_place(to: Path) -> None:
    """Nothing is overwritten, but an empty folder is as good as none; and it must be writable."""
    if to.is_symlink():  # the export takes the place of what is there: that would be the link
        raise CannotExport(
            f"{to}: is a link to {to.readlink()}  (name that folder itself, or a new one)"
        )
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise CannotExport(f"{to}: exists already  (name a new folder: nothing is overwritten)")
    # The export gets its name when it is whole, in place of the folder that is there.
    if to.resolve() == Path.cwd():
        raise CannotExport(
            f"{to}: is the folder you are in, which cannot be replaced  (name a new folder in it)"
        )
    above = next(place for place in to.absolute().parents if place.exists())
    if not above.is_dir():
        raise CannotExport(f"{to}: cannot be written: {above} is not a folder  (name another one)")
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=above):
            pass
    except OSError as error:
        raise _cannot_write(to, error) from error


@contextmanager
def naming(to: Path) -> Iterator[None]:
    """Errors of writing name the folder the user gave, not the temporary one."""
    try:
        yield
    except OSError as error:
        named = error.filename
        elsewhere = named is not None and to.absolute().parent not in Path(named).absolute().parents
        if elsewhere or error.errno not in CANNOT_WRITE:
            raise
        raise _cannot_write(to, error) from error


def _cannot_write(to: Path, error: OSError) -> CannotExport:
    return CannotExport(
        f"{to}: cannot be written: {error.strerror}  (fix that, or name another folder)"
    )
