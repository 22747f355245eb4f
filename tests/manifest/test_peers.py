"""Files and keys of Axolotl, LLaMA-Factory, TRL, Unsloth, torchtune, FSDP and DeepSpeed: what is
trained is what they say, or they are refused with the reason and the way out."""

from __future__ import annotations

import json
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ManifestError
from expert.manifest.migrate.aliases import CONFIG_ALIASES, CONFIG_KEYS, DATASET_KEYS, SPECIAL_NAMES
from expert.manifest.peers.distributed import DISTRIBUTED_KEYS
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.peers.sections import SECTIONS
from expert.manifest.peers.unused import ANSWERS, FAMILIES, answer_to
from expert.manifest.reader import ReadManifest, read_manifest
from tests.each import each
from tests.manifest.reading import (
    MANIFESTS,
    MINIMAL,
    WHOLE,
    error_of,
    notices_of,
    problems_of,
    read,
    value_at,
)

AXOLOTL = "base_model: tiny\nsequence_len: 512\nval_set_size: 0.1\nadapter: lora\n"
FACTORY = "model_name_or_path: tiny\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\n"
TUNE = (MANIFESTS / "peers" / "torchtune.yaml").read_text("utf-8")
ALPACA = """model: {_component_: torchtune.models.qwen2.qwen2_0_5b}
checkpointer: {checkpoint_dir: /m/small}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
"""
AXOLOTL_PAIRS = """base_model: a/b
sequence_len: 1024
micro_batch_size: 2
datasets: [{path: c/d, type: chatml.intel, field_chosen: good, field_rejected: x}]
"""
PACKED = "per_device_train_batch_size: 4\npacking: true\n"
LOWEST = "config.lr_scheduler_kwargs.min_lr"


def axolotl(*lines: str) -> str:
    return AXOLOTL + "\n".join(("datasets:", *lines)) + "\n"


def entry(fields: str) -> str:
    return axolotl(f"  - {{{fields}}}")


def tune_model(arguments: str) -> str:
    component = "_component_: torchtune.models.x.lora_x, lora_rank: 4"
    return f"{MINIMAL}model: {{{component}, {arguments}}}\n"


def tune_rows(arguments: str = "") -> str:
    component = "_component_: torchtune.datasets.chat_dataset, source: owner/a"
    return f"base_model: tiny\ndataset: {{{component}, {arguments}}}\n"


def trl(more: str) -> str:
    return f"model_name_or_path: tiny\ndataset: a.jsonl\n{more}"


def kinds(made: ReadManifest, key: str) -> set[str]:
    return {n.kind for n in made.notices if n.path.replace(": ", ".").split(".")[-1] == key}


SCHEDULE = "{_component_: torchtune.training.get_cosine_schedule_with_warmup, num_cycles: 2}"


@each(
    ("text", "path", "value"),
    [
        # Axolotl
        (entry("path: owner/set, split: 'train[:10%]'"), "data.path", "owner/set::train[:10%]"),
        (axolotl("  - rows.jsonl"), "data.path", "rows.jsonl"),
        (axolotl("  path: rows.jsonl"), "data.path", "rows.jsonl"),
        (entry("path: rows.data, ds_type: json"), "data.format", "json"),
        (entry("path: a, type: completion"), "data.field_mapping.text", "text"),
        (entry("path: a, type: {field_input: about}"), "data.field_mapping.input", "about"),
        (entry("path: a") + "float32: true\n", "config.bf16", False),
        (entry("path: a").replace("adapter: lora\n", ""), "config.adapter_type", "full"),
        (
            entry("path: a") + "lora_target_linear: true\nlora_target_modules: [q_proj]\n",
            "config.target_modules",
            ["q_proj"],
        ),
        (f"{AXOLOTL_PAIRS}rl: dpo\n", "data.preference_rows", "pairs"),
        (f"{AXOLOTL_PAIRS}rl: dpo\n", "data.field_mapping.response", "good"),
        (f"{AXOLOTL_PAIRS}rl: dpo\n", "data.field_mapping.rejected", "x"),
        # LLaMA-Factory
        (f"{FACTORY}dataset: a.jsonl\n", "config.rank", 8),
        (FACTORY.replace("lora", "full") + "dataset: a.jsonl\n", "config.rank", "auto"),
        # torchtune: its defaults where nothing is set, and its sections
        (ALPACA, "config.train_on_prompt", True),
        (ALPACA, "config.max_grad_norm", 0),
        (ALPACA, "config.weight_decay", 0.01),
        (f"{ALPACA}clip_grad_norm: 3\n", "config.max_grad_norm", 3),
        (TUNE, "config.train_on_prompt", False),
        (tune_model("quantize_base: true, use_dora: true"), "config.adapter_type", "dora"),
        (tune_rows("column_map: {instruction: a, input: b}"), "data.field_mapping.input", "b"),
        (tune_rows("column_map: {input: b}"), "data.field_mapping.instruction", "b"),
        (
            tune_rows("packed: true") + "tokenizer: {max_seq_len: 512}\nbatch_size: 2\n",
            "config.batch_tokens",
            1024,
        ),
        (f"{MINIMAL}lr_scheduler: {SCHEDULE}\n", "config.lr_scheduler", "cosine"),
        (f"{MINIMAL}lr_scheduler: {SCHEDULE}\n", "config.lr_scheduler_kwargs.num_cycles", 2),
        # TRL and Unsloth: max_steps alone ends a run there
        (trl("max_steps: 60\nepochs: 1\n"), "config.epochs", 1),
        (trl(PACKED), "config.batch_tokens", 4 * 1024),  # TRL's own length
        (trl(f"{PACKED}finetuning_type: lora\n"), "config.batch_tokens", 4 * 2048),
        (trl("per_device_train_batch_size: 4\nmax_length: 512\n"), "config.batch_tokens", None),
        (f"{MINIMAL}max_steps: 60\n", "config.epochs", 3),
        (f"{MINIMAL}warmup_steps: 9\nwarmup_ratio: 0.1\n", "config.warmup_ratio", 0.1),
        # A whole manifest may speak of templates.
        (WHOLE + "template: {a: 1}\n", "model.prompt_template", "auto"),
        (WHOLE + "stage: beta\n", "config.epochs", 1),
        (WHOLE + "micro_batch_size: 2\ntrain_on_inputs: true\n", "config.micro_batch_size", 2),
        # Sections and single keys
        (f"{MINIMAL}lr: 1e-3\ncosine_min_lr_ratio: 0.5\n", LOWEST, 5e-4),
        (f"{MINIMAL}report_to: [wandb, comet_ml]\n", "config.trackers", ["wandb"]),
        (f"{MINIMAL}report_to: comet_ml\n", "config.trackers", ["tensorboard"]),
        (f"{MINIMAL}use_wandb: true\n", "config.trackers", ["tensorboard", "wandb"]),
        (f"{MINIMAL}wandb_project: sql\nreport_to: none\n", "config.trackers", []),
        (f"{MINIMAL}mlflow_experiment_name: sql\n", "config.tracker_project", "sql"),
        (f"{MINIMAL}training: {{config: {{lora: {{r: 4}}}}}}\n", "config.rank", 4),
        (f"{MINIMAL}training: {{config: {{optimizer: {{name: sgd}}}}}}\n", "config.optim", "sgd"),
        (f"{MINIMAL}quantization: int4\nload_in_8bit: false\n", "model.quantization", "int4"),
        # Lines of a Python dataclass
        (f"{MINIMAL}bf16: Optional[bool] = None\n", "config.bf16", "auto"),
        (f"{MINIMAL}warmup_steps: int | None = 200\n", "config.warmup_steps", 200),
        (f"{MINIMAL}betas: Tuple[float, float] = (0.9, 0.95)\n", "config.betas", (0.9, 0.95)),
        ("base_model: tiny\ndataset: a=b.jsonl\n", "data.path", "a=b.jsonl"),
        # Keys keep their meaning
        (MINIMAL + "peft_use_rslora: true\nlora_r: 4\n", "config.alpha", 16),
        (MINIMAL + "use_rslora: false\nlora_alpha: 8\n", "config.alpha", 8),
        (MINIMAL + "pissa_init: true\npissa_iter: 16\n", "config.adapter_init", "pissa"),
        (MINIMAL + "init_lora_weights: pissa_niter_4\n", "config.adapter_init", "pissa"),
        (MINIMAL + "init_lora_weights: true\n", "config.adapter_init", "default"),
        (MINIMAL + "save_steps: 0.5\n", "config.save_strategy", "epoch"),
        (MINIMAL + "loraplus_lr_ratio: 16\n", "config.loraplus_lr_ratio", 16),
        (
            MINIMAL + "additional_target: embed_tokens,lm_head\n",
            "config.modules_to_save",
            ["embed_tokens", "lm_head"],
        ),
        (
            MINIMAL
            + "lora_target_modules: [q_proj]\nlora_target_parameters: [experts.down_proj]\n",
            "config.target_modules",
            ["q_proj", "experts.down_proj"],
        ),
        (MINIMAL + "target_parameters: [experts.down_proj]\n", "config.target_modules", "auto"),
        (MINIMAL + "lora_model_dir: ./adapter\n", "config.start_from", "./adapter"),
        (MINIMAL + "chat_template: '{{ Messages }}'\n", "model.prompt_template", "{{ Messages }}"),
        (MINIMAL + "chat_template_jinja: '{% if X %}'\n", "model.prompt_template", "{% if X %}"),
        (
            MINIMAL + "prompt_template: '{{ Messages }}'\n",
            "model.prompt_template",
            "{{ Messages }}",
        ),
        (
            MINIMAL + "unfrozen_parameters: ['^model.language_model']\n",
            "config.adapter_type",
            "lora",
        ),
    ],
)
def test_what_a_file_of_another_trainer_sets(text, path, value):
    assert value_at(read(text), path) == value


@each(
    ("text", "words"),
    [
        *(
            (FACTORY.replace("stage: sft", line) + "dataset: a.md\n", "is not supported")
            for line in ("stage: ppo", "stage: rm", "rl: grpo")
        ),
        (f"{MINIMAL}rl: dpo\npref_loss: kto_pair\n", "got 'kto_pair'"),
        (f"{FACTORY}dataset: a.md\nquantization_bit: 3\n", "got 3, expected 4 or 8"),
        (f"{MINIMAL}chat_template_jinja: t.jinja\n", "only a name or the text of a template"),
        (f"{MINIMAL}unfrozen_parameters: [layers.1]\n", "parts of the model cannot be chosen"),
        (f"{MINIMAL}init_lora_weights: olora\n", "true or pissa"),
        (
            f"{MINIMAL}optimizer: {{_component_: bitsandbytes.optim.Lion8bit, lr: 1e-4}}\n",
            "lion8bit",
        ),
        (f"{MINIMAL}pissa_init: true\nadapter: dora\n", "cannot be combined with adapter_type"),
        (f"{MINIMAL}additional_target: q_proj\n", "embed_tokens"),
        ("model_name_or_path: tiny\ndataset_mixture: {datasets: []}\n", "a list of entries"),
        (MINIMAL + "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n", "which is missing"),
        (f"{MINIMAL}dataset_config: en\n", "needs dataset_name, which is missing"),
        (f"{MINIMAL}epochs: int = open('/etc/passwd')\n", "expected a value"),
        (f"{MINIMAL}iters: 9\n", "files of that trainer are not read"),
        *(
            (entry(fields), words)
            for fields, words in {
                "path: owner/set, data_files: [x.json]": "selects files of a data set",
                "path: json, data_files: [x.json, y.json]": "several files",
                "type: alpaca": "datasets[0]: has no path",
                "path: a, type: input_output": "segments with their own labels",
                "path: a, type: bradley_terry.chat_template": "is not supported",
                "path: a, roles_to_train: all": "only answers are trained on",
            }.items()
        ),
        (axolotl("  - {path: a, field_output: b}", "  - {path: b}"), "have different columns"),
        (tune_rows("masking_strategy: train_on_last"), "dataset.masking_strategy"),
        (tune_rows("new_system_prompt: Be brief."), "system messages come from the rows"),
        (tune_rows().replace(", source: owner/a", ""), "is a Python class, which is not run"),
        (tune_model("lora_attn_modules: q_proj"), "lora_attn_modules"),
        # Values of the wrong kind never break the reader.
        *(
            (f"base_model: tiny\n{text}", "problem")
            for text in (
                "datasets: [7, []]\n",
                "datasets: 'list[int] = [1, (2,)]'\n",
                "datasets: [{path: {a: 1}, data_files: {b: 2}, roles: {user: {x: 1}}}]\n",
                "pretraining_dataset: 7\n",
                "test_datasets: [[]]\n",
                "model: {_component_: {a: 1}, lora_attn_modules: 3}\ndataset: {_component_: [1]}\n",
                "finetuning_type: lora\ndataset: {a: 1}\ndataset_dir: [1]\n",
                "optimizer: {_component_: {a: 1}, init_args: [2]}\n",
            )
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text, words):
    assert words in error_of(text)


# --- keys without a counterpart ------------------------------------------------------------------

KEYS = [*ANSWERS, *(f"{start}x" for start in FAMILIES)]


def test_no_key_of_ours_is_listed_as_not_used_and_every_reason_is_short():
    ours = CONFIG_KEYS | DATASET_KEYS | set(CONFIG_ALIASES) | set(SPECIAL_NAMES)
    assert not ours & (set(ANSWERS) | set(SECTIONS) | set(CONVERTED))
    assert not set(ANSWERS) & set(CONVERTED)
    assert not [key for key in ours if answer_to(key)]
    for key, answer in {**ANSWERS, **FAMILIES}.items():
        assert len(answer.reason.split()) <= 8, key
        assert answer.refused is bool(answer.fix), key


@pytest.mark.parametrize(
    "before",
    [MINIMAL, MINIMAL + "training:\n  ", WHOLE + "    "],
    ids=["top", "training", "config"],
)
def test_every_key_without_a_counterpart_is_reported_in_every_section(before):
    """A value that no trainer has: whatever happens here, it is not that."""
    answers = {key: answer for key in KEYS if (answer := answer_to(key))}
    assert [*answers] == KEYS
    indent = before[before.rindex("\n") + 1 :]
    unused = [key for key, answer in answers.items() if not answer.refused]
    notices = read(before + f"\n{indent}".join(f"{key}: odd-value" for key in unused)).notices
    told = {n.path.rpartition(".")[2]: (n.kind, n.text) for n in notices}
    for key in unused:
        assert told[key] == ("not used here", answers[key].reason)
    for key in answers.keys() - unused:
        text = error_of(f"{before}{key}: odd-value\n")
        assert answers[key].reason in text
        assert "unknown key" not in text


def test_an_empty_key_of_another_trainer_says_nothing_and_metadata_stays_metadata():
    keys = [*KEYS, *CONVERTED]
    notices = read(MINIMAL + "".join(f"{key}:\n" for key in keys)).notices
    assert {n.path for n in notices} & {*keys} == set()
    [told] = [n for n in notices_of(WHOLE + "tokens: [a]\nstrict: high\n") if "metadata" in n]
    assert "tokens" in told
    assert "strict" in told


@each(
    ("key", "text", "kind"),
    [
        ("odd_one", entry("path: a, odd_one: 3"), "not used here"),
        ("roles", entry("path: a, roles: {assistant: [system]}"), "not used here"),
        ("roles_to_train", entry("path: a, roles_to_train: []"), "warning"),
        ("evals_per_epoch", entry("path: a") + "evals_per_epoch: 4\n", "warning"),
        ("max_seq_len", tune_model("max_seq_len: 9"), "not used here"),
    ],
)
def test_what_is_not_done_as_there_is_told(key, text, kind):
    assert kind in kinds(read(text), key)


# --- rows and batches ----------------------------------------------------------------------------


def test_several_sets_become_tasks_and_usual_names_in_messages_need_no_mapping():
    text = axolotl("  - {path: a.jsonl, type: alpaca}", "  - {path: deep/a.jsonl, type: alpaca}")
    data = read(text).manifest.training.dataset
    assert data.type == "multi_task"
    tasks = {name: task.train for name, task in (data.tasks or {}).items()}
    assert tasks == {"a": "a.jsonl", "a-2": "deep/a.jsonl"}
    names = "field_messages: conversations, message_property_mappings: {role: from}, "
    names += "roles: {user: [human], assistant: [gpt]}, roles_to_train: [gpt], field_tools: tools"
    assert read(entry(f"path: a, {names}")).manifest.training.dataset.field_mapping is None


def test_packed_sequences_of_axolotl_are_counted_in_tokens_and_rows_as_rows():
    """micro_batch_size counts sequences there, and each holds many rows: 2 rows a step would be a
    batch many times smaller."""
    text = axolotl("  - {path: a}") + "micro_batch_size: 2\ngradient_accumulation_steps: 2\n"
    config = read(text + "sample_packing: true\n").manifest.training.config
    assert (config.batch_size, config.batch_tokens) == ("auto", 2 * 512)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == ("auto", 2)
    # batch_size is the whole step there; it sets the accumulation, unless that is set.
    both = read(text + "batch_size: 6\n").manifest.training.config
    assert (both.batch_size, both.gradient_accumulation_steps) == (2, 2)
    whole = text.replace("gradient_accumulation_steps: 2", "batch_size: 6")
    assert read(whole).manifest.training.config.gradient_accumulation_steps == 3
    ours = read(MINIMAL + "micro_batch_size: 2\n").manifest.training.config
    assert (ours.batch_size, ours.micro_batch_size) == ("auto", 2)


def in_folder(folder: Path, text: str, info: Any) -> Path:
    """The text as a file, beside a data folder with a dataset_info.json."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "run.yaml").write_text(FACTORY + text, encoding="utf-8")
    return folder / "run.yaml"


MINE, YOURS = {"file_name": "mine.json"}, {"file_name": "deep\\yours.json"}
CHAT = {"file_name": "c.json", "formatting": "sharegpt", "tags": {"role_tag": "role"}}
HUB = {"hf_hub_url": "owner/qa", "subset": "en", "split": "full", "num_samples": 70}
QA = {"prompt": "question", "response": "answer"}


@each(
    ("listed", "expected"),
    [
        (MINE, {"path": "data/mine.json"}),
        ({**HUB, "columns": QA}, {"path": "owner/qa::full::en", "max_samples": 70}),
        ({**HUB, "columns": QA}, {"field_mapping.instruction": "question"}),
        ({**HUB, "columns": QA}, {"field_mapping.response": "answer", "field_mapping.input": None}),
        ({**CHAT, "columns": {"messages": "dialog"}}, {"field_mapping.messages": "dialog"}),
        ({**CHAT, "columns": {"messages": "conversations"}}, {"field_mapping": None}),
        ({**MINE, "columns": {"prompt": "body"}}, {"text_field": "body", "field_mapping": None}),
    ],
)
def test_a_name_in_dataset_info_is_read_with_its_columns(tmp_path, listed, expected):
    data = read_manifest(in_folder(tmp_path, "dataset: x\n", {"x": listed})).manifest
    for key, value in expected.items():
        assert attrgetter(key)(data.training.dataset) == value


def test_several_names_become_tasks_and_plain_text_is_trained_on_for_stage_pt(tmp_path):
    info = {"mine": MINE, "yours": YOURS, "web": {**MINE, "columns": {"prompt": "content"}}}
    lines = "dataset: mine,yours\neval_dataset: yours\n"
    data = read_manifest(in_folder(tmp_path, lines, info)).manifest.training.dataset
    tasks = {name: task.train for name, task in (data.tasks or {}).items()}
    assert tasks == {"mine": "data/mine.json", "yours": "data/deep/yours.json"}
    assert data.validation_path == "data/deep/yours.json"
    file = in_folder(tmp_path, "dataset: web\n", info)
    file.write_text(file.read_text("utf-8").replace("sft", "pt"), "utf-8")
    assert read_manifest(file).manifest.training.dataset.text_field == "content"


@each(
    ("lines", "about", "words"),
    [
        ("dataset: x", {**MINE, "columns": {"images": "images"}}, "x.images: not read"),
        ("dataset: x", {"ms_hub_url": "owner/a"}, "x: no file_name"),
        ("dataset: x", {**MINE, "folder": "a"}, "x.folder: not read"),
        ("dataset: x", {"file_name": "../a.json"}, "may not leave its folder"),
        ("dataset: mein", MINE, "(it has x)"),
        ("dataset: mein,x", MINE, "dataset: mein: not in"),
        ("dataset: x,x", MINE, ""),
        ("dataset: x\ndataset_dir: elsewhere", MINE, "set dataset_dir to the folder"),
        ("dataset: a.json\neval_dataset: x,x", MINE, "keep one of them"),
        ("dataset: 5", MINE, ""),
    ],
)
def test_what_cannot_be_read_of_a_listed_set_is_refused_by_name(tmp_path, lines, about, words):
    file = in_folder(tmp_path, f"{lines}\n", {"x": about})
    if not words:
        with suppress(ManifestError):
            read_manifest(file)
        return
    with pytest.raises(ManifestError) as caught:
        read_manifest(file)
    assert words in str(caught.value)
    assert "there is no data" not in str(caught.value)


def test_dataset_info_is_found_from_above_both_folders_and_may_be_broken(tmp_path, monkeypatch):
    file = in_folder(tmp_path, "dataset: x\n", {"x": MINE})
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    made = read_manifest(file.rename(tmp_path / "examples" / "run.yaml")).manifest
    assert made.training.dataset.path == (tmp_path / "data" / "mine.json").as_posix()
    file = in_folder(tmp_path, "dataset: rows.jsonl\n", [])
    assert read_manifest(file).manifest.training.dataset.path == "rows.jsonl"
    file = in_folder(tmp_path, "dataset: a,b\n", {})
    (tmp_path / "data" / "dataset_info.json").write_text("{", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"dataset_info\.json: cannot be read"):
        read_manifest(file)


TRL = "model_name_or_path: tiny\ndataset_name: owner/set\n"
NO_ROWS = axolotl("  - rows.jsonl").replace("val_set_size: 0.1", "train_on_inputs: false")


@each(
    ("text", "expected"),
    [
        (
            f"{FACTORY}dataset: a.jsonl\n",
            "validation_split=0 load_best_model_at_end=False lr_scheduler=linear warmup_steps=0",
        ),
        (f"{FACTORY}dataset: a.jsonl\nval_size: 0.2\n", "validation_split=0.2"),
        (f"{FACTORY}dataset: a.jsonl\nwarmup_ratio: 0.1\n", "warmup_ratio=0.1 warmup_steps=None"),
        (f"{FACTORY}dataset: a.jsonl\neval_dataset: b.json\n", "validation_split=0.1"),
        (f"{FACTORY}dataset: a.jsonl\neval_strategy: 'no'\n", "validation_split=0"),
        (f"{FACTORY}dataset: a.jsonl\neval_strategy: epoch\n", "validation_split=0.1"),
        (f"{FACTORY}dataset: a.jsonl\nearly_stopping_steps: 2\n", "load_best_model_at_end=auto"),
        (TRL, "validation_split=0 adapter_type=full max_seq_length=1024 lr_scheduler=linear"),
        (f"{TRL}lora_r: 4\nmax_length: 64\n", "adapter_type=lora max_seq_length=64"),
        (f"{TRL}training_args: {{lr_scheduler_type: cosine}}\n", "lr_scheduler=cosine"),
        (trl(""), "validation_split=0 adapter_type=lora max_seq_length=auto"),
        (NO_ROWS, "validation_split=0 epochs=1 lr_scheduler=cosine warmup_steps=None"),
        (ALPACA, "validation_split=0 max_grad_norm=0 warmup_steps=0"),
        (f"{MINIMAL}cutoff_len: 64\n", "validation_split=0.1 lr_scheduler=cosine rank=auto"),
        (f"{MINIMAL}training:\n  train_file: a.jsonl\n", "validation_split=0.1"),
        (WHOLE.replace("base_model:", "model_name:"), "validation_split=0.1"),
    ],
)
def test_what_a_file_leaves_out_means_what_it_means_to_its_trainer(text, expected):
    training = read(text).manifest.training
    for key, value in (pair.split("=") for pair in expected.split()):
        found = getattr(training.config, key, None) if key != "validation_split" else None
        found = training.dataset.validation_split if key == "validation_split" else found
        assert f"{found:g}" == value if isinstance(found, float) else str(found) == value, key


def test_a_mixture_becomes_tasks_with_their_weights():
    sets = "{id: owner/a, split: train_sft, config: en, columns: [messages], weight: 0.5}"
    text = f"model_name_or_path: tiny\ndataset_mixture:\n  datasets: [{sets}, {{id: owner/a}}]\n"
    data = read(f"{text}  test_split_size: 0.05\n").manifest.training.dataset
    tasks = {name: (task.train, task.weight) for name, task in (data.tasks or {}).items()}
    assert tasks == {"a": ("owner/a::train_sft::en", 0.5), "a-2": ("owner/a", 1)}
    assert data.validation_split == 0.05
    rows = read(f"{text}  test_split_size: 1000\n")
    assert "warning" in kinds(rows, "test_split_size")
    single = f"model_name_or_path: tiny\ndataset_mixture: {{datasets: [{sets}]}}\n"
    assert "there is only one data set" in error_of(single)


def test_an_absolute_output_folder_of_another_trainer_moves_into_the_run_folder():
    made = read(f"{ALPACA}output_dir: /tmp/there\n")
    assert made.manifest.training.config.output_dir is None
    [line] = [n for n in map(str, made.notices) if "output_dir" in n]
    assert "--set output_dir=/tmp/there writes there" in line
    assert read(f"{ALPACA}output_dir: there\n").manifest.training.config.output_dir == "there"
    assert "may write only inside" in error_of(f"{MINIMAL}output_dir: /tmp/there\n")


def test_the_dtype_of_loading_gives_way_to_the_one_of_training():
    made = read(f"{TRL}torch_dtype: float16\nbf16: true\n")
    assert made.manifest.training.config.bf16 is True
    assert any("not used here: bf16: true decides" in str(notice) for notice in made.notices)


def test_a_mixer_names_data_sets_with_their_shares_and_splits():
    splits = "dataset_splits: [train_prefs, test_prefs]\n"
    one = read(f"model_name_or_path: tiny\ndataset_mixer: {{owner/a: 1.0}}\n{splits}")
    dataset = one.manifest.training.dataset
    assert (dataset.path, dataset.validation_path) == (
        *("owner/a::train_prefs", "owner/a::test_prefs"),
    )
    two = read(f"model_name_or_path: tiny\ndataset_mixer: {{owner/a: 1, owner/b: 0.5}}\n{splits}")
    tasks = two.manifest.training.dataset.tasks
    assert {name: task.weight for name, task in (tasks or {}).items()} == {"a": 1.0, "b": 0.5}
    assert any("held out of the training rows" in str(notice) for notice in two.notices)
    mixer = "model_name_or_path: tiny\ndataset_mixer: {owner/a: 1, owner/b: 0.5}\n"
    named = read(f"{mixer}dataset_configs: [x, y]\ndataset_splits: [train]\n")
    tasks = named.manifest.training.dataset.tasks
    assert [task.train for task in (tasks or {}).values()] == [
        *("owner/a::train::x", "owner/b::train::y"),
    ]
    assert "is not one for each data set" in error_of(f"{mixer}dataset_configs: [x]\n")
    several = "dataset_splits: [train_sft, train_gen, test_sft]\n"
    assert "one split to train on and one to test on" in error_of(mixer + several)


def test_defaults_of_another_trainer_are_named_in_one_line():
    [line] = [n for n in notices_of(f"{FACTORY}dataset: a.jsonl\n") if n.startswith("defaults")]
    assert line.startswith("defaults of LLaMA-Factory: note: learning_rate: 5e-05, ")
    assert "validation_split: 0" in line
    told = [n for n in notices_of(f"{TRL}eval_strategy: epoch\n") if n.startswith("defaults")]
    assert len(told) == 2
    assert told[1].startswith("defaults of TRL: warning: not kept: a tenth of the rows is held out")
    assert "only answers are trained on" in told[1]
    assert not any(": warning" in n for n in notices_of(f"{TRL}completion_only_loss: true\n"))
    assert read(f"{TRL}", overrides=["rank=4"]).manifest.training.config.adapter_type == "full"


# --- FSDP and DeepSpeed --------------------------------------------------------------------------

DUMP = "fsdp: []\nfsdp_config: {min_num_params: 0, xla: false}\ndeepspeed: null\nddp_timeout: 1800"
ENGINES = {
    "auto": [
        *("", DUMP, "fsdp: shard_grad_op", 'fsdp: ""', "fsdp: false", "fsdp_cpu_offload: false"),
        *("deepspeed: mine.json", "distributed_type: 'NO'"),
        "deepspeed_config: {zero_stage: 2, offload_param_device: cpu}",
    ],
    "replicated": [
        *("distributed: DDP", "fsdp: no_shard", "distributed_type: MULTI_GPU"),
        *("fsdp_config: {fsdp_sharding_strategy: NO_SHARD}", "deepspeed: ds/ds_z0_config.json"),
    ],
    "sharded": [
        *("distributed: fsdp", "fsdp: true", "fsdp: hybrid_shard", "fsdp: [auto_wrap]"),
        *("fsdp: full_shard auto_wrap", "fsdp: [full_shard, auto_wrap, offload]"),
        *("fsdp_config: {sharding_strategy: 1}", "fsdp_config: {fsdp_version: 2}"),
        *("fsdp_cpu_offload: true", "deepspeed_config: {deepspeed_config_file: ds_z3.json}"),
        "deepspeed: deepspeed_configs/zero3_bf16.json",  # by its name: it is not there
    ],
}


@each(("line", "engine"), [(line, kind) for kind, lines in ENGINES.items() for line in lines])
def test_keys_of_fsdp_and_deepspeed_set_the_engine(line, engine):
    assert read(f"{MINIMAL}{line}\n").manifest.training.config.distributed == engine
    if "\n" not in line:
        whole = read(f"{WHOLE}    {line}\n").manifest.training.config
        assert whole.distributed == engine


@each(("stage", "engine"), [(0, "replicated"), (1, "auto"), (2, "auto"), (3, "sharded")])
def test_a_zero_config_is_read_inline_and_of_a_file_its_name(stage, engine):
    inline = (
        f"{{zero_optimization: {{stage: {stage}, overlap_comm: true}}, train_batch_size: auto}}"
    )
    made = read(f"{MINIMAL}deepspeed: {inline}\n")
    assert made.manifest.training.config.distributed == engine
    assert [n.text for n in made.notices if n.kind == "not used here"] == ["overlap_comm"]
    named = read(f"{MINIMAL}deepspeed: ds_z{stage}.json\n")
    assert named.manifest.training.config.distributed == engine
    assert "not used here" in kinds(named, "deepspeed")


def test_values_of_deepspeed_that_contradict_the_manifest_are_named_all_at_once():
    lines = "max_grad_norm: 0.5\nper_device_train_batch_size: 4\nbf16: false\n"
    lines += "gradient_accumulation_steps: 2\ndeepspeed:\n  zero_optimization: {stage: 3}\n"
    lines += "  gradient_clipping: 1.0\n  train_micro_batch_size_per_gpu: 8\n"
    lines += "  gradient_accumulation_steps: 4\n  bf16: {enabled: true}\n"
    told = error_of(MINIMAL + lines).splitlines()[1:]
    assert len(told) == 4
    assert all("keep one of the two" in line and "deepspeed." in line for line in told)


@each("value", [None, False, True, 0, 3, 1.5, "", "x", [], ["x"], {}, {"a": 1}])
@each("key", DISTRIBUTED_KEYS)
def test_any_value_is_read_or_refused_and_never_breaks(key, value):
    found = problems_of({"base_model": "X", "dataset": "a.jsonl", key: value})
    assert all(key in problem.path for problem in found)


# --- models that read images ---------------------------------------------------------------------


def test_a_model_that_reads_images_or_sound_is_refused_by_its_name():
    for name in (
        *("Qwen/Qwen2-VL-7B-Instruct", "llava-hf/llava-1.5-7b-hf", "x/InternVL3-8B"),
        *("google/gemma-3n-E2B-it", "openai/whisper-small", "C:\\models\\Qwen3-VL-4B"),
    ):
        assert "only text is trained" in error_of(f"base_model: '{name}'\ndataset: a.jsonl\n"), name
    for name in ("Qwen/Qwen3-0.6B", "evolve/evolver-1b", "x/VLite", "google/gemma-3-4b-it"):
        assert read(f"base_model: {name}\ndataset: a.jsonl\n")


TRL_DPO = "model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 2\n"
FACTORY_DPO = "model_name_or_path: a/b\nstage: dpo\nfinetuning_type: lora\ndataset: a.jsonl\n"


@each(
    ("text", "expected"),
    [
        # One of TRL's scripts for each method: only the arguments tell.
        (
            TRL_DPO + "beta: 0.05\nmax_length: 1024\nmax_prompt_length: 512\n",
            {"method": "dpo", "beta": 0.05, "max_seq_length": 2048, "epochs": 3},
        ),
        (TRL_DPO + "loss_type: ipo\n", {"method": "ipo", "learning_rate": 1e-6, "beta": 0.1}),
        (TRL_DPO + "loss_type: apo_down\nbeta: 0.1\n", {"method": "dpo", "loss_type": "apo_down"}),
        (
            TRL_DPO + "loss_type: simpo\ncpo_alpha: 0.0\nbeta: 2.0\n",
            {"method": "simpo", "sft_weight": 0.0, "simpo_gamma": 0.5, "beta": 2.0},
        ),
        (TRL_DPO + "loss_type: simpo\n", {"method": "simpo", "sft_weight": 1.0}),
        (TRL_DPO + "cpo_alpha: 0.5\n", {"method": "cpo", "sft_weight": 0.5}),
        (TRL_DPO + "beta: 0.1\nrpo_alpha: 0.3\n", {"method": "dpo", "sft_weight": 0.3}),
        (TRL_DPO + "beta: 0.1\nlabel_smoothing: 0.1\n", {"label_smoothing": 0.0}),
        (TRL_DPO + "loss_type: robust\nlabel_smoothing: 0.1\n", {"label_smoothing": 0.1}),
        (TRL_DPO + "beta: 0.1\nmethod: orpo\n", {"method": "orpo"}),
        (TRL_DPO + "loss_type: nll\n", {"method": "sft", "loss_type": "auto"}),
        (
            FACTORY_DPO + "pref_beta: 0.2\npref_loss: hinge\ncutoff_len: 512\npref_ftx: 0.1\n",
            {"method": "dpo", "loss_type": "hinge", "beta": 0.2, "sft_weight": 0.1}
            | {"max_seq_length": 1024},
        ),
        (FACTORY_DPO + "pref_loss: orpo\n", {"method": "orpo", "sft_weight": "auto"}),
        (FACTORY_DPO + "pref_loss: simpo\n", {"method": "simpo", "simpo_gamma": 0.5}),
        (FACTORY_DPO + "dpo_label_smoothing: 0.1\n", {"label_smoothing": 0.1}),
        (
            AXOLOTL_PAIRS + "rl: dpo\nrl_beta: 0.2\n",
            {"method": "dpo", "beta": 0.2, "max_seq_length": 2048},
        ),
        (
            AXOLOTL_PAIRS + "rl: orpo\norpo_alpha: 0.3\n",
            {"method": "orpo", "beta": 0.3},
        ),
    ],
)
def test_preference_configs_of_other_trainers_train_as_they_would_there(text, expected):
    config = read(text).manifest.training.config
    assert {key: getattr(config, key) for key in expected} == expected
