"""TypeScript answers that the compiler decides, where it is installed."""

from __future__ import annotations

import stat

import pytest

from expert.judging.judge_pool import judge_all
from expert.judging.oracles.typescript import find_tsc, type_errors
from tests.judging.judged import case_of

ADD = "function f(a: number, b: string): string {\n  return b + a;\n}"


def compiler(folder, output: str, code: int) -> str:
    """A stand-in that prints recorded output of tsc, for machines without Node."""
    path = folder / "tsc"
    path.write_text(f"#!/bin/sh\nprintf '%b' '{output}'\nexit {code}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_the_compiler_says_of_each_program_is_understood(tmp_path):
    said = "p1.ts(2,7): error TS2322: Type is wrong.\\np1.ts(3,1): error TS1: more\\n"
    tsc = compiler(tmp_path, said, 2)
    assert type_errors(["a", "b", "c"], tsc) == [None, "line 2: TS2322: Type is wrong.", None]
    assert type_errors(["a"], compiler(tmp_path, "error TS5023: no option\\n", 1)) is None
    assert type_errors(["a"], str(tmp_path / "nothing")) is None


def test_the_compiler_judges_what_was_left_to_it(tmp_path, monkeypatch):
    cases = [case_of(ADD, equals=False), case_of(ADD, equals=False), case_of(ADD)]
    answers = ["const x = 1", "const y: string = 1", "const z = 1"]
    # Two programs a case: the expected one, then the answer.
    tsc = compiler(tmp_path, "p3.ts(1,7): error TS2322: wrong\\n", 2)
    monkeypatch.setattr("expert.judging.judge_pool.find_tsc", lambda: tsc)
    found = judge_all(cases, answers, domain="typescript")
    assert [each.passed for each in found] == [True, False, False]
    assert found[1].reason == "line 1: TS2322: wrong"
    compiler(tmp_path, "p0.ts(1,7): error TS2304: no name\\n", 2)
    found = judge_all(cases[:1], answers[:1], domain="typescript")
    assert found[0].passed is None
    assert "the expected answer has a type error itself" in found[0].reason


@pytest.mark.skipif(find_tsc() is None, reason="tsc or Node is not installed")
def test_the_real_compiler_tells_types_apart():
    tsc = find_tsc()
    assert tsc is not None
    found = type_errors(["const a: number = 1", "const a: string = 1"], tsc)
    assert found is not None
    assert found[0] is None
    assert "TS2322" in str(found[1])
