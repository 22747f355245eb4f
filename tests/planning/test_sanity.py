"""Settings that prevent training or make it diverge are warned about before the run."""

from __future__ import annotations

from tests.each import each
from tests.planning.planning import manifest, plan

DECAY, RATE = "optim.weight_decay", "optim.learning_rate"
RISES = {"lr_scheduler_kwargs": {"min_lr": 0.1}}
NEVER = {"early_stopping_patience": 2, "early_stopping_threshold": 1e3, "max_steps": 5}


@each(
    "config, path, text",
    [
        (
            {"dropout": 1.0},
            "adapter.dropout",
            "1 drops every input of the adapter: nothing is trained  (usual: 0 to 0.1)",
        ),
        (
            {"dropout": 0.9},
            "adapter.dropout",
            "0.9 drops 90 % of the adapter's inputs  (usual: 0 to 0.1)",
        ),
        (
            {"weight_decay": 1e10},
            DECAY,
            (
                "1e+10 at a learning rate of 0.0002: every step multiplies each weight by "
                "-2e+06, and they explode  (usual: 0 to 0.1)"
            ),
        ),
        (
            {"weight_decay": 5000, "learning_rate": 2e-4},
            DECAY,
            (
                "5000 at a learning rate of 0.0002: nearly nothing is left of a weight after "
                "each step  (usual: 0 to 0.1)"
            ),
        ),
        (
            {"weight_decay": 200, "learning_rate": 2e-4},
            DECAY,
            (
                "200 at a learning rate of 0.0002: every step takes away 4 % of each weight  "
                "(usual: 0 to 0.1)"
            ),
        ),
        ({"learning_rate": 0.5}, RATE, "0.5 makes nearly every run with adamw_torch_fused diverge"),
        ({"learning_rate": 1e-12}, RATE, "1e-12 is so small that hardly a weight changes"),
        (
            {"adam_epsilon": 1.0},
            "optim.epsilon",
            "1 is larger than most gradients: hardly a weight changes  (usual: 1e-8)",
        ),
        (
            {"max_grad_norm": 1e-9},
            "optim.max_grad_norm",
            "gradients scaled down to 1e-09 hardly change a weight  (usual: 1; 0: none)",
        ),
        (
            RISES,
            "optim.scheduler_options",
            "min_lr 0.1 is above the learning rate of 0.0002: the rate rises",
        ),
        (
            {"warmup_ratio": 1.0},
            "optim.warmup_ratio",
            "100 % of the run is warm-up: the learning rate never reaches its peak",
        ),
        (
            NEVER,
            "watch.early_stopping_threshold",
            "no evaluation improves by 1000: the run ends after 2 of them",
        ),
    ],
)
def test_what_trains_nothing_or_explodes_is_a_warning_of_the_plan(config, path, text):
    said = [remark for remark in plan(manifest(config)).remarks if remark.path == path]
    assert text in [remark.text for remark in said]
    assert {remark.kind for remark in said} == {"warning"}


@each(
    "config",
    [
        {},
        {"dropout": 0.5, "weight_decay": 0.1, "learning_rate": 1e-3},
        {"optim": "sgd", "learning_rate": 0.5},
        {"max_grad_norm": 0, "warmup_ratio": 0.5},
        {"warmup_steps": 5, "max_steps": 5, "early_stopping_patience": 1},
        {"adapter_type": "full", "weight_decay": 1.0},
    ],
)
def test_unusual_settings_that_do_train_are_not_doubted(config):
    doubted = ("adapter.dropout", "optim.weight_decay", "optim.epsilon", "optim.max_grad_norm")
    more = ("optim.warmup_ratio", "optim.warmup_steps", "optim.scheduler_options")
    paths = {remark.path for remark in plan(manifest(config)).remarks}
    assert paths.isdisjoint({*doubted, *more, "watch.early_stopping_threshold"})
