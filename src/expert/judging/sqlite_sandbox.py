"""A database in memory in which a foreign query can read, and do no more than it is let."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

MOST_ROWS = 10_000
MOST_BYTES = 1_000_000
"""Of one value: zeroblob(1e9) fills no memory."""
STEPS_BETWEEN_LOOKS = 20_000
"""Of SQLite's own machine: a millisecond or so."""

_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_NEVER = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
_NO_FUNCTIONS = {"load_extension", "fts3_tokenizer", "randomblob", "zeroblob", "writefile"}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MOST_BYTES,
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
    """A column as its table declares it."""

    name: str
    kind: str
    is_key: bool
    """Part of the primary key."""


class NotAllowed(Exception):
    """A statement that SQLite refuses, or that it was told to refuse."""


class TooMuch(Exception):
    """A statement that took too long or gave too much."""


class Sandbox:
    """A fresh database; everything in it is gone when it is closed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = 0.0
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_progress_handler(self._is_late, STEPS_BETWEEN_LOOKS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def set_up(self, statements: Iterable[str]) -> None:
        """Make the tables of a case; its statements are trusted no more than they need."""
        self._connection.set_authorizer(_changing)
        with self._told():
            for statement in statements:
                self._connection.executescript(statement)

    def columns(self) -> dict[str, list[Column]]:
        """The columns of every table."""
        self._connection.set_authorizer(None)
        with self._told():
            names = self._connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            return {
                name: [
                    Column(column[1], column[2] or "", bool(column[5]))
                    for column in self._connection.execute(f"PRAGMA table_info({_quoted(name)})")
                ]
                for (name,) in names
            }

    def fill(self, rows: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Put rows into tables; those that a table does not take are left out."""
        self._connection.set_authorizer(None)
        with self._told():
            for name, values in rows.items():
                places = ", ".join("?" * len(values[0])) if values else ""
                statement = f"INSERT OR IGNORE INTO {_quoted(name)} VALUES ({places})"
                for row in values:
                    with contextlib.suppress(sqlite3.Error, OverflowError):
                        self._connection.execute(statement, row)

    def turn_round(self) -> None:
        """From now on tables are read from their end: what no query asked for is another order."""
        self._connection.set_authorizer(None)
        self._connection.execute("PRAGMA reverse_unordered_selects = ON")

    def run(self, statement: str, *, reads: bool) -> list[tuple[Any, ...]]:
        """The rows of one statement; unless it `reads` only, it may change tables."""
        self._connection.set_authorizer(_reading if reads else _changing)
        with self._told():
            rows = self._connection.execute(statement).fetchmany(MOST_ROWS + 1)
        if len(rows) > MOST_ROWS:
            raise TooMuch(f"returns more than {MOST_ROWS:,} rows")
        return rows

    def state(self) -> dict[str, Any]:
        """Every table with its columns and rows, the rows sorted."""
        self._connection.set_authorizer(None)
        with self._told():
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
        rows = sorted(cursor.fetchmany(MOST_ROWS), key=repr)
        return {"kind": kind, "columns": columns, "rows": rows}

    @contextlib.contextmanager
    def _told(self) -> Any:
        """What SQLite does not do, as one of two errors."""
        self._ends_at = time.monotonic() + self._seconds
        try:
            yield
        except sqlite3.Error as error:
            if time.monotonic() >= self._ends_at:
                raise TooMuch(f"takes longer than {self._seconds:g} s") from None
            raise NotAllowed(str(error)[:160]) from None
        except (sqlite3.Warning, ValueError, OverflowError, UnicodeError) as error:
            raise NotAllowed(str(error)[:160]) from None
        except MemoryError:
            raise TooMuch("needs too much memory") from None

    def _is_late(self) -> bool:
        return time.monotonic() >= self._ends_at


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _reading(action: int, first: str | None, second: str | None, *_: Any) -> int:
    allowed = action in _READING and not _is_forbidden(action, second)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _changing(action: int, first: str | None, second: str | None, *_: Any) -> int:
    refused = action in _NEVER or _is_forbidden(action, second)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def _is_forbidden(action: int, function: str | None) -> bool:
    return action == sqlite3.SQLITE_FUNCTION and (function or "").lower() in _NO_FUNCTIONS
