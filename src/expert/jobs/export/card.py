"""The model card (README.md) of an export, from one template: usage, training, evaluation.

Its code loads the export and answers a question like `expert sample`. It sets the dtype, the base's
quantization, the prompt format of training and the decoding settings: with the base in another
dtype, 60 of 100 answers were right instead of 68. A test runs the code of a card and compares its
answer with that of the run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from expert import __version__
from expert.answer.decoding import resolve_decoding, stop_texts
from expert.core.events import Event
from expert.core.files import read_text
from expert.core.install import INSTALL_HINT
from expert.core.secrets import redacted
from expert.core.text import in_markdown, loss, visible
from expert.jobs.export.exported import Exported
from expert.jobs.export.portable_base import portable_base
from expert.jobs.sample.sample import prompt_text
from expert.jobs.validate.saved_verdict import SavedVerdict
from expert.manifest.schema.kinds import IN_FLOAT32, is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.plan import folder_name
from expert.planning.run_plan import RunPlan
from expert.run.stored.load import Trained

QUESTION = "{question}"
FOLDER = "PATH/TO/THIS/FOLDER"
LIBRARIES = ("torch", "transformers", "peft")
_DTYPES = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
# `expert sample` uses float32 on a CPU, too.
_HALF = 'torch.float16 if device == "cuda" else torch.float32'
_QUANTISED = {
    "int4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
    "bnb_4bit_compute_dtype=dtype",
    "int8": "load_in_8bit=True, llm_int8_threshold=0.0",
}
_FORMAL = ("c", "cs", "css", "go", "js", "md", "py", "rb", "rs", "sh", "ts", "vb")
"""Short names of formal languages; all other codes of two letters are of human languages, as on
model hubs."""


class PromptFormat(NamedTuple):
    """The prompt for a question, and where the answer ends."""

    text: str
    """The prompt, with `QUESTION` in place of the question."""
    plain: bool
    """The model continues text: answers are not stripped."""
    stops: tuple[str, ...] = ()
    """Texts that end an answer, besides the tokens in generation_config.json."""


def prompt_format_of(trained: Trained) -> PromptFormat | None:
    """The prompt that `expert sample` would use; None for the character model."""
    from expert.data.plain_text import FirstRow, trained_on_text
    from expert.data.tokens.encoder import TextEncoder

    template, encoder = trained.template, trained.encoder
    if template is None:
        return None
    assert isinstance(encoder, TextEncoder)
    first = FirstRow(trained.plan)
    plain = trained_on_text(trained.plan, first)
    stops = stop_texts(resolve_decoding(trained.plan, {})[0], encoder, template, plain=plain)
    text = prompt_text(template, QUESTION, plain=plain, tools="" if plain else first.tools)
    # The tokenizer's prefix (bos): the code calls it with add_special_tokens=False.
    before = encoder.decode(encoder.prefix) if encoder.prefix else ""
    return PromptFormat(before + text, plain, tuple(stops))


def model_card(
    plan: RunPlan,
    done: Exported,
    *,
    events: Sequence[Event] = (),
    environment: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    verdict: SavedVerdict | None = None,
    prompt: PromptFormat | None = None,
    of_images: bool = False,
) -> str:
    """The card as Markdown, with the YAML header that model hubs read. `of_images`: the adapter
    fits a whole model, which also reads images."""
    import jinja2

    base = portable_base(plan.model)
    is_char_model, manifest = plan.model.name == CHAR_GPT, manifest or {}
    is_adapter, name = done.kind == "adapter", folder_name(plan.expert)
    library = "gguf" if done.gguf else {"adapter": "peft"}.get(done.kind, "transformers")
    people, machines = languages(manifest.get("capabilities") or ())
    tags = [plan.adapter.type, "expert", *(["code"] if machines else []), *machines]
    tags += ["gguf"] if done.gguf else []
    tags += [str(tag) for tag in manifest.get("tags") or ()]
    license_ = manifest.get("license")
    data = str(plan.data.dataset.get("path") or "")
    if PurePath(data).is_absolute():  # without folders of this machine
        data = PurePath(data).name
    # The dtype in which it is used.
    dtype = plan.kernels.precision if is_adapter else done.dtype
    used = done.gguf and ("F32" if done.gguf == "lora" else done.gguf)
    # Soft prompts alone are the adapter of their export.
    prompts = [each["name"] for each in plan.adapter.soft_prompts]
    alone = plan.adapter.type == "none" and len(prompts) == 1
    folders = ["" if alone else f"/soft_prompts/{each}" for each in prompts]
    pages = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    pages.tests["jinja_text"] = is_jinja
    pages.filters |= {
        "json": json.dumps,
        "md": in_markdown,
        # A Python string literal without backticks, which could end the Markdown block.
        "sh": shlex.quote,
        "literal": lambda text: repr(text).replace("`", "\\x60"),
        "fenced": _fenced,
        "loss": lambda value: "unknown" if value is None else loss(value),
    }
    versions = (environment or {}).get("versions") or {}
    steps, epochs = steps_and_epochs(plan, done, events)
    text = pages.from_string(read_text(Path(__file__).with_name("card.jinja"))).render(
        expert=plan.expert,
        done=done,
        base=base,
        languages=people,
        # The Hub knows licences by ids such as apache-2.0.
        license="-".join(license_.lower().split()) if isinstance(license_, str) else "",
        manifest=manifest,
        tasks=[tag[5:] for tag in manifest.get("capabilities") or () if tag[:5] == "task:"],
        library="expert" if is_char_model else library,
        tags=dict.fromkeys(tags),
        plan=plan,
        used_dtype=used or dtype,
        served_as=name,
        vllm_dtype=_DTYPES.get(dtype, "float16").removeprefix("torch."),
        built_in=plan.model.place == "built-in",
        soft_prompts=", ".join(prompts),
        folder=FOLDER,
        install=INSTALL_HINT,
        is_char_model=is_char_model,
        characters=is_char_model or prompt is None,
        is_adapter=is_adapter,
        model_class="AutoModelForImageTextToText" if of_images else "AutoModelForCausalLM",
        has_adapter=is_adapter and plan.adapter.type != "none",
        keeps_dtype=keeps_adapter_dtype(plan),
        prompt_files=[f"{folder}/adapter_model.safetensors" for folder in folders],
        quantised=_QUANTISED.get(plan.model.quantization, "") if is_adapter else "",
        torch_dtype=_DTYPES.get(dtype, _HALF),
        source=base.arguments if is_adapter else "folder",
        prompt=prompt,
        question=QUESTION,
        data=data or ", ".join(plan.data.dataset.get("tasks") or ()) or "unknown",
        steps=steps,
        epochs=epochs,
        used=[f"{key} {versions[key]}" for key in LIBRARIES if key in versions],
        verdict=verdict,
        losses=_losses(events),
        # The path of the run means nothing elsewhere.
        warnings=[
            warning.replace(f"{done.run}/", "").replace(str(done.run), "RUN")
            for warning in done.warnings()
        ],
        version=__version__,
    )
    return redacted(visible(text))


def _fenced(text: str) -> str:
    """A Markdown block of the text, which cannot end it."""
    fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", text))])
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def keeps_adapter_dtype(plan: RunPlan) -> bool:
    """Whether the adapter stays in bfloat16; by default PEFT converts it to float32, which is what
    was trained with a float16 base and with AdaLoRA."""
    return plan.kernels.precision == "bf16" and plan.adapter.type not in IN_FLOAT32


def languages(capabilities: Iterable[str]) -> tuple[list[str], list[str]]:
    """Human languages and formal ones, from tags like `language:de`, `language:sql` and
    `format:json`; nothing is guessed."""
    people, machines = [], []
    for tag in capabilities:
        kind, _, name = str(tag).lower().partition(":")
        code = name.partition("-")[0]
        if kind == "language" and len(code) == 2 and code not in _FORMAL:
            people.append(code)
        elif kind in ("language", "format") and name:
            machines.append(name)
    return list(dict.fromkeys(people)), list(dict.fromkeys(machines))


def steps_and_epochs(plan: RunPlan, done: Exported, events: Sequence[Event]) -> tuple[str, str]:
    """Steps and epochs of training of the exported weights, with those planned if different."""
    asked = f"{plan.length.epochs:.3g}"
    named = re.search(r"step-(\d+)", done.checkpoint)
    ends = [each for each in events if each["event"] in ("finished", "step", "took_best")]
    last = next((each for each in ends if each["event"] == "took_best"), ends[-1] if ends else None)
    if named is not None:
        step = int(named[1])
    elif last is not None:
        step = int(last["step"])
    else:
        return "unknown", f"unknown (asked for: {asked})"
    planned = plan.length.total_steps
    steps = f"{step:,}" + (f" of {planned:,}" if planned and planned != step else "")
    logged = [each for each in ends if each["event"] == "step" and each["step"] <= step]
    if not logged or logged[-1].get("epoch") is None:
        return steps, f"unknown (asked for: {asked})"
    # The last log line may be some steps earlier.
    shown = f"{logged[-1]['epoch'] * step / logged[-1]['step']:.3g}"
    ended = f"; max_steps: {plan.length.max_steps:,}" if plan.length.max_steps else ""
    return steps, shown if shown == asked else f"{shown} (asked for: {asked}{ended})"


def _losses(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """Losses of the run by name; None where they are unknown."""
    last: dict[str, Event] = {}
    for event in events:
        if event["event"] == "eval":
            split = str(event.get("split") or "validation")
            last["validation loss, last" if split == "validation" else f"{split} loss"] = event
    finished = next((one for one in reversed(events) if one["event"] == "finished"), {})
    return [
        ("training loss", finished.get("smoothed_loss")),
        ("validation loss, best", finished.get("eval_loss")),
        *((name, event.get("loss")) for name, event in last.items()),
    ]
