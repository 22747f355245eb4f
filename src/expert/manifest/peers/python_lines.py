"""Lines of a Python dataclass in YAML: `batch_size: int = 24` means 24."""

from __future__ import annotations

import ast
import re

from expert.manifest.migrate.moving import Migration
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, shown

_TYPE = r"(?:typing\.)?[A-Za-z_][\w.]*(?:\[[^=]*\])?(?:\s*\|\s*[A-Za-z_][\w.]*(?:\[[^=]*\])?)*"
_LINE = re.compile(rf"({_TYPE})\s*=\s*(\S.*)")
_TYPES = re.compile(
    r"\b(?:int|float|str|bool|Optional|Union|List|list|Dict|dict|Tuple|tuple|Literal|Path|Any)\b"
)


def read_python_lines(work: Migration) -> None:
    """Give every `name: type = value` its value; one that is no literal is refused."""
    for item in list(Item(work.root).walk()):
        if not isinstance(item.value, str) or "=" not in item.value:
            continue
        line = _LINE.fullmatch(item.value)
        if line is None or not _TYPES.match(line[1].removeprefix("typing.")):
            continue
        try:
            value = ast.literal_eval(line[2])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            work.refuse(item, "a value", f"write {item.path.rpartition('.')[2]}: VALUE")
            item.value = None
            continue
        item.value = _tree(value, item)
        work.notices.append(notice("read as", item, f"{shown(item.plain())}: a line of Python"))


def _tree(
    value: object, at: Item
) -> str | int | float | bool | list[Item] | dict[str, Item] | None:
    """A Python literal as items, where the user wrote it."""
    if isinstance(value, list | tuple | set):
        return [Item(_tree(entry, at), at.path, at.line) for entry in value]
    if isinstance(value, dict):
        return {str(key): Item(_tree(entry, at), at.path, at.line) for key, entry in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
