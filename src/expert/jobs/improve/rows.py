"""What a round trains on: rows and pairs made of judged answers, and the manifest for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.files import replacing
from expert.data.records import Example, Turn
from expert.jobs.improve.answers import Asked
from expert.jobs.validate.test_sets import TestSet
from expert.judging.oracles.calls import CALLS
from expert.manifest.schema.kinds import ON_POLICY, PREFERENCES
from expert.manifest.schema.manifest import Manifest
from expert.planning.run_plan import RunPlan

if TYPE_CHECKING:
    from expert.judging.cases import Case

PAIRS_PER_PROMPT = 2
PROMPTS_PER_STEP = 64
SFT_WEIGHT = 0.2
"""Keeps right answers from becoming less likely beside the wrong ones."""


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write rows as JSON lines; returns how many."""
    count = 0
    with replacing(file) as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


def rows_to_judge_by(test: TestSet) -> Iterator[dict[str, Any]]:
    """The rows of a test set with all that their judge needs."""
    whole = test.part_of or test
    for example, cases in zip(whole.examples, whole.cases, strict=True):
        facts = {"id": cases[0].row, "task": cases[0].task} if cases else {}
        own = [case for case in cases if case.domain != CALLS]  # those are recognised again
        if own and (domain := own[0].domain or whole.domain):
            facts["domain"] = domain
        if own and own[0].check:
            facts["check"] = json.dumps(dict(own[0].check))
        yield row_of(example) | {key: value for key, value in facts.items() if value}


def row_of(example: Example) -> dict[str, Any]:
    """An example as a row of messages, or of text."""
    if not example.turns:
        return {"text": example.text}
    tools = {"tools": json.loads(example.tools)} if example.tools else {}
    return {"messages": [_message(turn) for turn in example.turns], **tools}


def right_answers(
    trained: TestSet, asked: Sequence[Asked], copies: int
) -> Iterator[dict[str, Any]]:
    """Every prompt `copies` times: with its distinct right answers in turn, with the expected one
    if there is none. Rows that were not asked stay as they are."""
    known = {each.id: each for each in asked}
    for example, cases in zip(trained.examples, trained.cases, strict=True):
        if not any(case.id in known for case in cases):
            yield from [row_of(example)] * copies
            continue
        for case in cases:
            right = known[case.id].right if case.id in known else []
            until = _up_to(example, case.turn)
            answers = [each.text for each in right]
            for copy in range(copies):
                answer = answers[copy % len(answers)] if answers else None
                yield row_of(_answered(until, answer))


def copies_for(asked: Sequence[Asked], epochs: float) -> int:
    """How often a prompt is in the rows: as many different right answers as it has, and as epochs
    allow, so that every prompt is trained on as often as before."""
    return max(1, min(round(epochs), max((len(each.right) for each in asked), default=1)))


def pairs(trained: TestSet, asked: Sequence[Asked]) -> Iterator[dict[str, Any]]:
    """A right answer, else the expected one, beside a wrong answer to the same prompt."""
    known = {each.id: each for each in asked}
    for example, cases in zip(trained.examples, trained.cases, strict=True):
        for case in cases:
            if case.id not in known:
                continue
            right, wrong = known[case.id].right, known[case.id].wrong
            until = _up_to(example, case.turn)
            prompt = {**row_of(until), "prompt": [_message(turn) for turn in until.turns[:-1]]}
            del prompt["messages"]
            for number, each in enumerate(wrong[:PAIRS_PER_PROMPT]):
                chosen = right[number % len(right)].text if right else until.turns[-1].text
                answers = {"chosen": chosen, "rejected": each.text}
                if all(text.strip() for text in answers.values()):
                    yield prompt | {
                        name: [{"role": "assistant", "content": text}]
                        for name, text in answers.items()
                    }


def prompts_of(asked: Sequence[tuple[Case, Example]]) -> Iterator[dict[str, Any]]:
    """A row for each prompt, in order."""
    return (row_of(_up_to(example, case.turn)) for case, example in asked)


def _up_to(example: Example, turn: int) -> Example:
    """The example up to an answer, which alone is trained on."""
    before = [
        Turn(each.role, each.text, each.role != "assistant", each.extra)
        for each in example.turns[: turn - 1]
    ]
    return Example((*before, example.turns[turn - 1]), tools=example.tools)


def _answered(example: Example, answer: str | None) -> Example:
    if answer is None:
        return example
    return Example((*example.turns[:-1], Turn("assistant", answer)), tools=example.tools)


def _message(turn: Turn) -> dict[str, Any]:
    own: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.role == "assistant" and not turn.is_trained(learn_prompt=False):
        own["weight"] = 0
    return own | (json.loads(turn.extra) if turn.extra else {})


# --- the manifest of a round ---------------------------------------------------------------------


def manifest_of_round(
    manifest: Manifest,
    plan: RunPlan,
    place: Path,
    *,
    dataset: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of the first run with other rows; what it names beside itself, in `place`, keeps
    its place."""
    content = manifest.model_dump(mode="json", exclude_none=True)
    base = next(
        (each for each in content["base_models"] if each["name"] == plan.model.name),
        content["base_models"][0],
    )
    if plan.model.place not in ("built-in", "hub"):
        base["name"] = plan.model.location
    base["prompt_template"] = plan.model.prompt_template  # its folder's name may be another now
    content["base_models"] = [base]
    training = content["training"]
    training["dataset"], training["packaging_checkpoint"] = dict(dataset), "final"
    training["config"] |= {"output_dir": "runs", **config}
    training["config"].pop("pretokenized_cache", None)
    for holder, key in ((training["decoding"], "grammar_file"), (training["config"], "start_from")):
        if holder.get(key):
            holder[key] = str(place / holder[key])
    for prompt in content.get("soft_prompts", ()):
        if prompt.get("path"):
            prompt["path"] = str(place / prompt["path"])
    return content


def settings_of_groups(start: Path, adapter: str) -> dict[str, Any]:
    """Settings of a round that learns from groups of answers, from the weights of a run."""
    whole = adapter == "full"
    return {
        "method": ON_POLICY,
        "learning_rate": "auto",
        "epochs": 1,
        "max_steps": None,
        "batch_size": PROMPTS_PER_STEP,
        "gradient_accumulation_steps": 1,
        "dropout": "auto" if whole else 0,  # the weights are to learn as they answered
        "logging_steps": 1,
        **({} if whole else {"start_from": str(start)}),
    }


def preference_settings(start: Path) -> dict[str, Any]:
    """Settings of a round that learns from pairs, from the adapter of a run."""
    return {
        "method": "dpo",
        "beta": PREFERENCES["dpo"].beta,
        "sft_weight": SFT_WEIGHT,
        "learning_rate": "auto",
        "epochs": 1,
        "max_steps": None,
        "start_from": str(start),
    }
