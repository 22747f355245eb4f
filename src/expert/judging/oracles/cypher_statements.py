"""Parses Cypher and lets only statements through that read or build a graph.

Queries are parsed by openCypher's grammar, tables by a reader of Ladybug's CREATE NODE TABLE and
CREATE REL TABLE, which that grammar lacks. Everything else is refused, in a setup, an expected
query and an answer alike: LOAD, COPY, EXPORT, IMPORT, INSTALL, ATTACH, USE, CALL, macros and
settings. The database receives text rewritten from the parsed tokens, so that a comment, quotation
mark or escape cannot mean something else to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expert.judging.answers import DoesNotParse, check_parseable, short
from expert.judging.oracles.oracle import import_optional

WRITING = frozenset({"CREATE", "DELETE", "DETACH", "MERGE", "REMOVE", "SET", "DROP", "ADD"})
_SPACE = frozenset({"SP", "WHITESPACE"})
_COMMENT = frozenset({"Comment", "COMMENT"})
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

Token = tuple[str, str]
"""(kind, text)."""


class _AmbiguousToken(Exception):
    """A token that another lexer might read differently."""


@dataclass(frozen=True, kw_only=True)
class ParsedQuery:
    tokens: tuple[Token, ...]
    """Without whitespace and comments."""
    safe: str
    """The statement rewritten for the database; "" if it may not run."""
    refused: str = ""
    """Why it may not run; "" if it may."""

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.tokens}

    @property
    def reads(self) -> bool:
        return not self.kinds & WRITING

    @property
    def ordered(self) -> bool:
        """Whether the last RETURN is sorted."""
        kinds = [kind for kind, _ in self.tokens]
        last = len(kinds) - kinds[::-1].index("RETURN") if "RETURN" in kinds else len(kinds)
        return "ORDER" in kinds[last:]

    def canonical(self) -> tuple[str, ...]:
        """Equal for queries that differ only in whitespace and keyword case."""
        words = ("ID", "ESC_LITERAL", "STRING_LITERAL", "CHAR_LITERAL")
        return tuple(text if kind in words else text.upper() for kind, text in self.tokens)


def parse(text: str) -> ParsedQuery:
    """One query by openCypher's grammar, or DoesNotParse. A query that does anything but read or
    build a graph is `refused`: it can be compared but not run."""
    check_parseable(text)
    # SLL prediction is several times faster; if it fails, full LL decides.
    modes = import_optional("antlr4.atn.PredictionMode").PredictionMode
    for mode in (modes.SLL, modes.LL):
        tree, tokens, complaint = _parsed(text, mode)
        if not complaint:
            break
    else:
        raise DoesNotParse(f"does not parse: {complaint}")
    return _statement([token for token in tokens if token[0] != "SEMI"], _forbidden_part(tree))


@lru_cache(maxsize=256)
def setup_statements(text: str) -> tuple[ParsedQuery, ...]:
    """The statements of a setup: tables and what fills them; DoesNotParse for any other."""
    check_parseable(text, "the statement")
    found = []
    for part in _split(_lexed(text)):
        words = [token for token in part if token[0] not in _SPACE | _COMMENT]
        if not words:
            continue
        found.append(_setup_statement(part, words))
    return tuple(found)


def _setup_statement(part: Sequence[Token], words: Sequence[Token]) -> ParsedQuery:
    try:
        if [word.upper() for _, word in words[:3]] in _TABLES:
            _check_table(words)
            found = _statement(part)
        else:
            found = parse("".join(word for _, word in part))
        why = found.refused
    except DoesNotParse as fault:
        why = str(fault)
    if why:
        begins = short(" ".join(word for _, word in words[:3]))
        raise DoesNotParse(
            f"{begins}: not allowed in a setup, which builds a graph by CREATE NODE TABLE, "
            f"CREATE REL TABLE, CREATE, MERGE and clauses around them: {why[:160]}"
        )
    return found


def _statement(tokens: Sequence[Token], refused: str = "") -> ParsedQuery:
    safe = ""
    if not refused:
        try:
            safe = "".join(_rewritten(token) for token in tokens)
        except _AmbiguousToken as why:
            refused = str(why)
    blank = _SPACE | _COMMENT
    kept = tuple(token for token in tokens if token[0] not in blank)
    return ParsedQuery(tokens=kept, safe=safe, refused=refused)


def _rewritten(token: Token) -> str:
    """A token that every lexer reads alike: strings without quotation marks, backslashes or
    newlines inside, no comments."""
    kind, text = token
    if kind in _COMMENT or kind in _SPACE:
        return " "
    if kind == "ID" and not re.fullmatch(r"\w+", text):
        # The grammar takes some spaces for letters, U+00A0 among them; the database does not.
        raise _AmbiguousToken(
            f"the name {text[:40]!r} has a character that is not a letter or a digit"
        )
    if kind == "ESC_LITERAL":
        if re.search(r"[`\\\x00-\x1f]", text[1:-1]):
            raise _AmbiguousToken(
                f"the name {text[:40]} has a quotation mark or a control character"
            )
        return text
    if kind in _STRINGS:
        return "'" + "".join(_escaped(letter) for letter in _value(text)) + "'"
    return text


def _escaped(letter: str) -> str:
    if letter.isalnum() or letter in " _-.,:;/+*=()[]{}<>@#%&!?|^~$":
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def _value(literal: str) -> str:
    """The value of a string literal."""

    def one(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        if code:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                raise _AmbiguousToken(f"{found[0]} is not a character")
            return chr(number)
        return _ESCAPES.get(found[3], found[3])

    return _ESCAPE.sub(one, literal[1:-1])


def _split(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Statement by statement; a semicolon inside a string is not a token."""
    part: list[Token] = []
    for token in tokens:
        if token[0] == "SEMI":
            yield part
            part = []
        else:
            part.append(token)
    yield part


def _lexed(text: str) -> list[Token]:
    """The tokens of a text, including whitespace and comments."""
    stream, listener = _stream(text)
    stream.fill()
    if listener.first:
        raise DoesNotParse(f"does not parse: {listener.first}")
    return _named(stream)


def _stream(text: str) -> tuple[Any, Any]:
    """The token stream of a text, and its error listener."""
    antlr, listener = import_optional("antlr4"), _listener()
    lexer = import_optional("antlr4_cypher").CypherLexer(antlr.InputStream(text))
    lexer.removeErrorListeners()
    lexer.addErrorListener(listener)
    return antlr.CommonTokenStream(lexer), listener


def _named(stream: Any) -> list[Token]:
    names = import_optional("antlr4_cypher").CypherLexer.symbolicNames
    return [(names[token.type], token.text) for token in stream.tokens if token.type > 0]


def _parsed(text: str, mode: Any) -> tuple[Any, list[Token], str]:
    """The tree of a text, its tokens, and the first syntax error."""
    stream, listener = _stream(text)
    parser = import_optional("antlr4_cypher").CypherParser(stream)
    parser._interp.predictionMode = mode
    parser.removeErrorListeners()
    parser.addErrorListener(listener)
    try:
        tree = parser.script()
    except RecursionError:
        return None, [], "it is nested too deep"
    return tree, _named(stream), str(listener.first)


def _listener() -> Any:
    """Keeps the first syntax error; by default the parser prints all of them."""
    base: Any = import_optional("antlr4.error.ErrorListener").ErrorListener

    class FirstFault(base):  # type: ignore[misc, valid-type, unused-ignore]
        first = ""

        def syntaxError(
            self, recognizer: Any, symbol: Any, line: int, column: int, message: str, error: Any
        ) -> None:
            self.first = self.first or f"line {line}, column {column + 1}: {message[:120]}"

    return FirstFault()


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


_BODY = re.compile(r"n\((?:[nd(),\[\]]|D[+-]?[dl])*\)")
_LETTERS = {
    **dict.fromkeys(("Integer", "DIGIT"), "d"),
    **dict.fromkeys((*_STRINGS, "FLOAT", "TRUE", "FALSE", "NULL_W"), "l"),
    "ESC_LITERAL": "n",
}


def _check_table(words: Sequence[Token]) -> None:
    """Raise unless this is a table definition of Ladybug's dialect and nothing more:

    CREATE NODE TABLE [IF NOT EXISTS] name (column type [DEFAULT literal] [PRIMARY KEY], …,
        [PRIMARY KEY (column)])
    CREATE REL TABLE [GROUP] [IF NOT EXISTS] name (FROM name TO name, …, column type …, [MANY_ONE])

    Inside the parentheses are only names, integers and brackets, and literals after DEFAULT: no
    text that could name a file, no call. Nothing may follow: AS reads rows from a file, and WITH
    names a storage. The database refuses the rest.
    """
    upper = [word.upper() for _, word in words]
    at = 3 + (upper[1] == "REL" and upper[3:4] == ["GROUP"] and upper[4:5] != ["("])
    at += 3 * (upper[at : at + 3] == ["IF", "NOT", "EXISTS"])
    shape = "".join(map(_letter, words[at:]))
    inside = [shape[:end].count("(") - shape[:end].count(")") for end in range(2, len(shape))]
    if not _BODY.fullmatch(shape) or shape.count("(") != shape.count(")") or 0 in inside:
        raise DoesNotParse("a table has a name, columns with types, and literals as defaults")


def _letter(token: Token) -> str:
    kind, text = token
    if kind in _LETTERS or text in "(),[]+-":
        return _LETTERS.get(kind, text)
    name = re.fullmatch(r"[^\W\d]\w*", text)
    return "D" if text.upper() == "DEFAULT" else "n" if name else "?"
