"""Options that several commands share, and the manifest they name.

Aliases are options with the same meaning in every command; functions are for those whose help
differs. Options of a single command are defined next to it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from expert.cli.show.display import make_console, show
from expert.core.errors import ExpertError, ManifestError

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.run.open import Opened
    from expert.run.stored.locate import Prefer

RUN_HELP = "A run folder, or a folder of runs or of an expert: its newest run."
TRAINED_HELP = (
    "A run folder, or a folder of runs or of an expert: its newest run, finished and validated "
    "ones first; default: runs/."
)
SETTINGS_FILE = "config.yaml"
"""Settings of the character GPT, read from the working directory."""
# Keys of a manifest that describe its own rows, not those given with --dataset.
_KEYS_OF_OWN_DATA = ("tasks", "type", "format", "validation_path", "test_path")


class Device(StrEnum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


def manifest_option(what: str) -> Any:
    """`--manifest FILE` with its purpose; a folder means the manifest in it."""
    text = f"{what}; a folder means the manifest in it."
    return typer.Option("--manifest", "-m", help=text, callback=manifest_file)


def output_option(what: str) -> Any:
    return typer.Option("--output", "-o", help=what)


def hint_unused_gpus(console: Console, gpus: str | None, opened: Opened) -> None:
    """One line if there are more cards than are used, and nobody has chosen how many."""
    from expert.parallel.launch import world_from_environment

    cards, device = len(opened.machine.gpus), opened.plan.kernels.device
    if gpus is None and cards > 1 and device == "cuda" and world_from_environment().size == 1:
        text = f"{cards} GPUs are visible and one is used: add --gpus all to use them"
        show(console, text, "dim")


def json_option(what: str) -> Any:
    return typer.Option("--json", help=what)


def remote_code_option(what: str) -> Any:
    return typer.Option("--allow-remote-code", help=what)


def manifest_file(place: Path | None) -> Path | None:
    """The manifest file; for a folder the one in it, whose path is shown."""
    from expert.jobs.launch.ranks import COMMAND_VARIABLE
    from expert.manifest.text.document import manifest_in

    if place is None or not place.is_dir():
        return place
    file = manifest_in(place)
    if file is None:
        return place  # reading it reports what is wrong
    if COMMAND_VARIABLE not in os.environ:  # else the parent process has shown it
        show(make_console(error=True), f"manifest: {file}", "dim")
    return file


RunFolder = Annotated[
    Path | None, typer.Argument(metavar="RUN", help=TRAINED_HELP, show_default=False)
]
ExpertPlace = Annotated[
    Path | None, typer.Option("--expert", metavar="RUN", help="The same as RUN.")
]
ManifestFile = Annotated[
    Path | None, typer.Argument(help="The manifest, same as --manifest.", callback=manifest_file)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a key of the manifest."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Reject unknown keys.")]
BaseModelName = Annotated[
    str | None, typer.Option("--model", help="Which base model of the manifest; default: first.")
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME|FILE",
        help="Train on this data instead of the manifest's. Without a manifest: a text "
        "(shakespeare, python-stdlib or a .txt file) for the built-in character GPT.",
    ),
]
MemoryLimit = Annotated[
    str | None, typer.Option("--vram", help='Use at most this much GPU memory, such as "16GB".')
]
TrainingDevice = Annotated[Device | None, typer.Option("--device", help="Device to train on.")]
ComputeDevice = Annotated[Device, typer.Option("--device", help="Device to compute on.")]
AllowRemoteCode = Annotated[
    bool,
    remote_code_option("Run Python code that ships with the model; needs a 40-digit revision."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="final|best|N",
        help="Which checkpoint of the run; default: training.packaging_checkpoint.",
    ),
]
ResultAsJson = Annotated[
    bool, json_option("Print the result as JSON; progress goes to standard error.")
]


def chosen_run(run: Path | None, expert: Path | None, prefer: Prefer = "validated") -> Path | None:
    """The run or expert, given as an argument or with --expert; reports which run of several."""
    from expert.run.stored.locate import choice_in_words

    if run is not None and expert is not None:
        raise typer.BadParameter(f"{run} and --expert {expert}: give one expert")
    place = run or expert
    if words := choice_in_words(place, prefer):
        show(make_console(error=True), words, "dim")
    return place


def one_manifest(file: Path | None, manifest: Path | None) -> Path | None:
    """The manifest, given as an argument or with --manifest."""
    if file is not None and manifest is not None:
        raise typer.BadParameter(f"{file} and --manifest {manifest}: give one manifest")
    return file or manifest


def flag_overrides(
    *,
    dataset: str | None,
    output: Path | None,
    epochs: float | None,
    device: Device | None,
    start: Path | None = None,
) -> list[str]:
    """The flags as overrides of the manifest. Paths are relative to the working directory."""
    found = []
    if dataset is not None:
        name, colons, split = dataset.partition("::")
        local = Path(name)
        path = f"{local.absolute()}{colons}{split}" if local.exists() else dataset
        found.append(f"training.dataset.path={json.dumps(path)}")
        found += [f"training.dataset.{key}=null" for key in _KEYS_OF_OWN_DATA]
    if output is not None:
        found.append(f"training.config.output_dir={json.dumps(str(output.resolve()))}")
    if start is not None:
        found.append(f"training.config.start_from={json.dumps(str(start.absolute()))}")
    if epochs is not None:
        found.append(f"training.config.epochs={epochs:g}")
    if device is not None:
        found.append(f"training.config.device={device.value}")
    return found


def read_requested_manifest(
    manifest: Path | None, dataset: str | None, overrides: tuple[str, ...]
) -> ReadManifest:
    """The given manifest; without one, the character GPT's on the given text, with the settings of
    config.yaml in the working directory."""
    from expert.manifest.migrate.aliases import CORPORA
    from expert.manifest.reader import read_manifest
    from expert.run.text_manifest import (
        NotACharacterConfig,
        character_manifest,
        configured_manifest,
    )

    if manifest is not None:
        return read_manifest(manifest, overrides=overrides)
    if dataset is None:
        raise ExpertError(
            "nothing to train  (expert train --manifest FILE; or a text for the built-in "
            "character GPT: expert train --dataset shakespeare)"
        )
    if dataset not in CORPORA and Path(dataset).suffix != ".txt":
        raise ExpertError(
            f"--dataset {dataset}: without a manifest the built-in character GPT is trained, on "
            f"{', '.join(CORPORA)} or a .txt file  (for other data give --manifest FILE)"
        )
    if dataset not in CORPORA and not Path(dataset).is_file():
        raise ExpertError(f"--dataset {dataset}: file not found  (check the path)")
    if not Path(SETTINGS_FILE).is_file():
        return character_manifest(dataset, overrides)
    console = make_console(error=True)
    try:
        read = configured_manifest(Path(SETTINGS_FILE), dataset, overrides)
    except NotACharacterConfig as why:
        show(console, f"{SETTINGS_FILE} is not used: {why}", "yellow")
        return character_manifest(dataset, overrides)
    show(console, f"using the settings in {SETTINGS_FILE}", "dim")
    warnings = tuple(notice for notice in read.notices if notice.kind == "warning")
    for notice in read.notices:
        if notice not in warnings:  # those are shown with the plan
            show(console, f"  {notice}", "dim")
    return replace(read, notices=warnings)


def settings_file() -> Path | None:
    """config.yaml in the working directory, if it describes a run of the character GPT."""
    from expert.manifest.text.document import read_document
    from expert.run.text_manifest import NotACharacterConfig, configured_manifest

    file = Path(SETTINGS_FILE)
    try:
        root = read_document(file).root
        if root.get("dataset") is None and root.get("training", "dataset") is None:
            return None
        configured_manifest(file, "")
    except (ManifestError, NotACharacterConfig, OSError):  # of another program
        return None
    show(make_console(error=True), f"using the settings in {SETTINGS_FILE}", "dim")
    return file
