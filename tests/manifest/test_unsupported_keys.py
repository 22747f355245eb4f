"""Keys that people bring from elsewhere: honoured, converted with a notice, or refused with what to
write instead; never "unknown key" alone."""

from __future__ import annotations

from typing import Any

import pytest

from expert.manifest.migrate.aliases import CONFIG_ALIASES, CONFIG_KEYS, DATASET_KEYS, SPECIAL_NAMES
from expert.manifest.peers.converted_keys import CONVERTED
from expert.manifest.peers.sections import SECTIONS
from expert.manifest.peers.unsupported_keys import ANSWERS, FAMILIES, answer_to
from tests.each import each
from tests.manifest.reading import MINIMAL, WHOLE, error_of, notices_of, read


def config_of(text: str) -> Any:
    return read(MINIMAL + text).manifest.training.config


# --- every answer --------------------------------------------------------------------------------


def test_no_key_of_ours_is_listed_as_unsupported():
    ours = CONFIG_KEYS | DATASET_KEYS | set(CONFIG_ALIASES) | set(SPECIAL_NAMES)
    assert not ours & (set(ANSWERS) | set(SECTIONS))
    assert not ours & set(CONVERTED)
    assert not set(ANSWERS) & set(CONVERTED)
    assert not [key for key in ours if answer_to(key)]


KEYS = [*ANSWERS, *(f"{start}x" for start in FAMILIES)]


@pytest.mark.parametrize(
    "before",
    [MINIMAL, MINIMAL + "training:\n  ", WHOLE + "    "],
    ids=["top", "training", "config"],
)
def test_every_unsupported_key_is_reported_in_every_section(before):
    """A value that no trainer has: whatever happens here, it is not that."""
    answers = {key: answer for key in KEYS if (answer := answer_to(key))}
    assert [*answers] == KEYS
    indent = before[before.rindex("\n") + 1 :]
    noted = [key for key, answer in answers.items() if answer.kind is not None]
    notices = read(before + f"\n{indent}".join(f"{key}: odd-value" for key in noted)).notices
    told = {n.path.rpartition(".")[2]: (n.kind, n.text) for n in notices}
    assert {key: told.get(key) for key in noted} == {
        key: (answers[key].kind, answers[key].text) for key in noted
    }
    for key in answers.keys() - noted:
        text = error_of(f"{before}{key}: odd-value\n")
        assert answers[key].text in text
        assert answers[key].fix in text
        assert "unknown key" not in text


@each(
    "key",
    [
        "rank_pattern: {q_proj: 4}",
        "alpha_pattern: {q_proj: 4}",
        "exclude_modules: [lm_head]",
        "target_parameters: [x]",
        "layer_replication: [[0, 2]]",
        "trainable_token_indices: [1]",
    ],
)
def test_what_an_adapter_of_peft_does_to_single_layers_is_refused(key):
    name = key.partition(":")[0]
    assert f"lora_config.{name}: {ANSWERS[name].text}" in error_of(
        f"{MINIMAL}lora_config: {{r: 8, {key}}}\n"
    )
    assert read(f"{MINIMAL}lora_config: {{r: 8, {name}: {{}}}}\n").manifest


def test_an_empty_key_of_another_trainer_says_nothing():
    keys = [*KEYS, *CONVERTED]
    notices = read(MINIMAL + "".join(f"{key}:\n" for key in keys)).notices
    assert {n.path for n in notices} & {*keys} == set()


def test_of_several_keys_for_one_thing_the_first_is_reported_and_the_others_go_with_it():
    text = error_of(MINIMAL + "use_galore: true\ngalore_rank: 8\ngalore_scale: 2.0\n")
    assert "line 3: use_galore: true: that optimizer is not supported  (use" in text
    assert "line 4: galore_rank: goes with use_galore, which is refused  (remove it too)" in text
    assert text.count("not supported") == 1


def test_words_that_describe_an_expert_are_left_alone_in_a_whole_manifest():
    text = WHOLE + "tokens: [a]\nstrict: high\nmodel_type: coder\n"
    told = [each for each in notices_of(text) if "metadata" in each]
    assert len(told) == 1
    for word in ("tokens", "strict", "model_type"):
        assert word in told[0]


# --- bits and precision --------------------------------------------------------------------------


def test_load_in_8bit_false_does_not_override_load_in_4bit():
    made = read(MINIMAL + "load_in_8bit: false\nload_in_4bit: true\n")
    assert made.manifest.base_models[0].quantization == "int4"
    assert [n.path for n in made.notices if "quantization" in n.text] == ["load_in_4bit"]
    made = read(MINIMAL + "load_in_8bit: false\n")
    assert made.manifest.base_models[0].quantization == "none"
    made = read(MINIMAL + "quantization: int4\nload_in_8bit: false\n")
    assert made.manifest.base_models[0].quantization == "int4"


# --- names of one key ----------------------------------------------------------------------------


@each(
    ("line", "key", "value"),
    [
        ("report_to: [wandb, tensorboard]", "trackers", ["wandb", "tensorboard"]),
        ("report_to: [wandb, comet_ml]", "trackers", ["wandb"]),
        ("report_to: comet_ml", "trackers", ["tensorboard"]),
        ("use_wandb: true", "trackers", ["tensorboard", "wandb"]),
        ("wandb_project: sql", "trackers", ["tensorboard", "wandb"]),
        ("wandb_project: sql", "tracker_project", "sql"),
        ("wandb_project: sql\nuse_mlflow: true", "trackers", ["tensorboard", "wandb", "mlflow"]),
        ("wandb_project: ''", "trackers", ["tensorboard"]),
        ("wandb_project: sql\nreport_to: none", "trackers", []),
        ("mlflow_experiment_name: sql", "tracker_project", "sql"),
        ("run_name: first", "tracker_run_name", "first"),
        ("logger_name: mlflow", "trackers", ["tensorboard", "mlflow"]),
        ("logger_name: csv", "trackers", ["tensorboard"]),
        (
            "metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, "
            "project: sql}",
            "tracker_project",
            "sql",
        ),
        ("flash_attn: disabled", "attention", "eager"),
        ("flash_attn: true", "attention", "flash"),
        ("attn: kernels-community/vllm-flash-attn3", "attention", "flash"),
        ("eager_attention: true", "attention", "eager"),
        ("use_peft: true", "adapter_type", "lora"),
        ("use_gradient_checkpointing: true", "gradient_checkpointing", True),
        ("completion_only_loss: false", "train_on_prompt", True),
        ("packing: true\npacking_strategy: wrapped", "packing", "concat"),
        ("lora:\n  r: 4\n  alpha: 8", "rank", 4),
        ("lora_r: 16\nuse_rslora: false", "rank", 16),
        ("dataloader: {num_workers: 3}", "dataloader_num_workers", 3),
        ("training: {data: {num_workers: 3}}", "dataloader_num_workers", 3),
        ("training_args: {num_train_epochs: 2}", "epochs", 2),
        ("use_cpu: true", "device", "cpu"),
        ("lora_target: q_proj", "target_modules", ["q_proj"]),
        ("training: {config: {lora: {r: 4}}}", "rank", 4),
        ("training: {config: {optimizer: {name: sgd, lr: 0.1}}}", "optim", "sgd"),
        ("config: {lr: 0.1}", "learning_rate", 0.1),
        ("precision: 16-mixed", "fp16", True),
    ],
)
def test_keys_of_other_trainers_are_read_as_ours(line, key, value):
    assert getattr(config_of(line + "\n"), key) == value


@each(
    ("lines", "words"),
    [
        ("lora_r: 16\nlora_alpha: 16\nuse_rslora: true\n", "write alpha: 64 for the same scale"),
        (
            "lora_target_modules: '.*(q|v)_proj'\n",
            "is a regular expression  (list the names of the layers, such as [q_proj",
        ),
        ("val_size: 500\n", "val_size: got 500, a number of rows; here it is a share of them"),
        ("dataset_config: en\n", "needs dataset_name, which is missing"),
        (
            "epochs: int = EPOCHS\n",
            "epochs: got 'int = EPOCHS', expected a value  (write epochs: VALUE)",
        ),
        ("epochs: int = open('/etc/passwd')\n", "open("),
        (
            'validation_path: "data\\train.jsonl"\n',
            "a backslash before t, n, r, f or b is an escape: use / instead",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(lines, words):
    assert words in error_of(MINIMAL + lines)


# --- lines of Python -----------------------------------------------------------------------------


@each(
    ("line", "key", "value"),
    [
        ("bf16: Optional[bool] = None", "bf16", "auto"),
        ("torch_compile: bool = True", "torch_compile", True),
        ("warmup_steps: int | None = 200", "warmup_steps", 200),
        ("betas: Tuple[float, float] = (0.9, 0.95)", "betas", (0.9, 0.95)),
        ('target_modules: list[str] = ["q_proj"]', "target_modules", ["q_proj"]),
        ("seed: typing.Optional[int] = 3", "seed", 3),
    ],
)
def test_a_line_of_a_dataclass_has_its_value(line, key, value):
    assert getattr(config_of(line + "\n"), key) == value
    assert any("a line of Python" in each for each in notices_of(MINIMAL + line + "\n"))


def test_a_class_instead_of_its_lines_is_refused_with_what_to_keep():
    text = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    epochs: int = 3\n"
    assert "keep its `name: type = value` lines" in error_of(text)


def test_texts_with_an_equals_sign_are_left_alone():
    made = read("base_model: tiny\ndataset: a=b.jsonl\ndescription: 'speed = 3, str = 4'\n")
    assert made.manifest.training.dataset.path == "a=b.jsonl"
    assert made.manifest.description == "speed = 3, str = 4"
    streamed = "base_model: tiny\ndataset_name: owner/set\ndataset_streaming: true\nmax_steps: 3\n"
    assert read(streamed).manifest.training.dataset.streaming is True


# --- paths from Windows --------------------------------------------------------------------------


def test_paths_of_tasks_and_from_the_command_line_too():
    text = "base_model: tiny\ntraining: {dataset: {tasks: {a: {train: 'a\\b.jsonl'}}}}\n"
    made = read(text, overrides=[r"training.config.output_dir=x\y"]).manifest
    assert (made.training.dataset.tasks or {})["a"].train == "a/b.jsonl"
    assert made.training.config.output_dir == "x/y"


# --- models that read images ---------------------------------------------------------------------


@each(
    "name",
    [
        *("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B", "llava-hf/llava-1.5-7b-hf"),
        *("HuggingFaceTB/SmolVLM-256M", "meta-llama/Llama-3.2-11B-Vision", "x/InternVL3-8B"),
        *("mistralai/Pixtral-12B-2409", "google/gemma-3-4b-it", "google/gemma-3n-E2B-it"),
        "Qwen/Qwen2.5-Omni-7B",
        *("openai/whisper-small", "C:\\models\\Qwen3-VL-4B", "deepseek-ai/deepseek-vl2"),
    ],
)
def test_a_model_that_reads_images_is_refused_by_its_name(name):
    text = error_of(f"base_model: '{name}'\ndataset: a.jsonl\n")
    assert "is a model for images or sound; only text is trained" in text
    for other in (
        *("Qwen/Qwen3-0.6B", "mistralai/Devstral-Small-2507", "evolve/evolver-1b", "x/VLite"),
        *("google/gemma-3-1b-it", "HuggingFaceTB/SmolLM2-135M", "tiny", "org/provision-7b"),
        *("microsoft/phi-2", "x/revision-1b", "Salesforce/codegen-350M-mono"),
    ):
        assert read(f"base_model: {other}\ndataset: a.jsonl\n")
