"""Checks before an export loads anything: the quality gate, the options, the target folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

from expert.core.errors import ExpertError
from expert.core.resources import disk_full_error, disk_full_message
from expert.core.rundir import RunFolder
from expert.core.text import shell_quoted
from expert.jobs.export.exported import Kind
from expert.jobs.validate.saved_verdict import SavedVerdict, read_verdict
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.run_plan import RunPlan
from expert.run.stored.choose_checkpoint import Choice

KINDS = ("adapter", "merged")
DTYPES = ("bf16", "fp16", "fp32")


def export_refusal(found: SavedVerdict) -> str:
    """Why a verdict forbids to export; "" if it does not."""
    if found.passed is False:
        return f"the quality gate failed: {found.reasons}"
    if found.undecided:
        return f"not enough to tell whether the quality gate passes: {found.reasons}"
    return ""


def gate_warning(folder: RunFolder, choice: Choice, *, allow_failed: bool) -> str:
    """A warning about the run's validation, or ""; ExpertError if its gate failed, or
    there was not enough to tell. A verdict on earlier weights only gives a warning."""
    found, file, run = read_verdict(folder), folder.validation, shell_quoted(folder.path)
    if found is None:
        return ""
    if found.outdated:
        return f"{file} {found.outdated}  (expert validate {run})"
    if refusal := export_refusal(found):
        if allow_failed:
            return f"{file}: {refusal}"
        fix = f"score more rows with expert validate {run} --test-set FILE, or lower --min-accuracy"
        if found.passed is False:
            fix = "train longer, validate another checkpoint with expert validate --checkpoint"
        raise ExpertError(f"{file}: {refusal}  ({fix}, or export it anyway with --allow-failed)")
    if found.checkpoint not in ("", choice.name):
        done = "passed the quality gate" if found.passed else "was validated"
        return (
            f"{found.checkpoint} {done}, but {choice.name} is exported  (validate it with expert "
            f"validate {run})"
        )
    return ""


def settle_kind(plan: RunPlan, asked: str | None, dtype: str | None) -> Kind:
    """The kind of the export; ExpertError if the run has no such thing."""
    for name, value, known in (("kind", asked, KINDS), ("dtype", dtype, DTYPES)):
        if value is not None and value not in known:
            raise ExpertError(f"{name} {value!r}: is not known  (known: {', '.join(known)})")
    full, why = plan.adapter.type == "full", ""
    if full and asked is not None:
        why = f"--{asked}: all weights were trained, there is no adapter  (leave --{asked} out)"
    elif full and dtype is not None and plan.model.name == CHAR_GPT:
        why = "--dtype: the character model is float32, as it was trained  (leave --dtype out)"
    elif asked == "merged" and plan.adapter.type == "none":
        why = "--merged: soft prompts cannot be merged into weights  (export them with --adapter)"
    elif not full and asked != "merged" and dtype is not None:
        why = "--dtype: an adapter is exported as it was trained  (use --dtype with --merged)"
    if why:
        raise ExpertError(why)
    return "model" if full else "merged" if asked == "merged" else "adapter"


def check_target_folder(to: Path) -> None:
    """ExpertError unless the target is missing or an empty folder, and can be written."""
    if to.is_symlink():  # publishing would replace the link itself
        raise ExpertError(
            f"{to}: is a link to {to.readlink()}  (name that folder itself, or a new one)"
        )
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ExpertError(f"{to}: exists already  (name a new folder: nothing is overwritten)")
    # The finished export is renamed to `to`, replacing an empty folder.
    if to.resolve() == Path.cwd():
        raise ExpertError(
            f"{to}: is the folder you are in, which cannot be replaced  (name a new folder in it)"
        )
    above = next(place for place in to.absolute().parents if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=above):
            pass
    except OSError as error:
        if said := disk_full_message(error):
            raise disk_full_error(to, said) from error
        raise ExpertError(
            f"{to}: cannot be written: {error.strerror}  (fix that, or name another folder)"
        ) from error
