"""Defaults of other trainers that differ from ours, written out where a file leaves them to its
trainer: the same file trains the same."""

from __future__ import annotations

from expert.manifest.migrate.aliases import home_of
from expert.manifest.migrate.migration import Migration, beside
from expert.manifest.text.item import Item


def put_default(
    work: Migration, key: str, value: str | float, text: str, at: Item | None = None
) -> None:
    """Set a key of training.config that the file does not set, with a notice."""
    config = work.config.fields() if work.config is not None else {}
    home = f"training.config.{key}"
    written = [*work.root, *work.section("training"), *config]
    if home not in map(home_of, written):
        item = Item(None, key) if at is None else at
        work.root[key] = beside(item, value)
        work.read_as(item, f"{home}: {value} ({text})")


def no_clipping(work: Migration, trainer: str, at: Item | None = None) -> None:
    put_default(work, "max_grad_norm", 0, f"no clipping, {trainer}'s default", at)


def constant_rate(work: Migration, trainer: str) -> None:
    """A constant learning rate without a warm-up."""
    put_default(work, "lr_scheduler", "constant", f"{trainer}'s default")
    if "warmup_ratio" not in work.root:
        put_default(work, "warmup_steps", 0, f"{trainer}'s default")
