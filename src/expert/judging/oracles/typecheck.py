"""The TypeScript compiler, if installed: checks many programs in one call and runs none of them.

It works in a temporary folder without the user's environment. On Linux it can read only that
folder, its own files and the system's programs, and write nothing (see confinement).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from expert.core.process import clean_environment, run_program

SECONDS = 120.0
"""For all programs together: 300 short ones took 4 s on two cores."""
HEAP_MEGABYTES = 2048
MAX_CHARACTERS = 10_000_000
_PROGRAMS = ("/bin", "/usr/bin", "/usr/local/bin")
_ERROR = re.compile(r"^p(\d+)\.tsx?\((\d+),\d+\): error (TS\d+: .*)$")
_OPTIONS = {
    "noEmit": True,
    "strict": True,
    "skipLibCheck": True,
    "target": "es2022",
    "module": "esnext",
    "moduleResolution": "bundler",
    # Every file is a module, so that equal names in different programs do not clash.
    "moduleDetection": "force",
    "jsx": "preserve",
    "types": [],
}


def find_tsc() -> str | None:
    """The compiler on the path; None without it or without Node."""
    return shutil.which("tsc") if shutil.which("node") else None


def type_errors(programs: Sequence[str], tsc: str, *, tsx: bool = False) -> list[str | None] | None:
    """The first error of each program, None for those without; None for all if tsc failed."""
    if not programs:
        return []
    with tempfile.TemporaryDirectory(prefix="expert-tsc-") as place:
        folder = Path(place)
        names = [f"p{number}.{'tsx' if tsx else 'ts'}" for number in range(len(programs))]
        for name, text in zip(names, programs, strict=True):
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        config = {"compilerOptions": _OPTIONS, "files": names}
        (folder / "tsconfig.json").write_text(json.dumps(config), encoding="utf-8")
        done = _run([tsc, "--noEmit", "--pretty", "false", "-p", place], folder)
    if done is None:
        return None
    said, code = done
    found: dict[int, str] = {}
    for line in said[:MAX_CHARACTERS].splitlines():
        match = _ERROR.match(line.strip())
        if match:
            found.setdefault(int(match[1]), f"line {match[2]}: {match[3][:160]}")
    if code and not found:
        return None  # its error is not about the programs
    return [found.get(number) for number in range(len(programs))]


def _run(command: list[str], folder: Path) -> tuple[str, int] | None:
    """The compiler's output and exit code; None if it cannot start or does not finish."""
    own = {"HOME": str(folder), "NODE_OPTIONS": f"--max-old-space-size={HEAP_MEGABYTES}"}
    if sys.platform.startswith("linux"):
        node = shutil.which("node")
        places = {*_homes(command[0]), *(_homes(node) if node else ()), *_PROGRAMS, str(folder)}
        launcher = [sys.executable, "-P", "-m", "expert.judging.confinement"]
        command = [*launcher, *sorted(places), "--", *command]
        own["OPENSSL_CONF"] = os.devnull  # Node does not start if it may not read its own
    env = {**clean_environment(), **own}
    try:
        said, _, code = run_program(
            command, seconds=SECONDS, env=env, cwd=folder, kill_children=True
        )
    except OSError:
        return None
    return None if code is None else (said, code)


def _homes(program: str) -> set[str]:
    """A program's location, and what is installed with it: …/bin/tsc reads …/lib. The folder above
    may be a home folder and is not included."""
    found: set[Path] = set()
    for place in (Path(program).absolute(), Path(program).resolve()):
        packages = [above for above in place.parents if above.name == "node_modules"]
        found |= {place, *packages[-1:]}
        if place.parent.name == "bin":
            found |= {place.parents[1] / name for name in ("lib", "share", "package.json")}
    return {str(place) for place in found}
