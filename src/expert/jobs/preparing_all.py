"""The job behind `expert pretokenize --all`: what became of each manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    from expert.jobs.prepared import PreparedData
    from expert.jobs.preparing import Tell


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one manifest; a reason where it was not prepared."""

    manifest: Path
    state: Literal["prepared", "skipped", "failed"]
    data: PreparedData | None = None
    reason: str = ""


def manifests_below(folder: Path) -> list[Path]:
    """Every manifest in a folder of experts, one or two levels down."""
    from expert.data.records import DataError
    from expert.manifest.document import FILE_NAMES

    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "there is no such folder"
        raise DataError(f"--all {folder}: {what}  (name a folder of experts)")
    names = FILE_NAMES
    found = [path for name in names for path in [*folder.glob(name), *folder.glob(f"*/{name}")]]
    if not found:
        raise DataError(f"{folder}: no manifest below  (looked for {', '.join(names)})")
    return sorted(found)


def attempt(
    manifest: Path, *, model: str | None, overrides: tuple[str, ...], tell: Tell
) -> Outcome:
    """Prepare what a manifest names. It is skipped where there is nothing to prepare on this
    machine, and has failed where there is."""
    from expert.data.records import DataNotHere
    from expert.jobs.preparing import NothingToPrepare, prepare

    try:
        data = prepare(manifest, model=model, overrides=overrides, tell=tell)
    except (DataNotHere, NothingToPrepare) as error:
        return Outcome(manifest=manifest, state="skipped", reason=str(error))
    except ExpertError as error:
        return Outcome(manifest=manifest, state="failed", reason=str(error))
    except OSError as error:
        reason = f"{error.filename or manifest}: {error.strerror or error}"
        return Outcome(manifest=manifest, state="failed", reason=reason)
    return Outcome(manifest=manifest, state="prepared", data=data)
