"""`expert diagnose`: why a run is as fast as it is, or will be, and what would make it faster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expert.cli.options import (
    RUN_HELP,
    BaseModelName,
    Overrides,
    json_option,
    manifest_option,
    one_manifest,
    remote_code_option,
)

DIAGNOSE_EPILOG = (
    "Exit codes besides: 2 where a finding before a run is an error, so that it would not start; "
    "4 where --parity finds a difference beyond its tolerance."
)


WhichRun = Annotated[
    Path | None,
    typer.Argument(help=f"{RUN_HELP} A file: a manifest. Without: this machine."),
]
Card = Annotated[str | None, typer.Option(help="Check for this card; no kernel is tried.")]
CardMemory = Annotated[str | None, typer.Option(help='Memory to check for, such as "16GB".')]
NoKernels = Annotated[bool, typer.Option("--no-kernels", help="Do not run each kernel once.")]
Parity = Annotated[
    bool, typer.Option("--parity", help="Compare packed, compiled, fused with the plain way.")
]
ProfiledUpdates = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Trace N settled updates of a short run.")
]
TryIt = Annotated[bool, typer.Option("--try", help="Measure the first fix in two short runs.")]


def diagnose(
    run: WhichRun = None,
    manifest: Annotated[
        Path | None, manifest_option("Look at a run of this before it begins")
    ] = None,
    model: BaseModelName = None,
    gpu: Card = None,
    vram: CardMemory = None,
    overrides: Overrides = None,
    no_kernels: NoKernels = False,
    parity: Parity = False,
    profile: ProfiledUpdates = None,
    try_it: TryIt = False,
    remote_code: Annotated[bool, remote_code_option("Run the model's own Python program.")] = False,
    as_json: Annotated[bool, json_option("Everything found as JSON.")] = False,
) -> None:
    """Say where the time of a run went and what mends that; or, before one, what is in its way.

    With a run only its folder is read: it may still be going on, or come from another machine. The
    exit code is 0 whatever is found about it. Without one the machine is looked at, and with
    --manifest the data and the configuration too.
    """
    from expert.cli.check import (
        Asked,
        check_before,
        check_parity,
        refuse_contradictions,
        take_profile,
        try_first_fix,
    )

    if run is not None and run.is_file():  # a run is a folder: this can only be a manifest
        run, manifest = None, one_manifest(run, manifest)
    asked = Asked(
        run=run,
        manifest=manifest,
        model=model,
        gpu=gpu,
        vram=vram,
        overrides=tuple(overrides or ()),
        allow_remote_code=remote_code,
        kernels=not no_kernels,
        as_json=as_json,
    )
    refuse_contradictions(asked, parity=parity, profile=profile, try_it=try_it)
    if parity:
        code = check_parity(asked)
    elif profile is not None:
        code = take_profile(asked, profile)
    elif try_it:
        code = try_first_fix(asked)
    elif run is None:
        code = check_before(asked)
    else:
        code = _diagnose_run(run, as_json=as_json)
    if code:
        raise typer.Exit(code)


def _diagnose_run(run: Path, *, as_json: bool) -> int:
    import json

    from expert.cli.diagnose_view import show_diagnosis
    from expert.cli.display import make_console, write_line
    from expert.jobs.diagnose.diagnose import diagnose_run

    found = diagnose_run(run)
    if as_json:
        write_line(json.dumps(found.as_dict(), indent=2))
    else:
        show_diagnosis(found, make_console())
    return 0
