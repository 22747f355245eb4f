"""Loads exported experts from their folder: merged weights, or an adapter and its base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import Damaged, ExpertError
from expert.core.publish import cached_damage
from expert.core.stored_json import read_object, read_object_or_empty
from expert.jobs.export.portable_base import BASE_COPY
from expert.jobs.export.push import EXPORT_RECORD
from expert.manifest.schema.kinds import ADAPTERS, IN_FLOAT32
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec
from expert.planning.models.resolve import resolve_model
from expert.planning.run_plan import (
    AdapterPlan,
    KernelPlan,
    LengthPlan,
    ModelPlan,
    OptimPlan,
    RunPlan,
)
from expert.run.stored.choose_checkpoint import Choice
from expert.run.stored.load import Trained, fuse_to_answer, load_base, loading

if TYPE_CHECKING:
    import torch

EXPORT = "export"
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class ServedSource:
    """A run or an export to serve, before its weights are loaded."""

    name: str
    path: Path
    plan: RunPlan
    """Of an export, only the parts needed to load and sample a model."""
    state: str
    load: Callable[..., Trained]
    notes: tuple[str, ...] = ()


def read_export(path: Path) -> ServedSource:
    """An exported folder, described by its small files; the hashes of all are checked."""
    fault = cached_damage(path)
    if fault:
        raise Damaged(f"{path}: {fault}  (export it again, or download it again)")
    origin, settings = read_object((path / EXPORT_RECORD).resolve()), _object(path / _CONFIG)
    if any(path.glob("*.gguf")):
        raise ExpertError(f"{path}: is a GGUF file  (llama-server -m FILE --jinja serves it)")
    kind = "dora" if settings.get("use_dora") else str(settings.get("peft_type", "none")).lower()
    if (path / "soft_prompts").is_dir() or kind not in (*ADAPTERS, "none"):
        raise ExpertError(f"{path}: soft prompts of exports are not served  (serve its run)")
    if settings.get("modules_to_save"):
        what = "embedding or head are trained whole, which is not served from an export"
        raise ExpertError(f"{path}: {what}  (serve its run, or export it with --merged)")
    base: dict[str, Any] = origin.get("base") or {}
    plan: RunPlan = _partly(
        RunPlan,
        expert=str(origin.get("name") or path.name),
        model=_model(path, settings, base),
        adapter=AdapterPlan(type=kind, rank=None, alpha=None, dropout=0.0, target_modules=None,
                            feedforward_modules=[], soft_prompts=[], trainable_parameters=None),
        kernels=KernelPlan(device="cpu", precision=origin.get("dtype", "fp32"), tf32=False,
                           loss_scaling=False, attention="sdpa", fused_loss=False, compile=False,
                           compile_mode="default", compile_backend="inductor",
                           checkpointing="none", recomputed_blocks=None, cudnn_benchmark=False),
        optim=_partly(OptimPlan, seed=0),
        length=_partly(LengthPlan, total_steps=None),
        decoding=origin.get("decoding") or {},
    )  # fmt: skip
    load = partial(_load, path, plan, base.get("weights") or "")
    return ServedSource(name=plan.expert, path=path, plan=plan, state=EXPORT, load=load)


def _partly(kind: Any, **values: Any) -> Any:
    """A plan with these values only: reading any other raises."""
    return kind.model_construct(**values)


def _object(path: Path) -> dict[str, Any]:
    """A JSON file of an export; links (in the hub's cache) are followed, as hashes were checked."""
    return read_object_or_empty(path.resolve())


def _model(path: Path, settings: dict[str, Any], base: dict[str, Any]) -> ModelPlan:
    """The folder itself, or the base of its adapter: the copy in it, or resolved as for a manifest
    in that folder."""
    is_char_gpt = _object(path / "config.json").get("model_type") == CHAR_GPT
    name, place, location = CHAR_GPT if is_char_gpt else path.name, "folder", str(path)
    if settings and (path / BASE_COPY).is_dir():
        location = str(path / BASE_COPY)
    elif settings:
        name = str(settings.get("base_model_name_or_path") or "")
        spec = BaseModelSpec(name=name, revision=base.get("revision"))
        found = resolve_model(spec, path)
        place, location = found.place, found.location
    return ModelPlan(
        name=name, place=place, location=location, revision=base.get("revision"),
        parameters=None, architecture=None, quantization=base.get("quantization") or "none",
        prompt_template=None,
    )  # fmt: skip


def _load(
    path: Path, plan: RunPlan, trained_on: str, *, device: torch.device, fused: bool
) -> Trained:
    """`trained_on`: identity of the base's weights in training, if the export records it."""
    from expert.data.template.text_tools import text_tools
    from expert.run.session.identity import BaseWeights

    merged = plan.adapter.type == "none"
    trained = load_base(plan, device=device, fused=fused and merged)
    if merged:
        return replace(trained, choice=Choice(name=EXPORT, path=path, step=None))
    here = BaseWeights(plan)()["weights"] or ""
    # A hub commit cannot be compared with a hash of files.
    if here != trained_on and here.split()[:1] == trained_on.split()[:1]:
        raise ExpertError(
            f"{plan.model.location}: its weights are not those {path} was trained on  (put the "
            "right ones there, or export the run with --merged)"
        )
    from peft import PeftModel

    in_float32 = plan.kernels.precision != "bf16" or plan.adapter.type in IN_FLOAT32
    with loading(path):
        module = PeftModel.from_pretrained(
            trained.loaded.module, str(path), autocast_adapter_dtype=in_float32
        )
        encoder, template = text_tools(path, None)
    module.eval().requires_grad_(False)
    loaded = replace(trained.loaded, module=module, adapter=plan.adapter)
    if fused:
        fuse_to_answer(loaded, device)
    return replace(
        trained,
        choice=Choice(name=EXPORT, path=path, step=None),
        loaded=loaded,
        encoder=encoder,
        template=template,
        tokenizer_folder=path,
    )
