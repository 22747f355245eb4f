"""Defaults of other trainers that differ from those of Expert: written out where a file does not
set them, so that it trains as it does there."""

from __future__ import annotations

from expert.manifest.migrate.aliases import canonical_path
from expert.manifest.migrate.migration import NULL_IS_A_VALUE, Entries, Migration, with_value
from expert.manifest.peers.packed_batches import MODEL_NAMES, int_or_zero
from expert.manifest.text.item import Item


def put_default(
    work: Migration, key: str, value: str | float, text: str, at: Item | None = None
) -> None:
    """Set a key of training.config that the file does not set, with a notice."""
    home = f"training.config.{key}"
    is_set = any(
        canonical_path(name) == home and (item.value is not None or key in NULL_IS_A_VALUE)
        for zone in (work.root, work.section("training"))
        for name, item in zone.items()
    )
    if not is_set and not work.is_override and not work.is_expert_manifest:
        item = Item(None, key) if at is None else at
        work.root[key] = with_value(item, value)
        work.read_as(item, f"{home}: {value} ({text})")


def default_no_clipping(work: Migration, trainer: str, at: Item | None = None) -> None:
    put_default(work, "max_grad_norm", 0, f"no clipping, {trainer}'s default", at)


def default_constant_rate(work: Migration, trainer: str) -> None:
    """A constant learning rate without a warm-up."""
    put_default(work, "lr_scheduler", "constant", f"{trainer}'s default")
    if "warmup_ratio" not in work.root:
        put_default(work, "warmup_steps", 0, f"{trainer}'s default")


def read_lengths(work: Migration) -> None:
    """In Transformers, TRL, Unsloth and LLaMA-Factory, steps overrule epochs and shares."""
    if work.is_expert_manifest or not {*MODEL_NAMES} & {*work.root}:
        return
    steps_overrule_epochs(work, work.root)
    warmup, share = (work.root.get(key, Item(None)) for key in ("warmup_steps", "warmup_ratio"))
    if int_or_zero(warmup) > 0 and share.value:
        work.supersede(work.root.pop("warmup_ratio"), "warmup_steps takes precedence there")


def steps_overrule_epochs(work: Migration, zone: Entries) -> None:
    """For trainers where max_steps alone ends a run: in Expert the epochs may end it first, so they
    are set high enough. An epoch has at least one step."""
    limit = zone.get("max_steps", Item(None))
    if int_or_zero(limit) <= 0 or "epochs" in zone:  # a key of Expert: whichever is reached first
        return
    for key in [key for key in zone if canonical_path(key) == "training.config.epochs"]:
        item = zone.pop(key)
        if item.value is not None:
            work.supersede(item, "max_steps alone ends a run there")
    zone["epochs"] = with_value(limit, limit.value)
    work.read_as(limit, f"training.config.epochs: {limit.value} (so that max_steps ends the run)")
