"""The model card (README.md) of an export, from one template: usage, training, evaluation.

Its code loads the export and answers a question like `expert sample`. It sets the dtype, the base's
quantization, the prompt format of training and the decoding settings: with the base in another
dtype, 60 of 100 answers were right instead of 68. A test runs the code of a card and compares its
answer with that of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from expert import __version__
from expert.answer.decoding import resolve_decoding, stop_texts
from expert.core.files import read_text
from expert.core.install import INSTALL_HINT
from expert.core.secrets import redacted
from expert.core.text import counted, in_markdown, loss, visible
from expert.jobs.export.modelfile import base_file
from expert.jobs.export.portable_base import PortableBase, portable_base
from expert.jobs.export.servers import FOLDER, engines, gguf_commands
from expert.jobs.sample.sample import prompt_text
from expert.manifest.schema.kinds import IN_FLOAT32, is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.plan import folder_name

if TYPE_CHECKING:
    from expert.core.events import Event
    from expert.jobs.export.exported import Exported
    from expert.jobs.validate.saved_verdict import SavedVerdict
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.load import Trained

QUESTION = "{question}"
_DTYPES = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
# `expert sample` uses float32 on a CPU, too.
_HALF = 'torch.float16 if device == "cuda" else torch.float32'
_QUANTISED = {
    "int4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
    "bnb_4bit_compute_dtype=dtype",
    "int8": "load_in_8bit=True, llm_int8_threshold=0.0",
}


_SPOKEN = (
    " aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da "
    "de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy "
    "hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg "
    "li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or "
    "os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta "
    "te tg th ti tk tl tn to tr tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
)
"""ISO 639-1 codes, as on model hubs; without `ts` (Tsonga), which means TypeScript in manifests."""


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


class CardFacts(NamedTuple):
    """What is known of the run besides its plan."""

    events: Sequence[Event] = ()
    environment: Mapping[str, Any] = {}
    manifest: Mapping[str, Any] = {}
    verdict: SavedVerdict | None = None
    prompt_format: PromptFormat | None = None
    has_template: bool = False
    """Whether the export has its own chat template."""


def model_card(plan: RunPlan, done: Exported, known: CardFacts) -> str:
    """The card as Markdown, with the YAML header that model hubs read."""
    import jinja2

    base = portable_base(plan.model, with_hashes=done.kind == "adapter")
    is_char_model, prompt = plan.model.name == CHAR_GPT, known.prompt_format
    is_adapter, name = done.kind == "adapter", folder_name(plan.expert)
    library = "gguf" if done.gguf else {"adapter": "peft"}.get(done.kind, "transformers")
    people, machines = languages(known.manifest.get("capabilities") or ())
    tags = [plan.adapter.type, "expert", *(["code"] if machines else []), *machines]
    tags += ["gguf"] if done.gguf else []
    tags += [str(tag) for tag in known.manifest.get("tags") or ()]
    license_ = known.manifest.get("license")
    # The dtype in which it is used.
    dtype = plan.kernels.precision if is_adapter else done.dtype
    used = done.gguf and ("F32" if done.gguf == "lora" else done.gguf)
    if done.gguf:
        plain = prompt is not None and prompt.plain
        file, lora = base_file(plan.model), done.gguf == "lora"
        servers = gguf_commands(done.file, name, plain=plain, lora=lora, base=file)
    else:
        template = known.has_template
        servers = engines(plan, done.kind, done.dtype, base, template=template, name=name)
    # Soft prompts alone are the adapter of their export.
    prompts = [each["name"] for each in plan.adapter.soft_prompts]
    alone = plan.adapter.type == "none" and len(prompts) == 1
    folders = ["" if alone else f"/soft_prompts/{each}" for each in prompts]
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": json.dumps, "md": in_markdown, "literal": _literal}
    text = environment.from_string(read_text(Path(__file__).with_name("card.jinja"))).render(
        expert=plan.expert,
        done=done,
        base=base,
        languages=people,
        license=license_ if isinstance(license_, str) else "",
        library="expert" if is_char_model else library,
        tags=dict.fromkeys(tags),
        what=_what(plan, done, base),
        used_dtype=used or dtype,
        servers=servers,
        built_in=plan.model.place == "built-in",
        folder=FOLDER,
        install=INSTALL_HINT,
        is_char_model=is_char_model,
        characters=is_char_model or prompt is None,
        is_adapter=is_adapter,
        has_adapter=is_adapter and plan.adapter.type != "none",
        keeps_dtype=keeps_adapter_dtype(plan),
        prompt_files=[f"{folder}/adapter_model.safetensors" for folder in folders],
        quantised=_QUANTISED.get(plan.model.quantization, "") if is_adapter else "",
        torch_dtype=_DTYPES.get(dtype, _HALF),
        source=base.arguments if is_adapter else "folder",
        prompt=prompt,
        question=QUESTION,
        loading_notes=() if is_char_model else _loading_notes(plan, done, base, prompts),
        training=_settings(plan, done, base, known),
        evaluation=[*_answers(known.verdict), *_losses(known.events)],
        # The path of the run means nothing elsewhere.
        warnings=[
            warning.replace(f"{done.run}/", "").replace(str(done.run), "RUN")
            for warning in done.warnings()
        ],
        version=__version__,
    )
    return redacted(visible(text))


def _literal(text: str) -> str:
    """A Python string literal without backticks, which could end the Markdown block."""
    return repr(text).replace("`", "\\x60")


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
        if kind == "language" and f" {code} " in _SPOKEN:
            people.append(code)
        elif kind in ("language", "format") and name:
            machines.append(name)
    return list(dict.fromkeys(people)), list(dict.fromkeys(machines))


def _what(plan: RunPlan, done: Exported, base: PortableBase) -> str:
    name = in_markdown(base.name)
    if plan.adapter.type == "none":
        return f"Soft prompts for {name}"
    return {
        "adapter": f"A {plan.adapter.type} adapter for {name}",
        "merged": f"{name} with a {plan.adapter.type} adapter merged into its weights",
        "model": f"{name}, every weight trained",
    }[done.kind]


def _loading_notes(
    plan: RunPlan, done: Exported, base: PortableBase, prompts: Sequence[str]
) -> list[str]:
    template = plan.model.prompt_template or "tokenizer"
    named = f"template `{in_markdown(template)}`"
    if is_jinja(template):
        named = "the chat template of the manifest"
    if template == "tokenizer":
        named = "the tokenizer's chat template"
    notes = [base.note] if base.note and done.kind == "adapter" else []
    notes.append(
        f"`prompt` was written by {named}, as in training. With another prompt format or dtype, "
        "answers differ."
    )
    rounding = {
        "int8": "In training the base's 8-bit weights were multiplied with unrounded inputs; "
        "bitsandbytes rounds the inputs, too, so that some answers can differ.",
        "fp8": "In training the base's weights were in FP8; the code above loads them in the dtype "
        "of its files, so that some answers can differ.",
    }
    if done.kind == "adapter" and plan.model.quantization in rounding:
        notes.append(rounding[plan.model.quantization])
    if prompts and plan.adapter.type != "none":
        notes.append(
            f"The soft prompts {in_markdown(', '.join(prompts))} are in soft_prompts/ as PEFT "
            "prompt tuning; their rows precede every conversation."
        )
    return notes


def _settings(
    plan: RunPlan, done: Exported, base: PortableBase, known: CardFacts
) -> list[tuple[str, str]]:
    adapter, optim, data = plan.adapter, plan.optim, plan.data
    rows = f", {counted(plan.length.rows, 'row')}" if plan.length.rows else ""
    rank = f", rank {adapter.rank}" if adapter.rank else ""
    rank += f", alpha {adapter.alpha:g}" if adapter.alpha else ""
    comes_with = ", which comes with Expert" if plan.model.place == "built-in" else ""
    versions = known.environment.get("versions") or {}
    used = [
        f"{name} {versions[name]}" for name in ("torch", "transformers", "peft") if name in versions
    ]
    steps, epochs = steps_and_epochs(plan, done, known.events)
    return [
        ("base", f"{base.name}{comes_with}, quantization {plan.model.quantization}"),
        ("data", f"{_source(data.dataset)}{rows}"),
        ("trained", f"{adapter.type}{rank}, dropout {adapter.dropout:g}"),
        ("trained weights", _number(adapter.trainable_parameters, "{:,}".format)),
        ("longest sequence", f"{data.max_seq_length} tokens, packing {data.packing}"),
        ("rows per step", str(plan.batch.examples_per_update)),
        ("epochs", epochs),
        ("steps", steps),
        (
            "optimizer",
            f"{optim.optimizer}, {optim.scheduler}, learning rate {optim.learning_rate:g}",
        ),
        ("dtype", plan.kernels.precision),
        ("seed", str(optim.seed)),
        ("on", plan.target),
        ("with", ", ".join(used) or "unknown"),
    ]


def _source(spec: Mapping[str, Any]) -> str:
    """The data by name, without folders of this machine."""
    path = str(spec.get("path") or "")
    if PurePath(path).is_absolute() or PureWindowsPath(path).is_absolute():
        path = PureWindowsPath(path).name
    return path or ", ".join(spec.get("tasks") or ()) or "unknown"


def steps_and_epochs(plan: RunPlan, done: Exported, events: Sequence[Event]) -> tuple[str, str]:
    """Steps and epochs of training of the exported weights, with those planned if different."""
    step, seen = _step_of(done, events), None
    for event in events:
        if event["event"] == "step" and step is not None and event["step"] <= step:
            seen = event
    if step is None:
        return "unknown", f"unknown (asked for: {plan.length.epochs:g})"
    planned = plan.length.total_steps
    steps = f"{step:,}" + (f" of {planned:,}" if planned and planned != step else "")
    epoch = seen.get("epoch") if seen else None
    if not isinstance(epoch, int | float) or not seen:
        return steps, f"unknown (asked for: {plan.length.epochs:g})"
    real = epoch * step / seen["step"]  # the last log line may be some steps earlier
    shown = f"{real:.3g}"
    asked = f"{plan.length.epochs:.3g}"
    if shown == asked:
        return steps, shown
    ended = f"; max_steps: {plan.length.max_steps:,}" if plan.length.max_steps else ""
    return steps, f"{shown} (asked for: {asked}{ended})"


def _step_of(done: Exported, events: Sequence[Event]) -> int | None:
    """The step after which the exported weights were saved."""
    named = re.search(r"step-(\d+)", done.checkpoint)
    if named:
        return int(named[1])
    taken = [event["step"] for event in events if event["event"] == "took_best"]
    last = [event["step"] for event in events if event["event"] in ("finished", "step")]
    found = taken or last
    return int(found[-1]) if found else None


def _answers(verdict: SavedVerdict | None) -> list[tuple[str, str]]:
    """The results of `expert validate`, or why there are none."""
    if verdict is None or verdict.cases is None:
        return [("answers", "not judged: expert validate was not run")]
    if verdict.outdated:
        return [("answers", f"not judged: the validation {verdict.outdated}")]
    if not verdict.cases:
        none = ("answers", "not judged: the rows have no answers to ask for")
        return [none, (f"loss on {verdict.test_set}", _number(verdict.loss, loss))]
    if verdict.by_loss:
        rows = [("answers", "open text: judged by loss, not individually")]
        rows += [
            ("loss on them", _number(verdict.loss, loss)),
            ("loss of the base", _number(verdict.base_loss, loss)),
        ]
        rows.append(("token accuracy", _number(verdict.token_accuracy, "{:.1%}".format)))
    elif verdict.mean_score is not None:
        rows = [("answers, mean score of a judge command", f"{verdict.mean_score:.3g}")]
    else:
        rows = [("answers right", _number(verdict.accuracy, "{:.1%}".format))]
    if verdict.interval is not None and verdict.mean_score is None:
        low, high = verdict.interval
        rows.append(("95 % interval", f"{low:.1%} to {high:.1%}"))
    of = f" of {counted(verdict.rows or 0, 'row')}" if verdict.rows != verdict.cases else ""
    part = f", a part of {verdict.of:,}" if verdict.of is not None else ""
    rows.append(("cases", f"{verdict.cases:,}{of}{part} ({verdict.test_set})"))
    if verdict.learnt:
        without = _number(verdict.learnt.get("accuracy_of_others"), "{:.1%}".format)
        also = f"{verdict.learnt.get('cases')}; answers right without them: {without}"
        rows.append(("cases also in the training rows", also))
    gate = "passed" if verdict.passed else f"failed: {verdict.reasons}"
    bar = f", {verdict.lowered_requirement}" if verdict.lowered_requirement else ""
    rows.append(("quality gate", f"{gate} ({verdict.checkpoint}){bar}"))
    if verdict.demands:
        rows.append(("required", "; ".join(verdict.demands)))
    return rows


def _losses(events: Sequence[Event]) -> list[tuple[str, str]]:
    by_split: dict[str, Event] = {}
    finished: Event = {}
    for event in events:
        if event["event"] == "eval":
            by_split[str(event.get("split") or "validation")] = event
        elif event["event"] == "finished":
            finished = event
    rows = [
        ("training loss, mean", _number(finished.get("loss"), loss)),
        ("validation loss, best", _number(finished.get("eval_loss"), loss)),
    ]
    for split, event in by_split.items():
        name = "validation loss, last" if split == "validation" else f"{split} loss"
        rows.append((name, _number(event.get("loss"), loss)))
    return rows


def _number(value: Any, write: Callable[[Any], str]) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return write(value) if known else "unknown"
