"""Options that several commands take, declared once: the same name, value and words everywhere.

An alias is an option that means the same in every command. A function is one whose help says what
it means there. An option of one command stands above that command.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

RUN_HELP = "A run folder; of a folder of runs or an expert's folder, the newest."


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


RunFolder = Annotated[Path, typer.Argument(help=RUN_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a key of the manifest."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse every unknown key.")]
BaseModelName = Annotated[str | None, typer.Option("--model", help="Which of the base models.")]
Rows = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME|FILE",
        help="Other rows than the manifest's; without a manifest a text (shakespeare, "
        "python-stdlib or a .txt file) for the built-in character GPT.",
    ),
]
MemoryLimit = Annotated[
    str | None, typer.Option("--vram", help='Memory to use at most, as "16GB".')
]
WhereToTrain = Annotated[Device | None, typer.Option("--device", help="Where to train.")]
WhereToCompute = Annotated[Device, typer.Option("--device", help="Where to compute.")]


def manifest_option(what: str) -> Any:
    """`--manifest FILE`, with what it is for; a folder means the manifest in it."""
    text = f"{what}; of a folder, the one in it."
    return typer.Option("--manifest", "-m", help=text, callback=named_file)


def named_file(place: Path | None) -> Path | None:
    """The file that is meant, and a line that says which where a folder was named."""
    from expert.cli.display import make_console
    from expert.cli.run_view import say
    from expert.manifest.text.document import manifest_in

    if place is None or not place.is_dir():
        return place
    file = manifest_in(place)
    if file is None:
        return place  # reading it says what is wrong
    say(make_console(error=True), f"the manifest is {file}", "dim")
    return file


ManifestFile = Annotated[
    Path | None, typer.Argument(help="The manifest, as with --manifest.", callback=named_file)
]


def one_manifest(file: Path | None, manifest: Path | None) -> Path | None:
    """The manifest that was named, with the option or without."""
    if file is not None and manifest is not None:
        raise typer.BadParameter(f"{file} and --manifest {manifest}: name one manifest")
    return file or manifest


def output_option(what: str) -> Any:
    """`--output PATH`, with what goes there."""
    return typer.Option("--output", "-o", help=what)


def json_option(what: str) -> Any:
    """`--json`, with what is written instead of words."""
    return typer.Option("--json", help=what)


def remote_code_option(what: str) -> Any:
    """`--allow-remote-code`, with what it lets happen."""
    return typer.Option("--allow-remote-code", help=what)


def checkpoint_option(by_default: str) -> Any:
    """`--checkpoint`, with what decides where it is not given."""
    text = f"Which state of the run; by default {by_default}."
    return typer.Option("--checkpoint", metavar="final|best|N", help=text)


AllowRemoteCode = Annotated[
    bool,
    remote_code_option("Run Python code that comes with the model; needs a revision of 40 digits."),
]
ResultAsJson = Annotated[bool, json_option("The result as JSON; progress goes to standard error.")]
