"""The README.md of an export: what it is, what it learnt from, how well, and how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.words import counted, loss
from expert.manifest.schema import CHAR_GPT
from expert.model.base_folder import base_reference

if TYPE_CHECKING:
    from expert.core.events import Event
    from expert.jobs.exporting import Exported
    from expert.jobs.standing_verdict import Verdict
    from expert.planning.run_plan import RunPlan

_PEFT = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, "PATH/TO/THIS/FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
```
"""
_BUILT_IN = """\
```python
from expert.model.base_folder import built_in_folder  # pip install expert-cli
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained(built_in_folder({base}))
model = PeftModel.from_pretrained(base, "PATH/TO/THIS/FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
```

The base, {name}, comes with Expert (`pip install expert-cli`) and is on no hub.
`adapter_config.json` names the folder it had on the machine of the export, for PEFT where that is
to find the base by itself.
"""
_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH/TO/THIS/FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
```
"""
_CHARACTERS = """\
```python
from pathlib import Path
from expert.model.chargpt import load_char_gpt

model, characters = load_char_gpt(Path("PATH/TO/THIS/FOLDER"))
```
"""


def model_card(
    plan: RunPlan,
    events: Sequence[Event],
    environment: dict[str, Any],
    done: Exported,
    verdict: Verdict | None = None,
) -> str:
    """The card as Markdown, with the head that model hubs read."""
    parts = [
        _head(plan, done),
        f"# {plan.expert}\n",
        _what(plan, done),
        "## Loading it\n",
        _loading(plan, done),
        "## How it was trained\n",
        _table(_settings(plan, environment)),
        "## How well\n",
        _table([*_answers(verdict), *_losses(events)]),
        "The losses are sums over all learnt tokens, divided once. The logits of this export were "
        f"compared with those of the trained model on {done.texts} texts: the largest difference "
        f"is {done.largest_difference:.3g}, {done.share:.2%} of their spread (at most "
        f"{done.tolerance:.1%} is let pass).\n",
        *(f"Note: {warning}\n" for warning in done.warnings()),
        f"Made with expert {__version__}.\n",
    ]
    return "\n".join(parts)


def _head(plan: RunPlan, done: Exported) -> str:
    library = {"adapter": "peft"}.get(done.kind, "transformers")
    lines = ["---"]
    if plan.model.name == CHAR_GPT:
        library = "expert"
    else:
        lines.append(f"base_model: {json.dumps(_base(plan))}")
    lines += [f"library_name: {library}", "tags:", f"- {plan.adapter.type}", "- expert", "---\n"]
    return "\n".join(lines)


def _base(plan: RunPlan) -> str:
    """What others know the base by."""
    own = plan.model.place == "built-in"  # its folder is one of this machine
    return plan.model.name if own else base_reference(plan.model)[0]


def _what(plan: RunPlan, done: Exported) -> str:
    kind = {
        "adapter": f"A {plan.adapter.type} adapter for {plan.model.name}",
        "merged": f"{plan.model.name} with a {plan.adapter.type} adapter merged into its weights",
        "model": f"{plan.model.name}, every weight trained",
    }[done.kind]
    if plan.adapter.type == "none":
        kind = f"Soft prompts for {plan.model.name}"
    return f"{kind} ({done.checkpoint} of the run, {done.dtype}).\n"


def _loading(plan: RunPlan, done: Exported) -> str:
    if plan.model.name == CHAR_GPT:
        return _CHARACTERS
    template = plan.model.prompt_template or "tokenizer"
    said = f"Prompts were written with the template `{template}`"
    said += " of the tokenizer (chatml where it has none).\n" if template == "tokenizer" else ".\n"
    prompts = [prompt["name"] for prompt in plan.adapter.soft_prompts]
    if prompts and plan.adapter.type != "none":
        said += f"\nThe soft prompts {', '.join(prompts)} lie in soft_prompts/ as PEFT prompt "
        said += "tuning; their rows stand in front of every conversation.\n"
    if done.kind == "adapter" and plan.model.place == "built-in":
        name = plan.model.name
        return _BUILT_IN.format(base=json.dumps(name), name=name) + "\n" + said
    if done.kind == "adapter":
        base, revision = base_reference(plan.model)
        pinned = f", revision={json.dumps(revision)}" if revision else ""
        return _PEFT.format(base=json.dumps(base) + pinned) + "\n" + said
    return _TRANSFORMERS + "\n" + said


def _settings(plan: RunPlan, environment: dict[str, Any]) -> list[tuple[str, str]]:
    adapter, optim, length, data = plan.adapter, plan.optim, plan.length, plan.data
    spec = data.dataset
    source = str(spec.get("path") or ", ".join(spec.get("tasks") or ()) or "unknown")
    rows = f", {counted(length.rows, 'row')}" if length.rows else ""
    rank = f", rank {adapter.rank}, alpha {adapter.alpha:g}" if adapter.rank else ""
    comes_with = ", which comes with Expert" if plan.model.place == "built-in" else ""
    versions = environment.get("versions") or {}
    used = [
        f"{name} {versions[name]}" for name in ("torch", "transformers", "peft") if name in versions
    ]
    return [
        ("base", f"{plan.model.name}{comes_with}, quantization {plan.model.quantization}"),
        ("data", f"{source}{rows}"),
        ("trained", f"{adapter.type}{rank}, dropout {adapter.dropout:g}"),
        ("trained weights", _number(adapter.trainable_parameters, "{:,}")),
        ("longest sequence", f"{data.max_seq_length} tokens, packing {data.packing}"),
        ("rows an update", str(plan.batch.examples_per_update)),
        ("epochs", f"{length.epochs:g}"),
        ("updates", _number(length.total_steps, "{:,}")),
        (
            "optimizer",
            f"{optim.optimizer}, {optim.scheduler}, learning rate {optim.learning_rate:g}",
        ),
        ("precision", plan.kernels.precision),
        ("seed", str(optim.seed)),
        ("on", plan.target),
        ("with", ", ".join(used) or "unknown"),
    ]


def _answers(verdict: Verdict | None) -> list[tuple[str, str]]:
    """What `expert validate` found; a reader who cannot judge answers is told that nobody did."""
    if verdict is None or verdict.cases is None:
        return [("answers", "not judged: expert validate was not run")]
    if verdict.outdated:
        return [("answers", f"not judged: the validation {verdict.outdated}")]
    if not verdict.cases:
        none = ("answers", "not judged: the rows have none that could be asked for")
        return [none, (f"loss on {verdict.test_set}", _loss(verdict.loss))]
    if verdict.by_loss:
        rows = [("answers", "open text: judged by the loss on them, not one by one")]
        rows += [
            ("loss on them", _loss(verdict.loss)),
            ("loss of the base", _loss(verdict.base_loss)),
        ]
        rows.append(("token accuracy", _number(verdict.token_accuracy, "{:.1%}")))
    elif verdict.mean_score is not None:
        rows = [("answers, mean score of a judge command", f"{verdict.mean_score:.3g}")]
    else:
        rows = [("answers right", _number(verdict.accuracy, "{:.1%}"))]
    if verdict.interval is not None and verdict.mean_score is None:
        low, high = verdict.interval
        rows.append(("95 % interval", f"{low:.1%} to {high:.1%}"))
    of = f" of {counted(verdict.rows or 0, 'row')}" if verdict.rows != verdict.cases else ""
    part = f", a part of {verdict.of:,}" if verdict.of is not None else ""
    rows.append(("cases", f"{verdict.cases:,}{of}{part} ({verdict.test_set})"))
    if verdict.learnt:
        without = _number(verdict.learnt.get("accuracy_of_others"), "{:.1%}")
        also = f"{verdict.learnt.get('cases')}; answers right without them: {without}"
        rows.append(("cases that were also learnt", also))
    gate = "passed" if verdict.passed else f"not passed: {verdict.reasons}"
    bar = f", {verdict.low_bar}" if verdict.low_bar else ""
    rows.append(("quality gate", f"{gate} ({verdict.checkpoint}){bar}"))
    if verdict.demands:
        rows.append(("it asks for", "; ".join(verdict.demands)))
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
        ("training loss, mean", _loss(finished.get("loss"))),
        ("validation loss, best", _loss(finished.get("eval_loss"))),
    ]
    for split, event in by_split.items():
        name = "validation loss, last" if split == "validation" else f"{split} loss"
        rows.append((name, _loss(event.get("loss"))))
    return rows


def _loss(value: Any) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return loss(value) if known else "unknown"


def _number(value: Any, form: str) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return form.format(value) if known else "unknown"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines, ""])
