"""Cypher: the answer parses, and does the same as the expected query in an embedded graph database.

The grammar is openCypher's. The database is Ladybug, the successor of Kuzu: its dialect needs
tables for nodes and relationships, and lacks some functions of Neo4j. Queries it refuses for such
a reason have no oracle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from expert.judging.answers import DoesNotParse, normalised
from expert.judging.cases import Case
from expert.judging.oracles.cypher_statements import ParsedQuery, parse, setup_statements
from expert.judging.oracles.oracle import (
    Judgement,
    JudgeOptions,
    NoOracle,
    import_optional,
    right,
    unknown,
    wrong,
)
from expert.judging.oracles.tables import difference

MAX_ROWS = 10_000
POOL_BYTES, DATABASE_BYTES = 2**26, 2**30
"""Limits for the graph of a case; the default is most of the machine's memory."""

_DIALECT = re.compile(
    r"Parser exception|function .* does not exist|not supported|not implemented|Not implemented|"
    r"Cannot (?:implicitly )?cast|Conversion exception|Implicit cast",
    re.IGNORECASE,
)
_EVERYTHING = ("MATCH (n) RETURN n", "MATCH (a)-[r]->(b) RETURN a, r, b")


class QueryRefused(Exception):
    """A query the database does not run; `dialect` if another database might."""

    def __init__(self, what: str, *, dialect: bool) -> None:
        self.dialect = dialect
        super().__init__(what)


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `setup`, the statements that create its graph, in Ladybug's dialect."""
    own = how.inside(answer)
    try:
        wanted = parse(case.expected)
    except DoesNotParse as fault:
        how.begin()
        same = normalised(own) == normalised(case.expected)
        why = f"the expected query is not in the grammar: {fault}"
        return right("equal") if same else unknown(why)
    given = case.check.get("setup") or ()
    setup = [str(each) for each in ([given] if isinstance(given, str | int) else given)]
    expected, none = None, "the case has no graph to run the query on"
    if setup:
        try:
            with closing(Graph(setup, how.seconds)) as graph:
                expected = graph.result_of(wanted)
        except NoOracle as fault:
            none = str(fault)
        except QueryRefused as fault:
            none = f"the expected query does not run in Ladybug: {fault}"
    how.begin()
    found = parse(own)
    if found.canonical() == wanted.canonical():
        return right("equal")
    if expected is None:
        return unknown(none)
    if found.reads != wanted.reads:
        what = "a query" if wanted.reads else "a statement that changes the graph"
        return wrong("run", f"is not {what}")
    with closing(Graph(setup, how.seconds)) as graph:
        try:
            before = [] if wanted.reads else graph.everything()
            rows = graph.result_of(found)
        except QueryRefused as fault:
            if fault.dialect:
                return unknown(f"Ladybug's dialect does not support the answer: {fault}")
            return wrong("run", str(fault))
    kind = "rows" if wanted.reads else "state"
    place = difference(expected, rows, ordered=wanted.ordered)
    if place is not None:
        return wrong(kind, place)
    if wanted.reads and not expected:
        return unknown("the expected query returns no rows, as does the answer")
    if not wanted.reads and difference(before, expected, ordered=False) is None:
        return unknown("the expected statement changes nothing, as does the answer")
    return right(kind)


class Graph:
    """An in-memory graph created by the statements of a case."""

    def __init__(self, setup: Sequence[str], seconds: float) -> None:
        self._seconds = seconds
        self._ladybug = import_optional("ladybug")
        self._database = self._ladybug.Database(
            ":memory:",
            buffer_pool_size=POOL_BYTES,
            max_db_size=DATABASE_BYTES,
            max_num_threads=1,
        )
        self._connection = self._ladybug.Connection(self._database, num_threads=1)
        self._connection.set_query_timeout(int(1000 * seconds))
        try:
            for text in setup:
                for statement in setup_statements(text):
                    self._rows(statement.safe)
        except (DoesNotParse, QueryRefused) as fault:
            self.close()
            raise NoOracle(f"the graph of the case cannot be made: {fault}") from None

    def close(self) -> None:
        self._connection.close()
        self._database.close()

    def result_of(self, query: ParsedQuery) -> list[list[Any]]:
        """The rows of a query, or the whole graph after a statement that changes it."""
        if query.refused:
            raise QueryRefused(query.refused, dialect=True)
        rows = self._rows(query.safe)
        return rows if query.reads else self.everything()

    def everything(self) -> list[list[Any]]:
        """All nodes and relationships."""
        nodes, ways = (self._rows(query) for query in _EVERYTHING)
        return [[*row, None, None] for row in nodes] + ways

    def _rows(self, query: str) -> list[list[Any]]:
        try:
            result = self._connection.execute(query)
            if isinstance(result, list):
                result = result[-1]
            rows: list[list[Any]] = []
            while result.has_next():
                rows.append(list(result.get_next()))
                if len(rows) > MAX_ROWS:
                    raise QueryRefused(f"returns more than {MAX_ROWS:,} rows", dialect=False)
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0][:160]
            if first.startswith("Interrupted"):
                raise QueryRefused(
                    f"takes longer than {self._seconds:g} s", dialect=False
                ) from None
            raise QueryRefused(first, dialect=bool(_DIALECT.search(first))) from None
        return rows
