"""JSON: the answer parses, and equals the expected value or matches the schema of the case."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal, DecimalException
from typing import Any

from expert.judging.answers import DoesNotParse, check_parseable, short
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


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `schema`, a JSON Schema, and `equals` (by default true without a
    schema)."""
    schema = case.check.get("schema")
    equals = bool(case.check.get("equals", schema is None))
    with expected_part("the expected answer is not JSON: "):
        expected = parse(case.expected) if equals else None
    validator = _validator(schema, how.seconds) if schema is not None else None
    how.begin()
    try:
        value = parse(how.inside(answer))
    except DoesNotParse as fault:
        return wrong("parse", f"not JSON: {fault}")
    if equals:
        place = difference(expected, value)
        if place is not None:
            return wrong("equal", place)
    if validator is not None:
        try:
            with _in_time(how.seconds):
                plain = json.loads(how.inside(answer))  # with floats, which JSON Schema knows
                broken = next(validator.iter_errors(plain), None)
        except import_optional("referencing").exceptions.Unresolvable as error:
            return unknown(f"the schema of the case refers to something outside it: {error}")
        except RecursionError:
            return unknown("the schema of the case refers to itself endlessly")
        except Exception as error:  # noqa: BLE001 - a pattern may fail when it is first used
            return unknown(f"the schema of the case cannot be used: {short(str(error))}")
        if broken is not None:
            where = "".join(f"[{part!r}]" for part in broken.absolute_path)
            return wrong("schema", f"${where}: {short(broken.message)}")
    if not equals and validator is None:
        return unknown("it parses; the case has neither equals nor schema")
    return right("equal" if equals else "schema")


def parse(text: str) -> Any:
    """Parse JSON by RFC 8259: no NaN, no duplicate keys in an object.

    Numbers with a point or an exponent become Decimal, so that none is rounded.
    """
    check_parseable(text)
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=_number, parse_constant=_refuse
        )
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise DoesNotParse(f"{what} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits
        raise DoesNotParse(short(str(error))) from None


def difference(expected: Any, value: Any, path: str = "$") -> str | None:
    """Where two values differ, in words; None if they are equal.

    Key order does not matter. Numbers are compared by value: 1 is 1.0, and true is not 1.
    """
    kinds = _kind(expected), _kind(value)
    if kinds[0] != kinds[1]:
        return f"{path}: {kinds[1]} instead of {kinds[0]}"
    if isinstance(expected, Mapping):
        missing = [key for key in expected if key not in value]
        more = [key for key in value if key not in expected]
        if missing or more:
            key = (
                f"without the key {missing[0]!r}" if missing else f"with the extra key {more[0]!r}"
            )
            return f"{path}: an object {short(key)}"
        parts = [(f"{path}.{short(k)}", expected[k], value[k]) for k in expected]
    elif isinstance(expected, list):
        if len(expected) != len(value):
            return f"{path}: {len(value)} entries instead of {len(expected)}"
        pairs = enumerate(zip(expected, value, strict=True))
        parts = [(f"{path}[{place}]", one, other) for place, (one, other) in pairs]
    else:
        if expected == value:
            return None
        shown, wanted = (
            short(json.dumps(each, ensure_ascii=False, default=str)) for each in (value, expected)
        )
        return f"{path}: {shown} instead of {wanted}"
    found = (difference(one, other, place) for place, one, other in parts)
    return next((place for place in found if place is not None), None)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    if isinstance(value, int | Decimal):
        return "a number"
    return {"str": "a string", "list": "a list"}.get(type(value).__name__, "an object")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counted = Counter(key for key, _ in pairs)
        twice = short(counted.most_common(1)[0][0])
        raise ValueError(f"the key {twice!r} occurs twice in an object")
    return found


def _number(text: str) -> Decimal:
    with contextlib.suppress(DecimalException):
        if (found := Decimal(text)).is_finite():
            return found
    raise ValueError(f"the number {short(text)} is out of range")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _validator(schema: Any, seconds: float) -> Any:
    jsonschema, referencing = import_optional("jsonschema"), import_optional("referencing")
    if not isinstance(schema, Mapping | bool):
        raise NoOracle("the schema of the case is not a JSON Schema")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        with _in_time(seconds):
            kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        why = f"the schema of the case is not a JSON Schema: {short(error.message)}"
        raise NoOracle(why) from None
    except (TimeoutError, RecursionError, OverflowError):
        raise NoOracle("the schema of the case is too large or nested too deep") from None
    # An empty registry: no reference in the schema is fetched.
    return kind(schema, registry=referencing.Registry())


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this many seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
