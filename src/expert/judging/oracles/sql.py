"""SQL: the answer parses, and does the same as the expected query in SQLite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from expert.judging.answers import DoesNotParse, check_parseable
from expert.judging.cases import Case
from expert.judging.oracles.oracle import (
    Judgement,
    JudgeOptions,
    NoOracle,
    expected_part,
    import_optional,
    right,
    unknown,
    wrong,
)
from expert.judging.oracles.sqlite_sandbox import LimitExceeded, Sandbox, StatementRefused
from expert.judging.oracles.synthetic_rows import Rows, rows_for_query
from expert.judging.oracles.tables import difference

_UNDERLINES = re.compile(r"\x1b\[\d*m")  # sqlglot's terminal markup


SYNTHETIC_SETS = 3
"""Sets of rows made for empty tables: on a single set two maxima may agree by chance."""
_WORST = (False, True, None)  # a set of rows that decides nothing does not count against the others


class _Expected(NamedTuple):
    reads: bool
    ordered: bool
    rows: Sequence[Sequence[Any]]
    state: dict[str, Any]
    doubt: str
    """Why the result cannot tell right from wrong; "" if it can."""
    made: Rows
    """Rows put into tables that the case leaves empty."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `setup`, the statements that create its tables, and `dialect` if the
    queries are not SQLite's. Without a setup, the CREATE TABLE statements of the prompt are used.
    If no table has a row, rows are made around the values of the expected query."""
    dialect = str(case.check.get("dialect") or "sqlite")
    with expected_part("the expected query: "):
        wanted = parse(case.expected, dialect)
    setup = setup_of(case)
    expected, none = [], "the case has no tables to run the query on"
    if setup:
        try:
            query = _for_sqlite(wanted, case.expected, dialect)
            expected = _run_expected(wanted, query, setup, how.seconds)
        except (StatementRefused, LimitExceeded) as fault:
            none = f"the expected query does not run in SQLite: {fault}"
        except NoOracle as fault:
            none = str(fault)
    how.begin()
    found = parse(how.inside(answer), dialect)
    if _canonical(found) == _canonical(wanted):
        return right("equal")
    if not expected:
        return unknown(none)
    own = _for_sqlite(found, how.inside(answer), dialect)
    verdicts = (_run_answer(one, found, own, setup, how.seconds) for one in expected)
    return min(verdicts, key=lambda verdict: _WORST.index(verdict.passed))


def parse(text: str, dialect: str) -> Any:
    """Parse the single statement of a text, or raise DoesNotParse."""
    sqlglot = import_optional("sqlglot")
    check_parseable(text)
    try:
        trees = [tree for tree in sqlglot.parse(text, read=dialect) if tree is not None]
    except sqlglot.errors.SqlglotError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DoesNotParse(f"does not parse: {_UNDERLINES.sub('', first)[:160]}") from None
    except (RecursionError, ValueError) as error:
        raise DoesNotParse(f"does not parse: {type(error).__name__}") from None
    if len(trees) != 1:
        raise DoesNotParse(f"{len(trees)} statements instead of one")
    if isinstance(trees[0], sqlglot.exp.Command | sqlglot.exp.Column | sqlglot.exp.Alias):
        raise DoesNotParse("does not parse: no statement")
    return trees[0]


def setup_of(case: Case) -> list[str]:
    """The statements that create the tables of a case; empty if there are none."""
    given = case.check.get("setup")
    if given is not None:
        return [given] if isinstance(given, str) else [str(statement) for statement in given]
    # Data sets often put the schema into the prompt: from the first CREATE TABLE on.
    found = re.search(r"CREATE\s+TABLE\b", case.prompt, re.IGNORECASE)
    if not found:
        return []
    text = case.prompt[found.start() :]
    return [text[: text.rindex(";") + 1] if ";" in text else text]


def _for_sqlite(tree: Any, text: str, dialect: str) -> str:
    """The query for SQLite: verbatim if it is SQLite's dialect, else translated."""
    return text if dialect == "sqlite" else str(tree.sql(dialect="sqlite"))


def _run_expected(wanted: Any, query: str, setup: list[str], seconds: float) -> list[_Expected]:
    """Results of the expected query on every set of rows, and whether each depends on the query
    alone; NoOracle if SQLite cannot run it."""
    reads = isinstance(wanted, import_optional("sqlglot").exp.Query)
    with Sandbox(seconds) as box:
        try:
            box.set_up(setup)
            full = any(table["rows"] for table in box.state().values())
            columns = box.columns()
        except (StatementRefused, LimitExceeded) as fault:
            raise NoOracle(f"the tables of the case cannot be made in SQLite: {fault}") from None
    sets: list[Rows] = [{}]
    if reads and not full:
        sets = [rows_for_query(wanted, columns, seed=seed) for seed in range(SYNTHETIC_SETS)]
    found = []
    for made in sets:
        rows, before, after = _result(query, setup, made, seconds, reads=reads)
        other, doubt = rows, ""
        if made:
            other, before, after = _result(query, setup, made, seconds, reads=reads, turned=True)
        if reads and not rows:
            doubt = "the expected query returns no rows"
        elif made and not any(value for row in rows for value in row):
            doubt = "the tables of the case are empty, and on rows made for them the query counts "
            doubt += "none"
        elif difference(rows, other, ordered=False) is not None:
            doubt = "what the expected query returns depends on the order in which tables are read"
        elif not reads and after == before:
            doubt = "the expected statement changes nothing"
        ordered = reads and wanted.args.get("order") is not None
        ordered = ordered and difference(rows, other, ordered=True) is None  # without ties
        found.append(_Expected(reads, ordered, rows, after, doubt, made))
    return found


def _result(
    query: str, setup: list[str], made: Rows, seconds: float, *, reads: bool, turned: bool = False
) -> tuple[list[tuple[Any, ...]], dict[str, Any], dict[str, Any]]:
    """The rows of a query in a fresh database with these rows, and the tables before and after a
    statement that changes them. `turned`: with tables and rows in reverse order."""
    with Sandbox(seconds) as box:
        box.set_up(setup)
        box.fill({table: rows[::-1] for table, rows in made.items()} if turned else made)
        before = {} if reads else box.state()
        if turned:
            box.reverse_unordered_reads()
        rows = box.run(query, reads=reads)
        return rows, before, {} if reads else box.state()


def _run_answer(
    expected: _Expected, found: Any, query: str, setup: list[str], seconds: float
) -> Judgement:
    """Run the answer in a fresh database and compare."""
    reads = expected.reads
    if isinstance(found, import_optional("sqlglot").exp.Query) != reads:
        return wrong("run", f"is not {'a query' if reads else 'a statement that changes tables'}")
    try:
        rows, _, state = _result(query, setup, expected.made, seconds, reads=reads)
    except (StatementRefused, LimitExceeded) as fault:
        return wrong("run", str(fault))
    if not reads:
        same = state == expected.state
        if same and expected.doubt:
            return unknown(expected.doubt)
        return right("state") if same else wrong("state", "the tables differ afterwards")
    if expected.made and expected.doubt:
        return unknown(expected.doubt)
    kind = "made rows" if expected.made else "rows"
    place = difference(expected.rows, rows, ordered=expected.ordered)
    if place is not None:
        return wrong(kind, place)
    return unknown(f"{expected.doubt}, as does the answer") if expected.doubt else right(kind)


def _canonical(tree: Any) -> str:
    """A normalized statement: whitespace, keyword case and comments do not matter."""
    return str(tree.sql(dialect="sqlite", normalize=True, comments=False))
