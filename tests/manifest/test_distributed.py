"""FSDP, DeepSpeed, DDP, Lightning's strategies and accelerate's file, as `distributed`: every key
is honoured, refused, or superseded with a notice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from expert.manifest.peers.distributed import DISTRIBUTED_KEYS
from expert.manifest.reader import ReadManifest, read_manifest
from tests.each import each
from tests.manifest.reading import MANIFESTS, MINIMAL, WHOLE, error_of, problems_of, read

DUMP = """fsdp: []
fsdp_config: {min_num_params: 0, xla: false, xla_fsdp_v2: false}
deepspeed: null
ddp_timeout: 1800
local_rank: 0"""
OF_LIGHTNING = "lightning.pytorch.strategies"
ENGINES = {
    "auto": [
        *("", DUMP, "fsdp: shard_grad_op", "fsdp: []", 'fsdp: ""', "fsdp: false"),
        *("fsdp_cpu_offload: false", "strategy: auto", "strategy: deepspeed"),
        *("strategy: deepspeed_stage_2", "deepspeed: mine.json"),
    ],
    "replicated": [
        *("distributed: DDP", "fsdp: no_shard", "strategy: ddp"),
        "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}",
        "strategy: ddp_find_unused_parameters_true",
        f"strategy: {{class_path: {OF_LIGHTNING}.DDPStrategy}}",
        "deepspeed: examples/deepspeed/ds_z0_config.json",
    ],
    "sharded": [
        *("distributed: fsdp", "distributed: sharded", "fsdp: true", "fsdp: hybrid_shard"),
        *("fsdp: full_shard auto_wrap", "fsdp: [full_shard, auto_wrap, offload]"),
        *("fsdp: [auto_wrap]", "fsdp_config: {sharding_strategy: FULL_SHARD}"),
        *("fsdp_config: {sharding_strategy: 1}", "fsdp_config: {sharding_strategy: HYBRID_SHARD}"),
        *("fsdp_cpu_offload: true", "strategy: fsdp", "strategy: deepspeed_stage_3"),
        "strategy: deepspeed_stage_3_offload",
        f"strategy: {{class_path: {OF_LIGHTNING}.FSDPStrategy, init_args: {{}}}}",
        "deepspeed: deepspeed_configs/zero3_bf16.json",  # by its name: it is not there
    ],
}


@each(("line", "engine"), [(line, kind) for kind, lines in ENGINES.items() for line in lines])
def test_keys_of_other_trainers_set_the_engine(line, engine):
    made = read(f"{MINIMAL}{line}\n")
    assert made.manifest.training.config.distributed == engine
    key, _, value = line.partition(": ")
    if key in ("fsdp", "strategy"):
        assert bool(kinds(made, key)) == (value not in ("[]", '""', "false", DUMP[6:]))
    if "\n" not in line and key in ("fsdp", "deepspeed"):
        whole = read(f"{WHOLE}    {line}\n").manifest.training.config
        assert whole.distributed == engine


def test_what_the_engine_cannot_say_is_a_notice_and_a_word_about_an_expert_is_left_alone():
    offloads = read(MINIMAL + "fsdp_cpu_offload: true\n")
    assert kinds(offloads, "fsdp_cpu_offload") == {"read as", "superseded"}
    assert kinds(read(MINIMAL + "deepspeed: mine.json\n"), "deepspeed") == {"warning"}
    described = read(WHOLE + "strategy: careful answers\n")
    assert described.manifest.training.config.distributed == "auto"


def kinds(made: ReadManifest, key: str) -> set[str]:
    """The kinds of notices about a key."""
    return {n.kind for n in made.notices if n.path.replace(": ", ".").split(".")[-1] == key}


# --- FSDP ----------------------------------------------------------------------------------------


def test_keys_of_fsdp_mean_the_same_with_and_without_their_prefix():
    text = (MANIFESTS / "peers" / "fsdp.yaml").read_text(encoding="utf-8")
    plain, prefixed = (read(each) for each in (text, text.replace("\n  ", "\n  fsdp_")))
    assert plain.manifest == prefixed.manifest
    assert [(n.kind, n.text) for n in plain.notices] == [(n.kind, n.text) for n in prefixed.notices]


# --- DeepSpeed -----------------------------------------------------------------------------------


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": True, **more},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


@each(("stage", "engine"), [(0, "replicated"), (1, "auto"), (2, "auto"), (3, "sharded")])
def test_a_zero_config_is_read_inline_and_from_its_file(tmp_path, stage, engine):
    inline = read(f"{MINIMAL}deepspeed: {json.dumps(zero(stage))}\n")
    assert inline.manifest.training.config.distributed == engine
    (tmp_path / "ds.json").write_text(json.dumps(zero(stage)), encoding="utf-8")
    (tmp_path / "m.yaml").write_text(f"{MINIMAL}deepspeed: ds.json\n", encoding="utf-8")
    made = read_manifest(tmp_path / "m.yaml")
    assert made.manifest.training.config.distributed == engine
    assert kinds(made, "stage") == {"read as"}
    [unused] = [n for n in made.notices if "overlap_comm" in n.text]
    assert "wall_clock_breakdown" in unused.text
    assert unused.kind == "superseded"


def test_offloading_of_zero_is_left_to_the_plan():
    for key in ("offload_optimizer", "offload_param"):
        made = read(f"{MINIMAL}deepspeed: {json.dumps(zero(3, **{key: {'device': 'cpu'}}))}\n")
        assert kinds(made, "device") == {"superseded"}
        silent = read(f"{MINIMAL}deepspeed: {json.dumps(zero(3, **{key: {'device': 'none'}}))}\n")
        assert kinds(silent, "device") == set()


@each("text", ["{", "[1]", '"x"'])
def test_a_file_that_is_no_config_is_an_error_with_its_name(tmp_path, text):
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    (tmp_path / "m.yaml").write_text(f"{MINIMAL}deepspeed: ds.json\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"ds\.json"):
        read_manifest(tmp_path / "m.yaml")


CONTRADICTIONS = """
max_grad_norm: 0.5
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
bf16: false
deepspeed:
  zero_optimization: {stage: 3}
  gradient_clipping: 1.0
  train_micro_batch_size_per_gpu: 8
  gradient_accumulation_steps: 4
  bf16: {enabled: true}
"""


def test_values_that_contradict_the_manifest_are_named_all_at_once():
    text = error_of(MINIMAL + CONTRADICTIONS)
    for pair in (
        ("deepspeed.gradient_clipping: is 1.0", "max_grad_norm is 0.5"),
        ("deepspeed.train_micro_batch_size_per_gpu: is 8", "per_device_train_batch_size is 4"),
        ("deepspeed.gradient_accumulation_steps: is 4", "gradient_accumulation_steps is 2"),
        ("deepspeed.bf16.enabled: is true", "bf16 is false"),
    ):
        assert all(words in text for words in pair), pair
    assert len(text.splitlines()) == 5


# --- strategies, accelerate, DDP -----------------------------------------------------------------


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {type}
{section}
downcast_bf16: 'no'
machine_rank: 1
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: false
"""


@each(
    ("kind", "section", "engine"),
    [
        ("'NO'", "", "auto"),
        ("MULTI_GPU", "", "replicated"),
        ("FSDP", "fsdp_config: {fsdp_version: 2}", "sharded"),
        ("DEEPSPEED", "deepspeed_config: {zero_stage: 3, zero3_init_flag: true}", "sharded"),
        ("DEEPSPEED", "deepspeed_config: {deepspeed_config_file: ds_z3.json}", "sharded"),
        ("DEEPSPEED", "deepspeed_config: {zero_stage: 2, offload_param_device: cpu}", "auto"),
    ],
)
def test_the_keys_of_accelerates_file_are_read(kind, section, engine):
    made = read(MINIMAL + ACCELERATE.format(type=kind, section=section))
    config = made.manifest.training.config
    assert (config.distributed, config.bf16) == (engine, True)
    for key in ("num_processes", "num_machines", "machine_rank"):
        assert kinds(made, key) == {"superseded"}, key


@each(
    "line",
    [
        *("fsdp: half_shard", "fsdp: {a: 1}", "fsdp_config: 3", "distributed: everywhere"),
        *("fsdp_config: {sharding_strategy: SOME}", "fsdp_offload_params: maybe", "deepspeed: 3"),
        *("deepspeed: {zero_optimization: {stage: 4}}", "strategy: tpu", "distributed_type: XLA"),
        "deepspeed: {zero_optimization: {stage: true}}",
    ],
)
def test_a_value_that_means_nothing_is_refused_with_those_that_do(line):
    text = error_of(f"{MINIMAL}{line}\n")
    assert line.partition(":")[0] in text
    assert "expected" in text
    # And so are two keys that say the opposite.
    assert "strategy" in error_of(MINIMAL + "fsdp: full_shard\nstrategy: ddp\n")
    assert "fsdp" in error_of(MINIMAL + "distributed: replicated\nfsdp: full_shard\n")


@each("value", [None, False, True, 0, 3, 1.5, "", "x", [], ["x"], {}, {"a": 1}])
@each("key", DISTRIBUTED_KEYS)
def test_any_value_is_read_or_refused_and_never_breaks(key, value):
    found = problems_of({"base_model": "X", "dataset": "a.jsonl", key: value})
    assert all(key in problem.path for problem in found)
