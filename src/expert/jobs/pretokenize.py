"""The manifests that `expert pretokenize --all` prepares."""

from __future__ import annotations

from pathlib import Path

from expert.core.files import files_below


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
