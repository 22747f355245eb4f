"""Files of Axolotl and LLaMA-Factory: read as they are meant there, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ManifestError
from expert.manifest.reader import ReadManifest, read_manifest
from tests.each import each
from tests.wording import wording

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
adapter: lora
datasets:
  - path: rows.jsonl
    type:
      field_instruction: ask
      field_input: about
      field_output: reply
sequence_len: 2048
sample_packing: true
train_on_inputs: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
evals_per_epoch: 4
saves_per_epoch: 1
"""
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-0.5B
stage: sft
finetuning_type: lora
dataset: rows.jsonl
cutoff_len: 1024
max_samples: 1000
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
val_size: 0.1
"""


def reading(folder: Path, text: str) -> ReadManifest:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return read_manifest(file)


def told(read: ReadManifest) -> list[str]:
    return [str(each).partition(": ")[2] for each in read.notices]


def test_packed_sequences_of_axolotl_are_counted_in_tokens(tmp_path):
    """micro_batch_size counts sequences there, and each holds many rows: 2 rows a step would be a
    batch many times smaller."""
    read = reading(tmp_path, AXOLOTL)
    config = read.manifest.training.config
    assert (config.batch_size, config.batch_tokens) == ("auto", 2 * 2048)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == ("auto", 2)
    assert wording("read-packed-sequences-tokens") in told(read)


@each(
    ("more", "tokens"),
    [
        ("packing: true\nmax_length: 512\n", 4 * 512),
        ("packing: true\n", 4 * 1024),  # TRL's own length
        ("packing: true\nfinetuning_type: lora\n", 4 * 2048),  # LLaMA-Factory's
        ("neat_packing: true\ncutoff_len: 4096\nstage: sft\n", 4 * 4096),
        ("packing: false\nmax_length: 512\n", None),
        ("max_length: 512\n", None),
        ("packing: true\nmax_length: 512\nbatch_size: 4\n", None),
    ],
    ids=str,
)
def test_packed_sequences_of_trl_and_llama_factory_are_counted_in_tokens(tmp_path, more, tokens):
    text = f"model_name_or_path: tiny\ndataset: rows.jsonl\nper_device_train_batch_size: 4\n{more}"
    if "batch_size: 4\n" in more:
        text = text.replace("per_device_train_batch_size: 4\n", "")
    read = reading(tmp_path, text)
    config = read.manifest.training.config
    assert config.batch_tokens == tokens
    assert config.batch_size == (4 if tokens is None else "auto")
    assert any("packed sequences" in each for each in told(read)) == (tokens is not None)
    ours = reading(tmp_path, text.replace("model_name_or_path", "base_model")).manifest
    assert ours.training.config.batch_size == 4


def test_rows_of_a_step_that_are_not_packed_are_those_of_axolotl(tmp_path):
    for line in ("sample_packing: false\n", ""):
        read = reading(tmp_path, AXOLOTL.replace("sample_packing: true\n", line))
        config = read.manifest.training.config
        assert (config.batch_size, config.batch_tokens) == (2, None)
        assert wording("read-rows-step-before") in told(read)


def test_the_key_keeps_its_meaning_in_files_of_our_own(tmp_path):
    text = "base_model: tiny\ndataset: rows.jsonl\nmicro_batch_size: 2\n"
    config = reading(tmp_path, text).manifest.training.config
    assert (config.batch_size, config.micro_batch_size) == ("auto", 2)
    config = reading(tmp_path, f"{AXOLOTL}batch_size: 6\n").manifest.training.config
    assert (config.batch_size, config.micro_batch_size) == (6, 2)


def test_columns_and_prompts_and_cadences_of_axolotl_are_understood(tmp_path):
    read = reading(tmp_path, AXOLOTL)
    training = read.manifest.training
    mapping: Any = training.dataset.field_mapping
    assert (mapping.instruction, mapping.input, mapping.response) == ("ask", "about", "reply")
    assert training.config.train_on_prompt is True
    assert (training.config.evaluation_strategy, training.config.save_strategy) == (
        "epoch",
        "epoch",
    )
    assert any(wording("once-epoch-not-times") in line for line in told(read))


def test_columns_beside_the_type_are_understood_too(tmp_path):
    text = "base_model: tiny\ndatasets:\n  - {path: a.jsonl, type: alpaca, field_output: reply}\n"
    mapping: Any = reading(tmp_path, text).manifest.training.dataset.field_mapping
    assert mapping.response == "reply"
    text = "base_model: tiny\ndatasets:\n  - {path: a.jsonl, type: completion, field: body}\n"
    mapping = reading(tmp_path, text).manifest.training.dataset.field_mapping
    assert mapping.text == "body"


def test_a_file_of_llama_factory_has_its_rows_of_a_step(tmp_path):
    training = reading(tmp_path, FACTORY).manifest.training
    config = training.config
    assert (config.batch_size, config.gradient_accumulation_steps) == (1, 8)
    assert (config.max_seq_length, training.dataset.validation_split) == (1024, 0.1)
    assert training.dataset.max_samples == 1000


@each("line", ["stage: dpo", "stage: ppo", "stage: kto", "stage: rm", "rl: dpo"])
def test_other_methods_are_refused(tmp_path, line):
    word = line.partition(": ")[2]
    with pytest.raises(ManifestError, match=wording("not-built-only-sft", word=word)):
        reading(tmp_path, FACTORY.replace("stage: sft", line))


def test_pretraining_of_llama_factory_is_plain_text(tmp_path):
    read = reading(tmp_path, FACTORY.replace("stage: sft", "stage: pt"))
    assert read.manifest.training.dataset.text_field == "text"


def test_messages_in_a_column_of_another_name_are_mapped(tmp_path):
    text = "base_model: tiny\ndatasets:\n  - {path: a.jsonl, field_messages: talk}\n"
    mapping: Any = reading(tmp_path, text).manifest.training.dataset.field_mapping
    assert mapping.messages == "talk"


def test_a_template_that_is_written_out_is_reported_to_have_no_effect(tmp_path):
    text = AXOLOTL.replace(
        "      field_output: reply\n", '      field_output: reply\n      format: "{instruction}"\n'
    )
    assert any(
        "without effect: base_models[0].prompt_template" in t for t in told(reading(tmp_path, text))
    )
