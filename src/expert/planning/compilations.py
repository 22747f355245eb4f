"""Compile times measured on this machine, stored for later plans.

torch keeps compiled code in a folder. A later run with the same card, model, versions and shape of
step finds it there and compiles in a few seconds, as long as the folder exists.
"""

from __future__ import annotations

import datetime
import getpass
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from expert.planning.choose.rates import COLD_COMPILE, WARM_COMPILE
from expert.planning.machine.host import package_version
from expert.planning.measurements import measurements_file, remember_record
from expert.planning.memory.calibration import shape_key
from expert.planning.memory.workload import Workload

KEPT = 200
VERSIONS = ("torch", "triton", "transformers", "peft")


class Compilation(BaseModel):
    """The first step of one run, which compiled its blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    model: str
    """Sizes and what is trained: everything the compiled code depends on."""
    step: str
    """Rows and tokens of a micro-batch."""
    versions: dict[str, str | None]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    warm: bool
    """torch had compiled all of it before."""
    cache: str
    """torch's cache folder."""
    measured_on: str


@dataclass(frozen=True, kw_only=True)
class CompileSeconds:
    """The expected compile time, and whether torch's cache shortens it."""

    seconds: float
    warm: bool = False


def compilations_file(environ: Mapping[str, str] = os.environ) -> Path:
    return measurements_file(environ).parent / "compilations.json"


def cache_folder() -> str:
    """torch's cache folder for compiled code."""
    asked = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if asked:
        return asked
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have an unnamed user
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{name}")


def model_signature(work: Workload) -> str:
    """The sizes of a model and what is trained, as one string."""
    trained = "+".join(sorted(work.targets)) or "all"
    what = (work.adapter, str(work.rank), trained, work.quantization, work.precision)
    recomputed = "recomputed" if work.recomputed_blocks else "kept"
    return " ".join((shape_key(work.shape), *what, recomputed))


def step_signature(work: Workload) -> str:
    return f"{work.rows}x{work.row_tokens}"


def installed_versions() -> dict[str, str | None]:
    return {name: package_version(name).value for name in VERSIONS}


def expected_compile(known: Sequence[Compilation], work: Workload, card: str) -> CompileSeconds:
    """Expected time to compile `work` on this machine, given its earlier compile times."""
    if not known:
        return CompileSeconds(seconds=COLD_COMPILE)
    versions, model, step = installed_versions(), model_signature(work), step_signature(work)
    mine = [record for record in known if record.card == card and record.versions == versions]
    mine = [record for record in mine if record.model == model]
    same = [record for record in mine if record.step == step and Path(record.cache).is_dir()]
    if same:
        cached = [record for record in same if record.warm]
        seconds = cached[-1].seconds if cached else min(WARM_COMPILE, same[-1].seconds)
        return CompileSeconds(seconds=seconds, warm=True)
    before = [record for record in mine if not record.warm]
    return CompileSeconds(seconds=before[-1].seconds if before else COLD_COMPILE)


def remember_compilation(
    path: Path, work: Workload, card: str, *, seconds: float, warm: bool
) -> None:
    """Add a compile time; an older record of the same kind is replaced."""
    record = Compilation(
        card=card,
        model=model_signature(work),
        step=step_signature(work),
        versions=installed_versions(),
        seconds=seconds,
        warm=warm,
        cache=cache_folder(),
        measured_on=datetime.date.today().isoformat(),
    )
    keys = ("card", "model", "step", "versions", "warm")
    remember_record(path, record, keys, most=KEPT)
