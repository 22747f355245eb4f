"""The job behind `expert pretokenize`: one manifest or all below a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expert.core.errors import ExpertError
from expert.core.files import files_below

if TYPE_CHECKING:
    from expert.data.pipeline import Tell
    from expert.data.prepared import PreparedData


@dataclass(frozen=True)
class PrepareOutcome:
    """The result for one manifest, with the reason if it was not prepared."""

    manifest: Path
    state: Literal["prepared", "skipped", "failed"]
    reason: str = ""
    data: PreparedData | None = None


def manifests_below(folder: Path) -> list[Path]:
    """Every manifest in a folder of experts; runs, environments and caches are skipped."""
    from expert.data.records import DataError
    from expert.manifest.text.document import FILE_NAMES

    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise DataError(f"--all {folder}: {what}  (name a folder of experts)")
    found = [file for file in files_below(folder) if file.name in FILE_NAMES]
    if not found:
        raise DataError(f"{folder}: no manifest below  (looked for {', '.join(FILE_NAMES)})")
    return found


def try_prepare(
    manifest: Path, *, model: str | None, overrides: tuple[str, ...], tell: Tell
) -> PrepareOutcome:
    """Prepare what a manifest names. It is skipped if there is nothing to prepare on this machine,
    and failed if preparing it did not work."""
    from expert.data.records import DataNotFound
    from expert.data.splits import NothingToPrepare
    from expert.manifest.text.document import is_other_tools_file
    from expert.run.open import prepare

    if is_other_tools_file(manifest):
        return PrepareOutcome(manifest, "skipped", "it names neither a model nor rows to train on")
    try:
        data = prepare(manifest, model=model, overrides=overrides, tell=tell)
    except (DataNotFound, NothingToPrepare) as error:
        return PrepareOutcome(manifest, "skipped", str(error))
    except ExpertError as error:
        return PrepareOutcome(manifest, "failed", str(error))
    except OSError as error:
        return PrepareOutcome(
            manifest, "failed", f"{error.filename or manifest}: {error.strerror or error}"
        )
    return PrepareOutcome(manifest, "prepared", data=data)
