"""Which manifest the flags of `expert train` and `expert benchmark` ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    from expert.cli.options import Device
    from expert.manifest.reader import ReadManifest

# Keys of a manifest that speak of its own rows and not of those named with --dataset.
_OF_OTHER_ROWS = ("tasks", "type", "format", "validation_path", "test_path")


BESIDE = "config.yaml"
"""Settings of the character GPT, where they lie in the folder that the command is given in."""


class NotAsked(ExpertError):
    """Flags that leave open what is to be trained, or that contradict each other."""


def flag_overrides(
    *, dataset: str | None, output: Path | None, epochs: float | None, device: Device | None
) -> list[str]:
    """The flags as overrides of the manifest. Paths are the caller's: relative to this folder."""
    import json

    found = []
    if dataset is not None:
        local = Path(dataset)
        path = str(local.absolute()) if local.exists() else dataset
        found.append(f"training.dataset.path={json.dumps(path)}")
        found += [f"training.dataset.{key}=null" for key in _OF_OTHER_ROWS]
    if output is not None:
        found.append(f"training.config.output_dir={json.dumps(str(output.resolve()))}")
    if epochs is not None:
        found.append(f"training.config.epochs={epochs:g}")
    if device is not None:
        found.append(f"training.config.device={device.value}")
    return found


def asked_manifest(
    manifest: Path | None, dataset: str | None, overrides: tuple[str, ...]
) -> ReadManifest:
    """The manifest named; without one, that of the character GPT on the text that was named."""
    from expert.jobs.resumable import character_manifest
    from expert.manifest.migrate.aliases import CORPORA
    from expert.manifest.reader import read_manifest

    if manifest is not None:
        return read_manifest(manifest, overrides=overrides)
    if dataset is None:
        raise NotAsked(
            "nothing to train is named  (expert train --manifest FILE; or a text for the built-in "
            "character GPT: expert train --dataset shakespeare)"
        )
    if dataset not in CORPORA and Path(dataset).suffix != ".txt":
        raise NotAsked(
            f"--dataset {dataset}: without a manifest the built-in character GPT is trained, on "
            f"{', '.join(CORPORA)} or a .txt file  (name a manifest for other rows: --manifest "
            "FILE)"
        )
    if dataset not in CORPORA and not Path(dataset).is_file():
        raise NotAsked(f"--dataset {dataset}: there is no such file  (check the path)")
    if not Path(BESIDE).is_file():
        return character_manifest(dataset, overrides)
    return _with_settings_beside(dataset, overrides)


def _with_settings_beside(dataset: str, overrides: tuple[str, ...]) -> ReadManifest:
    """With the settings of config.yaml in this folder; that it is used, or is not, is said."""
    from dataclasses import replace

    from expert.cli.display import make_console
    from expert.cli.run_view import say
    from expert.core.errors import ManifestError
    from expert.jobs.resumable import OfSomethingElse, character_manifest, configured_manifest
    from expert.manifest.text.document import read_document

    console = make_console(error=True)
    try:
        read = configured_manifest(Path(BESIDE), dataset, overrides)
    except OfSomethingElse as why:
        say(console, f"{BESIDE} of this folder is not used: {why}", "yellow")
        return character_manifest(dataset, overrides)
    except ManifestError:
        try:
            read_document(Path(BESIDE))
        except ManifestError as error:  # a file of that name that is nobody's settings
            first = str(error.problems[0].what)
            say(console, f"{BESIDE} of this folder is not used: {first}", "yellow")
            return character_manifest(dataset, overrides)
        raise
    say(console, f"settings are those of {BESIDE} in this folder", "dim")
    for notice in read.notices:
        if notice.kind != "warning":  # those are shown with the plan
            say(console, f"  {notice}", "dim")
    warnings = tuple(notice for notice in read.notices if notice.kind == "warning")
    return replace(read, notices=warnings)
