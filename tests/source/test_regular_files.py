"""Every file is opened by core/files.py, which refuses pipes and devices, or has a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "expert"

OWN = {
    "core/files.py": "it is what opens",
    "core/install.py": "files of installed packages",
    "core/rundir.py": "descriptors that open_plain has checked, and /proc",
    "core/events.py": "descriptors that open_plain has checked",
    "core/process.py": "a descriptor that open_plain has checked",
    "planning/machine/host.py": "/proc and /sys",
    "telemetry/cpu.py": "/proc",
    "parallel/launch.py": "the source of this package, and a log of its own",
}
READS = {"read_text", "read_bytes"}
WORDS = re.compile(r"\b(?:open|read_text|read_bytes)\b")
"""No call of `reads_a_file` is without one of them."""
LIBRARIES = {"gzip", "bz2", "lzma", "io", "zipfile", "codecs"}


def reads_a_file(call: ast.Call) -> bool:
    """Whether a call opens a path to read it, by a method of the path or by `open`."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in READS:
        return True
    is_method = isinstance(function, ast.Attribute) and function.attr == "open"
    if not is_method and not (isinstance(function, ast.Name) and function.id == "open"):
        return False
    owner = function.value if isinstance(function, ast.Attribute) else None
    of_library = isinstance(owner, ast.Name) and owner.id in LIBRARIES
    if owner is None and call.args and isinstance(call.args[0], ast.Call):
        return False  # a descriptor
    place = 1 if owner is None or of_library else 0
    mode = call.args[place] if len(call.args) > place else None
    mode = next((word.value for word in call.keywords if word.arg == "mode"), mode)
    if mode is None:  # some other thing that is opened, unless it is one of files
        return owner is None or of_library or any(k.arg == "encoding" for k in call.keywords)
    text = mode.value if isinstance(mode, ast.Constant) else ""
    return isinstance(text, str) and text.startswith("r")


def direct_reads(tree: ast.Module) -> Iterator[int]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    yield from (call.lineno for call in calls if reads_a_file(call))


def test_files_are_opened_by_the_one_place_that_refuses_pipes_and_devices():
    found = {
        f"{name}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (name := path.relative_to(SOURCE).as_posix()) not in OWN
        # One file in seven has such a word; reading the tree of each took 2 s.
        and WORDS.search(text := path.read_text(encoding="utf-8"))
        for line in direct_reads(ast.parse(text))
    }
    assert found == set()


def test_a_direct_read_is_found_however_it_is_written():
    for text in (
        "path.read_text()",
        "(folder / 'x').read_bytes()",
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "gzip.open(path)",
        "io.open(path, mode='r')",
    ):
        assert list(direct_reads(ast.parse(text))) == [1], text
    for text in ("path.open('wb')", "run.open(place)", "open(os.open(path, flags), 'rb')"):
        assert list(direct_reads(ast.parse(text))) == [], text


def test_every_exception_is_still_there():
    assert all((SOURCE / name).is_file() for name in OWN)
