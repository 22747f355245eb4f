"""Loads the trained weights of a run: the finished expert, or one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder, RunFolderError, checkpoints_in
from expert.core.stored_json import read_object, read_object_or_empty
from expert.manifest.schema.dataset import DatasetSpec, Decoding
from expert.manifest.schema.kinds import ADAPTERS, LOW_RANK
from expert.manifest.schema.manifest import CHAR_GPT, CharGptShape, Manifest, SoftPrompt
from expert.model.base_folder import built_in_folder, model_folder, read_config
from expert.planning.choose.recipe import ADAPTER_CONFIG
from expert.planning.models.architectures import ARCHITECTURES
from expert.planning.run_plan import RunPlan
from expert.run.session.identity import BaseWeights, config_of
from expert.run.stored.choose_checkpoint import BASE, Choice
from expert.run.stored.locate import with_current_paths

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from expert.data.template.templates import Template
    from expert.data.tokens.encoder import CharacterEncoder, TextEncoder
    from expert.model.load import LoadedModel

Record = TypeVar("Record", bound="BaseModel")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model on its device, with its tokenizer."""

    plan: RunPlan
    choice: Choice
    loaded: LoadedModel
    encoder: TextEncoder | CharacterEncoder
    template: Template | None
    """None for the character model, whose text has no turns."""
    tokenizer_folder: Path | None
    device: torch.device


def read_plan(folder: RunFolder) -> RunPlan:
    """The validated plan of a run, with its paths updated to the present."""
    folder.refuse_damaged()
    plan = _checked(RunPlan, read_object(folder.plan), folder.plan)
    parts: list[tuple[type[BaseModel], dict[str, Any]]]
    parts = [(DatasetSpec, plan.data.dataset), (Decoding, plan.decoding)]
    parts += [(SoftPrompt, prompt) for prompt in plan.adapter.soft_prompts]
    parts += [(CharGptShape, plan.model.architecture)] if plan.model.architecture else []
    for kind, part in parts:
        _checked(kind, part, folder.plan)
    return with_current_paths(plan, folder)


def manifest_of_run(folder: RunFolder) -> Manifest:
    return _checked(Manifest, read_object(folder.manifest), folder.manifest)


def _checked(kind: type[Record], data: dict[str, Any], file: Path) -> Record:
    from pydantic import ValidationError

    try:  # as JSON: tuples of the plan are lists there
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise RunFolderError(
            f"{file}: is not a {file.stem} of this version: {where}: {error.errors()[0]['msg']}  "
            "(use the version of Expert that made the run; environment.json names it)"
        ) from None


def base_warning(folder: RunFolder, plan: RunPlan) -> str:
    """A warning about the base of a run, or ""; an error if a built-in base is known to differ
    from the one trained on: the answers would be garbage. `load_trained` compares the weights of a
    folder."""
    from expert.planning.models.resolve import weights_hash_prefix

    # A fully trained model keeps none of its base's weights.
    if plan.adapter.type == "full":
        return ""
    if plan.model.place != "built-in":
        config = _base_trained_on(folder).get("config")
        if config in (None, config_of(plan.model)):
            return ""
        fix = "if the answers make no sense, restore the old file or train again"
        return f"{plan.model.location}: config.json changed since training  ({fix})"
    base = built_in_folder(plan.model.name)
    here = weights_hash_prefix(base) if base is not None else None
    if here is None or plan.model.revision == here:
        return ""
    trained_on = f"another `{plan.model.name}` ({plan.model.revision}; this version has {here})"
    fix = "train it again, or use the version it was made with"
    raise ExpertError(f"{folder.path}: was trained on {trained_on}: {fix}")


def _base_trained_on(folder: RunFolder) -> dict[str, Any]:
    """What the newest checkpoint records about the base; empty if there is none."""
    for _, path in reversed(checkpoints_in(folder.checkpoints)):
        record: Any = read_object_or_empty(path / "state.json")
        for key in ("state", "identity", "base"):
            record = record.get(key) if isinstance(record, dict) else None
        if isinstance(record, dict):
            return record
    return {}


def weights_trained_on(folder: RunFolder) -> str | None:
    """The identity of the base weights trained on; None if the run does not record it."""
    weights = _base_trained_on(folder).get("weights")
    return weights if isinstance(weights, str) else None


def pick_device(asked: str) -> torch.device:
    """The named device; `auto` is a GPU if torch can use one."""
    import torch

    if asked not in ("auto", "cuda", "cpu"):
        raise ExpertError(f"device {asked!r}: is not known  (known: auto, cuda, cpu)")
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ExpertError("--device cuda: torch finds no card it can use  (use --device cpu)")
    if asked == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_trained(
    folder: RunFolder,
    plan: RunPlan,
    choice: Choice,
    *,
    device: torch.device,
    quantised: bool = True,
    precision: str | None = None,
    adapter_dtype: torch.dtype | None = None,
    fused: bool = True,
) -> Trained:
    """The base with the trained weights, ready to answer: no dropout or gradients, plain attention.

    Without `quantised` the base is loaded unquantised; `precision` and `adapter_dtype` default to
    those of the run. Without `fused`, blocks and weights stay as transformers knows them.
    """
    base_warning(folder, plan)
    weights = BaseWeights(plan)
    weights.begin(first=True)  # in parallel with loading
    model = plan.model if quantised else plan.model.model_copy(update={"quantization": "none"})
    settled = plan.model_copy(update={"model": model})
    loaded = _loaded(settled, choice, device, precision, adapter_dtype, run=folder)
    trained_on = weights_trained_on(folder)
    if plan.adapter.type != "full" and trained_on not in (None, weights()["weights"]):
        what = f"its weights are not those {folder.path} was trained on"
        fix = "put the old ones back, or train it again"
        raise ExpertError(f"{plan.model.location}: {what}: {fix}")
    if fused:
        fuse_to_answer(loaded, device)
    return _ready_to_answer(plan, choice, loaded, device)


def fuse_to_answer(loaded: LoadedModel, device: torch.device) -> None:
    """Fuse the blocks if that is faster. A step then takes a model of 135M half as long on an H200
    (docs/benchmarks/serving-h200.json), and `tiny` with LoRA 8.7 ms instead of 12.1 on one CPU
    core, with 32 rows 31 ms instead of 55. Without an adapter a CPU takes 5 to 17 % longer
    (fused-answers-cpu.json)."""
    import torch

    from expert.model.adapters import ADAPTER
    from expert.model.device_memory import release_memory
    from expert.model.fused.block import fuse_blocks
    from expert.model.fused.experts import fuse_experts
    from expert.model.fused.kernels import triton_failure
    from expert.model.load import DTYPES

    kinds = LOW_RANK if device.type == "cpu" else (*LOW_RANK, "full", "none")
    fusible = loaded.adapter.type in kinds and loaded.characters is None
    # Float32 weights of a checkpoint are computed with under autocast, which fused blocks are not.
    rounded = loaded.head().dtype == DTYPES[loaded.kernels.precision]
    if fusible and rounded and not triton_failure(device):
        with suppress(torch.OutOfMemoryError):  # blocks without room to be packed stay as they are
            fuse_experts(loaded.module, ADAPTER)
            fuse_blocks(loaded.blocks, ADAPTER, to_answer=True)
        release_memory(device)  # of the weights that were packed


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Attribute errors of libraries to the folder being loaded: it may come from someone else, with
    matching hashes."""
    import torch

    try:
        yield
    except (ExpertError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        what = f"cannot be loaded: {type(error).__name__}: {words}"
        fix = "its files do not fit together: take another checkpoint, or train it again"
        raise ExpertError(f"{path}: {what}  ({fix})") from error


def load_base(plan: RunPlan, *, device: torch.device, fused: bool = True) -> Trained:
    """The base of a run without its trained weights, used the same way."""
    if plan.model.name == CHAR_GPT:
        what = "the character model is trained from scratch, it has no base"
        raise ExpertError(f"--baseline base: {what}  (name a run)")
    bare = plan.adapter.model_copy(update={"type": "none", "soft_prompts": []})
    nothing = Choice(name=BASE, path=Path(), step=None)
    loaded = _loaded(plan.model_copy(update={"adapter": bare}), nothing, device)
    assert loaded.folder is not None
    if fused:
        fuse_to_answer(loaded, device)
    return _ready_to_answer(plan, replace(nothing, path=loaded.folder), loaded, device)


def _loaded(
    plan: RunPlan,
    choice: Choice,
    device: torch.device,
    precision: str | None = None,
    adapter_dtype: torch.dtype | None = None,
    *,
    run: RunFolder | None = None,
) -> LoadedModel:
    """The model of a plan with the weights of a choice, with plain attention."""
    import torch

    from expert.model.load import load_model
    from expert.model.saving import load_trainable
    from expert.training.checkpoint import load_checkpoint

    precision = precision or plan.kernels.precision
    if precision == "fp16" and device.type == "cpu":
        precision = "fp32"  # float16 is slow on CPUs, and float32 holds all its values
    if adapter_dtype is None:
        adapter_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    changes = {"attention": "sdpa", "precision": precision, "device": device.type}
    model, characters = plan.model, None
    adapter = plan.adapter.model_copy(update={"start": None})  # its own weights follow
    if adapter.init == "pissa" and choice.is_final:  # saved with what it started with
        twice = {"rank": 2 * (adapter.rank or 0), "alpha": 2 * (adapter.alpha or 0.0)}
        saved = read_object_or_empty(choice.path / ADAPTER_CONFIG)  # a mixture's experts have none
        names = saved.get("target_modules", adapter.target_modules)
        adapter = adapter.model_copy(update={"init": "default", "target_modules": names, **twice})
    of_characters = model.name == CHAR_GPT
    # A fully trained model is loaded from its final folder, without a base.
    whole = choice.is_final and (of_characters or adapter.type == "full")
    if whole:
        model = model.model_copy(update={"place": "folder", "location": str(choice.path)})
        adapter = adapter if of_characters else adapter.model_copy(update={"type": "none"})
    elif of_characters:
        assert run is not None
        file = run.path / "vocabulary.json"
        if not file.is_file():
            what = "vocabulary.json is missing: the characters of the model are unknown"
            raise ExpertError(f"{run.path}: {what}  (let the run finish with --resume)")
        characters = str(read_object(file).get("characters", ""))
    with loading(Path(model.location)):
        folder = model_folder(model)
        known = ARCHITECTURES.get(str(read_config(folder).get("model_type"))) if folder else None
        if known is not None and known.sinks:
            changes["attention"] = "eager"
        loaded = load_model(
            model,
            adapter,
            plan.kernels.model_copy(update=changes),
            vocabulary=characters,
            device=device,
            seed=plan.optim.seed,
            total_steps=plan.length.total_steps,
            adapter_dtype=adapter_dtype,
        )
    with loading(choice.path):
        if not choice.is_final:
            groups, _ = load_checkpoint(choice.path)
            ranks = {f"adalora.{name}": each for name, each in groups.get("adalora", {}).items()}
            load_trainable(loaded, {**groups["model"], **ranks})
        elif not whole:
            _load_final(loaded, choice.path)
    return loaded


def _ready_to_answer(
    plan: RunPlan, choice: Choice, loaded: LoadedModel, device: torch.device
) -> Trained:
    """The loaded model with its tokenizer and template: no dropout, no gradients."""
    from expert.answer.cache import attention_for
    from expert.data.template.text_tools import text_tools

    loaded.module.eval().requires_grad_(False)
    if loaded.characters is not None:
        from expert.data.tokens.encoder import CharacterEncoder

        encoder: Any = CharacterEncoder(loaded.characters)
        template, tokens = None, None
    else:
        loaded.causal_lm.set_attn_implementation(attention_for(loaded.causal_lm.config))
        loaded.causal_lm.config.use_cache = True
        has_tokenizer = (choice.path / "tokenizer_config.json").is_file()
        tokens = choice.path if has_tokenizer else loaded.folder
        assert tokens is not None
        with loading(tokens):
            encoder, template = text_tools(tokens, plan.model.prompt_template)
    return Trained(
        plan=plan,
        choice=choice,
        loaded=loaded,
        encoder=encoder,
        template=template,
        tokenizer_folder=tokens,
        device=device,
    )


def _load_final(loaded: LoadedModel, path: Path) -> None:
    """Load the adapter and soft prompts of a finished expert into a model."""
    import torch
    from safetensors.torch import load_file

    if loaded.adapter.type in ADAPTERS:
        from peft import set_peft_model_state_dict

        tensors: Mapping[str, Any] = load_file(path / "adapter_model.safetensors")
        result: Any = set_peft_model_state_dict(loaded.module, dict(tensors))
        # AdaLoRA's ranknum is a setting, which PEFT does not save.
        own = {name for name in loaded.weights if ".ranknum." not in name}
        missing = own & set(result.missing_keys)
        if result.unexpected_keys or missing:
            wrong = sorted([*result.unexpected_keys, *missing])
            what = f"the adapter does not fit the plan of its run: {', '.join(wrong[:3])}"
            fix = "the run folder was changed; take another checkpoint"
            raise ExpertError(f"{path}: {what}  ({fix})")
    if loaded.soft_prompts is not None:
        rows = soft_prompt_rows(path, loaded.soft_prompts.names)
        with torch.no_grad():
            for parameter, values in zip(loaded.soft_prompts.prompts, rows, strict=True):
                parameter.copy_(values)


def soft_prompt_rows(path: Path, names: tuple[str, ...]) -> list[torch.Tensor]:
    """The soft-prompt embeddings in a folder, in the order of `names`."""
    from safetensors.torch import load_file

    rows = []
    for name in names:
        subfolder = path / "soft_prompts" / name
        place = subfolder if subfolder.is_dir() else path
        rows.append(load_file(place / "adapter_model.safetensors")["prompt_embeddings"])
    return rows
