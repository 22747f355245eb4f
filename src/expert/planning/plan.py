"""From a manifest and a target to a RunPlan: every "auto" settled, without loading a weight."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from expert.core.errors import ExpertError
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec, Manifest
from expert.planning.choose.batching import settle_fit
from expert.planning.choose.cuda_graphs import choose_graphs
from expert.planning.choose.kernels import (
    choose_attention,
    choose_compile,
    choose_optimizer,
    choose_precision,
    choose_switches,
    choose_tf32,
)
from expert.planning.choose.learning import (
    settle_adapter,
    settle_model,
    settle_optimisation,
    settle_watching,
    warn_of_cadences_longer_than_the_run,
)
from expert.planning.choose.length import (
    likely_seconds,
    settle_arithmetic,
    settle_disk,
    settle_length,
    settle_time,
)
from expert.planning.choose.planned_time import settle_expected_time
from expert.planning.choose.sequences import settle_sequences, settle_update, settle_widths
from expert.planning.choose.starting_points import made_for_tiny
from expert.planning.decisions import Ledger
from expert.planning.machine.host import package_version
from expert.planning.machine.target import Target
from expert.planning.measurements import find_best, measurements_file, read_rates
from expert.planning.memory.calibration import calibrations_file, calibrations_of
from expert.planning.memory.workload import Workload
from expert.planning.models.resolve import basename, resolve_model
from expert.planning.run_plan import RunPlan
from expert.planning.situation import Kept, Situation
from expert.planning.survey import Survey, survey_data

PREFETCHED_BATCHES = 4
STREAMING_WORKERS = 4
PADDED_WORKERS = 2


class UnknownModel(ExpertError):
    """A --model that the manifest does not have."""


def make_plan(
    manifest: Manifest,
    target: Target,
    *,
    folder: Path = Path(),
    model: str | None = None,
    environ: Mapping[str, str] = os.environ,
    use_measurements: bool = True,
    survey: Survey | None = None,
    plain_text: bool | None = None,
    kept: Kept | None = None,
) -> RunPlan:
    """Settle everything the manifest leaves open for this target.

    Without measurements what ladders have found is left out: one that is climbed looks for itself.
    A survey is what somebody knows of the rows who can tokenise; without one, files are looked at.
    `plain_text`: whether the rows are texts without answers, for those who know. `kept`: what a
    run that is resumed has settled.
    """
    now = gather(manifest, target, folder=folder, model=model, environ=environ)
    rates = now.rates if use_measurements else ()
    now = replace(
        now,
        survey=survey or now.survey,
        rates=rates,
        plain_text=plain_text,
        kept=kept or Kept(),
    )
    ledger = Ledger()
    settle_model(now, ledger)
    rank, targets = settle_adapter(now, ledger)
    precision = choose_precision(now, ledger)
    choose_tf32(now, ledger)
    length, packed = settle_sequences(now, ledger)
    now = _with_best(now, length, str(ledger.decisions["data.packing"].value))
    fused_loss = choose_switches(now, ledger)
    optimizer = choose_optimizer(now, ledger)
    examples, sequences, places = settle_update(now, ledger, length=length, packed=packed)
    settle_length(now, ledger, length=length, examples=examples)
    _settle_loader(now, ledger)
    work = None
    if now.resolved.shape is not None:
        work = Workload(
            shape=now.resolved.shape,
            rows=1,
            row_tokens=places,
            adapter=now.config.adapter_type,
            rank=rank,
            targets=targets,
            quantization=_base_quantization(now),
            precision=precision,
            optimizer=optimizer,
            fused_loss=fused_loss,
            soft_tokens=sum(prompt.tokens for prompt in manifest.soft_prompts),
            prefetch=ledger.decisions["loader.prefetch"].value,
            compiled=False,
        )
    compiled = choose_compile(now, ledger, likely_seconds(now, ledger, work), packed=packed)
    attention = choose_attention(now, ledger, packed=packed, compiled=compiled, precision=precision)
    if work is not None:
        work = replace(work, compiled=compiled, attention=attention)
    work = settle_fit(now, ledger, work, examples=examples, sequences=sequences)
    recorded = choose_graphs(now, ledger, work, packed=packed, compiled=compiled)
    fixed = "recorded passes have one width" if recorded else ""
    fixed = "FlexAttention is compiled for one width" if attention == "flex" else fixed
    fixed = "compiled blocks want one width" if compiled else fixed
    settle_widths(now, ledger, packed=packed, fixed=fixed)
    settle_optimisation(now, ledger)
    for path, text in made_for_tiny(now.model, now.config, now.resolved.shape):
        ledger.warn(path, text)
    settle_watching(now, ledger)
    warn_of_cadences_longer_than_the_run(now, ledger)
    settle_time(now, ledger, work)
    settle_expected_time(now, ledger, work)
    settle_arithmetic(now, ledger, work)
    settle_disk(now, ledger, work)
    _settle_rest(now, ledger, work)
    return _as_plan(now, ledger)


def _with_best(now: Situation, length: int, packing: str) -> Situation:
    """Look up what a ladder found for sequences like these."""
    wanted = (now.card_key, now.model_key, now.config.adapter_type)
    base = "int8" if now.model.quantization == "fp8" else now.model.quantization
    shape = now.resolved.shape
    best = find_best(
        now.rates,
        wanted,
        quantization=base,
        max_seq_length=length,
        packing=packing,
        parameters=shape.parameters if shape is not None else None,
    )
    return replace(now, best=best)


def gather(
    manifest: Manifest,
    target: Target,
    *,
    folder: Path,
    model: str | None,
    environ: Mapping[str, str],
) -> Situation:
    """Look at the model, the data and what was measured before."""
    spec = choose_model(manifest, model)
    resolved = resolve_model(spec, folder, environ)
    is_char_model = spec.name == CHAR_GPT
    return Situation(
        manifest=manifest,
        folder=folder,
        model=spec,
        resolved=resolved,
        target=target,
        survey=survey_data(manifest.training.dataset, folder, characters=is_char_model),
        rates=tuple(read_rates(measurements_file(environ))),
        calibrations=calibrations_of(
            target.name, package_version("torch").value, calibrations_file(environ)
        ),
    )


def choose_model(manifest: Manifest, name: str | None) -> BaseModelSpec:
    """The base model named, by its whole name or its last part; the first one by default."""
    if name is None:
        return manifest.base_models[0]
    for spec in manifest.base_models:
        if name.lower() in (spec.name.lower(), basename(spec.name).lower()):
            return spec
    names = ", ".join(basename(spec.name) for spec in manifest.base_models)
    raise UnknownModel(
        f"--model {name}: the manifest has {names}  (--model chooses among those; another one "
        f"takes its place with --set base_model={name})"
    )


def _base_quantization(now: Situation) -> str:
    asked = now.model.quantization
    if asked == "fp8":
        return "int8"
    return str(asked) if asked in ("int4", "int8") else "none"


def _settle_loader(now: Situation, ledger: Ledger) -> None:
    config = now.config
    workers = _settle_workers(now, ledger)
    if config.dataloader_prefetch_factor == "auto":
        because = "batches ready ahead of the card"
        ledger.settle("loader.prefetch", PREFETCHED_BATCHES, because, "preset")
    else:
        now.pass_on(ledger, "loader.prefetch", "dataloader_prefetch_factor")
    keep = config.dataloader_persistent_workers
    chosen = bool(workers) if keep == "auto" else bool(keep) and workers > 0
    honoured = keep != "auto" and workers > 0
    because = "set in the manifest" if honoured else f"{workers} workers"
    ledger.settle(
        "loader.persistent_workers", chosen, because, "manifest" if honoured else "machine"
    )
    if config.dataloader_pin_memory == "auto":
        because = "faster copies to the card" if now.on_gpu else "no GPU"
        ledger.settle("loader.pin_memory", now.on_gpu, because, "machine")
    else:
        now.pass_on(ledger, "loader.pin_memory", "dataloader_pin_memory")


def _settle_workers(now: Situation, ledger: Ledger) -> int:
    """Processes that make batches: none for packed tokens, which a thread lays out faster."""
    asked, cores, path = now.config.dataloader_num_workers, now.target.cores, "loader.workers"
    streaming = now.manifest.training.dataset.streaming
    padded = ledger.decisions["data.packing"].value == "none" and not now.is_char_model
    if not (streaming or padded):
        because = "tokens are memory-mapped: a thread keeps the card fed, processes would only copy"
        ledger.settle(path, 0, because, "machine")
        if asked not in ("auto", 0):
            text = f"dataloader_num_workers {asked}: prepared tokens are memory-mapped"
            ledger.supersede(path, f"{text} and fed by a thread")
        return 0
    if asked != "auto":
        ledger.settle(path, asked, "set in the manifest", "manifest")
        if asked > cores:
            ledger.warn(path, f"{asked} workers on {cores} cores get in each other's way")
        return asked
    if now.target.windows:
        ledger.settle(path, 0, "starting processes is slow on Windows", "machine")
        return 0
    most, what = PADDED_WORKERS, "rows are padded ahead"
    if streaming:
        most, what = STREAMING_WORKERS, "streamed rows are tokenised ahead"
    workers = max(0, min(most, cores - 1))
    ledger.settle(path, workers, f"{what}; {cores} cores", "machine")
    return workers


def folder_name(name: str) -> str:
    """A name as one plain folder: no separators, nothing hidden, nothing that climbs."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "expert"


def _settle_rest(now: Situation, ledger: Ledger, work: Workload | None) -> None:
    training = now.manifest.training
    data = training.dataset
    dataset = data.model_dump(mode="json", exclude_none=True)
    ledger.settle("data.dataset", dataset, "training.dataset of the manifest", "manifest")
    if data.validation_path:
        words, because = f"file {data.validation_path}", "validation_path"
    elif any(task.valid for task in (data.tasks or {}).values()):
        words, because = "files of the tasks", "tasks"
    elif data.streaming or data.validation_split == 0:
        words, because = "none", "streamed" if data.streaming else "validation_split is 0"
    else:
        words = f"{data.validation_split:.0%} of the training rows"
        because = f"split off with seed {now.config.seed}"
    written = {"validation_split", "validation_path", "tasks", "streaming"} & data.model_fields_set
    ledger.settle("data.validation", words, because, "manifest" if written else "preset")
    ledger.settle("data.overlong", *now.overlong)
    for key in ("train_on_prompt", "tokenize"):
        now.pass_on(ledger, f"data.{key}", key)
    if now.config.tokenize == "late":
        text = "every row is tokenised again whenever a batch needs it: only to measure what"
        ledger.warn("data.tokenize", f"{text} that costs")
    if data.streaming:
        ledger.settle("data.cache", None, "streamed rows are not kept", "machine")
    elif now.config.pretokenized_cache:
        cache = str(now.folder / now.config.pretokenized_cache)
        ledger.settle("data.cache", cache, "set in the manifest", "manifest")
    else:
        cache = str(now.folder / "datasets_optimized" / folder_name(now.manifest.name))
        ledger.settle("data.cache", cache, "keyed by content, beside the manifest", "preset")
    ledger.settle("kernels.device", now.target.device, now.target.name, "machine")
    if now.config.device == "cpu" and now.on_gpu:
        text = f"device: cpu: the plan was asked for {now.target.name}"
        ledger.supersede("kernels.device", text)
    if now.config.device == "cuda" and not now.on_gpu:
        text = "cuda was asked for, but there is no GPU: this is a plan for the CPU"
        ledger.warn("kernels.device", text)
    if work is None:
        ledger.unknown("adapter.trainable_parameters", now.resolved.shape_from)
    else:
        because = f"{work.trainable_parameters / work.shape.parameters:.2%} of the model"
        ledger.settle("adapter.trainable_parameters", work.trainable_parameters, because, "machine")
    decoding = training.decoding.model_dump(mode="json", exclude_none=True)
    ledger.settle("decoding", decoding, "training.decoding of the manifest", "manifest")
    needed, free = ledger.decisions["disk.total_bytes"].value, now.target.disk_free_bytes
    if needed is not None and free is not None and needed > free:
        text = f"needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
        ledger.warn("disk.total_bytes", text)
    if now.target.held_bytes and now.target.is_this_machine:
        gib = now.target.held_bytes / 2**30
        ledger.warn("memory.budget_bytes", f"{gib:.1f} GiB of the card are held by others")


def _as_plan(now: Situation, ledger: Ledger) -> RunPlan:
    return RunPlan.model_validate(
        {
            "expert": now.manifest.name,
            "target": now.target.name,
            **ledger.tree(),
            "decisions": tuple(ledger.decisions.values()),
            "remarks": tuple(ledger.remarks),
        }
    )
