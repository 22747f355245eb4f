"""Turns a manifest and a target into a RunPlan: settles every "auto", without loading weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_text
from expert.core.text import gib
from expert.manifest.schema.kinds import QUANTISED
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec, Manifest
from expert.planning.choose.batching import settle_fit
from expert.planning.choose.fastest import settle_expected_time, settle_graphs
from expert.planning.choose.kernels import (
    base_quantization,
    choose_attention,
    choose_compile,
    choose_fused_blocks,
    choose_precision,
    choose_switches,
    choose_tf32,
)
from expert.planning.choose.length import settle_arithmetic, settle_disk, settle_length
from expert.planning.choose.parallel import settle_engine
from expert.planning.choose.recipe import (
    settle_adapter,
    settle_model,
    settle_objective,
    settle_optimisation,
    settle_watching,
    warn_of_settings,
)
from expert.planning.choose.savings import suggest_savings
from expert.planning.choose.sequences import settle_sequences, settle_step, settle_widths
from expert.planning.choose.starting_points import tiny_alpha_warning
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft, ResumedChoices
from expert.planning.machine.target import Cluster, Target
from expert.planning.memory.workload import Workload
from expert.planning.models.resolve import basename, resolve_model
from expert.planning.run_plan import ObjectivePlan, RunPlan
from expert.planning.survey import Survey, cache_folder, survey_data

PREFETCHED_BATCHES = 4
STREAMING_WORKERS = 4
PADDED_WORKERS = 2


def make_plan(
    manifest: Manifest,
    target: Target,
    *,
    folder: Path = Path(),
    model: str | None = None,
    environ: Mapping[str, str] = os.environ,
    survey: Survey | None = None,
    plain_text: bool | None = None,
    kept: ResumedChoices | None = None,
    on_command_line: frozenset[str] = frozenset(),
    ranks: int = 1,
    nodes: int = 1,
) -> RunPlan:
    """Settle everything the manifest leaves open for this target.

    `survey`: what is known about the rows; without one, the files are examined. `plain_text`:
    whether the rows are texts without answers, if known. `kept`: choices of a resumed run.
    `on_command_line`: keys that were set there. `ranks`: processes on all `nodes` together, each
    with a device like the target.
    """
    spec = choose_model(manifest, model)
    dataset, is_char_model = manifest.training.dataset, spec.name == CHAR_GPT
    cluster = Cluster(ranks, nodes)
    # Each process has its own card; on a CPU they divide its memory, and all divide the cores of
    # this machine.
    if target.is_this_machine:
        target = replace(target, cores=max(1, target.cores // cluster.ranks_per_node))
    if target.device == "cpu":
        target = replace(target, budget_bytes=target.budget_bytes // cluster.ranks_per_node)
    draft = PlanDraft(
        manifest=manifest,
        folder=folder,
        model=spec,
        resolved=resolve_model(spec, folder, environ),
        target=target,
        cluster=cluster,
        survey=survey or survey_data(dataset, folder, characters=is_char_model),
        plain_text=plain_text,
        kept=kept or ResumedChoices(),
        on_command_line=on_command_line,
    )
    _settle_all(draft)
    suggest_savings(draft, _settle_all)
    slices: dict[str, Any] = {}
    for path, decision in draft.decisions.items():
        name, _, key = path.partition(".")
        if key:
            slices.setdefault(name, {})[key] = decision.value
        else:
            slices[name] = decision.value
    return RunPlan.model_validate(
        {
            "expert": manifest.name,
            "target": target.name,
            **slices,
            "decisions": tuple(draft.decisions.values()),
            "remarks": tuple(draft.remarks),
        }
    )


def _settle_all(draft: PlanDraft) -> None:
    """Make every choice, each after those it depends on."""
    settle_model(draft)
    settle_objective(draft)
    rank, targets = settle_adapter(draft)
    choose_precision(draft)
    choose_tf32(draft)
    settle_sequences(draft)
    choose_switches(draft)
    sequences, places = settle_step(draft)
    settle_length(draft)
    _settle_loader(draft)
    work = _workload(draft, rank=rank, targets=targets, places=places)
    choose_fused_blocks(draft, work, sequences)
    choose_compile(draft, work, sequences)
    choose_attention(draft)
    if work is not None:
        compiled, attention = draft["kernels.compile"], draft["kernels.attention"]
        fused = draft["kernels.fused_blocks"]
        work = replace(work, compiled=compiled, attention=attention, fused_blocks=fused)
    work = settle_fit(draft, work, sequences)
    settle_engine(draft, work)
    if work is None:
        settle_graphs(draft, None)
    settle_widths(draft)
    settle_optimisation(draft)
    if text := tiny_alpha_warning(draft.model, draft.config, draft.resolved.shape):
        draft.warn("adapter.alpha", text)
    settle_watching(draft)
    warn_of_settings(draft)
    settle_expected_time(draft, work)
    settle_arithmetic(draft, work)
    settle_disk(draft, work)
    _settle_data(draft)
    _settle_device(draft)
    if work is None:
        draft.unknown(draft.resolved.shape_from, "adapter.trainable_parameters")
    else:
        because = f"{work.trainable_parameters / work.shape.parameters:.2%} of the model"
        draft.settle("adapter.trainable_parameters", work.trainable_parameters, because)
    decoding = draft.manifest.training.decoding.model_dump(mode="json", exclude_none=True)
    if grammar := _grammar(draft):
        decoding["grammar"] = grammar
    draft.settle("decoding", decoding, "training.decoding of the manifest", "manifest")


def _grammar(draft: PlanDraft) -> str:
    """The grammar that answers keep to: a JSON Schema or a Lark grammar, or "" for none."""
    decoding = draft.manifest.training.decoding
    if not decoding.use_grammar:
        return ""
    if decoding.grammar_file is None:
        tags = [tag.lower().rpartition(":")[2] for tag in draft.manifest.capabilities]
        kind = (decoding.grammar_type or "").lower().partition("-")[0]
        if kind == "json" or (not kind and "json" in tags):
            return "{}"  # the schema of any value
        text = f"there is no grammar for {kind or 'these'} answers  (grammar_file may name one)"
        draft.warn("training.decoding.use_grammar", text)
        return ""
    file = draft.folder / decoding.grammar_file
    try:
        if file.suffix not in (".json", ".lark"):
            raise ValueError("expected a JSON Schema (.json) or a Lark grammar (.lark)")
        text = read_text(file)
        if file.suffix == ".json" and not isinstance(json.loads(text), dict):
            raise ValueError("expected a JSON object")
    except (OSError, ValueError) as error:
        why = f"answers keep to no grammar: {file}: {getattr(error, 'strerror', None) or error}"
        draft.warn("training.decoding.grammar_file", why)
        return ""
    return text


def choose_model(manifest: Manifest, name: str | None) -> BaseModelSpec:
    """The base model with this full name or last part; the first one by default."""
    if name is None:
        return manifest.base_models[0]
    for spec in manifest.base_models:
        if name.lower() in (spec.name.lower(), basename(spec.name).lower()):
            return spec
    names = ", ".join(basename(spec.name) for spec in manifest.base_models)
    fix = f"--model chooses among those; to use another, --set base_model={name}"
    raise ExpertError(f"--model {name}: the manifest has {names}  ({fix})")


def _workload(
    draft: PlanDraft, *, rank: int, targets: frozenset[str], places: int
) -> Workload | None:
    """One sequence as settled so far; None if the model's sizes are unknown."""
    if draft.resolved.shape is None:
        return None
    base, shape = base_quantization(draft), draft.resolved.shape
    if shape.experts and draft.config.adapter_init != "default":  # none for the experts
        targets = (targets or frozenset(shape.linear_sizes)) & frozenset(shape.linear_sizes)
    return Workload(
        shape=shape,
        rows=1,
        row_tokens=places,
        adapter=draft.config.adapter_type,
        rank=rank,
        targets=targets,
        quantization=base if base in QUANTISED else "none",
        precision=draft["kernels.precision"],
        optimizer=draft["optim.optimizer"],
        fused_loss=draft["kernels.fused_loss"],
        soft_tokens=draft.soft_tokens,
        whole=frozenset(draft.config.modules_to_save),
        branches=ObjectivePlan(loss=draft["objective.loss"]).branches,
        prefetch=draft["loader.prefetch"],
        compiled=False,
        loss_rows=draft["kernels.loss_chunk"],
    )


def _settle_loader(draft: PlanDraft) -> None:
    """Processes that make batches, none for packed tokens; and how batches reach the device."""
    asked, cores, path = draft.config.dataloader_num_workers, draft.target.cores, "loader.workers"
    streaming = draft.dataset.streaming
    source: Source = "machine"
    workers, because = 0, "a thread feeds memory-mapped tokens; processes would only copy them"
    if not streaming and (draft.packed or draft.is_char_model):
        if asked not in ("auto", 0):
            text = f"dataloader_num_workers {asked}: a thread feeds prepared, memory-mapped tokens"
            draft.supersede(path, text)
    elif asked != "auto":
        workers, because, source = int(asked), SET, "manifest"
        if asked > cores:
            draft.warn(path, f"{asked} workers on {cores} cores slow each other down")
    else:
        most = STREAMING_WORKERS if streaming else PADDED_WORKERS
        workers, because = max(0, min(most, cores - 1)), f"rows are made ahead; {cores} cores"
    draft.settle(path, workers, because, source)
    because = "batches ready ahead of the device"
    key = "dataloader_prefetch_factor"
    draft.choose("loader.prefetch", key, PREFETCHED_BATCHES, because, "preset")
    draft.settle("loader.persistent_workers", workers > 0, f"{workers} workers")
    because = "faster copies to the GPU" if draft.on_gpu else "no GPU"
    draft.choose("loader.pin_memory", "dataloader_pin_memory", draft.on_gpu, because)


def folder_name(name: str) -> str:
    """A name as a single plain folder: no separators, not hidden, no parent folder."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "expert"


def _settle_data(draft: PlanDraft) -> None:
    """The rows, the validation rows, and the token cache."""
    data, config = draft.dataset, draft.config
    dataset = data.model_dump(mode="json", exclude_none=True)
    draft.settle("data.dataset", dataset, "training.dataset of the manifest", "manifest")
    if data.validation_path:
        words, because = f"file {data.validation_path}", "validation_path"
    elif draft.has_validation_file:
        words, because = "files of the tasks", "tasks"
    elif data.streaming or data.validation_split == 0:
        words, because = "none", "streamed" if data.streaming else "validation_split is 0"
    else:
        words = f"{data.validation_split:.0%} of the training rows"
        because = f"split off with seed {config.seed}"
    written = {"validation_split", "validation_path", "streaming"} & data.model_fields_set
    is_set = bool(written) or draft.has_validation_file
    draft.settle("data.validation", words, because, "manifest" if is_set else "preset")
    draft.settle("data.overlong", *draft.overlong)
    for key in ("train_on_prompt", "tokenize"):
        draft.settle_from_config(f"data.{key}", key)
    if config.tokenize == "late":
        text = "every row is tokenised again for each batch: use it only to measure that cost"
        draft.warn("data.tokenize", text)
    if data.streaming:
        draft.settle("data.cache", None, "streamed rows are not cached")
    elif config.pretokenized_cache:
        found, because = cache_folder(config.pretokenized_cache, draft.folder)
        draft.settle("data.cache", str(found), because, "manifest")
    else:
        cache = str(draft.folder / "datasets_optimized" / folder_name(draft.manifest.name))
        draft.settle("data.cache", cache, "keyed by content, beside the manifest", "preset")


def _settle_device(draft: PlanDraft) -> None:
    """The device, and whether it and the disk have enough space."""
    target, path = draft.target, "kernels.device"
    draft.settle(path, target.device, target.name)
    if draft.config.device == "cpu" and draft.on_gpu:
        draft.supersede(path, f"device: cpu: this plan is for {target.name}")
    if draft.config.device == "cuda" and not draft.on_gpu:
        draft.warn(path, "device: cuda, but there is no GPU: this plan is for the CPU")
    if draft.cluster.ranks_per_node > 1 and not draft.on_gpu:
        count = draft.cluster.ranks_per_node
        text = f"{count} processes divide one CPU, which is no faster than one process"
        draft.advise(path, f"{text}; --gpu plans for a card that is elsewhere")
    needed, free = draft["disk.total_bytes"], target.disk_free_bytes
    if needed is not None and free is not None and needed > free:
        text = f"needs {gib(needed)} of disk, {gib(free)} are free"
        draft.warn("disk.total_bytes", text)
    if target.held_bytes and target.is_this_machine:
        text = f"other processes hold {gib(target.held_bytes)} of GPU memory"
        draft.warn("memory.budget_bytes", text)
