"""What a template of a tokenizer may not do, and what stops it."""

from __future__ import annotations

import pytest

from expert.data.records import DataError, Example, Turn
from expert.data.template import sandbox as template_sandbox
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import TemplateError
from tests.data.template.chat_templates import CHATML, as_transformers_does, exchange, family
from tests.data.template.test_templates import ANSWER, USER, text_of
from tests.each import each


def test_the_filters_that_are_charged_do_what_jinjas_do():
    source = (
        "{{ ['a', 1] | join('-') }} {{ messages[:1] | join('+', attribute='role') }} "
        "{{ 'a\\n\\nb' | indent }}|{{ 'a\\n\\nb' | indent(2, first=true, blank=true) }}|"
        "{{ 'aXbX' | replace('X', '.') }} {{ 'aXbX' | replace('X', '.', 1) }} "
        "{{ 'aXbX'.replace('X', '', 1) }} {{ ','.join(['a', 'b']) }} "
        "{% for i in [1, 2] %}{{ '+'.join(['a', 'b']).replace('b', i | string) }}{% endfor %} "
        "{{ 7 % 4 * 2 ** 3 }} "
        "{{ '-' * 3 }} {{ (1, 2)[1:] }} {{ 'a' ~ 1 ~ none }} {{ '<' | safe }} "
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %} {{ [1, 2, 3][::-1] }}"
    )
    expected = as_transformers_does(source, [USER])
    assert ChatTemplate(source + CHATML, eos="").prompt([USER]).startswith(expected)


STOPPED = "the tokenizer's chat template was stopped: "
UNSAFE = "the tokenizer's chat template is not safe to run: "
UNREADABLE = "the tokenizer's chat template cannot be read: "
TOO_MUCH = STOPPED + "it makes far more text than it is given"


@each(
    ("hostile", "text"),
    [
        ("{{ ''.__class__ }}", UNSAFE + "'__class__' of 'str' is not accessible"),
        ("{{ ''['__class__'] }}", UNSAFE + "'__class__' of 'str' is not accessible"),
        ("{{ '' | attr('__class__') }}", UNSAFE + "'__class__' of 'str' is not accessible"),
        ("{{ [] | map(attribute='__class__') | list }}", None),
        ("{{ [''] | map(attribute='__class__') | list }}", UNSAFE),
        ("{{ namespace.__init__.__globals__ }}", UNSAFE),
        ("{{ raise_exception.__globals__ }}", UNSAFE),
        ("{{ strftime_now.__self__ }}", UNSAFE),
        ("{{ self.__init__ }}", UNSAFE),
        ("{{ dict.fromkeys }}", UNSAFE + "'fromkeys' of 'type' is not accessible"),
        ("{{ messages.append(1) }}", UNSAFE + "'append' of 'list' is not accessible"),
        ("{{ '{0.__class__}'.format(1) }}", UNSAFE + "'format' of 'str' is not accessible"),
        ("{{ 'a'.ljust(9999999999) }}", UNSAFE + "'ljust' of 'str' is not accessible"),
        ("{{ (1).to_bytes(9999999999, 'big') }}", UNSAFE),
        ("{{ '%9999999999d' % 1 }}", UNSAFE + "'%' is for numbers here"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}long{% endfor %}"
            "{% endfor %}{% endset %}",
            TOO_MUCH,
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
            "{{ f(40) }}",
            STOPPED,
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}", "RecursionError"),
        ("{{ 'a' * 9999999999 }}", TOO_MUCH),
        ("{{ [1] * 9999999999 }}", TOO_MUCH),
        ("{{ 9999999999 * 'a' }}", TOO_MUCH),
        ("{{ 10 ** (10 ** 10) }}", STOPPED + "it computes with enormous numbers"),
        (
            "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
            "{% endfor %}",
            STOPPED + "it computes with enormous numbers",
        ),
        *(
            (
                f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}"
                f"{{% set ns.x = {grown} %}}{{% endfor %}}{{{{ ns.x }}}}",
                TOO_MUCH,
            )
            for start, grown in (
                ("'ab'", "ns.x + ns.x"),
                ("'ab'", "ns.x ~ ns.x"),
                ("['ab']", "[ns.x, ns.x]"),
                ("['ab']", "(ns.x, ns.x)"),
                ("['ab']", "{'a': ns.x, 'b': ns.x}"),
                ("['ab']", "dict(a=ns.x, b=ns.x)"),
                ("['ab']", "ns.x + ns.x"),
            )
        ),
        ("{{ ('a' * 90000).replace('a', 'b' * 90000) }}", TOO_MUCH),
        ("{{ ('a' * 90000) | replace('a', 'b' * 90000) }}", TOO_MUCH),
        ("{{ ('a' * 90000).join(['a'] * 9000) }}", TOO_MUCH),
        ("{{ ['a'] * 9000 | join('a' * 90000) }}", TOO_MUCH),
        ("{{ 'a' | indent(9999999999) }}", STOPPED + "it indents by more than a line"),
        ("{{ [1] | tojson(indent=9999999999) }}", STOPPED + "it indents by more than a line"),
        ("{{ 'a' | center(9999999999) }}", UNREADABLE + "line 1: No filter named 'center'."),
        ("{{ range(9999999999) }}", "OverflowError"),
        ("{{ lipsum(9999) }}", "UndefinedError: 'lipsum' is undefined"),
        ("{% include 'secret' %}", "no loader"),
        ("{% if %}", UNREADABLE + "line 1: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", UNREADABLE + "RecursionError"),
        (
            "x" * 200_000,
            (
                f"the tokenizer's chat template has {200000 + len(CHATML):,} characters, more "
                "than 65,536"
            ),
        ),
        (
            "{{ raise_exception('never') }}",
            (
                "the tokenizer's chat template refuses this conversation: never  (it is: user, "
                "assistant)"
            ),
        ),
    ],
)
def test_a_hostile_template_is_refused_before_any_row(hostile, text, monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 600.0)  # by what it makes, on any machine
    monkeypatch.setattr(template_sandbox, "ALLOWANCE", 2**22)  # a sixteenth, in as much less time
    if text is None:
        assert ChatTemplate(hostile + CHATML, eos="")
        return
    with pytest.raises(DataError) as caught:
        ChatTemplate(hostile + CHATML, eos="")
    assert text in str(caught.value)
    assert str(caught.value).endswith("  (set base_models[0].prompt_template: chatml)")


def test_a_template_that_turns_hostile_or_runs_too_long_stops_the_whole_data_set(monkeypatch):
    source = "{% if 'x' in messages[0].content %}{{ 'a' * 99999999 }}{% endif %}" + CHATML
    template = ChatTemplate(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(DataError) as caught:
        template.segments(Example((Turn("user", "x"), ANSWER)))
    assert not isinstance(caught.value, TemplateError)
    assert str(caught.value).startswith(TOO_MUCH)
    monkeypatch.setattr(template_sandbox, "SECONDS", -1.0)
    with pytest.raises(DataError, match="was stopped: it runs for more than -1 s"):
        ChatTemplate(CHATML, eos="")


def test_long_rows_have_a_larger_allowance():
    long = "word " * 1_000_000
    example = exchange(long, long)
    assert len(text_of(family("headers").segments(example))) > 2 * len(long) - 10


@each(("source", "role"), [("{{ messages[0].content }}", "assistant"), ("hello", "user")])
def test_a_template_that_leaves_out_what_is_said_is_of_no_use(source, role):
    with pytest.raises(DataError) as caught:
        ChatTemplate(source, eos="")
    assert str(caught.value) == (
        f"the tokenizer's chat template leaves out the {role} turn  (set "
        "base_models[0].prompt_template: chatml)"
    )
