"""Runs one test over a table of rows, instead of a test for each row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

Test = Callable[..., None]


def each(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Iterable[object] | Callable[[Any], Any] | None = None,
) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but one test: pytest takes two milliseconds per test, more
    than most rows take. Every failing row is listed with its reason.

    A row has a `tmp_path` and a `monkeypatch` of its own; other fixtures are shared.
    """
    asked = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    called = ids if ids is None or callable(ids) else list(ids)
    table = [_named(row, place, asked, called) for place, row in enumerate(rows)]
    assert table, f"no rows for {asked}"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in asked]

        def all_rows(**given: Any) -> None:
            failed: list[tuple[str, Exception]] = []
            for place, (name, values) in enumerate(table):
                try:
                    _one(test, values, given, place)
                except Exception as error:  # noqa: BLE001 - whatever fails is reported below
                    failed.append((name, error))
            if failed:
                told = "\n".join(f"[{name}] {type(e).__name__}: {e}" for name, e in failed)
                message = f"{len(failed)} of {len(table)} rows fail\n{told}"
                raise AssertionError(message) from failed[0][1]

        all_rows.__dict__.update(test.__dict__, rows=len(table))
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(all_rows, name, getattr(test, name))
        all_rows.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return all_rows

    return decorate


def _one(test: Test, values: dict[str, Any], given: dict[str, Any], place: int) -> None:
    with ExitStack() as after:
        own = dict(given)
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / str(place)
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = after.enter_context(pytest.MonkeyPatch.context())
        test(**values, **own)


def _named(
    row: Any, place: int, names: list[str], ids: Sequence[object] | Callable[[Any], Any] | None
) -> tuple[str, dict[str, Any]]:
    """The name of a row in failures, and its values by name."""
    name = None
    if isinstance(row, type(pytest.param())):
        assert not row.marks, "a row cannot be marked: make it a test"
        name, row = row.id, row.values
        row = row if len(names) > 1 else row[0]
    values = tuple(row) if len(names) > 1 else (row,)
    if isinstance(name, str):
        return name, dict(zip(names, values, strict=True))
    if callable(ids):
        name = "-".join(str(ids(value)) for value in values)
    elif ids is not None:
        name = str(ids[place])
    else:
        name = "-".join(value if isinstance(value, str) else repr(value) for value in values)
    return name[:200], dict(zip(names, values, strict=True))
