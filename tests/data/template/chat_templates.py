"""Templates written for tests, each in the manner of a family of models, and a real one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expert.data.records import Example, Turn
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import Template
from tests.data import SHARED

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


def family(name: str) -> Template:
    return ChatTemplate(FAMILIES.get(name, name), bos="<s>", eos="</s>")


def as_transformers_does(
    source: str, turns: Any, *, given: list[dict[str, Any]] | None = None, **variables: Any
) -> str:
    messages = given or [{"role": turn.role, "content": turn.text} for turn in turns]
    return _compiled(source).render(messages=messages, **variables)


@cache
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def qwen3_source() -> str:
    path = SHARED / "tokenizers" / "qwen3" / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip("shared/data/tokenizers/qwen3 is not here")
    source = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    assert isinstance(source, str)
    return source


def exchange(question: str, answer: str) -> Example:
    return Example((Turn("user", question), Turn("assistant", answer)))
