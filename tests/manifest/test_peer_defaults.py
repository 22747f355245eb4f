"""What a file of another trainer leaves to that trainer is written out: the same file trains the
same. Also mlx-lm's schedules and the files of Unsloth Studio."""

from __future__ import annotations

from typing import Any

from expert.manifest.schema.config import TrainingConfig
from tests.each import each
from tests.manifest.reading import error_of, read, value_at

TUNE = """model: {_component_: torchtune.models.qwen2.qwen2_0_5b}
checkpointer: {checkpoint_dir: /m/small}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
"""
LITGPT = "checkpoint_dir: tiny\nlora_r: 8\ndata: Alpaca\ntrain: {global_batch_size: 2}\n"
MLX = "model: tiny\ndata: rows.jsonl\niters: 100\nlearning_rate: 1e-5\n"
FACTORY = "model_name_or_path: tiny\nstage: sft\ndataset: rows.jsonl\n"


def config_of(text: str) -> TrainingConfig:
    return read(text).manifest.training.config


def rates(text: str) -> tuple[Any, ...]:
    """Schedule, warm-up, clipping and decay."""
    config = config_of(text)
    return config.lr_scheduler, config.warmup_steps, config.max_grad_norm, config.weight_decay


def test_a_recipe_of_torchtune_without_a_schedule_has_a_constant_rate_and_no_clipping():
    assert rates(TUNE) == ("constant", 0, 0, 0.01)
    told = {notice.path for notice in read(TUNE).notices}
    assert told >= {"lr_scheduler", "warmup_steps", "max_grad_norm", "optimizer._component_"}
    assert rates(f"{TUNE}clip_grad_norm: null\n")[2] is None
    assert rates(f"{TUNE}clip_grad_norm: 0.5\n")[2] == 0.5
    schedule = "{_component_: torchtune.x.get_cosine_schedule_with_warmup, num_warmup_steps: 7}"
    assert rates(f"{TUNE}lr_scheduler: {schedule}\n")[:2] == ("cosine", 7)
    ours = f"{TUNE}training: {{max_grad_norm: 2, lr_scheduler: linear}}\n"
    assert rates(ours) == ("linear", 0, 2, 0.01)
    decay = TUNE.replace("lr: 2e-5", "lr: 2e-5, weight_decay: 0.2")
    assert rates(decay)[3] == 0.2


def test_litgpt_fine_tunes_without_clipping():
    assert config_of(LITGPT).max_grad_norm == 0
    null = LITGPT.replace("size: 2", "size: 2, max_norm: null")
    assert config_of(null).max_grad_norm == 0
    assert config_of(LITGPT.replace("size: 2", "size: 2, max_norm: 3")).max_grad_norm == 3


def test_llama_factory_has_rank_8_where_none_is_given():
    assert config_of(FACTORY).rank == 8
    assert config_of(f"{FACTORY}lora_rank: null\n").rank == 8
    assert config_of(f"{FACTORY}lora_rank: 4\n").rank == 4
    assert config_of(f"{FACTORY}finetuning_type: full\n").rank == "auto"
    assert config_of(FACTORY.replace("stage: sft\n", "")).rank == "auto"


@each(
    ("more", "made"),
    [
        ("", ("constant", 0, 0, 0)),
        ("optimizer: adamw\n", ("constant", 0, 0, 0.01)),
        (
            "optimizer: adamw\noptimizer_config: {adamw: {weight_decay: 0.2, eps: 1e-6}}\n",
            ("constant", 0, 0, 0.2),
        ),
        (
            "lr_schedule: {name: cosine_decay, warmup: 9, arguments: [1e-4, 91, 1e-6]}\n",
            ("cosine", 9, 0, 0),
        ),
        (
            "lr_schedule: {name: linear_schedule, arguments: [1e-4, 1e-6, 100]}\n",
            ("polynomial", 0, 0, 0),
        ),
    ],
)
def test_schedule_and_optimizer_of_mlx(more, made):
    assert rates(MLX + more) == made
    assert config_of(MLX + more).learning_rate == (1e-4 if "lr_schedule" in more else 1e-5)


def test_the_final_rate_and_an_unknown_schedule_of_mlx():
    text = f"{MLX}lr_schedule: {{name: NAME, arguments: [1e-4, 1e-6, 100]}}\n"
    linear = config_of(text.replace("NAME", "linear_schedule"))
    assert linear.lr_scheduler_kwargs.lr_end == 1e-6
    cosine = f"{MLX}lr_schedule: {{name: cosine_decay, arguments: [1e-4, 100, 1e-6]}}\n"
    assert config_of(cosine).lr_scheduler_kwargs.min_lr == 1e-6
    kinds = {notice.path: notice.kind for notice in read(cosine).notices}
    assert kinds["learning_rate"] == "superseded"
    short = cosine.replace("100, 1e-6", "50, 1e-6")
    assert ("lr_schedule.arguments", "warning") in [(n.path, n.kind) for n in read(short).notices]
    assert "is not a schedule that is known here" in error_of(text.replace("NAME", "step_decay"))


def test_iterations_of_mlx_are_divided_by_the_accumulation():
    text = f"{MLX}grad_accumulation_steps: 4\nsave_every: 50\nsteps_per_eval: 3\n"
    config = config_of(text)
    assert (config.max_steps, config.save_steps, config.eval_steps) == (25, 13, 1)


@each(("decay", "is_warned_of"), [(25, False), (24, True)])
def test_the_decay_of_mlx_is_compared_with_steps_not_with_iterations(decay, is_warned_of):
    text = f"{MLX}grad_accumulation_steps: 4\nlr_schedule: "
    text += f"{{name: cosine_decay, arguments: [1e-4, {decay}]}}\n"
    warned = ("lr_schedule.arguments", "warning") in [(n.path, n.kind) for n in read(text).notices]
    assert warned == is_warned_of


def test_an_option_named_like_a_key_of_mlx_changes_nothing_else():
    made = read("base_model: tiny\ndataset: a.jsonl\n", overrides=["iters=100"])
    config = made.manifest.training.config
    assert (config.max_steps, config.train_on_prompt, config.max_grad_norm) == (100, False, 1)


@each(
    ("text", "epochs"),
    [
        ("model_name_or_path: tiny\ndataset: a.jsonl\nmax_steps: 60\n", 60),
        ("model_name: tiny\ndataset: a.jsonl\nmax_steps: 60\nnum_train_epochs: 1\n", 60),
        ("model_name: tiny\ndataset: a.jsonl\nmax_steps: -1\nnum_train_epochs: 1\n", 1),
        ("base_model: tiny\ndataset: a.jsonl\nmax_steps: 60\n", 3),
        ("base_model: tiny\ndatasets: [a.jsonl]\nsequence_len: 8\nmax_steps: 60\n", 3),
        (MLX, 100),
    ],
)
def test_where_steps_alone_end_a_run_the_epochs_do_not_end_it_first(text, epochs):
    assert config_of(text).epochs == epochs


def test_a_warm_up_in_steps_overrules_its_share_in_files_of_trl():
    both = "dataset: a.jsonl\nwarmup_steps: 9\nwarmup_ratio: 0.1\n"
    theirs, ours = (config_of(f"{key}: tiny\n{both}") for key in ("model_name", "base_model"))
    assert (theirs.warmup_steps, theirs.warmup_ratio) == (9, None)
    assert (ours.warmup_steps, ours.warmup_ratio) == (9, 0.1)


# --- Unsloth Studio ------------------------------------------------------------------------------

STUDIO = """model: tiny
data: {dataset: owner/set}
training: {training_type: lora, load_in_4bit: true, num_epochs: 1, save_steps: 0, max_steps: 0,
  train_on_completions: false, gradient_checkpointing: unsloth}
lora: {lora_r: 8, lora_alpha: 16, target_modules: 'q_proj,v_proj', use_loftq: false}
logging: {enable_wandb: false, wandb_project: mine, enable_tensorboard: false, log_frequency: 3}
"""


FULL_STUDIO = STUDIO.replace("type: lora, load_in_4bit: true", "type: full")


@each(
    ("text", "values"),
    [
        (
            STUDIO,
            {
                **{"config.adapter_type": "lora", "config.rank": 8, "config.train_on_prompt": True},
                **{"config.target_modules": ["q_proj", "v_proj"], "config.save_strategy": "no"},
                **{"config.gradient_checkpointing": "auto", "config.logging_steps": 3},
                **{"config.trackers": ["tensorboard"], "model.quantization": "int4"},
                "data.path": "owner/set",
            },
        ),
        (STUDIO.replace("wandb: false", "wandb: true"), {"config.tracker_project": "mine"}),
        (
            STUDIO.replace("wandb: false, wandb_project: mine", "wandb: true"),
            {"config.trackers": ["tensorboard", "wandb"]},
        ),
        (
            STUDIO.replace("epochs: 1", "epochs: 0").replace("max_steps: 0", "max_steps: 9"),
            {"config.max_steps": 9},
        ),
        (FULL_STUDIO, {"config.rank": "auto", "config.adapter_type": "full"}),
    ],
)
def test_a_file_of_unsloth_studio_trains_what_it_says(text, values):
    assert {path: value_at(read(text), path) for path in values} == values


def test_what_unsloth_studio_has_and_expert_has_not_is_refused():
    assert "training.training_type" in error_of(STUDIO.replace("type: lora", "type: odd"))
    assert "lora.use_loftq" in error_of(STUDIO.replace("loftq: false", "loftq: true"))
