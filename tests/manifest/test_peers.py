"""Files of Axolotl, LLaMA-Factory, LitGPT and torchtune: what is trained is what they say, or they
are refused with the reason and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ManifestError
from expert.manifest.reader import ReadManifest, read_manifest
from tests.each import each
from tests.manifest.reading import (
    MANIFESTS,
    MINIMAL,
    WHOLE,
    error_of,
    notices_of,
    read,
    value_at,
)

AXOLOTL = "base_model: tiny\nsequence_len: 512\nval_set_size: 0.1\nadapter: lora\n"
LOWEST = "config.lr_scheduler_kwargs.min_lr"
FACTORY = "model_name_or_path: tiny\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\n"


def in_folder(folder: Path, text: str, info: dict[str, Any] | None = None) -> ReadManifest:
    """The text as a file, beside a data folder with a dataset_info.json."""
    if info is not None:
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return read_manifest(file)


def refused(folder: Path, text: str, info: dict[str, Any] | None = None) -> str:
    with pytest.raises(ManifestError) as caught:
        in_folder(folder, text, info)
    return str(caught.value)


# --- Axolotl -------------------------------------------------------------------------------------


def axolotl(*lines: str) -> str:
    return AXOLOTL + "\n".join(("datasets:", *lines)) + "\n"


def entry(fields: str) -> str:
    return axolotl(f"  - {{{fields}}}")


SCHEDULE = "{_component_: torchtune.training.get_cosine_schedule_with_warmup, num_cycles: 2}"


@each(
    ("text", "path", "value"),
    [
        (entry("path: owner/set, split: 'train[:10%]'"), "data.path", "owner/set::train[:10%]"),
        (entry("path: owner/set, name: en, split: test"), "data.path", "owner/set::test::en"),
        (entry("path: json, data_files: [rows.jsonl]"), "data.path", "rows.jsonl"),
        (axolotl("  - rows.jsonl"), "data.path", "rows.jsonl"),
        (axolotl("  path: rows.jsonl"), "data.path", "rows.jsonl"),
        (entry("path: a.jsonl, ds_type: json, split: train"), "data.path", "a.jsonl"),
        (entry("path: owner/a, split: train"), "data.path", "owner/a::train"),
        (entry("path: rows.data, ds_type: json"), "data.format", "json"),
        (entry("path: rows.jsonl, shards: 1"), "data.path", "rows.jsonl"),
        (entry("path: a, type: completion"), "data.field_mapping.text", "text"),
        (entry("path: a, type: pretrain, field: body"), "data.field_mapping.text", "body"),
        (entry("path: a, field_output: reply"), "data.field_mapping.response", "reply"),
        (entry("path: a, type: {field_input: about}"), "data.field_mapping.input", "about"),
        (entry("path: a, field_messages: talk"), "data.field_mapping.messages", "talk"),
        (entry("path: a, field_system: persona"), "data.field_mapping.system", "persona"),
        (entry("path: a, field_tools: api"), "data.field_mapping.tools", "api"),
        (entry("path: a") + "float32: true\n", "config.bf16", False),
        (
            MINIMAL + "lr: 1e-5\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
            LOWEST,
            1e-6,
        ),
        (
            entry("path: a") + "lora_target_linear: true\nlora_target_modules: [q_proj]\n",
            "config.target_modules",
            ["q_proj"],
        ),
        *(
            (MINIMAL + rate + "\ncosine_min_lr_ratio: 0.5\n", LOWEST, 5e-4)
            for rate in ("lr: 1e-3", "training: {config: {learning_rate: 1e-3}}")
        ),
        (f"{MINIMAL}lr_scheduler: {SCHEDULE}\n", "config.lr_scheduler", "cosine"),
        (f"{MINIMAL}lr_scheduler: {SCHEDULE}\n", "config.lr_scheduler_kwargs.num_cycles", 2),
        # A whole manifest may speak of templates.
        (WHOLE + "template: {a: 1}\n", "model.prompt_template", "auto"),
    ],
)
def test_what_a_file_of_another_trainer_sets(text, path, value):
    assert value_at(read(text), path) == value


def test_an_axolotl_file_without_an_adapter_trains_every_weight():
    """Here lora is the default, there it is none at all."""
    for line in ("", "adapter:\n"):
        text = entry("path: a.jsonl").replace("adapter: lora\n", line)
        assert read(text).manifest.training.config.adapter_type == "full"
        assert any("no adapter is named: every weight is trained" in n for n in notices_of(text))
    for ours in (entry("path: a.jsonl"), MINIMAL):
        assert read(ours).manifest.training.config.adapter_type == "lora"


def test_several_sets_become_tasks_unless_their_columns_differ():
    text = axolotl("  - {path: a.jsonl, type: alpaca}", "  - {path: deep/a.jsonl, type: alpaca}")
    data = read(text).manifest.training.dataset
    assert data.type == "multi_task"
    tasks = {name: task.train for name, task in (data.tasks or {}).items()}
    assert tasks == {"a": "a.jsonl", "a-2": "deep/a.jsonl"}
    text = axolotl("  - {path: a, field_output: reply}", "  - {path: b, type: completion}")
    assert "datasets[1]: b and a have different columns or formats" in error_of(text)
    text = axolotl("  - {path: a, max_samples: 5}", "  - {path: b}")
    assert "b and a have different limits on their rows" in error_of(text)


@each(
    ("text", "words"),
    [
        *(
            (
                FACTORY.replace("stage: sft", line) + "dataset: a\n",
                "{word} is not supported: only sft".format(word=line.partition(": ")[2]),
            )
            for line in ("stage: dpo", "stage: ppo", "stage: kto", "stage: rm", "rl: dpo")
        ),
        (f"{FACTORY}dataset: a\nquantization_bit: 3\n", "quantization_bit: got 3, expected 4 or 8"),
        (
            f"{FACTORY}dataset: a\nquantization_method: hqq\n",
            "'hqq': bases are quantised with bitsandbytes only",
        ),
        # The letters of a family, as in "saying", say nothing here.
        (
            f"{FACTORY}dataset: a\nchat_template: '{{{{ x }}}} saying'\n",
            "chat_template: inline templates are not read",
        ),
        (f"{MINIMAL}task: llm-sft\nparams: {{lr: 0.1}}\n", "settings of AutoTrain are not read"),
        (MINIMAL + "dataset_mixer: {owner/a: 1.0}\n", "a mixture is written as tasks"),
        (
            MINIMAL + "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
            "a share of learning_rate, which is missing",
        ),
        *(
            (f"{MINIMAL}{key}: 0.2\n", "a share of all steps; here it is a number of steps")
            for key in ("eval_steps", "save_steps", "logging_steps")
        ),
        (
            MINIMAL + "dataset_mixture: {datasets: [{id: owner/a}]}\n",
            "a mixture is written as tasks",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(text, words):
    assert words in error_of(text)


@each(
    ("entry", "words"),
    [
        ("{path: a, shards: 4}", "selects one of 4 shards  (training.dataset.max_samples"),
        ("{path: owner/set, data_files: [x.json]}", "selects files of a data set"),
        ("{path: json, data_files: [x.json, y.json]}", "several files"),
        ("{type: alpaca}", "datasets[0]: has no path  (add path)"),
        ("{path: a, field_chosen: good}", "datasets[0].field_chosen: preference rows; only sft"),
        ("{path: a, type: input_output}", "segments with their own labels"),
        ("{path: a, type: bradley_terry.chat_template}", "preference rows; only sft"),
        (
            "{path: a, message_property_mappings: {role: speaker, content: text}}",
            "'speaker' is not a known message key for role  (rename it to role or from in the rows",
        ),
        (
            "{path: a, message_property_mappings: {tool_calls: calls}}",
            "'calls' is not a known message key",
        ),
        ("{path: a, message_field_content: said}", "for content  (rename it to content or value"),
        ("{path: a, roles: {user: [human, customer]}}", "'customer' is not a known role"),
        (
            "{path: a, roles: {assistant: [gpt, system]}}",
            "'system' is the role assistant there, but system here",
        ),
        (
            "{path: a, roles_to_train: [user, assistant]}",
            "but only answers are trained on  (write [assistant]",
        ),
        ("{path: a, roles_to_train: all}", "but only answers are trained on  (write [assistant]"),
        (
            "{path: a, message_field_training: learn}",
            "'learn' is not a known message key for train",
        ),
        (
            "{path: a, message_field_training_detail: parts}",
            "for train_detail  (rename it to train_",
        ),
        ("{path: a, field_thinking: hmm}", "(rename it to reasoning_content or"),
    ],
)
def test_what_cannot_be_read_of_a_set_is_refused(entry, words):
    assert words in error_of(axolotl(f"  - {entry}"))


@each(
    "text",
    [
        "datasets: [7, []]\n",
        "datasets: 'list[int] = [1, (2,)]'\n",
        "datasets: [{path: {a: 1}, data_files: {b: 2}, roles: {user: {x: 1}}}]\n",
        "pretraining_dataset: 7\n",
        "test_datasets: [[]]\n",
        "data: {class_path: [x], init_args: 3}\ntrain: [1]\n",
        "model: {_component_: {a: 1}, lora_attn_modules: 3}\ndataset: {_component_: [1]}\n",
        "finetuning_type: lora\ndataset: {a: 1}\ndataset_dir: [1]\n",
        "optimizer: {_component_: {a: 1}, init_args: [2]}\nlr_scheduler: {class_path: 3}\n",
    ],
)
def test_malformed_sections_of_other_trainers_are_refused(text):
    assert "problem" in error_of("base_model: tiny\n" + text)


def test_usual_names_in_messages_are_understood():
    entry = "{path: a, field_messages: conversations, message_property_mappings: {role: from, "
    names = "roles: {user: [human], assistant: [gpt]}, roles_to_train: [gpt], field_system: system"
    names += ", message_field_training: train_on_turn, field_thinking: thinking, field_tools: tools"
    made = read(axolotl(f"  - {entry}content: value}}, {names}}}"))
    assert made.manifest.training.dataset.field_mapping is None
    assert not [notice for notice in made.notices if notice.kind == "warning"]


def test_a_key_of_a_set_that_changes_the_rows_is_warned_of():
    entry = "{path: a, drop_system_message: true, revision: abc, odd_one: 3, type: {format: x}}"
    told = "\n".join(notices_of(axolotl(f"  - {entry}")))
    silent = notices_of(axolotl("  - {path: a, message_field_training: train, roles_to_train: []}"))
    assert any("roles_to_train: warning: answers" in line for line in silent)
    assert "without effect: base_models[0].prompt_template" in told
    assert "drop_system_message: warning: without effect: system messages are kept" in told
    assert "datasets[0].revision: warning: without" in told
    assert "datasets[0].odd_one: warning: without" in told


def test_packed_sequences_are_counted_in_tokens_and_rows_as_rows():
    """micro_batch_size counts sequences there, and each holds many rows: 2 rows a step would be a
    batch many times smaller."""
    text = axolotl("  - {path: a}") + "micro_batch_size: 2\ngradient_accumulation_steps: 2\n"
    config = read(text + "sample_packing: true\n").manifest.training.config
    assert (config.batch_size, config.batch_tokens) == ("auto", 2 * 512)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == ("auto", 2)
    assert read(text).manifest.training.config.batch_size == 2
    # batch_size is the whole step there; it sets the accumulation, unless that is set.
    both = read(text + "batch_size: 6\n").manifest.training.config
    assert (both.batch_size, both.gradient_accumulation_steps) == (2, 2)
    whole = text.replace("gradient_accumulation_steps: 2", "batch_size: 6")
    config = read(whole + "sample_packing: true\n").manifest.training.config
    assert (config.batch_tokens, config.gradient_accumulation_steps) == (2 * 512, 3)
    ours = read("base_model: tiny\ndataset: a.jsonl\nmicro_batch_size: 2\n").manifest.training
    assert (ours.config.batch_size, ours.config.micro_batch_size) == ("auto", 2)
    rows = "train_batch_size: 4\nmicro_batch_size: 2\ntrain_on_inputs: true\n"
    whole = f"base_model: tiny\ntraining: {{dataset: a.jsonl, config: {{epochs: 1}}}}\n{rows}"
    ours = read(whole).manifest.training
    assert (ours.config.batch_size, ours.config.micro_batch_size) == (4, 2)


@each("schedule", ["{name: [a]}", '{name: cosine_decay, warmup: "9", arguments: [1.0e-5, 9, 0]}'])
def test_a_schedule_of_mlx_with_odd_values_is_a_problem_with_its_line(schedule):
    text = f"model: tiny\ndata: d\niters: 200\nlr_schedule: {schedule}\n"
    with pytest.raises(ManifestError) as refused:
        read(text)
    assert [problem.line for problem in refused.value.problems] == [4]


def test_words_of_other_trainers_in_a_whole_manifest_change_nothing():
    whole = "base_model: tiny\ntraining: {dataset: a.jsonl, config: {epochs: 3}}\n"
    before = read(whole).manifest.training.config
    for more in ("stage: beta\n", "config: {epochs: 2, note: x}\n"):
        assert read(whole + more).manifest.training.config == before
    flat = read("model_name: tiny\ndataset: a.jsonl\nmax_steps: 100\nepochs: 1\n")
    assert flat.manifest.training.config.epochs == 1


@each(
    ("more", "tokens"),
    [
        ("packing: true\nmax_length: 512\n", 4 * 512),
        ("packing: true\n", 4 * 1024),  # TRL's own length
        ("packing: true\nfinetuning_type: lora\n", 4 * 2048),  # LLaMA-Factory's
        ("neat_packing: true\ncutoff_len: 4096\nstage: sft\n", 4 * 4096),
        ("packing: false\nmax_length: 512\n", None),
    ],
)
def test_packed_sequences_of_trl_and_llama_factory_are_counted_in_tokens(more, tokens):
    text = f"model_name_or_path: tiny\ndataset: rows.jsonl\nper_device_train_batch_size: 4\n{more}"
    config = read(text).manifest.training.config
    assert config.batch_tokens == tokens
    assert config.batch_size == (4 if tokens is None else "auto")
    unsloth = read(text.replace("model_name_or_path", "model_name")).manifest.training.config
    assert unsloth.batch_tokens == tokens
    ours = read(text.replace("model_name_or_path", "base_model")).manifest
    assert ours.training.config.batch_size == 4


# --- LLaMA-Factory -------------------------------------------------------------------------------


@each(
    ("about", "words"),
    [
        ({"file_name": "a.json", "ranking": True}, "x.ranking: preference rows; only sft"),
        ({"file_name": "a.json", "columns": {"kto_tag": "label"}}, "preference rows; only sft"),
        ({"file_name": "a.json", "columns": {"images": "images"}}, "the rows contain images"),
        ({"ms_hub_url": "owner/a"}, "x.ms_hub_url: rows are read from files and from the Hugging"),
        ({"script_url": "load"}, "x.script_url: rows are read from files"),
        ({"file_name": "a.json", "columns": {"history": "past"}}, "the column 'past'"),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "tags": {"function_tag": "tool"}},
            "'tool' is the role assistant there, but tool here",
        ),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "customer"}},
            "x.tags.user_tag: 'customer' is not a known role",
        ),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "tags": {"content_tag": "said"}},
            "x.tags.content_tag: 'said' is not a known message key for content",
        ),
    ],
)
def test_what_cannot_be_read_of_a_listed_set_is_refused(tmp_path, about, words):
    assert words in refused(tmp_path, f"{FACTORY}dataset: x\n", {"x": about})


def test_names_in_a_list_of_data_sets_are_found_there_or_reported(tmp_path):
    about = {"file_name": "a.json", "columns": {"system": "persona", "prompt": "question"}}
    listed = {"x": about}
    made = in_folder(tmp_path, f"{FACTORY}dataset: x\n", listed).manifest.training.dataset
    assert made.field_mapping is not None
    assert (made.field_mapping.system, made.field_mapping.instruction) == ("persona", "question")
    rows = in_folder(tmp_path, f"{FACTORY}dataset: rows.jsonl\n", {}).manifest.training.dataset
    assert rows.path == "rows.jsonl"
    text = refused(tmp_path, f"{FACTORY}dataset: mein\n", {"mine": {"file_name": "mine.json"}})
    assert "mein is not in" in text
    assert "(it has mine)" in text
    assert "has no path" not in text
    (tmp_path / "data" / "dataset_info.json").write_text("{", encoding="utf-8")
    assert "dataset_info.json cannot be read" in refused(tmp_path, f"{FACTORY}dataset: a,b\n")


def test_the_stage_alone_makes_a_file_one_of_llama_factory(tmp_path):
    text = "model_name_or_path: tiny\nstage: sft\ndataset: x\n"
    made = in_folder(tmp_path, text, {"x": {"file_name": "a.json"}})
    assert made.manifest.training.dataset.path == "data/a.json"


def test_names_without_a_list_say_where_it_was_looked_for(tmp_path):
    text = refused(tmp_path, f"{FACTORY}dataset: mine,yours\n")
    assert "mine, yours: there is no dataset_info.json in" in text
    assert "has no path" not in text
    text = refused(tmp_path, f"{FACTORY}dataset: mine\ndataset_dir: elsewhere\n")
    assert str(tmp_path / "elsewhere") in text


def test_a_list_in_the_current_folder_names_its_files_whole(tmp_path, monkeypatch):
    """As LLaMA-Factory is run: from above both folders."""
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    listed = json.dumps({"a": {"file_name": "a.json"}})
    (tmp_path / "data" / "dataset_info.json").write_text(listed, encoding="utf-8")
    made = in_folder(Path("examples"), f"{FACTORY}dataset: a\n")
    assert made.manifest.training.dataset.path == (tmp_path / "data" / "a.json").as_posix()
    text = f"{FACTORY}dataset: a\n"
    assert in_folder(Path(), text).manifest.training.dataset.path == "data/a.json"


# --- templates -----------------------------------------------------------------------------------


@each(
    ("word", "ours", "kind"),
    [
        ("alpaca", "alpaca", "read as"),
        ("chatml", "chatml", "read as"),
        ("llama3", "auto", "read as"),
        ("qwen3_nothink", "auto", "read as"),
        ("tokenizer_default", "auto", "read as"),
        ("zephyr", "auto", "warning"),
    ],
)
@each("key", ["template", "chat_template"])
def test_templates_of_others_are_ours_or_the_tokenizers(key, word, ours, kind):
    made = read(f"{FACTORY}dataset: a.jsonl\n{key}: {word}\n")
    assert made.manifest.base_models[0].prompt_template == ours
    assert [each.kind for each in made.notices if each.path == key] == [kind]


# --- LitGPT and torchtune ------------------------------------------------------------------------

LITGPT, TUNE = (
    (MANIFESTS / "peers" / f"{name}.yaml").read_text("utf-8") for name in ("litgpt", "torchtune")
)


def test_lora_target_linear_false_without_modules_warns():
    for more, kinds in (("", ["warning"]), ("lora_target_modules: [q_proj]\n", [])):
        made = read(entry("path: a.jsonl") + "lora_target_linear: false\n" + more)
        assert [n.kind for n in made.notices if n.path == "lora_target_linear"] == kinds


def test_plugins_of_axolotl_are_not_needed_or_not_run():
    text = entry("path: a.jsonl") + "plugins: [axolotl.liger.LigerPlugin, axolotl.kd.KDPlugin]\n"
    told = {notice.path: notice.kind for notice in read(text).notices}
    assert (told["plugins[0]"], told["plugins[1]"]) == ("superseded", "warning")
    assert any(
        "'axolotl.kd.KDPlugin' is a Python class, which is not run" in line
        for line in notices_of(text)
    )


def test_refused_rows_are_one_problem():
    for key in ("dataset_mixture: {datasets: [{id: owner/a}]}", "dataset_mixer: {owner/a: 1}"):
        text = error_of(f"model_name_or_path: tiny\n{key}\n")
        assert (text.count("\n"), "a mixture is written as tasks" in text) == (1, True)
    assert error_of(entry("type: alpaca")).count("\n") == 1


def test_a_class_of_rows_that_nobody_knows_is_refused():
    name = "checkpoint_dir: tiny\ndata: TinyStories\ntrain: {global_batch_size: 2}\n"
    assert "data: 'TinyStories' is a Python class, which is not run" in error_of(name)
    text = error_of(
        LITGPT.replace("litgpt.data.JSON", "mine.Rows").replace("json_path: rows.json, ", "")
    )
    assert "'mine.Rows' is a Python class, which is not run" in text
    assert "has no path" not in text


def test_a_data_set_class_of_torchtune_names_its_rows_or_is_refused():
    text = TUNE.replace("  source: json\n  data_files: rows.json\n", "")
    known = text.replace("instruct_dataset", "alpaca_dataset")
    training = read(known).manifest.training
    assert training.dataset.path == "tatsu-lab/alpaca"
    assert training.config.train_on_prompt  # torchtune's default for these alone
    masked = known.replace("  packed: true\n", "  packed: true\n  train_on_input: false\n")
    assert not read(masked).manifest.training.config.train_on_prompt
    assert not read(TUNE).manifest.training.config.train_on_prompt
    assert "instruct_dataset' is a Python class, which is not run" in error_of(text)


def test_rows_lengths_and_batches_of_torchtune_are_those_of_its_sections():
    text = TUNE.replace("  source: json\n  data_files: rows.json\n", "  source: owner/a\n")
    text = text.replace("  packed: true\n", "  packed: true\n  split: part\n")
    text += "tokenizer: {max_seq_len: 512}\nrun_val_every_n_steps: 9\n"
    text += "dataset_val: {_component_: x.chat_dataset, source: json, data_files: [b.json]}\n"
    training = read(text).manifest.training
    assert (training.dataset.path, training.dataset.validation_path) == ("owner/a::part", "b.json")
    assert (training.config.max_seq_length, training.config.eval_steps) == (512, 9)
    assert (training.config.batch_size, training.config.batch_tokens) == ("auto", 2 * 512)
    found = read(f"{TUNE}mixed_precision: {{enabled: false}}\n")
    assert "mixed_precision" in [notice.path for notice in found.notices]
    system = text.replace("  packed: true\n", "  new_system_prompt: Be brief.\n")
    assert "'Be brief.': system messages come from the rows" in error_of(system)


def tune_model(arguments: str) -> str:
    component = "_component_: torchtune.models.x.lora_x, lora_rank: 4"
    return f"model: {{{component}, {arguments}}}\n"


def tune_rows(arguments: str = "") -> str:
    component = "_component_: torchtune.datasets.chat_dataset, source: owner/a"
    return f"dataset: {{{component}, {arguments}}}\n"


BOTH = tune_model("quantize_base: true, use_dora: true")
WHOLE_MAP = tune_rows("column_map: {instruction: a, input: b, output: c}")
SHORT_MAP = tune_rows("column_map: {input: b, output: c}")
TALK = tune_rows("column_map: {conversations: talk}")


@each(
    ("text", "path", "value"),
    [
        (BOTH, "model.quantization", "int4"),
        (BOTH, "config.adapter_type", "dora"),
        (TALK, "data.field_mapping.messages", "talk"),
        (WHOLE_MAP, "data.field_mapping.input", "b"),
        (SHORT_MAP, "data.field_mapping.instruction", "b"),
        (tune_rows("masking_strategy: train_on_all"), "config.train_on_prompt", True),
        (tune_rows() + "save_every_n_steps: 5\n", "config.save_steps", 5),
        (tune_rows() + "batch_size_val: 5\n", "config.eval_batch_size", 5),
    ],
)
def test_arguments_of_torchtunes_classes_are_read(text, path, value):
    rows = "" if "dataset:" in text else "dataset: a.jsonl\n"
    assert value_at(read(f"base_model: tiny\n{rows}{text}"), path) == value


def test_arguments_of_torchtunes_classes_that_cannot_be_read_are_reported():
    model = "base_model: tiny\ndataset: a.jsonl\n"
    head = error_of(model + tune_model("apply_lora_to_output: true"))
    assert "the head cannot have an adapter" in head
    assert "lora_attn_modules" in error_of(model + tune_model("lora_attn_modules: q_proj"))
    for kind in ("lora_x", "x"):
        odd = model + tune_model("max_seq_len: 9").replace("lora_x,", f"{kind},")
        told = {notice.path: notice.kind for notice in read(odd).notices}
        assert told["model.max_seq_len"] == "warning"
    rows = "base_model: tiny\n"
    last = error_of(rows + tune_rows("masking_strategy: train_on_last"))
    assert "dataset.masking_strategy" in last
    images = read(rows + tune_rows("column_map: {image: picture}")).notices
    assert "dataset.column_map.image" in [notice.path for notice in images]


# --- mlx-lm, AutoTrain, mixtures -----------------------------------------------------------------


def test_iterations_and_scales_of_mlx_are_steps_and_alphas():
    text = "model: tiny\ndata: rows.jsonl\niters: 50\nsave_every: 10\nsteps_per_eval: 5\n"
    text += "lora_parameters: {keys: [self_attn.q_proj], rank: 4, scale: 2.0}\n"
    text += "fine_tune_type: dora\n"
    config = read(text + "num_layers: -1\n").manifest.training.config
    assert (config.max_steps, config.save_steps, config.eval_steps) == (50, 10, 5)
    assert (config.adapter_type, config.rank, config.alpha) == ("dora", 4, 8)
    assert (config.target_modules, config.train_on_prompt) == (["q_proj"], True)
    assert "the last 16 blocks, but every block gets an adapter here" in error_of(
        text + "num_layers: 16\n"
    )


def test_every_key_of_mlx_is_read_or_answered():
    text = "model: tiny\ndata: rows.jsonl\niters: 50\nnum_layers: -1\ngrad_accumulation_steps: 2\n"
    quiet = "train: true\ntest: false\nval_batches: 25\ntest_batches: 9\nadapter_path: adapters\n"
    found = read(f"{text}{quiet}resume_adapter_file: null\n")
    assert found.manifest.training.config.gradient_accumulation_steps == 2
    assert [notice for notice in found.notices if notice.kind == "warning"] == []
    superseded = {notice.path for notice in found.notices if notice.kind == "superseded"}
    assert superseded >= {"train", "test", "val_batches", "test_batches", "adapter_path"}
    assert "training cannot start from a finished adapter" in error_of(
        f"{text}resume_adapter_file: a\n"
    )


@each(
    ("more", "noted"),
    [
        ("", True),
        ("use_peft: false\n", False),
        ("lora_r: 8\n", False),
        ("full_finetuning: true\n", False),
        ("use_dora: true\n", False),
        ("training: {adapter_type: full}\n", False),
    ],
)
def test_a_file_of_trl_that_is_silent_about_the_adapter_gets_a_note(more, noted):
    said = notices_of(f"model_name_or_path: tiny\ndataset_name: owner/set\n{more}")
    assert (
        any(
            "note: a lora adapter is trained; TRL's default is all weights," in line
            for line in said
        )
        == noted
    )


def test_a_length_in_tokens_of_litgpt_is_warned_of():
    text = "checkpoint_dir: tiny\ndata: Alpaca\ntrain: {global_batch_size: 2, max_tokens: 1000}\n"
    assert any(
        "train.max_tokens: warning: without effect: max_steps or epochs end a run" in line
        for line in notices_of(text)
    )


@each(
    ("line", "note"),
    [
        (
            "assistant_only_loss: true",
            (
                "note: of conversations, only answers are trained on; TRL's default is "
                "train_on_prompt: true"
            ),
        ),
        ("lr_scheduler_type: linear", "the learning rate falls like a cosine; TRL's default"),
    ],
)
def test_a_file_of_trl_that_is_silent_about_the_loss_or_the_schedule_gets_a_note(line, note):
    text = "model_name_or_path: tiny\ndataset_name: owner/set\n"
    assert any(note in notice for notice in notices_of(text))
    assert not any(note in notice for notice in notices_of(f"{text}{line}\n"))
