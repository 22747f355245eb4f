"""Rows of strangers: what a test row or an answer may try on the machine that judges it.

Every attack goes the whole way that `expert validate` goes. A folder with files of the user's lies
where the command is given; after the attack it is as it was.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expert.judging.judge_pool import JudgeProcess, judge_all
from expert.judging.oracles.oracle import right
from tests.each import each
from tests.judging.judged import case_of

SECRET = "swordfish"
NODES = "CREATE NODE TABLE P(id INT64, name STRING, PRIMARY KEY(id))"
ONE = "CREATE (:P {id: 1, name: 'a'})"
NAMES = "MATCH (a:P) RETURN a.name"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's current folder, with private files."""
    (tmp_path / "canary.csv").write_text(f"1,{SECRET}\n", encoding="utf-8")
    (tmp_path / "canary.json").write_text(f'{{"const": "{SECRET}"}}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def bench():
    """One process for all attacks, as in a validation: each meets what the last one left."""
    with JudgeProcess(10, statement_seconds=0.1) as found:
        yield found


@pytest.fixture
def attacked(home, bench):
    """Judge one answer and check that the folder did not change."""
    before = _seen(home)

    def attack(domain: str, expected: str, answer: str, **more):
        prompt = more.pop("prompt", "do it")
        case = case_of(expected, prompt=prompt, **more)
        found = bench.judge(case, answer, domain=domain, strict=False)
        assert _seen(home) == before, "the attack left something behind"
        assert SECRET not in found.reason, "the attack read a file"
        return found

    return attack


def _seen(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"(folder)"
        for path in folder.rglob("*")
    }


# --- Cypher -------------------------------------------------------------------------------------

CYPHER = {
    "copy to": "COPY (MATCH (p:P) RETURN p.*) TO '{home}/canary.csv'",
    "copy to a relative path": "COPY (MATCH (p:P) RETURN p.*) TO 'canary.csv'",
    "export": "EXPORT DATABASE '{home}/exported'",
    "import": "IMPORT DATABASE '{home}'",
    "copy from": "COPY P FROM '{home}/canary.csv'",
    "load from": "LOAD FROM '{home}/canary.csv' RETURN *",
    "load inside a query": "MATCH (n:P) LOAD FROM '{home}/canary.csv' RETURN *",
    "load csv": "LOAD CSV FROM 'file://{home}/canary.csv' AS row CREATE (:P {{id: 2}})",
    "a table made of a file": "CREATE NODE TABLE Q AS LOAD FROM '{home}/canary.csv' RETURN *",
    "a table with a storage": "CREATE NODE TABLE Q(id INT64, PRIMARY KEY(id)) WITH (storage='x')",
    "a default that is called": "CREATE NODE TABLE Q(id INT64 DEFAULT nextval('s') PRIMARY KEY)",
    "extension by name": "INSTALL httpfs",
    "load extension by name": "LOAD httpfs",
    "attach": "ATTACH '{home}/other.db' AS other (dbtype lbug)",
    "use": "USE other",
    "setting": "CALL home_directory='{home}'",
    "procedure": "CALL show_functions() RETURN *",
    "procedure in a query": "MATCH (n:P) CALL show_tables() YIELD name RETURN name",
    "macro": "CREATE MACRO m(x) AS x + 1",
    "checkpoint": "CHECKPOINT",
    "two statements": "CREATE (:P {{id: 7}}); EXPORT DATABASE '{home}/exported'",
    "behind a comment": "CREATE (:P {{id: 7}}) /* */; EXPORT DATABASE '{home}/exported' //",
    "out of a string": "CREATE (:P {{id: 7, name: 'a\\\\'; EXPORT DATABASE \"{home}/out\" //'}})",
    "out of a name": "CREATE (:`P``; EXPORT DATABASE '{home}/exported' //` {{id: 7}})",
    "out of an alias": "CREATE (n:P {{id: 7}}) RETURN 1 AS a\u00a0LIMIT\u20280",
    "profiled": "PROFILE COPY (MATCH (p:P) RETURN p.*) TO '{home}/canary.csv'",
    "a parameter": "CREATE (:P {{id: $x}})",
    "an unknown function": "CREATE (:P {{id: 7, name: read_text('{home}/canary.csv')}})",
}


@each("name", CYPHER)
def test_statements_beyond_the_graph_are_refused(attacked, home, name):
    attack = CYPHER[name].format(home=home)
    setup = [NODES, ONE, attack]
    found = attacked("cypher", NAMES, "MATCH (b:P) RETURN b.name AS name", setup=setup)
    assert found.passed is None
    assert "the graph of the case cannot be made: " in found.reason
    assert "not allowed in a setup" in found.reason
    assert attacked("cypher", NAMES, attack, setup=[NODES, ONE]).passed is not True
    assert attacked("cypher", attack, NAMES, setup=[NODES, ONE]).passed is None


@each(
    "statement",
    [
        "UNWIND range(1, 10000000) AS x CREATE (:P {id: x})",
        "UNWIND range(1, 3000) AS x UNWIND range(1, 3000) AS y UNWIND range(1, 3000) AS z "
        "WITH x, y, z WHERE x + y + z < 0 CREATE (:P {id: x})",
        "RETURN " + "(" * 5000 + "1" + ")" * 5000,
        "RETURN " + "[" * 150 + "1" + "]" * 150,
        "RETURN " + "NOT " * 1500 + "true",
        "MATCH " + ", ".join(f"(a{n}:P)" for n in range(100)) + " RETURN 1",
        "RETURN repeat('x', 2000000000)",
    ],
    ids=["rows", "cross join", "brackets", "lists", "not", "patterns", "one value"],
)
def test_a_cypher_statement_that_takes_too_much_is_ended(attacked, statement):
    assert attacked("cypher", NAMES, statement, setup=[NODES, ONE]).passed is not True
    assert attacked("cypher", NAMES, "RETURN 2", setup=[NODES, ONE, statement]).passed is not True


# --- SQL ----------------------------------------------------------------------------------------

SQL = {
    "attach": "ATTACH DATABASE '{home}/made.db' AS other",
    "attach what is there": "ATTACH '{home}/canary.csv' AS other",
    "vacuum into": "VACUUM INTO '{home}/made.db'",
    "vacuum": "VACUUM",
    "extension": "SELECT load_extension('{home}/evil.so')",
    "writefile": "SELECT writefile('{home}/canary.csv', 'x')",
    "readfile": "INSERT INTO t SELECT readfile('{home}/canary.csv')",
    "edit": "SELECT edit('x', 'touch {home}/made')",
    "pragma": "PRAGMA temp_store_directory = '{home}'",
    "pragma function": "SELECT * FROM pragma_database_list",
    "virtual table": "CREATE VIRTUAL TABLE v USING csv(filename='{home}/canary.csv')",
    "virtual table of text": "CREATE VIRTUAL TABLE v USING fts5(a)",
    "statistics": "SELECT * FROM dbstat",
    "tokenizer": "SELECT fts3_tokenizer('simple', x'4141414141414141')",
    "shell": ".shell touch {home}/made",
    "output": ".output {home}/canary.csv",
}


@each("name", SQL)
def test_a_sql_setup_an_answer_and_an_expected_query_stay_in_memory(attacked, home, name):
    attack = SQL[name].format(home=home)
    tables = ["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"]
    question = "SELECT a FROM t"
    other = "SELECT t.a AS b FROM t"
    assert attacked("sql", question, other, setup=[*tables, attack]).passed is None
    assert attacked("sql", question, other, prompt="; ".join([*tables, attack, ""])).passed is None
    assert attacked("sql", question, attack, setup=tables).passed is False
    assert attacked("sql", "UPDATE t SET a = 0", attack, setup=tables).passed is False
    assert attacked("sql", attack, question, setup=tables).passed is None


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"


@each(
    "query",
    [
        ENDLESS.format("x"),
        ENDLESS.format("sum(x)"),
        ENDLESS.format("printf('%90000d', x)"),
        ENDLESS.format("group_concat(x)"),
        "SELECT count(*) FROM " + ", ".join(["(SELECT 1 UNION SELECT 2 UNION SELECT 3)"] * 40),
        "SELECT " + "(" * 3000 + "1" + ")" * 3000,
        "SELECT " + "+".join(["1"] * 5000),
        "SELECT " + "NOT " * 5000 + "1",
        "SELECT 'a' LIKE '" + "%a" * 400 + "b'",
        "SELECT replace(hex(zeroblob(900000)), '00', printf('%90000d', 1))",
    ],
    ids=["rows", "sum", "wide rows", "one value", "join", "deep", "long", "not", "like", "replace"],
)
def test_a_sql_statement_that_takes_too_much_is_ended(attacked, query):
    tables = ["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"]
    assert attacked("sql", "SELECT a FROM t", query, setup=tables).passed is False
    filled = [*tables, f"INSERT INTO t {query}"]
    assert attacked("sql", "SELECT a FROM t", "SELECT 3", setup=filled).passed is not True


# --- JSON ---------------------------------------------------------------------------------------


@each(
    "reference",
    [
        "file://{home}/canary.json",
        "{home}/canary.json",
        "canary.json",
        "http://127.0.0.1:{port}/x.json",
        "https://127.0.0.1:{port}/x.json",
        "urn:x",
    ],
)
@each("key", ["$ref", "$dynamicRef", "$schema"])
def test_a_schema_fetches_nothing(attacked, home, listening, reference, key):
    schema = {key: reference.format(home=home, port=listening.port)}
    if key == "$schema":
        schema["$ref"] = reference.format(home=home, port=listening.port)
    found = attacked("json", "1", '"x"', schema=schema)
    assert found.passed is None
    assert "refers to something outside it" in found.reason
    assert listening.calls == []


@each(
    ("schema", "answer"),
    [
        ({"patternProperties": {"^(a|a)*$": True}}, '{"' + "a" * 40 + 'b": 1}'),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            "1",
        ),
        ({"pattern": "("}, '"x"'),
        ({"pattern": "(" * 5000 + ")" * 5000}, '"x"'),
        ({"pattern": "(?:a{1000}){1000}{1000}"}, '"x"'),
        ({"multipleOf": 1e-320}, "1e300"),
    ],
    ids=["names", "each other", "no pattern", "deep", "wide", "tiny"],
)
def test_a_schema_that_takes_too_much_has_no_oracle(attacked, schema, answer):
    assert attacked("json", "1", answer, schema=schema).passed is not True


def test_a_case_that_never_ends_has_no_oracle(attacked):
    endless = attacked("json", "1", '"' + "a" * 40 + 'b"', schema={"pattern": "^(a+)+$"})
    circle = attacked("json", "1", "1", schema={"$ref": "#"})
    large = attacked("sql", "SELECT 1", "SELECT 2", setup=["-- " + "x" * 30_000_000])
    for found, why in (
        (endless, "takes longer than"),
        (circle, "refers to itself"),
        (large, "characters"),
    ):
        assert (found.passed, why in found.reason) == (None, True)


@each("domain", ["json", "sql", "cypher", "typescript", "calls", "text"])
def test_invalid_checks_never_pass(attacked, domain):
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    found = attacked(domain, "1", "2", schema=deep, setup=[deep], calls=[deep], marks=deep)
    assert found.passed is not True
    wrong = dict.fromkeys(("setup", "schema", "calls", "marks", "dialect"), 3)
    assert attacked(domain, "x: [1", "y", **wrong).passed is not True


@each("domain", ["json", "sql", "cypher", "typescript", "calls"])
@each(
    "text",
    ["[" * 90_000, '{"a":' * 20_000, "9" * 90_000, "<" * 3_000, "`" * 3_000],
)
def test_an_answer_that_nests_without_end_is_wrong(attacked, domain, text):
    setup = {"cypher": [NODES, ONE], "sql": ["CREATE TABLE t(a)"]}.get(domain, [])
    expected = {"cypher": NAMES, "sql": "SELECT 1", "typescript": "let a = 1"}.get(domain, "1")
    assert attacked(domain, expected, text, setup=setup).passed is not True


# --- The process --------------------------------------------------------------------------------

TRIES = {
    "read": "open('{home}/canary.csv').read()",
    "list": "os.listdir('{home}')",
    "empty": "open('{home}/canary.csv', 'w')",
    "append": "open('{home}/canary.csv', 'a')",
    "truncate": "os.truncate('{home}/canary.csv', 0)",
    "remove": "os.unlink('{home}/canary.csv')",
    "rename": "os.rename('{home}/canary.csv', '{home}/other')",
    "make a folder": "os.mkdir('{home}/made')",
    "link": "os.symlink('/', '{home}/made')",
    "rights": "os.chmod('{home}/canary.csv', 0o777)",
    "connect": "socket.create_connection(('127.0.0.1', {port}), 5)",
    "run": "subprocess.run(['true'], check=True)",
    "fork": "os.fork() or os._exit(0)",
    "signal": "os.kill(os.getppid(), 0)",
    "write here": "open('made', 'w').write('x')",
}


def test_code_in_a_judge_cannot_leave_the_sandbox(home, listening, tmp_path_factory):
    """What code in the judging process could do, if a row could run any."""
    before = _seen(home)
    code = (
        "import os, socket, subprocess\n"
        "from expert.judging.confinement import confine, python_folders\n"
        "lacking = confine(python_folders())\n"
    )
    for name, attempt in TRIES.items():
        code += f"try:\n    {attempt.format(home=home, port=listening.port)}\n"
        code += f"    os.write(1, b'{name}\\n')\n"
        code += "except (OSError, subprocess.SubprocessError):\n    pass\n"
    code += "os.write(1, str(lacking).encode())\n"
    empty = tmp_path_factory.mktemp("empty")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=empty, capture_output=True, text=True, check=True
    )
    if not done.stdout.endswith("[]"):
        pytest.skip(f"this kernel cannot: {done.stdout}")
    assert done.stdout == "[]"
    assert _seen(home) == before
    assert list(empty.iterdir()) == []
    assert listening.calls == []


def test_a_judge_works_in_an_empty_folder_and_without_the_users_environment(bench, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    with JudgeProcess(15) as own:
        assert own.judge(case_of("1"), "1", domain="json", strict=False).passed is True
        assert own._child is not None
        assert own._folder is not None
        folder = Path(own._folder.name)
        assert list(folder.iterdir()) == []
        process = Path(f"/proc/{own._child.pid}")
        assert (process / "cwd").resolve() == folder.resolve()
        assert SECRET not in (process / "environ").read_text(encoding="utf-8")
    assert not folder.exists()


def test_unblocked_access_is_reported(monkeypatch):
    told: list[str] = []

    def judge_in_the_open(self, case, answer, **more):
        self.open = ("network: not closed",)
        return right("equal")

    monkeypatch.setattr("expert.judging.judge_pool.JudgeProcess.judge", judge_in_the_open)
    judge_all([case_of("1")], ["1"], domain="json", notice=told.append)
    assert told == ["network: not closed"]
