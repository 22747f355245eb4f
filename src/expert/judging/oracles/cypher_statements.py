"""Parses Cypher and lets only statements through that read or build a graph.

Queries are parsed by openCypher's grammar, tables by a reader of Ladybug's CREATE NODE TABLE and
CREATE REL TABLE, which that grammar lacks. Everything else is refused, in a setup, an expected
query and an answer alike: LOAD, COPY, EXPORT, IMPORT, INSTALL, ATTACH, USE, CALL, macros and
settings. The database receives the parsed tokens without comments, and only where every lexer reads
them alike: strings and names have no backslash, and names no unusual characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from expert.judging.answers import DoesNotParse, check_parseable, short
from expert.judging.oracles.oracle import import_optional

WRITING = frozenset({"CREATE", "DELETE", "DETACH", "MERGE", "REMOVE", "SET", "DROP", "ADD"})
_BLANK = frozenset({"SP", "WHITESPACE", "Comment", "COMMENT"})
_STRINGS = frozenset({"STRING_LITERAL", "CHAR_LITERAL"})
_REFUSED_RULES = {
    "standaloneCall": "CALL",
    "queryCallSt": "CALL",
    "yieldItems": "YIELD",
    "parameter": "a parameter",
}
"""Grammar rules that neither read nor build; all others are clauses, patterns and expressions."""
_FUNCTIONS = re.compile(
    r"""(?:array|bitshift|bitwise|date|list|map|regexp|string|struct|time|to|union)_\w+|to[a-z]+|
    abs|acos|all|any|asin|atan2?|avg|blob|cardinality|cast|cbrt|ceil(?:ing)?|century|coalesce|
    collect|concat(?:_ws)?|constant_or_null|contains|cos|cot|count(?:_if)?|current_date|
    current_timestamp|date|datepart|datetrunc|dayname|decode|degrees|duration|element_at|encode|
    end_?node|ends_with|epoch_ms|even|exists|extract|factorial|filter|floor|gamma|gen_random_uuid|
    greatest|hash|head|histogram|id|ifnull|initcap|interval|is_acyclic|is_trail|keys|labels?|last|
    last_day|lcase|least|left|length|levenshtein|lgamma|ln|log|log10|log2|lower|lpad|ltrim|map|
    make_date|max|md5|min|monthname|nodes|none|nullif|octet_length|offset|percentile(?:cont|disc)|
    pi|pow|prefix|properties|radians|rand|random|range|relationships|rels|repeat|replace|reverse|
    right|round|rpad|rtrim|sha256|sign|sin|single|size|split(?:_part)?|sqrt|start_?node|
    starts_with|stdev|string|str_split|time|substr(?:ing)?|suffix|sum|tail|tan|timestamp|trim|type|typeof|
    ucase|upper|uuid""",
    re.VERBOSE | re.IGNORECASE,
)
"""Functions that work on values. The database itself refuses those it lacks."""

_TABLES = (["CREATE", "NODE", "TABLE"], ["CREATE", "REL", "TABLE"])
_TABLE_BODY = re.compile(r"n\((?:[nd(),\[\]]|D[+-]?[dl])*\)")
_LETTERS = {
    **dict.fromkeys(("Integer", "DIGIT"), "d"),
    **dict.fromkeys((*_STRINGS, "FLOAT", "TRUE", "FALSE", "NULL_W"), "l"),
    "ESC_LITERAL": "n",
}
_PLAIN = {
    # The grammar takes some spaces for letters, U+00A0 among them; the database does not.
    "ID": re.compile(r"\w+"),
    "ESC_LITERAL": re.compile(r"`[^`\\\x00-\x1f]+`"),
    **dict.fromkeys(_STRINGS, re.compile(r"[^\\\x00]*")),
}
"""What names and strings look like for every lexer to read them alike."""

Token = tuple[str, str]
"""(kind, text)."""


@dataclass(frozen=True, kw_only=True)
class ParsedQuery:
    tokens: tuple[Token, ...]
    """Without whitespace and comments."""
    safe: str
    """The statement rewritten for the database; "" if it may not run."""
    refused: str = ""
    """Why it may not run; "" if it may."""

    @property
    def reads(self) -> bool:
        return WRITING.isdisjoint(kind for kind, _ in self.tokens)

    @property
    def ordered(self) -> bool:
        """Whether the last RETURN is sorted."""
        kinds = [kind for kind, _ in self.tokens]
        last = len(kinds) - kinds[::-1].index("RETURN") if "RETURN" in kinds else len(kinds)
        return "ORDER" in kinds[last:]

    def canonical(self) -> tuple[str, ...]:
        """Equal for queries that differ only in whitespace and keyword case."""
        words = ("ID", "ESC_LITERAL", *_STRINGS)
        return tuple(text if kind in words else text.upper() for kind, text in self.tokens)


def parse(text: str) -> ParsedQuery:
    """One query by openCypher's grammar, or DoesNotParse. A query that does anything but read or
    build a graph is `refused`: it can be compared but not run."""
    check_parseable(text)
    # SLL prediction is several times faster; if it fails, full LL decides.
    for mode in ("SLL", "LL"):
        tree, tokens, complaint = _read(text, mode)
        if not complaint:
            return _statement([each for each in tokens if each[0] != "SEMI"], _forbidden_part(tree))
    raise DoesNotParse(f"does not parse: {complaint}")


@lru_cache(maxsize=256)
def setup_statements(text: str) -> tuple[ParsedQuery, ...]:
    """The statements of a setup: tables and what fills them; DoesNotParse for any other."""
    check_parseable(text, "the statement")
    _, tokens, complaint = _read(text)
    if complaint:
        raise DoesNotParse(f"does not parse: {complaint}")
    found = []
    for is_end, group in groupby(tokens, key=lambda token: token[0] == "SEMI"):
        part = list(group)
        words = [token for token in part if token[0] not in _BLANK]
        if is_end or not words:
            continue
        try:
            if [word.upper() for _, word in words[:3]] in _TABLES:
                _check_table(words)
                query = _statement(part)
            else:
                query = parse("".join(word for _, word in part))
            why = query.refused
        except DoesNotParse as fault:
            why = str(fault)
        if why:
            begins = short(" ".join(word for _, word in words[:3]))
            raise DoesNotParse(
                f"{begins}: not allowed in a setup, which builds a graph by CREATE NODE TABLE, "
                f"CREATE REL TABLE, CREATE, MERGE and clauses around them: {why[:160]}"
            )
        found.append(query)
    return tuple(found)


def _read(text: str, mode: str = "") -> tuple[Any, list[Token], str]:
    """The tree of a text, its tokens with whitespace and comments, and the first syntax error.
    Without a prediction mode it is only split into tokens."""
    antlr, cypher = import_optional("antlr4"), import_optional("antlr4_cypher")
    base: Any = import_optional("antlr4.error.ErrorListener").ErrorListener
    faults: list[str] = []

    class KeepFaults(base):  # type: ignore[misc, valid-type, unused-ignore]
        """By default the parser prints syntax errors."""

        def syntaxError(
            self, recognizer: Any, symbol: Any, line: int, column: int, message: str, error: Any
        ) -> None:
            faults.append(f"line {line}, column {column + 1}: {message[:120]}")

    lexer = cypher.CypherLexer(antlr.InputStream(text))
    stream = antlr.CommonTokenStream(lexer)
    parser = cypher.CypherParser(stream)
    for each in (lexer, parser):
        each.removeErrorListeners()
        each.addErrorListener(KeepFaults())
    tree = None
    if mode:
        modes = import_optional("antlr4.atn.PredictionMode").PredictionMode
        parser._interp.predictionMode = getattr(modes, mode)
        try:
            tree = parser.script()
        except RecursionError:
            return None, [], "it is nested too deep"
    else:
        stream.fill()
    names = cypher.CypherLexer.symbolicNames
    tokens = [(names[token.type], token.text) for token in stream.tokens if token.type > 0]
    return tree, tokens, faults[0] if faults else ""


def _statement(tokens: Sequence[Token], refused: str = "") -> ParsedQuery:
    """A statement with its text for the database: blanks and comments become one space."""
    for kind, text in tokens:
        if kind in _PLAIN and not _PLAIN[kind].fullmatch(text):
            refused = refused or f"{text[:40]!r} has a backslash or another unusual character"
    safe = "".join(" " if kind in _BLANK else text for kind, text in tokens)
    kept = tuple(token for token in tokens if token[0] not in _BLANK)
    return ParsedQuery(tokens=kept, safe="" if refused else safe, refused=refused)


def _forbidden_part(tree: Any) -> str:
    """The part of a query that neither reads nor builds a graph; "" if there is none."""
    rules = import_optional("antlr4_cypher").CypherParser.ruleNames
    left = [tree]
    while left:
        node = left.pop()
        if not hasattr(node, "getRuleIndex"):
            continue
        name = rules[node.getRuleIndex()]
        if name in _REFUSED_RULES:
            return f"{_REFUSED_RULES[name]} is not run here"
        if name == "functionInvocation":
            called = node.invocationName().getText().replace("`", "")
            if not _FUNCTIONS.fullmatch(called):
                return f"the function {called[:40]} is not run here"
        left.extend(node.getChildren())
    return ""


def _check_table(words: Sequence[Token]) -> None:
    """Raise unless this is a table definition of Ladybug's dialect and nothing more:

    CREATE NODE TABLE [IF NOT EXISTS] name (column type [DEFAULT literal] [PRIMARY KEY], …,
        [PRIMARY KEY (column)])
    CREATE REL TABLE [GROUP] [IF NOT EXISTS] name (FROM name TO name, …, column type …, [MANY_ONE])

    Inside the parentheses are only names, integers and brackets, and literals after DEFAULT: no
    text that could name a file, no call. Nothing may follow: AS reads rows from a file, and WITH
    names a storage. The database refuses the rest.
    """

    def letter(kind: str, text: str) -> str:
        if kind in _LETTERS or text in "(),[]+-":
            return _LETTERS.get(kind, text)
        name = re.fullmatch(r"[^\W\d]\w*", text)
        return "D" if text.upper() == "DEFAULT" else "n" if name else "?"

    upper = [word.upper() for _, word in words]
    at = 3 + (upper[1] == "REL" and upper[3:4] == ["GROUP"] and upper[4:5] != ["("])
    at += 3 * (upper[at : at + 3] == ["IF", "NOT", "EXISTS"])
    shape = "".join(letter(*word) for word in words[at:])
    inside = [shape[:end].count("(") - shape[:end].count(")") for end in range(2, len(shape))]
    if not _TABLE_BODY.fullmatch(shape) or shape.count("(") != shape.count(")") or 0 in inside:
        raise DoesNotParse("a table has a name, columns with types, and literals as defaults")
