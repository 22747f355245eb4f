"""TypeScript: the answer parses, and equals the expected program except for whitespace and
comments.

If a case allows other right answers (`equals: false`), the compiler decides, if it is installed: it
checks many programs in one call, in a temporary folder without the user's environment, and on Linux
it can read only that folder, its own files and the system's programs, and write nothing (see
confinement). Programs are never run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.core.process import clean_environment, run_program
from expert.judging.answers import DoesNotParse, check_parseable
from expert.judging.cases import Case
from expert.judging.oracles.oracle import (
    Judgement,
    JudgeOptions,
    expected_part,
    import_optional,
    right,
    unknown,
    wrong,
)

TYPES = "types"
"""Kind of a judgement that the compiler may still make."""
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
_BETWEEN = frozenset({";", ","})
_ENDS: list[list[str]] = [[], ["}"], [")"], ["]"], [">"], ["|}"]]
_MEMBERS = frozenset({"object_type", "interface_body"})
"""Where either of those, or a newline, may separate members."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `equals` (true by default), `tsx`, and for the compiler `before` and
    `after`, TypeScript around the answer that uses its declarations."""
    tsx = bool(case.check.get("tsx"))
    with expected_part("the expected answer: "):
        wanted = tokens(case.expected, tsx=tsx)
    how.begin()
    if tokens(how.inside(answer), tsx=tsx) == wanted:
        return right("equal")
    if case.check.get("equals", True):
        return wrong("equal", "the program differs from the expected one")
    for program in (case.check.get("before"), case.check.get("after"), case.expected):
        if outside := external_reference(str(program or ""), tsx=tsx):
            return unknown(f"the case itself {outside}")
    if outside := external_reference(how.inside(answer), tsx=tsx):
        return wrong(TYPES, outside)
    return replace(unknown("it parses; only the compiler tsc can check its types"), kind=TYPES)


def tokens(text: str, *, tsx: bool = False) -> list[str]:
    """The tokens of a program: no whitespace, no comments, no optional semicolons or commas, one
    kind of quotation marks; DoesNotParse if it does not parse."""
    check_parseable(text)
    tree = _tree(text, tsx=tsx)
    if tree.root_node.has_error:
        faults = (node for node in _nodes(tree) if node.is_error or node.is_missing)
        row, column = next((node.start_point for node in faults), (0, 0))
        raise DoesNotParse(f"does not parse: line {row + 1}, column {column + 1}")
    words = list(_words(tree))
    return [
        word
        for place, word in enumerate(words)
        if not (word == ";" or (word in _BETWEEN and words[place + 1 : place + 2] in _ENDS))
    ]


def external_reference(text: str, *, tsx: bool = False) -> str:
    """What a program takes from other files, or changes for the other programs compiled with it; ""
    if it is self-contained. Packages by name do not exist here and need no check."""
    tree = _tree(text, tsx=tsx)
    for node in _nodes(tree):
        said = node.text.decode("utf-8", "replace") if node.child_count == 0 else ""
        if node.type == "comment" and _DIRECTIVE.match(said):
            return f"names another file: {said[:60]}"
        above = node.parent.type if node.parent is not None else ""
        if said == "global" and above == "ambient_declaration":
            return "changes what all programs share: declare global"
        if node.type == "string" and _is_path(node):
            return f"imports another file: {node.text.decode('utf-8', 'replace')[:60]}"
    return ""


_DIRECTIVE = re.compile(r"\s*///\s*<\s*(reference|amd)", re.IGNORECASE)
_IMPORTING = frozenset({"import_statement", "export_statement", "import_require_clause", "module"})


def _is_path(node: Any) -> bool:
    """Whether a string names a module by its path: "./x", "/x", "C:/x", "file:…"."""
    path = node.text.decode("utf-8", "replace").strip("'\"`")
    if not re.match(r"[./\\~]|\w+:", path) or path.startswith("node:"):
        return False
    for _ in range(3):
        node = node.parent
        if node is None:
            return False
        called = node.children[0].text if node.children else b""
        if node.type in _IMPORTING or called in (b"import", b"require"):
            return True
    return False


def _tree(text: str, *, tsx: bool) -> Any:
    tree_sitter, grammar = import_optional("tree_sitter"), import_optional("tree_sitter_typescript")
    kind = grammar.language_tsx() if tsx else grammar.language_typescript()
    parser = tree_sitter.Parser(tree_sitter.Language(kind))
    return parser.parse(text.encode("utf-8", "replace"))


def _nodes(tree: Any) -> Iterator[Any]:
    """Every node, parents first, without recursion: programs may nest deeper than Python's
    stack."""
    cursor = tree.walk()
    while True:
        yield cursor.node
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return


def _words(tree: Any) -> Iterator[str]:
    for node in _nodes(tree):
        if node.type == "comment" or node.child_count:
            continue
        text = node.text.decode("utf-8", "replace")
        above = node.parent.type if node.parent is not None else ""
        if text in _BETWEEN and above in _MEMBERS:
            continue
        if text:
            yield '"' if text == "'" and above == "string" else text


# --- the compiler --------------------------------------------------------------------------------


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
