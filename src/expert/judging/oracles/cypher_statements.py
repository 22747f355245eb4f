"""Parses Cypher and lets only statements through that read or build a graph.

Queries are parsed by openCypher's grammar, tables by a reader of Ladybug's CREATE NODE TABLE and
CREATE REL TABLE, which that grammar lacks. Everything else is refused, in a setup, an expected
query and an answer alike: LOAD, COPY, EXPORT, IMPORT, INSTALL, ATTACH, USE, CALL, macros and
settings. The database receives text rewritten from the parsed tokens, so that a comment, quotation
mark or escape cannot mean something else to it.
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
FUNCTIONS = frozenset(
    """
    abs acos all any array_append array_cat array_concat array_contains array_cosine_similarity
    array_cross_product array_distance array_dot_product array_extract array_has array_indexof
    array_inner_product array_position array_prepend array_push_back array_push_front array_slice
    array_squared_distance array_value asin atan atan2 avg bitshift_left bitshift_right bitwise_and
    bitwise_or bitwise_xor blob cardinality cast cbrt ceil ceiling century coalesce collect concat
    concat_ws constant_or_null contains cos cot count count_if current_date current_timestamp date
    datepart datetrunc date_part date_trunc dayname decode degrees duration element_at encode
    ends_with end_node epoch_ms even exists extract factorial filter floor gamma gen_random_uuid
    greatest hash head histogram id ifnull initcap interval is_acyclic is_trail keys label labels
    last last_day lcase least left length levenshtein lgamma list_any_value list_append list_cat
    list_concat list_contains list_creation list_distinct list_element list_extract list_filter
    list_has list_has_all list_has_any list_indexof list_max list_min list_position list_prepend
    list_product list_reduce list_reverse list_reverse_sort list_slice list_sort list_sum
    list_to_string list_transform list_unique ln log log10 log2 lower lpad ltrim make_date map
    map_extract map_keys map_values max md5 min monthname nodes none nullif octet_length offset
    percentilecont percentiledisc pi pow prefix properties radians rand random range regexp_extract
    regexp_extract_all regexp_full_match regexp_matches regexp_replace regexp_split_to_array
    relationships rels repeat replace reverse right round rpad rtrim sha256 sign sin single size
    split split_part sqrt starts_with start_node stdev string string_split string_to_array
    struct_extract struct_pack str_split substr substring suffix sum tail tan time timestamp
    time_bucket toboolean tofloat tointeger tolower tostring toupper to_blob to_bool to_date to_days
    to_double to_epoch_ms to_float to_hours to_int128 to_int16 to_int32 to_int64 to_int8 to_interval
    to_microseconds to_milliseconds to_minutes to_months to_seconds to_string to_timestamp
    to_uint128 to_uint16 to_uint32 to_uint64 to_uint8 to_uuid to_years trim type typeof ucase
    union_extract union_tag union_value upper uuid
    """.split()  # noqa: SIM905 - one a line would be three screens
)
"""Functions that work on values. The database itself refuses those it lacks."""

_TABLES = (["CREATE", "NODE", "TABLE"], ["CREATE", "REL", "TABLE"])
_TABLE_BODY = re.compile(r"n\((?:[nd(),\[\]]|D[+-]?[dl])*\)")
_LETTERS = {
    **dict.fromkeys(("Integer", "DIGIT"), "d"),
    **dict.fromkeys((*_STRINGS, "FLOAT", "TRUE", "FALSE", "NULL_W"), "l"),
    "ESC_LITERAL": "n",
}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)

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
    safe = ""
    if not refused:
        try:
            safe = "".join(map(_rewritten, tokens))
        except ValueError as why:
            refused = str(why)
    kept = tuple(token for token in tokens if token[0] not in _BLANK)
    return ParsedQuery(tokens=kept, safe=safe, refused=refused)


def _rewritten(token: Token) -> str:
    """A token that every lexer reads alike: strings without quotation marks, backslashes or
    newlines inside, no comments. ValueError if another lexer might read it differently."""
    kind, text = token
    if kind in _BLANK:
        return " "
    if kind == "ID" and not re.fullmatch(r"\w+", text):
        # The grammar takes some spaces for letters, U+00A0 among them; the database does not.
        raise ValueError(f"the name {text[:40]!r} has a character that is not a letter or a digit")
    if kind == "ESC_LITERAL" and re.search(r"[`\\\x00-\x1f]", text[1:-1]):
        raise ValueError(f"the name {text[:40]} has a quotation mark or a control character")
    if kind not in _STRINGS:
        return text

    def character(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        if not code:
            return _ESCAPES.get(found[3], found[3])
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise ValueError(f"{found[0]} is not a character")
        return chr(number)

    def escaped(letter: str) -> str:
        if letter.isalnum() or letter in " _-.,:;/+*=()[]{}<>@#%&!?|^~$":
            return letter
        return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"

    return f"'{''.join(map(escaped, _ESCAPE.sub(character, text[1:-1])))}'"


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
            if called.lower() not in FUNCTIONS:
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
