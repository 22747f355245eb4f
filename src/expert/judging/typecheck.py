"""The compiler of TypeScript, where it is installed: many programs in one go, none of them run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

SECONDS = 120.0
"""For all programs together: 300 short ones took 4 s on two cores."""
_ERROR = re.compile(r"^p(\d+)\.tsx?\((\d+),\d+\): error (TS\d+: .*)$")
_OPTIONS = {
    "noEmit": True,
    "strict": True,
    "skipLibCheck": True,
    "target": "es2022",
    "module": "esnext",
    "moduleResolution": "bundler",
    # Every file is a module, so that programs that declare the same names do not meet.
    "moduleDetection": "force",
    "jsx": "preserve",
    "types": [],
}


def find_tsc() -> str | None:
    """The compiler on the path; None without it or without Node."""
    return shutil.which("tsc") if shutil.which("node") else None


def type_errors(
    programs: Sequence[str], tsc: str, *, tsx: bool = False, seconds: float = SECONDS
) -> list[str | None] | None:
    """The first error of each program, None for those without; None for all where tsc failed."""
    if not programs:
        return []
    with tempfile.TemporaryDirectory(prefix="expert-tsc-") as place:
        folder = Path(place)
        names = [f"p{number}.{'tsx' if tsx else 'ts'}" for number in range(len(programs))]
        for name, text in zip(names, programs, strict=True):
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        config = {"compilerOptions": _OPTIONS, "files": names}
        (folder / "tsconfig.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            done = subprocess.run(
                [tsc, "--noEmit", "--pretty", "false", "-p", place],
                cwd=folder,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    found: dict[int, str] = defaultdict(str)
    for line in done.stdout.splitlines():
        match = _ERROR.match(line.strip())
        if match:
            found[int(match[1])] = found[int(match[1])] or f"line {match[2]}: {match[3][:160]}"
    if done.returncode != 0 and not found:
        return None  # it complained of something else than the programs
    return [found.get(number) for number in range(len(programs))]
