"""The tables of STATUS.md: one function for each record of docs/benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GB = 1e9
SHAPES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-8b": "Llama-3.1-8B"}
AS_PEFT = "PEFT's sum"
# What the records call a way of running, and what it is.
STEPPING = {
    "run": "eager",
    "recorded": "CUDA graph",
    "compiled": "compiled",
    "compiled, recorded": "compiled, CUDA graph",
}
ANSWERING = {
    "growing": "growing cache",
    "fixed": "fixed cache",
    "recorded": "fixed cache, CUDA graph",
}

Record = dict[str, Any]


def training_speed(record: Record) -> str:
    """Whole runs through `expert train`: of each case the newest."""
    newest = {one["case"]: one for run in record["runs"] for one in run["results"]}
    rows = [
        (
            SHAPES[one["shape"]],
            case,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['gpu_utilization']:.0f} %",
            f"{100 * one['data_wait']:.4f} %",
            f"{100 * one['mfu']:.0f} %",
            f"{one.get('most_process_bytes', one['peak_reserved_bytes']) / GB:.1f} GB",
        )
        for case, one in newest.items()
        if not case.endswith((" lines", AS_PEFT))  # told below
    ]
    head = ("model", "case", "tokens/s", "GPU use", "waits for data", "of peak FLOPS", "memory")
    first, *_, last = (run["environment"] for run in record["runs"])
    when = f"{_card(first)[:-1]} to {last['date'][:10]})"
    text = (
        "LoRA (one case: DoRA) on all projections, real rows at length 2048, random weights at the "
        "real model size; measured before fused blocks and FlashAttention 4, whose rates are in "
        "[Speed](docs/SPEED.md). Padding does not count as tokens. Memory is that of the process "
        "where it was recorded, else the allocator's. `in 24GB` and `in 32GB`: limited with "
        "`--vram`."
    )
    parts = [f"### Training on one {when}", text, _table(head, rows)]
    parts += [*map(_beside_peers, record["runs"]), *map(_rounded_once, record["runs"])]
    parts += [_cost_of_lines(record)]
    return "\n\n".join(filter(None, parts))


def _beside_peers(run: Record) -> str:
    """What others made of the same model and rows in the same sitting."""
    ours = {one["case"]: one["tokens_per_second"] for one in run["results"]}
    told = []
    for peer in run.get("peers", []):
        name, rate = peer["peer"], peer["tokens_per_second"]
        told.append(
            f"{name.upper()} {peer['versions'][name]} with the same model, adapter, base and rows, "
            f"in the same session ({_settings(peer['settings'])}): {rate:,.0f} tokens/s. "
            f"`{peer['beside']}` is {ours[peer['beside']] / rate:.2f} times as fast."
        )
    return "\n\n".join(told)


def _rounded_once(run: Record) -> str:
    """What it costs to add LoRA before the product is rounded: in the same sitting."""
    rates = {one["case"]: one["tokens_per_second"] for one in run["results"]}
    told = []
    for case in rates:
        ours = case.replace(f", {AS_PEFT}", " compiled")
        if case.endswith(AS_PEFT) and ours in rates:
            told.append(
                f"LoRA added inside the matmul, which rounds once, and LoRA added as in PEFT, "
                f"in the same session: {rates[ours]:,.0f} and {rates[case]:,.0f} tokens/s "
                f"(`{ours}`)."
            )
    return "\n\n".join(told)


def _settings(values: Record) -> str:
    on = [name for name, value in values.items() if value is True]
    return ", ".join([*on, *(f"{k} {v}" for k, v in values.items() if not isinstance(v, bool))])


def _cost_of_lines(record: Record) -> str:
    """A line and TensorBoard for every step, against one for twenty."""
    rates = {
        one["case"].partition(", ")[2]: one["tokens_per_second"]
        for run in record["runs"]
        for one in run["results"]
    }
    few, many = rates.get("few lines"), rates.get("all lines")
    if few is None or many is None:
        return ""
    return (
        f"Logging every step, also to TensorBoard, changed the rate by "
        f"{100 * (many / few - 1):+.1f} % compared with every 20 steps."
    )


def char_gpt(record: Record) -> str:
    """The character GPT: speed at two sizes, and the loss of every seed."""
    speed = [
        (
            f"{one['batch']} blocks, {_way(one)}",
            f"{one['samples_per_second']:,.0f}",
            f"{one['milliseconds']:.1f}",
            f"{one['gpu_utilization']:.0f} %",
        )
        for one in record["speed"]
    ]
    loss = [
        (one["seed"], f"{one['best_validation_loss']:.3f}", f"{one['at_update']:,}")
        for one in record["loss"]
    ]
    return "\n\n".join(
        [
            f"### The character GPT on one {_card(record['environment'])}",
            _table(("step", "samples/s", "ms", "GPU use"), speed),
            _table(("seed", "best validation loss", "at step"), loss),
        ]
    )


def _way(case: Record) -> str:
    """How a case of the character GPT was run: as planned where nothing else was asked for."""
    if case.get("torch_compile") is None:
        return "as planned"
    return f"compiled, {case['torch_compile_mode']}" if case["torch_compile"] else "not compiled"


def rounding(record: Record) -> str:
    """LoRA in bfloat16, as it is added here and as PEFT adds it, against float32."""
    above, losses = record["above_float32"], record["losses"]
    rates = record.get("tokens_per_second", {})
    rows = [
        (
            way,
            *(f"{100 * half:+.2f} %" for half in halves),
            f"{losses[way][-1]:.4f}",
            *([f"{rates[way]:,.0f}"] if rates else []),
        )
        for way, halves in above.items()
    ]
    count, where = len(losses["float32"]), _place(record["environment"])
    text = (
        f"{record['model']}, {count} steps of the same rows; the last in float32 is "
        f"{losses['float32'][-1]:.4f}."
    )
    head = ("arithmetic", "loss above float32's, first half", "second half", "last loss")
    head += ("tokens/s",) if rates else ()
    return f"### LoRA in bfloat16 on {where}\n\n{text}\n\n{_table(head, rows)}"


def answers(record: Record) -> str:
    """What `validate` and `sample` do: many prompts answered, in each way there is."""
    rows = [
        (
            one["rows"],
            ANSWERING[way],
            f"{one[way]['tokens_per_second']:,.0f}",
            f"{one[way]['times_as_fast']:.2f}",
            f"{one[way]['same_answers']} of {one['prompts']}",
        )
        for one in record["results"]
        for way in ANSWERING
        if way in one
    ]
    text = (
        f"{record['model']}. `growing cache`: prompts padded to the longest, with a growing "
        "key-value cache; `fixed cache`: prompts without padding, with a fixed cache; `CUDA "
        "graph`: the same with the decoding step captured. The last column counts the answers "
        "that are the same as with a growing cache."
    )
    head = ("rows", "mode", "tokens/s", "times as fast", "same answers")
    where = _place(record["environment"])
    return f"### Generating answers on {where}\n\n{text}\n\n{_table(head, rows)}"


def preparation(record: Record) -> str:
    """Rows to packed tokens, against TRL's way."""
    rows = [
        (
            one["data"],
            f"{one['expert']['tokens']:,}",
            f"{one['expert']['seconds']:.2f} s",
            f"{one['trl']['seconds']:.2f} s",
            f"{one['ratio']:.1f}",
            f"{100 * one['expert']['fill']:.1f} %",
        )
        for one in record["results"]
    ]
    versions = record["environment"]["versions"]
    text = (
        f"On {record['environment']['cores']} cores, without fixed costs, the best of each side's "
        f"runs; TRL {versions['trl']} with the number of processes that was fastest for it."
    )
    head = ("data", "tokens", "Expert", "TRL", "times as fast", "sequences filled")
    return f"### Preparing data\n\n{text}\n\n{_table(head, rows)}"


def loading(record: Record) -> str:
    """Feeding from prepared tokens, and what a row costs in memory."""
    rows = []
    for one in record["results"]:
        for times in ("1x", "4x", "10x"):
            warm = one[times]["warm"]
            rows.append(
                (
                    one["data"],
                    f"{warm['rows']:,}",
                    f"{one[times]['cold']['first_batch_seconds']:.1f} s",
                    f"{warm['first_batch_seconds']:.2f} s",
                    f"{warm['tokens_per_second'] / 1e6:.0f} M",
                    f"{warm['peak_anonymous_bytes'] / GB:.3f} GB",
                )
            )
    head = (
        "data",
        "rows",
        "first batch, unprepared",
        "first batch, prepared",
        "tokens/s",
        "memory",
    )
    return (
        f"### Loading prepared data\n\nOn {record['environment']['cores']} cores, after imports."
        f"\n\n{_table(head, rows)}"
    )


def memory_runs(record: Record) -> str:
    """Peaks of whole runs: what the process held, by case and sequences at once."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in record["results"]:
        peaks = cases.setdefault((_checkpointed(one["case"]), one["segments"]), [])
        peaks.append(f"{one['rows']}: {one['measured_bytes'] / GB:.1f}")
    rows = [(case, segments, ", ".join(peaks)) for (case, segments), peaks in cases.items()]
    head = ("case", "allocator's segments", "micro-batch of 2,048-token sequences: GB")
    text = (
        "Peak memory of the process as the driver counts it. `checkpointed`: with activation "
        "checkpointing. `growing`: expandable segments, Expert's default; `fixed`: torch's default."
    )
    title = f"### Memory of runs on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


def memory_plans(record: Record) -> str:
    """Plans against what their runs took, for runs that calibrated nothing."""
    held = [one for one in record["results"] if one["role"] != "calibrates" and "error" not in one]
    rows = [
        (
            _checkpointed(one["case"]),
            one["rows"],
            f"{one['planned_bytes'] / GB:.1f} GB",
            f"{one['measured_bytes'] / GB:.1f} GB",
            f"{one['planned_bytes'] / one['measured_bytes'] - 1:+.1%}",
        )
        for one in held
    ]
    head = ("case", "micro-batch of 2,048 tokens", "planned", "measured", "error of the plan")
    text = (
        "One run of each kind calibrated the plans of its kind; the table has the other runs. "
        "Measured is the peak memory of the process as the driver counts it."
    )
    title = f"### Planned and measured memory on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


def _checkpointed(case: str) -> str:
    """The records call activation checkpointing recomputing."""
    return case.replace(" recomputed", ", checkpointed")


def planted_faults(record: Record) -> str:
    """Runs with something wrong, diagnosed from their run folders."""
    rows = [
        (
            one["fault"],
            f"`{one['expects']}`" if one["expects"] else "nothing",
            "yes" if one["ok"] else "no",
            one.get("verdict", ""),
        )
        for one in record["results"]
    ]
    head = ("planted", "expected finding", "found", "verdict")
    title = f"### Diagnosis of planted faults on one {_card(record['environment'])}"
    note = record["environment"].get("note", "")
    return f"{title}\n\n{note[:1].upper()}{note[1:]}\n\n{_table(head, rows)}"


def every_expert(record: Record) -> str:
    """The four experts with the built-in model."""
    rows = [
        (
            one["expert"],
            f"{one['tuned']['accuracy']:.1%}",
            " to ".join(f"{end:.1%}" for end in one["tuned"]["interval"]),
            one["tuned"]["passed"] + one["tuned"]["failed"] + one["tuned"]["without_oracle"],
            f"{one['base']['accuracy']:.1%}",
            f"{one['tuned']['rows']['loss']:.4f}",
        )
        for one in record["results"]
    ]
    head = ("expert", "accuracy", "95 % interval", "questions", "base model alone", "loss")
    text = (
        f"`{record['model']}`, {record['rows']:,} rows each, on a CPU, as `make experts` trains "
        "and validates them: held-out questions, answers judged by parsers and databases. A run "
        "uses as many threads as there are idle cores; with another number, sums are rounded "
        "differently, and the difference grows from step to step: expert-json had 195 of 200 "
        "right with two threads (demo-cpu.json) and 199 with one, a difference within chance."
    )
    return f"### The four experts with {record['model']}\n\n{text}\n\n{_table(head, rows)}"


def packing(record: Record) -> str:
    """Packed against unpacked: the losses of all seeds."""
    rows = [
        (
            one["rows"],
            one["way"],
            " ".join(f"{loss:.3f}" for loss in one["losses"]),
            f"{one['mean']:.3f}",
            f"{one['over_unpacked']:.2f}" if one["over_unpacked"] else "–",
        )
        for one in record["summary"]
    ]
    head = ("rows", "batches", "best validation loss, by seed", "mean", "relative to unpacked")
    kinds = "; ".join(
        f"{name}: {kind['rows']:,} of {kind['tokens'][0]} to {kind['tokens'][1]} tokens"
        for name, kind in record["kinds"].items()
    )
    text = (
        f"`{record['model']}` on a CPU ({record['threads']} thread), 16 rows per step, one epoch. "
        f"{kinds}. `before`: longest rows first, as earlier versions packed them. "
        f"{record.get('note', '')}"
    ).strip()
    return f"### Packed and unpacked\n\n{text}\n\n{_table(head, rows)}"


def threads(record: Record) -> str:
    """The same expert with one and with two threads, seed by seed."""
    rows = []
    for seed in dict.fromkeys(run["seed"] for run in record["runs"]):
        by_count = {run["threads"]: run for run in record["runs"] if run["seed"] == seed}
        cells = [
            f"{run['accuracy']:.1%} of {run['of']}, loss {run['loss']:.4f}"
            for run in by_count.values()
        ]
        rows.append((str(seed), *cells))
    head = ("seed", *(f"{count} thread{'s' * (count > 1)}" for count in by_count))
    text = (
        "expert-json with `tiny`, whole runs on a CPU. Rounding differs with the number of threads "
        "as it does with the seed; the intervals of 200 answers overlap in every pair."
    )
    return f"### Threads and seeds\n\n{text}\n\n{_table(head, rows)}"


def four_experts(record: Record) -> str:
    """Optimised against plain: speed, and quality on the same rows."""
    rows = []
    for one in record["results"]:
        if "judged" not in one.get("optimised", {}):
            continue
        fast, slow = one["optimised"], one["plain"]
        rows.append(
            (
                one["pair"].replace("made", "generated").replace("given", "public"),
                f"{fast['tokens_per_second']:,.0f}",
                f"{slow['tokens_per_second']:,.0f}",
                f"{one['times_as_fast']:.1f}",
                f"{fast['judged']['right']:.1%} / {slow['judged']['right']:.1%}",
                _both(one, "token_accuracy", ".2%"),
                _both(one, "loss", ".4f"),
            )
        )
    head = ("rows", "tokens/s", "baseline", "times as fast", "accuracy", "token accuracy", "loss")
    text = (
        f"{record['model']} with the manifests of the experts, and with the baseline of the "
        "benchmark (micro-batch size four); both train on the same rows, generated or of a public "
        f"dataset, and answer the same {record['judged_rows']} held-out questions. Throughput was "
        "measured over some steps, alone on the card. The last three columns are manifest / "
        "baseline."
    )
    title = f"### The experts on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


def _both(one: Record, what: str, style: str) -> str:
    fast, slow = (one[side]["judged"]["rows"][what] for side in ("optimised", "plain"))
    return f"{fast:{style}} / {slow:{style}}"


def small_updates(record: Record) -> str:
    """What launching costs: the same steps eager, compiled, and captured."""
    plain = {o["case"]: o["milliseconds"] for o in record["results"] if o["way"] == "run"}
    rows = [
        (
            one["case"],
            STEPPING[one["way"]],
            f"{one['tokens_per_second']:,.0f}",
            f"{one['milliseconds']:.1f}",
            f"{plain[one['case']] / one['milliseconds']:.1f}",
            f"{one['loss']:.4f}",
        )
        for one in record["results"]
    ]
    head = ("step", "mode", "tokens/s", "ms", "times as fast", "loss")
    text = (
        "Steps so short that the GPU waits for the host, which launches thousands of kernels. "
        "Generated rows, random weights."
    )
    title = f"### Short steps on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


WRITERS: dict[str, Callable[[Record], str]] = {
    "training-speed-h200.json": training_speed,
    "char-gpt-h200.json": char_gpt,
    "small-updates-h200.json": small_updates,
    "experts-h200.json": four_experts,
    "experts-cpu.json": every_expert,
    "packing-cpu.json": packing,
    "threads-cpu.json": threads,
    "lora-rounding-h200.json": rounding,
    "lora-rounding-cpu.json": rounding,
    "answers-h200.json": answers,
    "answers-cpu.json": answers,
    "data-preparation.json": preparation,
    "data-loading.json": loading,
    "memory-runs-h200.json": memory_runs,
    "memory-plans-h200.json": memory_plans,
    "planted-faults-h200.json": planted_faults,
}


def _place(environment: Record) -> str:
    return f"one {_card(environment)}" if environment.get("card") else "a CPU"


def _card(environment: Record) -> str:
    torch = environment.get("torch") or environment["versions"]["torch"]
    return f"{environment['card']} (torch {torch}, {environment['date'][:10]})"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
