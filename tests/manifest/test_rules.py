"""Rules over several keys: each fires where it should, and only there."""

from __future__ import annotations

from tests.each import each
from tests.manifest.reading import MINIMAL, error_of, notices_of, read


@each(
    "text",
    [
        "bf16: true\nfp16: false",
        "adapter_type: ia3\nrank: auto",
        "adapter_type: ia3\ntarget_modules: [k_proj, down_proj]\nfeedforward_modules: [down_proj]",
        "lr_scheduler: polynomial\nlr_scheduler_kwargs: {power: 2, lr_end: 0}",
        "lr_scheduler: cosine\nlr_scheduler_kwargs: {num_cycles: 1, min_lr: 0, power: null}",
        "save_strategy: steps\nsave_steps: 5",
        "evaluation_strategy: steps\neval_steps: 5\nearly_stopping_patience: 2",
        "evaluation_strategy: 'no'\nload_best_model_at_end: false",
        "early_stopping_patience: 2\nearly_stopping_threshold: 0.1",
        "output_dir: runs/deep",
        "output_dir: a..b",
        "text_field: a\nfield_mapping: {text: a}",
        "training: {packaging_checkpoint: checkpoint-0}",
        "soft_prompts: [{name: p, init_method: text, init_text: hello}]\nadapter_type: none",
    ],
)
def test_a_rule_leaves_right_settings_alone(text: str):
    assert read(MINIMAL + text).manifest.name == "m"


TASKS = "base_model: X\ntraining:\n  dataset:\n    tasks:\n      a: {train: x.jsonl}\n"


@each(
    ("text", "problem"),
    [
        (  # found beside a task without a dot
            TASKS + "      a.b:\n        train: ../x.jsonl\n",
            "line 7: training.dataset.tasks.a.b.train: '../x.jsonl'",
        ),
        (
            "base_models: [X, {name: Y, quantization: int8}]\ndataset: a\nadapter_type: full",
            "line 1: base_models[1].quantization: adapter_type full cannot train an int8 base",
        ),
        *(
            (
                MINIMAL + f"training: {{packaging_checkpoint: '{checkpoint}'}}",
                f"got {checkpoint!r}, expected final, best or checkpoint-N",
            )
            for checkpoint in ("/etc", "checkpoint-", "checkpoint-1/..", "Final", "weights")
        ),
    ],
)
def test_a_problem_has_the_path_and_the_line_of_what_is_wrong(text: str, problem: str):
    assert problem in error_of(text)


@each(
    ("text", "notice"),
    [
        ("group_by_length: true\npacking: false", None),
        ("use_sdpa: true\npacking: false", None),
        ("warmup_ratio: 0.1\nwarmup_steps: 0", None),
        (
            "dataloader_persistent_workers: false\ndataloader_num_workers: 2",
            "line 3: dataloader_persistent_workers: not used here: workers stay for the whole run",
        ),
        ("attention: sdpa\nflash_attention_2: false\npacking: false", None),
        ("validation_path: b.jsonl\nvalidation_split: 0\nearly_stopping_patience: 2", None),
        (
            "validation_split: 0\nearly_stopping_patience: 2",
            "line 4: early_stopping_patience: not used here: there are no validation rows "
            "(validation_split is 0)",
        ),
        ("attention: sdpa\npacking: false", None),
        ("greater_is_better: true\nmetric_for_best_model: eval_token_accuracy", None),
        ("adapter_type: ia3\ndropout: 0.1", "line 4: dropout: not used here: ia3 has no dropout"),
        (
            "soft_prompts: [{name: p}]\nadapter_type: none\ndropout: 0.1",
            "line 5: dropout: not used here: adapter_type none: only soft prompts are trained",
        ),
        (
            "flash_attention_2: true",
            (
                "line 3: flash_attention_2: not used here: flash kernels are used "
                "where the card has them; no package is needed"
            ),
        ),
    ],
)
def test_a_notice_comes_only_where_a_key_is_overruled(text: str, notice: str | None):
    told = [line for line in notices_of(MINIMAL + text) if ": read as " not in line]
    assert told == ([notice] if notice else [])
