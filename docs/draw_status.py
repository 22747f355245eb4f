"""Writes the performance section of STATUS.md from measured records: never typed, always made.

    .venv/bin/python docs/draw_status.py

It reads docs/benchmarks: ladders as `expert benchmark --to` writes them, and the records of the
scripts under benchmarks/. It replaces what stands between the two marks in STATUS.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert.insight.ladder import Ladder, read_ladder
from expert.insight.ladder_table import as_markdown, headline

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
STATUS = ROOT / "STATUS.md"
BEGIN = "<!-- performance: made by docs/draw_status.py, do not edit -->"
END = "<!-- end of performance -->"
NEW = f"# Status\n\n## Performance\n\n{BEGIN}\n{END}\n"
GB = 1e9
SHAPES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-8b": "Llama-3.1-8B"}

Record = dict[str, Any]


def ladders(folder: Path = BENCHMARKS) -> list[tuple[Path, Ladder]]:
    """Every committed result, by name."""
    return [(path, read_ladder(path)) for path in sorted(folder.glob("ladder-*.json"))]


def section(found: list[tuple[Path, Ladder]]) -> str:
    """The ladders: one line for each, then each of them whole."""
    lines = [
        f"- {headline(ladder)} ([data](docs/benchmarks/{path.name}))" for path, ladder in found
    ]
    whole = [as_markdown(ladder, level=3).rstrip() for _, ladder in found]
    return "\n\n".join(["\n".join(lines), *whole])


def made(folder: Path = BENCHMARKS) -> str:
    """All that the records in a folder say; a record that is not there leaves its part out."""
    parts = []
    for name, write in WRITERS.items():
        path = folder / name
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            parts.append(f"{write(record)}\n\nFrom [{name}](docs/benchmarks/{name}).")
    found = ladders(folder)
    if found:
        parts.append(section(found))
    return "\n\n".join(parts)


def training_speed(record: Record) -> str:
    """Whole runs through `expert train`."""
    rows = []
    for run in record["runs"]:
        for one in run["results"]:
            if one["case"].endswith(" lines"):  # told below: what the lines cost
                continue
            rows.append(
                (
                    SHAPES[one["shape"]],
                    one["case"],
                    f"{one['tokens_per_second']:,.0f}",
                    f"{one['gpu_utilization']:.0f} %",
                    f"{100 * one['data_wait']:.4f} %",
                    f"{100 * one['mfu']:.0f} %",
                    f"{one.get('most_process_bytes', one['peak_reserved_bytes']) / GB:.1f} GB",
                )
            )
    head = ("shape", "case", "tokens/s", "GPU use", "waits for data", "of the peak", "memory")
    versions = record["runs"][0]["environment"]
    text = (
        "LoRA (one case: DoRA) on all projections, real rows at length 2048, random weights of the "
        "real shape. Padding does not count as tokens. Memory is that of the process where it was "
        "recorded, else what the allocator held. `in 24GB` and `in 32GB` were held to that with "
        "`--vram`."
    )
    parts = [f"### Training on one {_card(versions)}", text, _table(head, rows)]
    parts += [*map(_beside_peers, record["runs"]), _cost_of_lines(record)]
    return "\n\n".join(filter(None, parts))


def _beside_peers(run: Record) -> str:
    """What others made of the same model and rows in the same sitting."""
    ours = {one["case"]: one["tokens_per_second"] for one in run["results"]}
    told = []
    for peer in run.get("peers", []):
        name, rate = peer["peer"], peer["tokens_per_second"]
        told.append(
            f"{name.upper()} {peer['versions'][name]} with the same model, adapter, base and rows, "
            f"in the same sitting ({_settings(peer['settings'])}): {rate:,.0f} tokens/s. "
            f"`{peer['beside']}` is {ours[peer['beside']] / rate:.2f} times as fast."
        )
    return "\n\n".join(told)


def _settings(values: Record) -> str:
    on = [name for name, value in values.items() if value is True]
    return ", ".join([*on, *(f"{k} {v}" for k, v in values.items() if not isinstance(v, bool))])


def _cost_of_lines(record: Record) -> str:
    """A line and TensorBoard for every update, against one for twenty."""
    rates = {
        one["case"].partition(", ")[2]: one["tokens_per_second"]
        for run in record["runs"]
        for one in run["results"]
    }
    few, many = rates.get("few lines"), rates.get("all lines")
    if few is None or many is None:
        return ""
    return (
        f"A line and TensorBoard's values for every update changed the rate by "
        f"{100 * (many / few - 1):+.1f} %, against a line for every 20."
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
            _table(("an update", "samples/s", "ms", "GPU use"), speed),
            _table(("seed", "best validation loss", "at update"), loss),
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
    rows = [
        (way, *(f"{100 * half:+.2f} %" for half in halves), f"{losses[way][-1]:.4f}")
        for way, halves in above.items()
    ]
    count = len(losses["float32"])
    text = (
        f"{record['model']}, {count} updates of the same rows on a CPU; the last in float32 is "
        f"{losses['float32'][-1]:.4f}."
    )
    head = ("arithmetic", "loss above float32's, first half", "second half", "last loss")
    return f"### LoRA in bfloat16\n\n{text}\n\n{_table(head, rows)}"


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
        f"runs; TRL {versions['trl']} with the number of processes that suited it best."
    )
    head = ("data", "tokens", "Expert", "TRL", "times as fast", "filled")
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
    head = ("data", "rows", "first batch, new", "first batch, prepared", "tokens/s fed", "memory")
    return (
        f"### Feeding prepared data\n\nOn {record['environment']['cores']} cores, after imports."
        f"\n\n{_table(head, rows)}"
    )


def memory_runs(record: Record) -> str:
    """Peaks of whole runs: what the process held, by case and sequences at once."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in record["results"]:
        peaks = cases.setdefault((one["case"], one["segments"]), [])
        peaks.append(f"{one['rows']}: {one['measured_bytes'] / GB:.1f}")
    rows = [(case, segments, ", ".join(peaks)) for (case, segments), peaks in cases.items()]
    head = ("case", "allocator's segments", "sequences of 2048 at once: GB")
    text = (
        "What the driver counts for the process at the peak. Without `recomputed` every activation "
        "is kept. Segments grow by default; `fixed` is torch's own default."
    )
    title = f"### Memory of runs on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


def memory_plans(record: Record) -> str:
    """Plans against what their runs took, for runs that calibrated nothing."""
    held = [one for one in record["results"] if one["role"] != "calibrates" and "error" not in one]
    rows = [
        (
            one["case"],
            one["rows"],
            f"{one['planned_bytes'] / GB:.1f} GB",
            f"{one['measured_bytes'] / GB:.1f} GB",
            f"{one['planned_bytes'] / one['measured_bytes'] - 1:+.1%}",
        )
        for one in held
    ]
    head = ("case", "sequences of 2048 at once", "planned", "measured", "plan against run")
    text = (
        "Of every kind of run one calibrates the plans of its kind; these are others. Measured: "
        "what the driver counts for the process at the peak."
    )
    title = f"### Plans of memory on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


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
    head = ("planted", "to be found", "found", "verdict")
    title = f"### Planted faults on one {_card(record['environment'])}"
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
    head = ("expert", "right", "95 % interval", "of", "the base alone", "loss")
    text = (
        f"`{record['model']}`, {record['rows']:,} rows each, on a CPU, as `make experts` trains "
        "and judges them: held-out questions, answers judged by parsers and databases."
    )
    return f"### The four experts with {record['model']}\n\n{text}\n\n{_table(head, rows)}"


def four_experts(record: Record) -> str:
    """Optimised against plain: speed, and quality on the same rows."""
    rows = []
    for one in record["results"]:
        if "judged" not in one.get("optimised", {}):
            continue
        fast, slow = one["optimised"], one["plain"]
        rows.append(
            (
                one["pair"],
                f"{fast['tokens_per_second']:,.0f}",
                f"{slow['tokens_per_second']:,.0f}",
                f"{one['times_as_fast']:.1f}",
                f"{fast['judged']['right']:.1%} / {slow['judged']['right']:.1%}",
                _both(one, "token_accuracy", ".2%"),
                _both(one, "loss", ".4f"),
            )
        )
    head = ("rows", "tokens/s", "plain", "times as fast", "right", "tokens right", "loss")
    text = (
        f"{record['model']}: the manifests as they are against the first rung of the ladder, four "
        f"rows at once; both learn the same rows and answer the same {record['judged_rows']} "
        "held-out ones. Rates of some updates, alone on the card. Of both: as the manifest says / "
        "the plain way."
    )
    title = f"### The experts on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


def _both(one: Record, what: str, style: str) -> str:
    fast, slow = (one[side]["judged"]["rows"][what] for side in ("optimised", "plain"))
    return f"{fast:{style}} / {slow:{style}}"


def small_updates(record: Record) -> str:
    """What launching costs: the same updates run, compiled, and recorded."""
    plain = {o["case"]: o["milliseconds"] for o in record["results"] if o["way"] == "run"}
    rows = [
        (
            one["case"],
            one["way"],
            f"{one['tokens_per_second']:,.0f}",
            f"{one['milliseconds']:.1f}",
            f"{plain[one['case']] / one['milliseconds']:.1f}",
            f"{one['loss']:.4f}",
        )
        for one in record["results"]
    ]
    head = ("an update", "way", "tokens/s", "ms", "times as fast", "loss")
    text = (
        "Updates so small that a card waits for its host, which launches thousands of kernels: "
        "run, recorded as CUDA graphs, compiled, both. Made-up rows, random weights."
    )
    title = f"### Small updates on one {_card(record['environment'])}"
    return f"{title}\n\n{text}\n\n{_table(head, rows)}"


WRITERS: dict[str, Callable[[Record], str]] = {
    "training-speed-h200.json": training_speed,
    "char-gpt-h200.json": char_gpt,
    "small-updates-h200.json": small_updates,
    "experts-h200.json": four_experts,
    "experts-cpu.json": every_expert,
    "lora-rounding-cpu.json": rounding,
    "data-preparation.json": preparation,
    "data-loading.json": loading,
    "memory-runs-h200.json": memory_runs,
    "memory-plans-h200.json": memory_plans,
    "planted-faults-h200.json": planted_faults,
}


def _card(environment: Record) -> str:
    torch = environment.get("torch") or environment["versions"]["torch"]
    return f"{environment['card']} (torch {torch}, {environment['date'][:10]})"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def status_with(text: str, made: str) -> str:
    """The document with the section between its marks; without marks it is an error."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"STATUS.md has no place for it: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    text = STATUS.read_text(encoding="utf-8") if STATUS.exists() else NEW
    STATUS.write_text(status_with(text, made()), encoding="utf-8")


if __name__ == "__main__":
    main()
