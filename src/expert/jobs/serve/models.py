"""The served models: experts by name; adapters of the same base share it in memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.answer.decoding import DecodingSettings, resolve_decoding
from expert.core.errors import Damaged, ExpertError
from expert.core.files import read_bytes
from expert.core.publish import DONE, cached_damage
from expert.core.stored_json import read_object, read_object_or_empty
from expert.core.text import visible
from expert.data.examples.tools import tool_names
from expert.data.template.templates import Template
from expert.jobs.export.portable_base import BASE_COPY
from expert.jobs.export.push import EXPORT_RECORD
from expert.jobs.validate.test_sets import call_marks
from expert.judging.domain import TEXT, domain_of
from expert.judging.oracles.calls import CallMarks
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
from expert.run.stored.choose_checkpoint import BASE, Choice, choose
from expert.run.stored.load import (
    Trained,
    base_warning,
    fuse_to_answer,
    load_base,
    load_trained,
    loading,
    manifest_of_run,
    pick_device,
    read_plan,
)
from expert.run.stored.locate import find_trained

if TYPE_CHECKING:
    import torch

    from expert.answer.steps import AnswerModel

EXPORT = "export"
_CONFIG = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


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
    tags: tuple[str, ...] = ()
    """Capabilities in its manifest."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """An expert or a base."""

    name: str
    run: Path
    checkpoint: str
    trained: Trained
    answer_model: AnswerModel
    template: Template
    decoding: DecodingSettings
    """Default settings, from the manifest."""
    domain: str
    """How answers are compared if they vote."""
    marks: CallMarks | None
    """How its template marks tool calls; None if that cannot be parsed."""
    notes: tuple[str, ...]
    fingerprint: str
    """`system_fingerprint`, which changes with the weights."""

    def entry(self) -> dict[str, Any]:
        """It in the format of `/v1/models`."""
        created = int(self.run.stat().st_mtime)
        return {"id": self.name, "object": "model", "created": created, "owned_by": "expert"}


def load_models(
    places: Sequence[str],
    *,
    checkpoint: str | None = None,
    device: str = "auto",
    with_base: bool = False,
    loading: Callable[[str], None] = lambda what: None,
) -> list[ServedModel]:
    """Load the experts of these places (`PLACE` or `NAME=PLACE`), and their bases if
    `with_base`."""
    import torch

    sources = [_source(place, checkpoint) for place in places]
    wanted = [*sources, *(_bases(sources) if with_base else [])]
    names = [source.name for source in wanted]
    for name in names:
        if names.count(name) > 1:
            raise ExpertError(f"two experts would be called {name}  (name them: NAME=FOLDER)")
    on = pick_device(device)
    loaded: list[ServedModel] = []
    bases: dict[str, Trained] = {}
    for source in wanted:
        loading(f"loading {source.plan.model.name} and {source.state} of {source.path}")
        plan, key = source.plan, _base_of(source.plan)
        own_base = plan.adapter.changes_base and source.state != BASE
        shares = not own_base and (source.state == BASE or plan.adapter.type in ADAPTERS)
        shared = bases.get(key) if shares else None
        # It is read on the CPU if its base is on the GPU already, unless its weights would differ
        # there. Fused blocks have weights of their own: they cannot use those of another expert.
        alike = plan.model.quantization == "none" and plan.kernels.precision != "fp16"
        place = torch.device("cpu") if shared is not None and alike else on
        trained = source.load(device=place, fused=shared is None)
        if shared is not None:
            trained = _on_base(trained, shared, on)
        elif not own_base:
            bases[key] = trained
        loaded.append(_model(source, trained))
    return loaded


def _bases(sources: Sequence[ServedSource]) -> list[ServedSource]:
    """The bases of some experts, each once."""
    found = []
    for number, source in enumerate({_base_of(one.plan): one for one in sources}.values(), 1):
        if source.state == EXPORT and source.plan.adapter.type == "none":
            what = f"{source.path} is merged and has no base"
            raise ExpertError(f"--with-base: {what}  (leave --with-base out)")
        name = BASE if number == 1 else f"{BASE}-{number}"
        load = partial(load_base, source.plan)
        found.append(replace(source, name=name, state=BASE, load=load, notes=()))
    return found


def _source(place: str, checkpoint: str | None) -> ServedSource:
    given_name, sign, path = place.partition("=")
    if not sign or Path(place).exists():
        given_name, path = "", place
    if not all((Path(path) / file).is_file() for file in (EXPORT_RECORD, DONE)):
        found = _run(path, checkpoint)
    elif checkpoint is None:
        found = read_export(Path(path))
    else:
        raise ExpertError(f"--checkpoint: {path} is an export, without checkpoints  (leave it out)")
    if found.plan.model.name == CHAR_GPT:
        what = "the character model has no conversations to answer"
        raise ExpertError(f"{found.path}: {what}  (expert sample continues its text)")
    safe = re.sub(r"[^A-Za-z0-9._:-]+", "-", found.name).strip("-._:")
    name = given_name or safe or found.path.name
    if not _NAME.fullmatch(name):
        what = f"{visible(place)}: {visible(name)!r} cannot be the name of a model"
        fix = "up to 100 letters, digits and . _ : -; set one with NAME=FOLDER"
        raise ExpertError(f"{what}  ({fix})")
    return replace(found, name=name)


def _run(path: str, checkpoint: str | None) -> ServedSource:
    from expert.data.plain_text import FirstRow, trained_on_text

    folder = find_trained(Path(path), "validated")
    plan = read_plan(folder)
    choice = choose(folder, checkpoint or plan.watch.packaging_checkpoint)
    notes, first = [base_warning(folder, plan)], FirstRow(plan)
    if trained_on_text(plan, first):
        notes.append("trained on plain text: /v1/completions continues it")
    elif first.tools:
        offered = ", ".join(tool_names((), first.tools))
        notes.append(f"trained with tools ({offered}): send tools with every request")
    manifest = manifest_of_run(folder)
    return ServedSource(
        name=manifest.name,
        tags=tuple(manifest.capabilities),
        path=folder.path,
        plan=plan,
        state=choice.name,
        load=partial(load_trained, folder, plan, choice),
        notes=tuple(filter(None, notes)),
    )


def _base_of(plan: RunPlan) -> str:
    """What must be the same for two adapters to share their base."""
    model = plan.model.model_dump(mode="json", exclude={"prompt_template", "name"})
    return json.dumps([model, plan.kernels.precision], sort_keys=True)


def _on_base(trained: Trained, shared: Trained, device: torch.device) -> Trained:
    """Replace the base layers of an expert by those of another that shares its base."""
    from expert.model.adapters import ADAPTER
    from expert.model.fused.experts import fuse_experts

    model, layers = trained.loaded.causal_lm, _base_layers(shared.loaded.causal_lm)
    for name, (path, module) in _base_layers(model).items():
        if name in layers and type(layers[name][1]) is type(module):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, layers[name][1])
    trained.loaded.module.to(device)
    fuse_experts(trained.loaded.module, ADAPTER)  # of a mixture: each adapter has its own
    if trained.loaded.soft_prompts is not None:
        trained.loaded.soft_prompts.to(device)
    return replace(trained, device=device)


def _base_layers(model: Any) -> dict[str, tuple[str, Any]]:
    """Paths and leaf modules of a model, except its adapter's, by their names in the base."""
    adapter = {
        id(inner)
        for layer in model.modules()
        if hasattr(layer, "base_layer")
        for name, child in layer.named_children()
        if name != "base_layer"
        for inner in child.modules()
    }
    return {
        path.replace(".base_layer", ""): (path, module)
        for path, module in model.named_modules()
        if path and id(module) not in adapter and not any(True for _ in module.children())
    }


def _model(source: ServedSource, trained: Trained) -> ServedModel:
    from expert.answer.steps import AnswerModel

    template = trained.template
    assert template is not None
    decoding, remarks = resolve_decoding(trained.plan, {})
    if not (answer_model := AnswerModel(trained, remarks.append)).fixed:
        remarks.append("sliding-window layers: only requests that come together share a batch")
    hashes = trained.choice.path / DONE  # of all files; a base has none
    weights = read_bytes(hashes) if hashes.is_file() else source.name.encode()
    return ServedModel(
        name=source.name,
        run=source.path,
        checkpoint=trained.choice.name,
        trained=trained,
        answer_model=answer_model,
        template=template,
        decoding=decoding,
        domain=domain_of(source.tags, trained.plan.decoding) or TEXT,
        marks=call_marks(template),
        notes=(*source.notes, *remarks),
        fingerprint=f"fp_{hashlib.sha256(weights).hexdigest()[:12]}",
    )


# --- exported experts: merged weights, or an adapter and its base --------------------------------


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
        model=_planned_model(path, settings, base),
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
    load = partial(_load_export, path, plan, base.get("weights") or "")
    tags = tuple(map(str, origin.get("capabilities") or ()))
    return ServedSource(name=plan.expert, path=path, plan=plan, state=EXPORT, load=load, tags=tags)


def _partly(kind: Any, **values: Any) -> Any:
    """A plan with these values only: reading any other raises."""
    return kind.model_construct(**values)


def _object(path: Path) -> dict[str, Any]:
    """A JSON file of an export; links (in the hub's cache) are followed, as hashes were checked."""
    return read_object_or_empty(path.resolve())


def _planned_model(path: Path, settings: dict[str, Any], base: dict[str, Any]) -> ModelPlan:
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


def _load_export(
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
        what = f"its weights are not those {path} was trained on"
        fix = "put the right ones there, or export the run with --merged"
        raise ExpertError(f"{plan.model.location}: {what}  ({fix})")
    from peft import PeftModel

    from expert.model.base_folder import TO_TEXT_ALONE

    in_float32 = plan.kernels.precision != "bf16" or plan.adapter.type in IN_FLOAT32
    with loading(path):
        module = PeftModel.from_pretrained(
            trained.loaded.module,
            str(path),
            autocast_adapter_dtype=in_float32,
            key_mapping=TO_TEXT_ALONE,
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
