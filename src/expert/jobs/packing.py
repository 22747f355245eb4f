"""How the rows of a split are laid into sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.data.pack_index import PackIndex
    from expert.planning.run_plan import RunPlan
    from expert.planning.sequences import Packing


def soft_tokens(plan: RunPlan) -> int:
    """Places that soft prompts take before every row."""
    return sum(prompt["tokens"] for prompt in plan.adapter.soft_prompts)


def packing_for(
    plan: RunPlan, name: str, lengths: Any, *, is_text: bool, streaming: bool
) -> Packing:
    """Sequences as long as the rows may be; of training rows, such as hold whole updates."""
    from expert.data.pack import cut_pieces
    from expert.planning.sequences import Packing, packing_of

    data, soft = plan.data, soft_tokens(plan)
    length = data.max_seq_length
    if name != "train" or not is_text or data.packing != "best-fit":
        return Packing(1, length, None)
    pieces = cut_pieces(lengths, length - soft, data.overlong)
    if not len(pieces):
        return Packing(1, length, None)
    sizes = pieces.stop - pieces.start + soft
    return packing_of(
        plan.batch.examples_per_update,
        mean=float(sizes.mean()),
        longest=float(sizes.max()),
        length=length,
        shorter=not streaming,  # every window of a stream is as long as the first
    )


def packed(
    plan: RunPlan, name: str, lengths: Any, seed: int, packing: Packing, *, is_text: bool
) -> PackIndex:
    """The index of rows of these lengths."""
    from expert.data.pack import pack_best_fit, pack_blocks, pack_concat, pack_none

    data, length, soft = plan.data, packing.length, soft_tokens(plan)
    if not is_text:
        if name == "train":
            return pack_blocks(lengths, length)
        return pack_none(lengths, length, overlong="split")
    if data.packing == "concat":
        return pack_concat(lengths, length, seed, overlong="split", soft_tokens=soft)
    if data.packing == "none":
        return pack_none(lengths, length, overlong=data.overlong, soft_tokens=soft)
    return pack_best_fit(
        lengths,
        length,
        seed,
        overlong=data.overlong,
        soft_tokens=soft,
        most_pieces=packing.most_rows,
    )
