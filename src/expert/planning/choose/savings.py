"""The cheapest change of the manifest that makes a plan fit which does not: found by planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from expert.core.text import gib
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.decisions import REQUESTED
from expert.planning.draft import PlanDraft

NOTHING_FITS = "no setting makes this model fit here: take a smaller model or a larger card"
SMALLEST_RANK = 4
SHORTEST_ADVISED = 64
Settle = Callable[[PlanDraft], None]


class Saving(NamedTuple):
    """Keys of training.config, and a quantisation of the base, that take less memory."""

    cost: int
    """Orders savings: first what changes no result, then what changes least."""
    config: Mapping[str, Any]
    quantization: str | None = None


def suggest_savings(draft: PlanDraft, settle: Settle) -> None:
    """Report what would make it fit, or fit without offloading on a single card. `settle` makes all
    choices of a draft."""
    too_large = draft["memory.fits"] is False
    if not too_large and not (draft["parallel.offload"] and draft.cluster.ranks == 1):
        return
    found = _cheapest(draft, settle)
    if not too_large:
        what = f"{_as_options(draft, found)} fits without it" if found else NOTHING_FITS
        draft.warn("parallel.offload", f"on the card alone: {what}")
        return
    needed, budget = draft["memory.peak_bytes"], draft["memory.budget_bytes"]
    text = f"needs {gib(needed)} and has {gib(budget)}: "
    draft.warn(
        "memory.fits", text + (f"{_as_options(draft, found)} fits" if found else NOTHING_FITS)
    )


def _cheapest(draft: PlanDraft, settle: Settle) -> list[Saving]:
    """The cheapest saving that suffices, else as few as suffice together; none if all do not."""
    kinds = _savings(draft)

    def suffices(savings: Sequence[Saving]) -> bool:
        other = _changed(draft, savings)
        settle(other)
        offloads = other["parallel.offload"] and draft["memory.fits"] is True
        return other["memory.fits"] is True and not offloads

    def by_cost(saving: Saving) -> int:
        return saving.cost

    if not suffices([kind[-1] for kind in kinds]):
        return []
    for saving in sorted((saving for kind in kinds for saving in kind), key=by_cost):
        if suffices([saving]):
            return [saving]
    taken: list[Saving] = []
    for kind in sorted(kinds, key=lambda kind: kind[-1].cost):
        taken.append(kind[-1])
        if suffices(taken):
            break
    for saving in sorted(
        taken, key=by_cost, reverse=True
    ):  # leave out or weaken what is not needed
        place = taken.index(saving)
        [kind] = [kind for kind in kinds if saving in kind]
        for weaker in ([], *([each] for each in kind)):
            tried = [*taken[:place], *weaker, *taken[place + 1 :]]
            if suffices(tried):
                taken = tried
                break
    return taken


def _savings(draft: PlanDraft) -> list[list[Saving]]:
    """Every kind of saving that this model and device leave, each from the least to the most."""
    config, full = draft.config, draft["adapter.type"] == "full"
    kinds = [
        [Saving(1, {key: "auto"})]
        for key, wasteful in (
            ("fused_loss", config.fused_loss is False),
            ("attention", config.attention == "eager"),
            ("micro_batch_size", config.micro_batch_size not in ("auto", 1)),
            ("gradient_checkpointing", config.gradient_checkpointing not in ("auto", True, "full")),
            ("use_cuda_graphs", config.use_cuda_graphs is True),
            ("distributed", config.distributed == "replicated"),
        )
        if wasteful
    ]
    optimizer = OPTIMIZERS[draft["optim.optimizer"]]
    if draft.on_gpu and optimizer.state_bytes == OPTIMIZERS["adamw_torch"].state_bytes:
        kinds.append([Saving(3, {"optim": "adamw_bnb_8bit"})])
    elif draft.on_gpu and full and optimizer.not_shardable:  # others can be offloaded
        kinds.append([Saving(8, {"optim": "auto"})])
    if draft.is_char_model:
        return kinds
    rank, alpha = draft["adapter.rank"], draft["adapter.alpha"]
    keeps_alpha = rank and alpha and draft.decisions["adapter.alpha"].source in REQUESTED
    ranks, lengths = list[Saving](), list[Saving]()
    while rank and rank // 2 >= SMALLEST_RANK:
        rank //= 2
        scaled = {"alpha": max(1, round(alpha * rank / draft["adapter.rank"]))}
        values = {"rank": rank, **(scaled if keeps_alpha else {})}
        ranks.append(Saving(4 + 2 * len(ranks), values))
    length, longest = draft["data.max_seq_length"], draft.survey.longest_tokens
    while length // 2 >= SHORTEST_ADVISED:
        length //= 2
        cuts = longest is None or longest > length
        lengths.append(Saving(5 + 4 * len(lengths) if cuts else 2, {"max_seq_length": length}))
    quantised = [Saving(7, {}, "int4")]
    may_quantise = draft.on_gpu and draft["model.quantization"] != "int4"
    adapters = [Saving(12, {"adapter_type": "lora"})]
    if full and may_quantise:
        adapters.append(Saving(14, {"adapter_type": "lora"}, "int4"))
    kinds += [ranks, lengths, adapters if full else quantised if may_quantise else []]
    return [kind for kind in kinds if kind]


def _changed(draft: PlanDraft, savings: Sequence[Saving]) -> PlanDraft:
    """The draft of the manifest with these savings, before any choice."""
    config: dict[str, Any] = {}
    model, manifest = draft.model, draft.manifest
    for saving in savings:
        config |= saving.config
        if saving.quantization:
            model = model.model_copy(update={"quantization": saving.quantization})
    models = [model if spec is draft.model else spec for spec in manifest.base_models]
    changed = manifest.training.config.model_copy(update=config)
    training = manifest.training.model_copy(update={"config": changed})
    manifest = manifest.model_copy(update={"training": training, "base_models": models})
    return replace(draft, manifest=manifest, model=model, best=None, decisions={}, remarks=[])


def _as_options(draft: PlanDraft, savings: Sequence[Saving]) -> str:
    """`--set rank=8 --set optim=adamw_bnb_8bit`."""
    words = [f"{key}={value}" for each in savings for key, value in each.config.items()]
    place = [spec is draft.model for spec in draft.manifest.base_models].index(True)
    key = f"base_models.{place}.quantization" if place else "quantization"
    words += [f"{key}={each.quantization}" for each in savings if each.quantization]
    return " ".join(f"--set {word}" for word in words)
