"""Settings that prevent training or make it diverge are warned about before the run."""

from __future__ import annotations

from tests.each import each
from tests.planning.planning import manifest, plan
from tests.wording import wording

DECAY, RATE = "optim.weight_decay", "optim.learning_rate"
RISES = {"lr_scheduler_kwargs": {"min_lr": 0.1}}
NEVER = {"early_stopping_patience": 2, "early_stopping_threshold": 1e3, "max_steps": 5}


@each(
    "config, path, text",
    [
        ({"dropout": 1.0}, "adapter.dropout", wording("dropout-trains-nothing")),
        ({"dropout": 0.9}, "adapter.dropout", wording("dropout-drops-much")),
        ({"weight_decay": 1e10}, DECAY, wording("decay-explodes")),
        ({"weight_decay": 5000, "learning_rate": 2e-4}, DECAY, wording("decay-takes-all")),
        ({"weight_decay": 200, "learning_rate": 2e-4}, DECAY, wording("decay-takes-much")),
        ({"learning_rate": 0.5}, RATE, wording("rate-diverges")),
        ({"learning_rate": 1e-12}, RATE, wording("rate-too-small")),
        ({"adam_epsilon": 1.0}, "optim.epsilon", wording("epsilon-too-large")),
        ({"max_grad_norm": 1e-9}, "optim.max_grad_norm", wording("norm-too-small")),
        (RISES, "optim.scheduler_options", wording("rate-rises")),
        ({"warmup_ratio": 1.0}, "optim.warmup_ratio", wording("warmup-is-all")),
        (NEVER, "watch.early_stopping_threshold", wording("never-improves")),
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
