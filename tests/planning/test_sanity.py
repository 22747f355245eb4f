"""Settings that train nothing or make training diverge are warned about before the run."""

from __future__ import annotations

from tests.each import each
from tests.planning.planning import manifest, plan

RATE = "optim.learning_rate"
RISES = {"lr_scheduler_kwargs": {"min_lr": 0.1}}


@each(
    "config, path, text",
    [
        ({"learning_rate": 0.5}, RATE, "nearly every run with adamw_torch_fused diverge"),
        ({"learning_rate": 1e-12}, RATE, "hardly a weight changes"),
        (RISES, "optim.scheduler_options", "the rate rises"),
        ({"warmup_ratio": 1.0}, "optim.warmup_ratio", "never reaches its peak"),
        ({"max_steps": 5, "warmup_steps": 100}, "optim.warmup_steps", "never reaches its peak"),
        ({"max_steps": 5, "eval_steps": 100}, "watch.eval_steps", "more than the 5"),
    ],
)
def test_what_trains_nothing_or_diverges_is_a_warning_of_the_plan(config, path, text):
    said = [remark for remark in plan(manifest(config)).remarks if remark.path == path]
    assert any(text in remark.text for remark in said)
    assert {remark.kind for remark in said} == {"warning"}
