"""The cheapest change of the manifest that makes a plan fit which does not: found by planning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from expert.core.text import gib
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.decisions import REQUESTED
from expert.planning.draft import PlanDraft

NOTHING_FITS = "no setting makes this model fit here: take a smaller model or a larger card"
SMALLEST_RANK = 4
SHORTEST_ADVISED = 64


class Saving(NamedTuple):
    """Values of training.config, or a quantisation of the base, that take less memory."""

    cost: int
    """Orders savings: first what changes no result, then what changes least."""
    values: dict[str, Any]


def suggest_savings(draft: PlanDraft, settle: Callable[[PlanDraft], None]) -> None:
    """Report what would make it fit, or fit without offloading on a single card. `settle` makes all
    choices of a draft."""
    too_large = draft["memory.fits"] is False
    if not too_large and not (draft["parallel.offload"] and draft.cluster.ranks == 1):
        return

    def suffice(savings: list[Saving]) -> bool:
        # The draft of the manifest with these values, before any choice.
        values = _values(savings)
        model, manifest = draft.model, draft.manifest
        if quantization := values.pop("quantization", None):
            model = model.model_copy(update={"quantization": quantization})
        models = [model if spec is draft.model else spec for spec in manifest.base_models]
        config = manifest.training.config.model_copy(update=values)
        training = manifest.training.model_copy(update={"config": config})
        manifest = manifest.model_copy(update={"training": training, "base_models": models})
        other = replace(draft, manifest=manifest, model=model, decisions={}, remarks=[])
        settle(other)
        return other["memory.fits"] is True and (too_large or not other["parallel.offload"])

    found = _cheapest(sorted(_savings(draft), key=lambda saving: saving.cost), suffice)
    words = NOTHING_FITS
    if found:
        place = [spec is draft.model for spec in draft.manifest.base_models].index(True)
        of_model = f"base_models.{place}." if place else ""
        names = {"quantization": f"{of_model}quantization"}
        options = (f"--set {names.get(key, key)}={v}" for key, v in _values(found).items())
        words = f"{' '.join(options)} fits{'' if too_large else ' without it'}"
    if too_large:
        needed, budget = draft["memory.peak_bytes"], draft["memory.budget_bytes"]
        draft.warn("memory.fits", f"needs {gib(needed)} and has {gib(budget)}: {words}")
    else:
        draft.warn("parallel.offload", f"on the card alone: {words}")


def _cheapest(savings: list[Saving], suffice: Callable[[list[Saving]], bool]) -> list[Saving]:
    """The cheapest saving that suffices, else the cheapest that do so together without those that
    are not needed; none if all together do not."""
    if not suffice(savings):
        return []
    alone = next((saving for saving in savings if suffice([saving])), None)
    if alone is not None:
        return [alone]
    growing = (savings[:count] for count in range(2, len(savings) + 1))
    taken = next(some for some in growing if suffice(some))
    for saving in reversed(taken):
        fewer = [other for other in taken if other is not saving]
        taken = fewer if suffice(fewer) else taken
    return taken


def _values(savings: list[Saving]) -> dict[str, Any]:
    """The values of several savings together; of a smaller and a larger one, the larger."""
    return {key: value for saving in savings for key, value in saving.values.items()}


def _savings(draft: PlanDraft) -> list[Saving]:
    """Every saving that this model and device leave."""
    config, full = draft.config, draft["adapter.type"] == "full"
    wasteful = {
        "fused_loss": config.fused_loss is False,
        "attention": config.attention == "eager",
        "micro_batch_size": config.micro_batch_size not in ("auto", 1),
        "gradient_checkpointing": config.gradient_checkpointing not in ("auto", True, "full"),
        "use_cuda_graphs": config.use_cuda_graphs is True,
        "distributed": config.distributed == "replicated",
    }
    found = [Saving(1, {key: "auto"}) for key, wastes in wasteful.items() if wastes]
    optimizer = OPTIMIZERS[draft["optim.optimizer"]]
    if draft.on_gpu and optimizer.state_bytes == OPTIMIZERS["adamw_torch"].state_bytes:
        found.append(Saving(3, {"optim": "adamw_bnb_8bit"}))
    elif draft.on_gpu and full and optimizer.not_shardable:  # others can be offloaded
        found.append(Saving(8, {"optim": "auto"}))
    if draft.is_char_model:
        return found
    rank, alpha = draft["adapter.rank"], draft["adapter.alpha"]
    keeps_alpha = rank and alpha and draft.decisions["adapter.alpha"].source in REQUESTED
    cost = 4
    while rank and rank // 2 >= SMALLEST_RANK:
        rank //= 2
        scaled = {"alpha": max(1, round(alpha * rank / draft["adapter.rank"]))}
        found.append(Saving(cost, {"rank": rank, **(scaled if keeps_alpha else {})}))
        cost += 2
    length, longest = draft["data.max_seq_length"], draft.survey.longest_tokens
    cost = 5
    while length // 2 >= SHORTEST_ADVISED:
        length //= 2
        cuts = longest is None or longest > length
        found.append(Saving(cost if cuts else 2, {"max_seq_length": length}))
        cost += 4
    may_quantise = draft.on_gpu and draft["model.quantization"] != "int4"
    if draft["adapter.init"] == "pissa":  # whose base cannot be quantised
        may_quantise = False
        found.append(Saving(3, {"adapter_init": "default"}))
    if full:
        found.append(Saving(12, {"adapter_type": "lora"}))
    if full and may_quantise:
        found.append(Saving(14, {"adapter_type": "lora", "quantization": "int4"}))
    elif may_quantise:
        found.append(Saving(7, {"quantization": "int4"}))
    return found
