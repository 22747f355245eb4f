"""Checks before an export loads anything: the quality gate, the options, the target folder."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.core.resources import disk_full_error, disk_full_message
from expert.core.text import counted, shell_quoted
from expert.jobs.export.exported import Kind
from expert.jobs.validate.saved_verdict import SavedVerdict, read_verdict
from expert.manifest.schema.manifest import CHAR_GPT

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.choose_checkpoint import Choice

KINDS = ("adapter", "merged")
DTYPES = ("bf16", "fp16", "fp32")
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)


class CannotExport(ExpertError):
    """An export that is not possible, or that would differ from the trained model."""


def export_refusal(found: SavedVerdict) -> str:
    """Why a verdict forbids to export; "" if it does not."""
    if found.passed is False:
        return f"the quality gate failed: {found.reasons}"
    if found.is_too_small:
        return f"the quality gate passed on only {found.cases} of {found.of} cases"
    return ""


def gate_warning(folder: RunFolder, choice: Choice, *, allow_failed: bool) -> str:
    """A warning about the run's validation, or ""; CannotExport if its gate failed, or passed on
    too few cases. A verdict on earlier weights only gives a warning."""
    found, file = read_verdict(folder), folder.validation
    if found is None:
        return ""
    if found.outdated:
        return f"{file} {found.outdated}  (expert validate --expert {shell_quoted(folder.path)})"
    warning, fix = export_refusal(found), "validate them all with expert validate --expert {}"
    if found.passed is False:
        fix = "train longer, validate another checkpoint with expert validate --checkpoint"
    elif warning and found.rows != found.cases:
        warning += f", from {counted(found.rows or 0, 'row')}"
    if warning and not allow_failed:
        or_anyway = (
            f"{fix.format(shell_quoted(folder.path))}, or export it anyway with --allow-failed"
        )
        raise CannotExport(f"{file}: {warning}  ({or_anyway})")
    if warning:
        return f"{file}: {warning}"
    judged = found.checkpoint
    if judged and judged != choice.name:
        done = "passed the quality gate" if found.passed else "was validated"
        return (
            f"{judged} {done}, but {choice.name} is exported  (validate it with expert validate "
            f"--expert {folder.path})"
        )
    return ""


def settle_kind(plan: RunPlan, asked: str | None, dtype: str | None) -> Kind:
    """The kind of the export; CannotExport if the run has no such thing."""
    for name, value, known in (("kind", asked, KINDS), ("dtype", dtype, DTYPES)):
        if value is not None and value not in known:
            raise CannotExport(f"{name} {value!r}: is not known  (known: {', '.join(known)})")
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


def check_target_folder(to: Path) -> None:
    """CannotExport unless the target is missing or an empty folder, and can be written."""
    if to.is_symlink():  # publishing would replace the link itself
        raise CannotExport(
            f"{to}: is a link to {to.readlink()}  (name that folder itself, or a new one)"
        )
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise CannotExport(f"{to}: exists already  (name a new folder: nothing is overwritten)")
    # The finished export is renamed to `to`, replacing an empty folder.
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
        if said := disk_full_message(error):
            raise disk_full_error(to, said) from error
        raise _cannot_write(to, error) from error


@contextmanager
def with_target_in_errors(to: Path) -> Iterator[None]:
    """Make write errors name the user's folder instead of the temporary one."""
    try:
        yield
    except OSError as error:
        named = error.filename
        elsewhere = named is not None and to.absolute().parent not in Path(named).absolute().parents
        if disk_full_message(error) and not elsewhere:
            raise disk_full_error(to) from error
        if elsewhere or error.errno not in CANNOT_WRITE:
            raise
        raise _cannot_write(to, error) from error


def _cannot_write(to: Path, error: OSError) -> CannotExport:
    return CannotExport(
        f"{to}: cannot be written: {error.strerror}  (fix that, or name another folder)"
    )
