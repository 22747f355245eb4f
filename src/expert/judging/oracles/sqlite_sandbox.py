"""An in-memory SQLite database that restricts what untrusted queries may do."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

MAX_ROWS = 10_000
MAX_BYTES = 1_000_000
"""Of one value, so that zeroblob(1e9) cannot fill memory."""
MAX_RESULT_BYTES = 50_000_000
"""Of all rows of a result: 10,000 rows of such values would be 10 GB."""
HEAP_BYTES = 2**29
"""SQLite's heap, for tables, sorting and values."""
STEPS_BETWEEN_CHECKS = 20_000
"""SQLite VM instructions, about a millisecond."""

_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_BUILDING = _READING | {
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("INSERT", "UPDATE", "DELETE", "TRANSACTION", "SAVEPOINT", "ALTER_TABLE", "REINDEX"),
        *(f"{verb}_{what}" for verb in ("CREATE", "DROP") for what in ("TABLE", "INDEX", "VIEW")),
        *(f"{verb}_TRIGGER" for verb in ("CREATE", "DROP")),
        *("CREATE_TEMP_TABLE", "CREATE_TEMP_INDEX", "CREATE_TEMP_VIEW", "ANALYZE"),
    )
}
"""Actions that change tables in memory. All others are refused: ATTACH (which VACUUM INTO uses),
DETACH, PRAGMA, virtual tables, and anything a later SQLite adds."""
_FORBIDDEN_FUNCTIONS = {
    *("load_extension", "fts3_tokenizer", "randomblob", "zeroblob"),
    *("readfile", "writefile", "edit", "lsmode", "sqlite_compileoption_get"),
}
_FORBIDDEN_TABLES = {"dbstat", "sqlite_dbpage", "fsdir", "zipfile", "sqlite_stmt", "bytecode"}
"""Table-valued functions that reveal more than the rows of a case."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 200_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 250_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 5,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class Column(NamedTuple):
    """A column as declared by its table."""

    name: str
    kind: str
    is_key: bool
    """Part of the primary key."""


class StatementRefused(Exception):
    """A statement that SQLite refuses, or was set up to refuse."""


class LimitExceeded(Exception):
    """A statement that took too long or returned too much."""


class Sandbox:
    """A fresh database that is discarded on close."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = 0.0
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.set_progress_handler(
            lambda: time.monotonic() >= self._ends_at, STEPS_BETWEEN_CHECKS
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def set_up(self, statements: Iterable[str]) -> None:
        """Create the tables of a case, with no more permissions than that needs."""
        self._connection.set_authorizer(_changing)
        with self._limited():
            for statement in statements:
                self._connection.executescript(statement)

    def columns(self) -> dict[str, list[Column]]:
        self._connection.set_authorizer(_reading)
        with self._limited():
            names = self._connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            self._connection.set_authorizer(None)  # for the pragma, which evaluates nothing
            return {
                name: [
                    Column(column[1], column[2] or "", bool(column[5]))
                    for column in self._connection.execute(f"PRAGMA table_info({_quoted(name)})")
                ]
                for (name,) in names
            }

    def fill(self, rows: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Insert rows into tables; rows that a table rejects are left out."""
        self._connection.set_authorizer(_changing)  # the case's triggers run here
        with self._limited():
            for name, values in rows.items():
                places = ", ".join("?" * len(values[0])) if values else ""
                statement = f"INSERT OR IGNORE INTO {_quoted(name)} VALUES ({places})"
                for row in values:
                    with contextlib.suppress(sqlite3.Error, OverflowError):
                        self._connection.execute(statement, row)

    def reverse_unordered_reads(self) -> None:
        """From now on, read unordered tables in reverse, to detect results that depend on order."""
        self._connection.set_authorizer(None)
        self._connection.execute("PRAGMA reverse_unordered_selects = ON")

    def run(self, statement: str, *, reads: bool) -> list[tuple[Any, ...]]:
        """The rows of one statement; it may change tables unless it only `reads`."""
        self._connection.set_authorizer(_reading if reads else _changing)
        with self._limited():
            rows, more = _fetched(self._connection.execute(statement))
        if more:
            raise LimitExceeded(more)
        return rows

    def state(self) -> dict[str, Any]:
        """Every table with its columns and sorted rows."""
        self._connection.set_authorizer(_reading)
        with self._limited():
            names = self._connection.execute(
                "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view', 'index', "
                "'trigger') AND name NOT LIKE 'sqlite_%' ORDER BY name"
            ).fetchall()
            return {name: self._table(name, kind) for name, kind in names}

    def _table(self, name: str, kind: str) -> dict[str, Any]:
        if kind != "table":
            return {"kind": kind, "columns": [], "rows": []}
        cursor = self._connection.execute(f"SELECT * FROM {_quoted(name)}")
        columns = [column[0] for column in cursor.description]
        rows, _ = _fetched(cursor)
        return {"kind": kind, "columns": columns, "rows": sorted(rows, key=repr)}

    @contextlib.contextmanager
    def _limited(self) -> Any:
        """Maps SQLite's errors to StatementRefused or LimitExceeded."""
        self._ends_at = time.monotonic() + self._seconds
        try:
            yield
        except sqlite3.Error as error:
            if time.monotonic() >= self._ends_at:
                raise LimitExceeded(f"takes longer than {self._seconds:g} s") from None
            raise StatementRefused(str(error)[:160]) from None
        except (sqlite3.Warning, ValueError, OverflowError, UnicodeError) as error:
            raise StatementRefused(str(error)[:160]) from None
        except MemoryError:
            raise LimitExceeded("needs too much memory") from None


def _fetched(cursor: sqlite3.Cursor) -> tuple[list[tuple[Any, ...]], str]:
    """The rows up to the limits, and why there are not more."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in cursor:
        if len(rows) == MAX_ROWS:
            return rows, f"returns more than {MAX_ROWS:,} rows"
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MAX_RESULT_BYTES:
            return rows, f"returns more than {MAX_RESULT_BYTES:,} bytes"
        rows.append(row)
    return rows, ""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _allowing(actions: set[int]) -> Callable[..., int]:
    def authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
        allowed = action in actions
        if action == sqlite3.SQLITE_FUNCTION:
            allowed = allowed and (second or "").lower() not in _FORBIDDEN_FUNCTIONS
        elif action == sqlite3.SQLITE_READ:
            table = (first or "").lower()
            known = table in _FORBIDDEN_TABLES or table.startswith("pragma_")
            allowed = allowed and not known
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return authorize


_reading, _changing = _allowing(_READING), _allowing(_BUILDING)
