"""What `expert diagnose` does before a run, and with --parity, --profile and --try."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from expert.core.errors import EXIT_OK

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.diagnose.one_step import Tried
    from expert.manifest.reader import ReadManifest


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command."""

    run: Path | None
    manifest: Path | None
    model: str | None
    gpu: str | None
    vram: str | None
    overrides: tuple[str, ...]
    allow_remote_code: bool
    kernels: bool
    as_json: bool

    def read(self, more: tuple[str, ...] = ()) -> ReadManifest:
        """The manifest named, or that of the run named, with further overrides."""
        from expert.jobs.diagnose.one_step import read_again
        from expert.manifest.reader import read_manifest
        from expert.run.stored.locate import find_trained

        overrides = (*self.overrides, *more)
        if self.manifest is not None:
            return read_manifest(self.manifest, overrides=overrides)
        return read_again(find_trained(self.run).path, overrides)

    @property
    def options(self) -> dict[str, Any]:
        """What every short run takes."""
        return {
            "model": self.model,
            "vram": self.vram,
            "allow_remote_code": self.allow_remote_code,
        }


def check_before(asked: Asked) -> int:
    """Findings about the machine, and about a manifest where one is named."""
    from expert.cli.check_view import show_check
    from expert.jobs.diagnose.check import check

    read = asked.read() if asked.manifest is not None else None
    console, tell = _telling(asked)
    found = check(
        read,
        gpu=asked.gpu,
        vram=asked.vram,
        model=asked.model,
        try_out=asked.kernels,
        replan=asked.read if read is not None else None,
        tell=tell,
    )
    if asked.as_json:
        _write_json(found.as_dict())
    else:
        show_check(found, console)
    return found.exit_code


def check_parity(asked: Asked) -> int:
    """The fast paths against the plain ones."""
    from expert.cli.check_view import show_parity
    from expert.jobs.diagnose.parity import parity

    console, tell = _telling(asked)
    found = parity(asked.read(), **asked.options, tell=tell)
    if asked.as_json:
        _write_json(found.as_dict())
    else:
        show_parity(found, console)
    return found.exit_code


def take_profile(asked: Asked, updates: int) -> int:
    """A trace of some updates, and what they were made of."""
    from expert.cli.check_view import show_profile
    from expert.jobs.diagnose.profile import profile
    from expert.run.stored.locate import find_trained

    console, tell = _telling(asked)
    tell(f"a short run, {updates} updates of it are looked at")
    folder = find_trained(asked.run).path / "profile" if asked.manifest is None else None
    found = profile(asked.read(), updates=updates, folder=folder, **asked.options)
    if asked.as_json:
        _write_json(found.as_dict())
    else:
        show_profile(found, console)
    return EXIT_OK


def try_first_fix(asked: Asked) -> int:
    """The first fix of the diagnosis, measured."""
    from expert.cli.check_view import show_tried

    console, tell = _telling(asked)
    found = _tried(asked, tell)
    if asked.as_json:
        _write_json(found.as_dict())
    else:
        show_tried(found, console)
    return EXIT_OK


def _tried(asked: Asked, tell: Callable[[str], None]) -> Tried:
    from expert.jobs.diagnose.one_step import first_fix, try_fix

    title, name = "", ""
    keys: tuple[str, ...] = ()
    if asked.manifest is None:
        from expert.jobs.diagnose.diagnose import diagnose_run

        diagnosis = diagnose_run(asked.run)
        verdict = diagnosis.verdict
        title, name, keys = verdict.sentence, verdict.kind, verdict.overrides
        findings = diagnosis.findings
    else:
        from expert.jobs.diagnose.check import check

        found = check(
            asked.read(),
            vram=asked.vram,
            model=asked.model,
            try_out=False,
            replan=asked.read,
            tell=tell,
        )
        findings = found.findings
    if not keys:
        first = first_fix(findings)
        title, name, keys = first.title, first.name, first.overrides
    return try_fix(asked.read, name=name, title=title, overrides=keys, **asked.options, tell=tell)


def _telling(asked: Asked) -> tuple[Console, Callable[[str], None]]:
    """The console, and a line for somebody who watches of each thing that takes a while."""
    from expert.cli.display import make_console

    notes = make_console(error=True)

    def tell(text: str) -> None:
        if notes.is_terminal:
            notes.print(f"{text} …", style="dim", markup=False)

    return make_console(), tell


def _write_json(found: dict[str, Any]) -> None:
    from expert.cli.display import write_line

    write_line(json.dumps(found, indent=2, default=str))


def refuse_contradictions(asked: Asked, *, parity: bool, profile: int | None, try_it: bool) -> None:
    """Say which options do not go together."""
    wanted = [
        name for name, on in (("--parity", parity), ("--profile", profile), ("--try", try_it)) if on
    ]
    if asked.run is not None and asked.manifest is not None:
        raise typer.BadParameter("name a run or a manifest, not both")
    if len(wanted) > 1:
        raise typer.BadParameter(f"{' and '.join(wanted)}: one of them at a time")
    if wanted and asked.run is None and asked.manifest is None:
        raise typer.BadParameter(f"{wanted[0]} needs --manifest FILE, or a run")
    if wanted and asked.gpu is not None:
        raise typer.BadParameter(f"{wanted[0]} runs on this machine: leave --gpu out")
    if asked.gpu is not None and asked.run is not None:
        raise typer.BadParameter("--gpu is for --manifest; a run has its own card")
