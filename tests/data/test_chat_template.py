"""The tokenizer's own template: what it writes, what of that is learnt, what it may not do."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expert.data import chat_template as module
from expert.data import template_sandbox
from expert.data.chat_template import ChatTemplate, chat_template
from expert.data.records import DataError, Example, Segment, Turn
from expert.data.templates import Template, TemplateError, named_template
from tests.data.test_formats import REAL_DATA, REAL_FILES, real_examples
from tests.data.test_templates import (
    ANSWER,
    SHAPES,
    SYSTEM,
    USER,
    check_segments,
    conversations,
    shown,
    text_of,
)

# Templates written for these tests, each in the manner of a family of models.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

HEADERS = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|h|>' + m['role'] + '<|/h|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{%- endif %}"""

BRACKETS = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}
{%- else %}{{ raise_exception('no system here') }}{% endif %}
{%- endfor %}"""

# Only the last answer keeps its thoughts; without any it gets an empty one.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = ns.last + 2 %}{% endfor %}
{%- if messages[0].role != 'system' %}{% set ns.last = ns.last - 1 %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The thought is opened for the model, and is not there when the answer is written down.
OPENED = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ '<U>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"""

# The system text is said before the last question, wherever that is.
MOVING = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if system and loop.index0 >= rest | length - 2 %}{{ '[S]' + system + '[/S]' }}{% endif %}
{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

BARE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|e|>\n{% endfor %}"
ENDLESS_ANSWERS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GENERATION = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<e>{% endgeneration %}
{%- else %}U:{{ m.content }};{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}A:{% endif %}"""

FAMILIES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "brackets": BRACKETS,
    "thinking": THINKING,
    "bare": BARE,
    "opened": OPENED,
    "endless answers": ENDLESS_ANSWERS,
    "generation": GENERATION,
}


def family(name: str, **more: Any) -> Template:
    return chat_template(FAMILIES.get(name, name), bos="<s>", eos="</s>", **more)


def as_transformers_does(source: str, turns: Any, **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return environment.from_string(source).render(messages=messages, **variables)


def qwen3_source() -> str:
    path = REAL_DATA / "tokenizers" / "qwen3" / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip("shared/data/tokenizers/qwen3 is not here")
    source = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    assert isinstance(source, str)
    return source


# What is written and what is learnt


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("headers", "user", "<s><|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[A<|eot|>]]"),
        ("brackets", "system", "<s>[INST] S\n\nQ [/INST][[ A</s>]]"),
        ("brackets", "turns", "<s>[INST] S\n\nQ [/INST][[ A</s>]][INST] R [/INST][[ B</s>]]"),
        (
            "thinking",
            "user",
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\n\n</think>\n\nA<|im_end|>\n]]",
        ),
        (
            "thinking",
            "turns",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
            "<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nR<|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\n\n</think>\n\nB<|im_end|>\n]]",
        ),
        ("opened", "user", "<U>Q<A>[[A</s>]]"),
        ("bare", "system", "<|system|>\nS<|e|>\n<|user|>\nQ<|e|>\n<|assistant|>\n[[A<|e|>\n]]"),
        ("endless answers", "user", "user: Q\nassistant: [[A\n</s>]]"),
        ("generation", "user", "U:Q;A:[[A<e>]]"),
    ],
)
def test_a_conversation_is_written_by_the_template_and_its_answers_are_found(name, shape, text):
    assert shown(family(name).segments(Example(SHAPES[shape]))) == text


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chatml_template_and_the_chatml_of_that_name_are_the_same(shape):
    example = Example(SHAPES[shape])
    named = named_template("chatml", eos="<|im_end|>")
    own = chat_template(CHATML, eos="<|im_end|>")
    assert own.segments(example) == named.segments(example)
    assert own.prompt(example.turns[:-1]) == named.prompt(example.turns[:-1])
    assert own.stop == named.stop


@pytest.mark.parametrize("shape", ["user", "system", "input"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_is_what_stands_before_the_answer_in_training(name, shape):
    check_segments(family(name), Example(SHAPES[shape]))


words = st.text(alphabet="aä 🙂\n<|/think_", min_size=1)


@given(question=words, answer=words)
@pytest.mark.parametrize("name", ["chatml", "brackets", "bare", "opened", "generation"])
def test_prompt_and_training_agree_whatever_is_said(name, question, answer):
    template = TEMPLATES[name]
    example = Example((Turn("user", question), Turn("assistant", answer)))
    check_segments(template, example)


TEMPLATES = {name: family(name) for name in FAMILIES}


@given(example=conversations())
@settings(max_examples=50)
@pytest.mark.parametrize("name", ["chatml", "headers", "thinking", "brackets"])
def test_the_text_is_that_of_a_plain_rendering_whatever_is_said(name, example):
    template = TEMPLATES[name]
    turns = example.turns
    if name == "brackets" and turns[0].role == "system":
        turns = (Turn("user", f"{turns[0].text}\n\n{turns[1].text}"), *turns[2:])
    plain = as_transformers_does(FAMILIES[name], turns, bos_token="<s>", eos_token="</s>")
    assert text_of(template.segments(example, learn_prompt=True)) == plain
    if not all(turn.text.strip() for turn in turns):
        return  # an answer that is nothing but blanks is nowhere to be found once it is trimmed
    segments = template.segments(example)
    assert text_of(segments) == plain
    answers = [turn for turn in turns if turn.role == "assistant"]
    assert [segment.learn for segment in segments] == [False, True] * len(answers)


def test_a_trimmed_text_is_found_by_rendering_the_beginnings():
    turns = (Turn("user", " Q\n"), Turn("assistant", "A \n"), USER, Turn("assistant", "\nB"))
    assert shown(family("headers").segments(Example(turns))) == (
        "<s><|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[A<|eot|>]]"
        "<|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[B<|eot|>]]"
    )


def test_thoughts_are_kept_in_the_last_answer_and_gone_from_earlier_ones():
    def thought(text: str) -> Turn:
        return Turn("assistant", f"<think>\nWhy {text}.\n</think>\n{text}")

    turns = (USER, thought("A"), Turn("user", "R"), thought("B"))
    assert shown(family("thinking").segments(Example(turns))) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\nWhy B.\n</think>\n\nB<|im_end|>\n]]"
    )


def test_an_answer_is_found_behind_its_header_where_the_beginning_of_the_text_moves():
    turns = SHAPES["turns"]
    assert shown(family(MOVING).segments(Example(turns))) == (
        "[INST] Q [/INST][[ A</s>]][S]S[/S][INST] R [/INST][[ B</s>]]".replace("[[ A", " [[A")
    )
    # The question contains the answer, and is not taken for it.
    turns = (SYSTEM, Turn("user", "A</s>"), ANSWER, Turn("user", "R"), Turn("assistant", "B"))
    assert [one.text for one in family(MOVING).segments(Example(turns)) if one.learn] == [
        "A</s>",
        " B</s>",
    ]


def test_an_answer_the_template_does_not_write_is_an_error_of_that_row_only():
    source = CHATML.replace("message.content +", "message.content | replace('b', 'c') +")
    template = chat_template(source, eos="<|im_end|>")
    turns = (USER, Turn("assistant", "ab"), Turn("user", "R"), ANSWER)
    assert shown(template.segments(Example(turns))).count("[[") == 2
    source = THINKING.replace("{{- content +", "{{- content | upper +")
    with pytest.raises(TemplateError) as caught:
        chat_template(source, eos="").segments(Example((USER, Turn("assistant", "ab"), *turns[2:])))
    assert str(caught.value) == (
        "the tokenizer's chat template rewrites turn 2 (assistant) so that its answer is not to be "
        "found in the text: 'ab'"
    )


def test_a_conversation_the_template_refuses_is_an_error_of_that_row_only():
    source = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    template = chat_template(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(TemplateError) as caught:
        template.segments(Example((USER, ANSWER, USER, ANSWER)))
    assert str(caught.value) == (
        "the tokenizer's chat template refuses this conversation: too long"
    )


def test_a_template_that_fails_on_a_row_says_how():
    source = "{% if 'x' in messages[0].content %}{{ 1 / 0 }}{% endif %}" + CHATML
    template = chat_template(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(TemplateError) as caught:
        template.segments(Example((Turn("user", "x"), ANSWER)))
    assert str(caught.value) == (
        "the tokenizer's chat template fails on this conversation: ZeroDivisionError: division by "
        "zero"
    )


def test_an_answer_without_an_end_between_turns_is_refused():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = chat_template(source, eos="</s>")
    assert shown(template.segments(Example((USER, ANSWER)))) == "Q[[A</s>]]"
    with pytest.raises(TemplateError) as caught:
        template.segments(Example((USER, ANSWER, USER, ANSWER)))
    assert str(caught.value) == "the tokenizer's chat template does not end turn 2 (assistant)"


def test_nothing_is_generated_without_a_question():
    with pytest.raises(TemplateError, match="only after a user turn"):
        family("chatml").prompt([USER, ANSWER])


# Tokens at the beginning and the end


def test_a_bos_the_template_writes_is_told_and_put_before_plain_text_too():
    template = family("headers")
    assert template.adds_bos
    plain = [Segment("<s>", False), Segment("abc</s>", True)]
    assert template.segments(Example(text="abc")) == plain
    whole = template.segments(Example(text="abc"), learn_prompt=True)
    assert whole == [Segment("<s>abc</s>", True)]


def test_a_bos_the_template_does_not_write_is_left_to_the_encoder():
    template = family("chatml")
    assert not template.adds_bos
    assert template.segments(Example(text="abc")) == [Segment("abc</s>", True)]


def test_a_bos_that_opens_every_turn_is_not_put_before_plain_text():
    template = chat_template(CHATML, bos="<|im_start|>", eos="<|im_end|>")
    assert template.adds_bos
    assert template.segments(Example(text="abc")) == [Segment("abc<|im_end|>", True)]


@pytest.mark.parametrize(
    ("name", "stop"),
    [("chatml", "<|im_end|>"), ("headers", "<|eot|>"), ("endless answers", "</s>")],
)
def test_a_template_knows_what_ends_an_answer(name, stop):
    assert family(name).stop == stop


def test_variables_and_the_date_reach_the_template():
    source = "{{ strftime_now('%d %b %Y') }}{% if calm %}!{% endif %}" + CHATML
    now = datetime(2024, 7, 26)
    template = chat_template(source, eos="", variables={"calm": True}, now=now)
    assert template.prompt([USER]).startswith("26 Jul 2024!<|im_start|>")
    other = chat_template(source, eos="", variables={"calm": True}, now=datetime(2024, 7, 27))
    calm = chat_template(source, eos="", now=now)
    assert len({template.fingerprint, other.fingerprint, calm.fingerprint}) == 3
    today = chat_template("{{ strftime_now('%H:%M:%S') }}" + CHATML, eos="")
    assert today.prompt([USER]).startswith("00:00:00<|im_start|>")
    same = chat_template(CHATML, eos="", now=now)
    assert same.fingerprint == chat_template(CHATML, eos="").fingerprint


def test_a_template_can_be_sent_to_another_process():
    template = pickle.loads(pickle.dumps(family("headers", variables={"a": 1})))
    example = Example(SHAPES["turns"])
    assert template.segments(example) == family("headers").segments(example)


def test_json_is_written_without_escapes():
    source = "{{ {'ä': '<b>'} | tojson }}{{ [1] | tojson(indent=2) }}" + CHATML
    assert chat_template(source, eos="").prompt([USER]).startswith('{"ä": "<b>"}[\n  1\n]<|im')


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
    assert chat_template(source + CHATML, eos="").prompt([USER]).startswith(expected)


# The short cut


def counted(template: Template, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    assert isinstance(template, ChatTemplate)
    calls: list[int] = []
    render = template._render

    def counting(turns: Any, **more: Any) -> str:
        calls.append(len(turns))
        return render(turns, **more)

    monkeypatch.setattr(template, "_render", counting)
    return calls


def exchange(question: str, answer: str) -> Example:
    return Example((Turn("user", question), Turn("assistant", answer)))


@pytest.mark.parametrize("name", ["chatml", "headers", "brackets", "thinking", "bare"])
def test_rows_that_take_a_known_way_are_not_rendered(name, monkeypatch):
    template = family(name)
    for number in range(module._ROWS_CHECKED):
        template.segments(exchange(f"Q{number}", "A"))
    calls = counted(template, monkeypatch)
    example = exchange("Why?", "Because.")
    segments = template.segments(example)
    assert calls == []
    assert segments == family(name).segments(example)


@pytest.mark.parametrize("answer", [" A", "A\n", "", "a</think>b"])
def test_rows_that_answer_a_question_of_the_template_otherwise_are_rendered(answer, monkeypatch):
    template = family(HEADERS.replace("m['content'] | trim", "m.content.strip()"))
    thinking = family("thinking")
    for number in range(module._ROWS_CHECKED):
        template.segments(exchange(f"Q{number}", "A"))
        thinking.segments(exchange(f"Q{number}", "A"))
    one, two = counted(template, monkeypatch), counted(thinking, monkeypatch)
    template.segments(exchange("Q", answer))
    thinking.segments(exchange("Q", answer))
    assert one or two


@pytest.mark.parametrize(
    "use",
    [
        "{{ m.content | length }}",
        "{{ m.content | upper }}",
        "{{ m.content[0] }}",
        "{{ m.content[:2] }}",
        "{{ m.content | tojson }}",
        "{{ m | string | length }}",
        "{{ m | tojson }}",
        "{{ m.content in 'abc' }}",
        "{{ 'xyz'.startswith(m.content) }}",
        "{{ (m.content + 'x') | trim }}",
        "{{ ('x' ~ m.content).endswith('b') }}",
        "{{ m.content | wordcount }}",
        "{{ m.content | title }}",
        "{{ m.content | int(7) }}",
        "{{ m.content.count('a') }}",
        "{{ m.content * 2 }}",
        "{{ [m.content, 'm'] | sort }}",
        "{{ {m.content: 1} }}",
        "{{ ', '.join([m.content]) }}",
        "{{ [m.content] | join }}",
        "{{ m.content is in 'abc' }}",
        "{{ m.content is lower }}",
        "{{ loop.changed(m.content) }}",
        "{{ m.content < 'm' }}",
        "{{ m.content == messages[0].content }}",
        "{% for c in m.content %}{{ loop.index }}{% endfor %}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | trim }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) | trim }}",
        "{% set ns = namespace(x=m.content) %}{{ ns.x | upper }}",
        "{{ (m.content, 1) | string }}",
        "{{ messages[:1] | map(attribute='content') | map('upper') | join }}",
        "{{ m.content | replace('a', 'bb') }}",
        "{{ m.content.split('a') | length }}",
        "{{ 'yes' if m.content == 'abc ' else 'no' }}",
        "{{ 'yes' if 'b' in m.content else 'no' }}",
        "{{ 'yes' if m.content.startswith(('a', 'b')) else 'no' }}",
        "{{ m.content.removeprefix('a') }}",
        "{{ m['content'] | trim | trim('b') }}",
    ],
)
def test_whatever_a_template_does_with_a_text_the_short_cut_never_shows(use, monkeypatch):
    monkeypatch.setattr(module, "_ROWS_CHECKED", 0)  # the trace alone decides
    source = BARE.replace(
        "{{ m.content }}", f"{{{{ m.content }}}}{{% if loop.first %}}{use}{{% endif %}}"
    )
    assert use in source
    template = chat_template(source, eos="")
    for text in ("Q", "abc ", "b a b", " 12", "MIX ed", "abc", "'quoted'\n", "z"):
        example = exchange(text, "Answer")
        plain = as_transformers_does(source, example.turns, bos_token="", eos_token="")
        assert text_of(template.segments(example, learn_prompt=True)) == plain


def test_a_trace_that_missed_something_is_given_up(monkeypatch):
    template = chat_template(CHATML.replace("message.content", "message.content.strip()"), eos="")
    monkeypatch.setattr(module, "answers_alike", lambda questions, texts: True)
    segments = template.segments(exchange(" Q ", "A"))
    assert text_of(segments).startswith("<|im_start|>user\nQ<|im_end|>")
    calls = counted(template, monkeypatch)
    template.segments(exchange("Q", "A"))
    assert calls


# What a template may not do

STOPPED = "the tokenizer's chat template was stopped: "
UNSAFE = "the tokenizer's chat template is not safe to run: "
UNREADABLE = "the tokenizer's chat template cannot be read: "
TOO_MUCH = STOPPED + "it makes far more text than it is given"


@pytest.mark.parametrize(
    ("hostile", "text"),
    [
        ("{{ ''.__class__ }}", UNSAFE + "'__class__' of 'str' is out of its reach"),
        ("{{ ''['__class__'] }}", UNSAFE + "'__class__' of 'str' is out of its reach"),
        ("{{ '' | attr('__class__') }}", UNSAFE + "'__class__' of 'str' is out of its reach"),
        ("{{ [] | map(attribute='__class__') | list }}", None),
        ("{{ [''] | map(attribute='__class__') | list }}", UNSAFE),
        ("{{ namespace.__init__.__globals__ }}", UNSAFE),
        ("{{ raise_exception.__globals__ }}", UNSAFE),
        ("{{ strftime_now.__self__ }}", UNSAFE),
        ("{{ self.__init__ }}", UNSAFE),
        ("{{ dict.fromkeys }}", UNSAFE + "'fromkeys' of 'type' is out of its reach"),
        ("{{ messages.append(1) }}", UNSAFE + "'append' of 'list' is out of its reach"),
        ("{{ '{0.__class__}'.format(1) }}", UNSAFE + "'format' of 'str' is out of its reach"),
        ("{{ 'a'.ljust(9999999999) }}", UNSAFE + "'ljust' of 'str' is out of its reach"),
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
            f"the tokenizer's chat template has {200_000 + len(CHATML):,} characters, more than "
            "65,536",
        ),
        (
            "{{ raise_exception('never') }}",
            "the tokenizer's chat template refuses this conversation: never  (it is: user, "
            "assistant)",
        ),
    ],
)
def test_a_hostile_template_is_refused_before_any_row(hostile, text):
    if text is None:
        assert chat_template(hostile + CHATML, eos="")
        return
    with pytest.raises(DataError) as caught:
        chat_template(hostile + CHATML, eos="")
    assert text in str(caught.value)
    assert str(caught.value).endswith("  (set base_models[0].prompt_template: chatml)")


def test_a_template_that_turns_hostile_on_some_row_stops_the_whole_data_set():
    source = "{% if 'x' in messages[0].content %}{{ 'a' * 99999999 }}{% endif %}" + CHATML
    template = chat_template(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(DataError) as caught:
        template.segments(Example((Turn("user", "x"), ANSWER)))
    assert not isinstance(caught.value, TemplateError)
    assert str(caught.value).startswith(TOO_MUCH)


def test_a_template_that_runs_too_long_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", -1.0)
    with pytest.raises(DataError, match="was stopped: it runs for more than -1 s"):
        chat_template(CHATML, eos="")


def test_long_rows_have_a_larger_allowance():
    long = "word " * 1_000_000
    example = exchange(long, long)
    assert len(text_of(family("headers").segments(example))) > 2 * len(long) - 10


@pytest.mark.parametrize(
    ("source", "role"), [("{{ messages[0].content }}", "assistant"), ("hello", "user")]
)
def test_a_template_that_leaves_out_what_is_said_is_of_no_use(source, role):
    with pytest.raises(DataError) as caught:
        chat_template(source, eos="")
    assert str(caught.value) == (
        f"the tokenizer's chat template leaves out the {role} turn  "
        "(set base_models[0].prompt_template: chatml)"
    )


def test_an_answer_left_out_of_longer_conversations_is_an_error_of_the_row():
    source = "{% set few = messages[-2:] %}" + CHATML.replace("in messages", "in few")
    template = chat_template(source, eos="")
    with pytest.raises(TemplateError) as caught:
        template.segments(Example((USER, ANSWER, USER, ANSWER)))
    assert str(caught.value) == (
        "the tokenizer's chat template does not write turn 2 (assistant) once"
    )


# A real template


@pytest.mark.parametrize("file", REAL_FILES)
def test_every_real_answer_is_learnt_exactly_once_by_a_real_template(file):
    source = qwen3_source()
    template = chat_template(source, eos="<|im_end|>")
    for number, (_, example) in enumerate(real_examples(file)):
        opening, learnt = template.segments(example)
        answer = example.turns[-1].text.lstrip("\n")
        assert (opening.learn, learnt.learn) == (False, True)
        assert opening.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert learnt.text == f"<think>\n\n</think>\n\n{answer}<|im_end|>\n"
        if number % 500 == 0:
            assert template.prompt(example.turns[:-1]) == opening.text
            plain = as_transformers_does(source, example.turns)
            assert opening.text + learnt.text == plain


def test_a_real_template_keeps_the_thoughts_of_the_last_answer():
    template = chat_template(qwen3_source(), eos="<|im_end|>")
    turns = (*SHAPES["turns"][:-1], Turn("assistant", "<think>\nWhy.\n</think>\nB"))
    segments = template.segments(Example(turns))
    assert [segment.text for segment in segments if segment.learn] == [
        "A<|im_end|>\n",
        "<think>\nWhy.\n</think>\n\nB<|im_end|>\n",
    ]
    assert template.prompt(turns[:-1]) == text_of(segments[:3])


def test_thinking_can_be_turned_off_and_is_then_not_learnt():
    template = chat_template(qwen3_source(), eos="<|im_end|>", variables={"enable_thinking": False})
    segments = template.segments(Example((USER, ANSWER)))
    assert segments[1] == Segment("A<|im_end|>\n", True)
    assert template.prompt([USER]) == segments[0].text
