"""Rules about how rows become batches, and how they reach the card."""

from __future__ import annotations

from expert.jobs.diagnose.faults.asked import CONFIG, Answer, Asked, answer, late


def late_tokenising(a: Asked) -> Answer:
    if not late(a.plan):
        return None
    workers = a.plan.loader.workers
    return answer(
        "tokenised-late",
        "warning",
        "rows are tokenised when a batch asks for them",
        f"{CONFIG}.tokenize is late, {workers} workers",
        "the card waits while text becomes tokens, in every epoch again",
        set_to=("tokenize=ahead",),
        workers=workers,
    )


def no_workers(a: Asked) -> Answer:
    if a.plan.loader.workers:
        return None
    if a.makes_batches and a.on_gpu:
        return answer(
            "no-workers",
            "warning",
            "batches are made between the updates",
            "0 workers, and rows are tokenised or padded while training",
            "the card stands still while a batch is made",
            set_to=("dataloader_num_workers=auto",),
        )
    asked = a.is_set("dataloader_num_workers") and a.asked("dataloader_num_workers") == 0
    if asked and not a.makes_batches:
        return answer(
            "no-workers",
            "note",
            "dataloader_num_workers 0 does no harm here",
            "prepared tokens are memory-mapped and a thread keeps the batches ready",
        )
    return None


def too_many_workers(a: Asked) -> Answer:
    workers = a.plan.loader.workers
    if workers > a.cores:
        return answer(
            "too-many-workers",
            "warning",
            "there are more workers than cores",
            f"{workers} workers, {a.cores} cores",
            "they get in each other's way and in that of the training loop",
            set_to=("dataloader_num_workers=auto",),
            workers=workers,
            cores=a.cores,
        )
    asked = a.asked("dataloader_num_workers")
    if isinstance(asked, int) and asked > 0 and workers == 0:
        return answer(
            "too-many-workers",
            "note",
            f"the {asked} workers asked for are not started",
            "prepared tokens are memory-mapped and fed by a thread",
        )
    return None


def few_cores(a: Asked) -> Answer:
    needed = a.plan.loader.workers + 1 if a.makes_batches else 2
    if not a.on_gpu or a.cores >= needed or a.named_card:
        return None
    return answer(
        "few-cores",
        "warning",
        "there are fewer cores than the run keeps busy",
        f"{a.cores} available, {needed} wanted: the loop and what makes its batches",
        "the card waits for the host",
        fix="give the process more cores, or prepare the rows: packing: auto, streaming: false",
        cores=a.cores,
        needed=needed,
    )


def pin_memory(a: Asked) -> Answer:
    if not a.on_gpu or a.plan.loader.pin_memory:
        return None
    return answer(
        "pin-memory-off",
        "warning",
        "batches are copied from ordinary memory",
        "pin_memory is off",
        "every copy to the card goes through a second buffer and stops the loop",
        set_to=("dataloader_pin_memory=auto",),
    )


def prefetch(a: Asked) -> Answer:
    if not a.on_gpu or a.plan.loader.prefetch > 1:
        return None
    return answer(
        "no-prefetch",
        "warning",
        "one batch is kept ready and no more",
        f"prefetch {a.plan.loader.prefetch}",
        "whatever delays one batch delays the card",
        set_to=("dataloader_prefetch_factor=auto",),
    )


def persistent(a: Asked) -> Answer:
    if not a.plan.loader.workers or a.plan.loader.persistent_workers:
        return None
    return answer(
        "workers-restart",
        "warning" if (a.plan.length.epochs or 1) > 1 else "note",
        "the workers start anew in every epoch",
        f"{a.plan.loader.workers} workers, {a.plan.length.epochs:g} epochs",
        "the card waits for processes to start",
        set_to=("dataloader_persistent_workers=auto",),
    )


def padding(a: Asked) -> Answer:
    if not a.padded or a.mean_tokens is None:
        return None
    longest = min(a.longest_tokens or a.plan.data.max_seq_length, a.plan.data.max_seq_length)
    if a.mean_tokens > longest / 2:
        return None
    grouped = a.plan.data.group_by_length
    evidence = f"rows of {a.mean_tokens:.0f} tokens on average, {longest} the longest"
    more = ", grouped by length" if grouped else ", not grouped by length"
    sliced = (a.plan.batch.accumulation or 1) > 1  # a whole step at once is padded to its longest
    return answer(
        "no-packing",
        "warning",
        "short rows go alone and are padded",
        evidence + more,
        "the card computes padding",
        set_to=("packing=auto", "group_by_length=auto"),
        gain=1.2 if grouped and sliced else min(3.0, longest / a.mean_tokens),
        mean_tokens=a.mean_tokens,
    )


def long_sequences(a: Asked) -> Answer:
    length, longest = a.plan.data.max_seq_length, a.longest_tokens
    if longest is None or length < 4 * longest:
        return None
    how = "rows are padded to the longest of their batch" if a.padded else "rows are packed"
    return answer(
        "long-sequences",
        "note",
        "max_seq_length is far above the longest row",
        f"{length} places, {longest} tokens in the longest row",
        f"nothing is lost: {how}",
    )
