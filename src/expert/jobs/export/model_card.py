"""The model card (README.md) of an export: usage, training, evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from expert import __version__
from expert.core.install import INSTALL_HINT
from expert.core.secrets import redacted
from expert.core.text import counted, in_markdown, loss, visible
from expert.jobs.export.card_code import PromptFormat, loading_code
from expert.jobs.export.modelfile import base_file
from expert.jobs.export.portable_base import PortableBase, portable_base
from expert.jobs.export.servers import ModelServer, engines, gguf_commands
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.plan import folder_name

if TYPE_CHECKING:
    from expert.core.events import Event
    from expert.jobs.export.exported import Exported
    from expert.jobs.validate.saved_verdict import SavedVerdict
    from expert.planning.run_plan import RunPlan

_SPOKEN = (
    " aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da "
    "de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy "
    "hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg "
    "li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or "
    "os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta "
    "te tg th ti tk tl tn to tr tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
)
"""ISO 639-1 codes, as on model hubs; without `ts` (Tsonga), which means TypeScript in manifests."""


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
    base = portable_base(plan.model, with_hashes=done.kind == "adapter")
    tolerance = f" (tolerance {done.tolerance:.1%})" if done.tolerance is not None else ""
    parts = [
        _head(plan, done, base, known.manifest),
        f"# {in_markdown(plan.expert)}\n",
        _what(plan, done, base),
        "## Usage\n",
        *_usage(plan, done, base, known),
        "## Training\n",
        _table(_settings(plan, done, base, known)),
        "## Evaluation\n",
        _table([*_answers(known.verdict), *_losses(known.events)]),
        "Losses are sums over all tokens trained on, divided once. The logits of this export, "
        f"loaded as above ({_dtype(plan, done)}), were compared with those of the trained model on "
        f"{done.texts} texts: their root mean square difference is {done.share:.2%} of their "
        f"spread{tolerance}, the largest {done.largest_difference:.3g}.\n",
        *_quality(done),
        *(f"Note: {in_markdown(_portable(warning, done))}\n" for warning in done.warnings()),
        f"Made with Expert {__version__} ({INSTALL_HINT}).\n",
    ]
    return redacted(visible("\n".join(parts)))


def _portable(warning: str, done: Exported) -> str:
    """A warning without the path of the run, which means nothing elsewhere."""
    return warning.replace(f"{done.run}/", "").replace(str(done.run), "RUN")


def _usage(plan: RunPlan, done: Exported, base: PortableBase, known: CardFacts) -> list[str]:
    name = folder_name(plan.expert)
    if done.gguf:
        commands = gguf_commands(
            done.file,
            name,
            plain=known.prompt_format is not None and known.prompt_format.plain,
            lora=done.gguf == "lora",
            base=base_file(plan.model),
        )
        parts = ["In this folder:\n", _commands(commands)]
        if done.gguf == "lora" and plan.model.place != "built-in":
            parts.append(
                f"`BASE.gguf` is {in_markdown(base.name)} as a GGUF file, whose tokenizer and chat "
                "template are used; set it in `Modelfile`, too.\n"
            )
        return parts
    parts = [loading_code(plan, done, base, known.prompt_format), _about_loading(plan, done, base)]
    serving = engines(plan, done.kind, done.dtype, base, template=known.has_template, name=name)
    if serving:
        parts += ["## Serving\n", _commands(serving)]
        parts.append(
            "Each has an OpenAI-compatible endpoint. Send the decoding settings with every request "
            "(`temperature=0` for those of `expert validate`, unless the manifest says otherwise): "
            "the servers have defaults of their own.\n"
        )
    return parts


def _commands(servers: Sequence[ModelServer]) -> str:
    lines = [line for one in servers for line in (f"# {one.server}: {one.asked}", one.command)]
    return "\n".join(["```bash", *lines, "```", ""])


def _quality(done: Exported) -> list[str]:
    """The quality lost by quantising, measured at export."""
    if done.quality is None or done.quality.unknown:
        return []
    head = ["| | before | this file | change |", "|---|---|---|---|"]
    rows = [f"| {' | '.join(row)} |" for row in done.quality.table()]
    on = in_markdown(done.quality.on())
    return [f"As {done.gguf}, on {on}:\n", "\n".join([*head, *rows, ""])]


def _head(plan: RunPlan, done: Exported, base: PortableBase, manifest: Mapping[str, Any]) -> str:
    library = "gguf" if done.gguf else {"adapter": "peft"}.get(done.kind, "transformers")
    if plan.model.name == CHAR_GPT:
        library = "expert"
    people, machines = languages(manifest.get("capabilities") or ())
    own = [str(tag) for tag in manifest.get("tags") or ()]
    tags = dict.fromkeys([plan.adapter.type, "expert", *(["code"] if machines else []), *machines])
    tags |= {"gguf": None} if done.gguf else {}
    lines = ["---"]
    if base.hub_id is not None:  # hubs expect the id of a repository
        lines.append(f"base_model: {json.dumps(base.hub_id)}")
    if people:
        lines += ["language:", *(f"- {json.dumps(code)}" for code in people)]
    if isinstance(manifest.get("license"), str) and manifest["license"]:
        lines.append(f"license: {json.dumps(manifest['license'])}")
    lines += [f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys([*tags, *own])]
    return "\n".join([*lines, "---\n"])


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
    kind = {
        "adapter": f"A {plan.adapter.type} adapter for {name}",
        "merged": f"{name} with a {plan.adapter.type} adapter merged into its weights",
        "model": f"{name}, every weight trained",
    }[done.kind]
    if plan.adapter.type == "none":
        kind = f"Soft prompts for {name}"
    return f"{kind} ({done.checkpoint} of the run, {_dtype(plan, done)}).\n"


def _dtype(plan: RunPlan, done: Exported) -> str:
    """The dtype in which it is used."""
    if done.gguf:
        return "F32" if done.gguf == "lora" else done.gguf
    return plan.kernels.precision if done.kind == "adapter" else done.dtype


def _about_loading(plan: RunPlan, done: Exported, base: PortableBase) -> str:
    if plan.model.name == CHAR_GPT:
        return ""
    notes = [base.note] if base.note and done.kind == "adapter" else []
    template = plan.model.prompt_template or "tokenizer"
    named = (
        "the tokenizer's chat template"
        if template == "tokenizer"
        else f"template `{in_markdown(template)}`"
    )
    notes.append(
        f"`prompt` was written by {named}, as in training. With another prompt format or dtype, "
        "answers differ."
    )
    if done.kind == "adapter" and plan.model.quantization == "int8":
        notes.append(
            "In training the base's 8-bit weights were multiplied with unrounded inputs; "
            "bitsandbytes rounds the inputs, too, so that some answers can differ."
        )
    if done.kind == "adapter" and plan.model.quantization == "fp8":
        notes.append(
            "In training the base's weights were in FP8; the code above loads them in the dtype of "
            "its files, so that some answers can differ."
        )
    prompts = [prompt["name"] for prompt in plan.adapter.soft_prompts]
    if prompts and plan.adapter.type != "none":
        notes.append(
            f"The soft prompts {in_markdown(', '.join(prompts))} are in soft_prompts/ as PEFT "
            "prompt tuning; their rows precede every conversation."
        )
    return "\n\n".join(notes) + "\n"


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


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {in_markdown(name)} | {in_markdown(value)} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines, ""])
