"""Finds a base model: built in, a folder, a models folder, the Hugging Face cache, or the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from expert.core.errors import ExpertError
from expert.core.files import read_json, read_text, sha256_of
from expert.manifest.check.problems import closest
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec, CharGptShape
from expert.planning.models.architectures import TEXT_PARTS
from expert.planning.models.known_models import KNOWN_MODELS, KnownModel, find_known_model
from expert.planning.models.model_files import MAX_CONFIG_BYTES, check_model_files
from expert.planning.models.shapes import ModelShape, UnknownShape, shape_from_config
from expert.planning.survey import portable

Place = Literal["built-in", "folder", "models folder", "hf cache", "hub"]
# Distinct characters in plain English text; the actual data decides once it is read.
_CHARACTERS = 96

TINY = "tiny"
"""A small pretrained model that ships with the package."""
BUILT_IN = Path(__file__).parents[2] / "model"
"""The folder of built-in models."""
WEIGHTS_DIGITS = 16
_INDEX = "model.safetensors.index.json"


class NotATextModel(ExpertError):
    """A model that also reads images or sound."""


@dataclass(frozen=True)
class ResolvedModel:
    """A base model that was found, or the hub id to download; with its shape if known."""

    place: Place
    location: str
    because: str
    shape: ModelShape | None
    shape_from: str
    """The source of the shape, or why there is none."""
    weights: str | None = None
    """For a built-in model: the hash of its weights in this version of the package."""
    named_kernels: tuple[str, ...] = ()
    """Kernels that its config.json requests by name, which are ignored."""
    reads_images: bool = False
    """Its language model is taken out of it."""


def resolve_model(
    spec: BaseModelSpec, folder: Path, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """Search for the name as written, in models folders, in the HF cache, and on the hub."""
    name = spec.name
    if name == CHAR_GPT:
        shape = char_gpt_shape(spec.architecture or CharGptShape())
        return ResolvedModel("built-in", name, "built-in character model", shape, "manifest")
    if name == TINY:
        own = BUILT_IN / name
        if not is_model_folder(own):
            fix = f"name another model; a folder of your own is ./{name}"
            raise ExpertError(f"base_models[].name: {name} is not part of this build  ({fix})")
        tiny = _found(name, "built-in", own, "comes with the package")
        return replace(tiny, weights=weights_hash_prefix(own))
    local = portable(name)
    for candidate in [local] if local.is_absolute() else [folder / local, local]:
        if is_model_folder(candidate):
            return _found(name, "folder", candidate, "a model folder, as written")
    base = basename(name)
    for models in models_folders(folder, environ):
        if is_model_folder(models / base):
            return _found(name, "models folder", models / base, f"{base} found in {models}")
    known = find_known_model(name)
    cached = _in_hf_cache(name, known, spec.revision, environ)
    if cached is not None and _is_whole(cached):
        return _found(name, "hf cache", cached, f"downloaded before, in {cached.parents[1].name}")
    # The hub id; its shape from an already downloaded config.json, or by name.
    hub_id = base if cached is None else hub_id_of(cached)
    if is_hub_id(name) or known is not None:
        hub_id = name if known is None or is_hub_id(name) else known.hub_id
    because = "not on this machine; it will be downloaded from the hub"
    if not is_hub_id(name):
        because = f"{base} is not on this machine; it will be downloaded from the hub as {hub_id}"
    if cached is not None:
        read, shape_from = read_shape(cached / "config.json")
        if read is not None:
            return ResolvedModel("hub", hub_id, because, read, shape_from)
    if known is None:
        why = f"{base} is not on this machine and not among the models known by name"
        return ResolvedModel("hub", hub_id, because, None, why)
    return ResolvedModel("hub", hub_id, because, known.shape, f"known sizes of {base}")


def near_model(name: str, folder: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """An available model with a similar name: built in, in a models folder, or known."""
    there = [path.name for models in models_folders(folder, environ) for path in models.iterdir()]
    known = [basename(model.hub_id) for model in KNOWN_MODELS]
    return closest(basename(name), [*known, *there, CHAR_GPT, TINY], 0.8)


def weights_hash_prefix(folder: Path) -> str | None:
    """The first digits of the sha256 of model.safetensors; None if it is missing."""
    file = folder / "model.safetensors"
    try:
        status = file.stat()
        return _digits(file, status.st_size, status.st_mtime_ns)
    except OSError:
        return None


@cache
def _digits(file: Path, size: int, changed: int) -> str:
    """Cached per state of the file: a process plans many times."""
    return sha256_of(file)[:WEIGHTS_DIGITS]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/repository."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", name))


def hub_id_of(snapshot: Path) -> str:
    """The repository of a snapshot in the hub cache."""
    return snapshot.parent.parent.name.removeprefix("models--").replace("--", "/", 1)


def basename(name: str) -> str:
    """The last part of a POSIX or Windows path or hub id."""
    return PureWindowsPath(name.rstrip("/\\")).name or name


def models_folders(folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """The folders searched for models: $EXPERT_MODELS, models/ beside and above the manifest, and
    models created on this machine."""
    named = [Path(environ["EXPERT_MODELS"])] if environ.get("EXPERT_MODELS") else []
    beside = [parent / "models" for parent in [folder, *folder.resolve().parents[:2], Path()]]
    return [path for path in [*named, *beside, home_models(environ)] if path.is_dir()]


def home_models(environ: Mapping[str, str]) -> Path:
    """The folder of models created on this machine: $EXPERT_HOME/models."""
    return expert_home(environ) / "models"


def expert_home(environ: Mapping[str, str] = os.environ) -> Path:
    """$EXPERT_HOME, else the user's data folder."""
    if environ.get("EXPERT_HOME"):
        return Path(environ["EXPERT_HOME"])
    data = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "expert"


def hf_cache_folder(environ: Mapping[str, str]) -> Path:
    """The hub cache, from the variables of huggingface_hub; importing it would take 0.3 s."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "hub"
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "huggingface" / "hub"


def _in_hf_cache(
    name: str, known: KnownModel | None, revision: str | None, environ: Mapping[str, str]
) -> Path | None:
    """The snapshot of the repository at the revision, complete or not; None: never downloaded.

    A hub id means that repository alone: another owner's model of the same name is another model. A
    known name without owner means the known repository; an unknown one must match only one.
    """
    cache = hf_cache_folder(environ)
    hub_id = name if is_hub_id(name) else (known.hub_id if known else None)
    try:
        if hub_id is not None:
            matches = [cache / ("models--" + hub_id.replace("/", "--"))]
        else:
            end = f"--{basename(name)}".lower()
            matches = [path for path in cache.glob("models--*") if path.name.lower().endswith(end)]
        return _snapshot(matches[0], revision) if len(matches) == 1 else None
    except (OSError, ValueError):  # no permission, an invalid file name, invalid text
        return None


def snapshot_in_cache(hub_id: str, revision: str | None) -> Path | None:
    """The complete snapshot of a repository's revision, or None."""
    snapshot = _in_hf_cache(hub_id, None, revision, os.environ)
    return snapshot if snapshot is not None and _is_whole(snapshot) else None


def _snapshot(repository: Path, revision: str | None) -> Path | None:
    """The snapshot of a revision, given as a commit or by name; without one, the main branch, or
    the newest commit if main was never downloaded by name."""
    snapshots = repository / "snapshots"
    name = revision or "main"
    reference = repository / "refs" / name
    commit = read_text(reference).strip() if reference.is_file() else name
    if re.fullmatch(r"\w[\w.-]*", commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    if revision is not None or reference.is_file():
        return None
    dated = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return dated[-1].parent if dated else None


def _is_whole(folder: Path) -> bool:
    """Whether the config and all weights are present: a download may have been for the tokenizer
    only, or interrupted."""
    try:
        shards = weight_files(folder)
        if not (folder / _INDEX).is_file() and any("-of-" in name for name in shards):
            return False  # part of several, and no index that says how many
        named = [folder / "config.json", *(folder / shard for shard in shards)]
        return len(shards) > 0 and all(path.is_file() for path in named)
    except (OSError, ValueError):
        return False


def weight_files(folder: Path) -> set[str]:
    """The names of a model's weight files; ValueError if its index is invalid."""
    there = {path.name for path in folder.glob("*.safetensors")}
    if "model.safetensors" in there:
        return {"model.safetensors"}
    if not (folder / _INDEX).is_file():
        return there
    try:
        return set(read_json(folder / _INDEX)["weight_map"].values())
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{_INDEX} lists no weights") from None


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has a model's config, or at least its tokenizer, and can be read."""
    try:
        return (folder / "config.json").exists() or (folder / "tokenizer.json").exists()
    except OSError:  # no permission, or an invalid file name
        return False


def _found(name: str, place: Place, location: Path, because: str) -> ResolvedModel:
    kernels = check_model_files(location)
    config = location / "config.json"
    shape, shape_from = read_shape(config)
    known = find_known_model(name) if not config.is_file() else None
    if known is not None:
        shape, shape_from = known.shape, f"known sizes of {basename(name)}"
    return ResolvedModel(
        *(place, str(location), because, shape, shape_from),
        named_kernels=kernels,
        reads_images=known is None and reads_images(config),
    )


def read_shape(config_file: Path) -> tuple[ModelShape | None, str]:
    """The shape in a config.json, and its source or why there is none."""
    try:
        config: Any = read_json(config_file, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        return None, f"{config_file} cannot be read: {error}"
    if not isinstance(config, Mapping):
        return None, f"{config_file} is not an object"
    is_text_part(config, config_file)
    try:
        return shape_from_config(config), f"{config_file.name} of the model"
    except UnknownShape as error:
        return None, f"{config_file}: {error}"


def reads_images(config_file: Path) -> bool:
    """Whether it is of a model that also reads images, whose language model is loaded alone."""
    try:
        config: Any = read_json(config_file, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(config, Mapping) and is_text_part(config, config_file)


_MEDIA_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual")
"""Keys of a config.json that indicate images or sound."""
_MEDIA_CLASS = re.compile(r"(Vision|Image|Audio|Speech|Llava|VL|Omni|Multimodal)\w*For\w+")


def is_text_part(config: Mapping[str, Any], file: Path) -> bool:
    """Whether a config.json is of a model that also reads images, whose language model is loaded
    alone; NotATextModel for other models of images or sound: they would be loaded with towers that
    no row ever reaches."""
    part = next((key for key in _MEDIA_PARTS if config.get(key)), None)
    named = config.get("architectures")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    part = part or next((name for name in classes if _MEDIA_CLASS.search(name)), None)
    text = config.get("text_config")
    if part is not None and isinstance(text, Mapping) and text.get("model_type") in TEXT_PARTS:
        return True
    if part is not None:
        what = f"{file} ({part}) is a model for images or sound; only text is trained"
        raise NotATextModel(f"base_models[].name: {what}  (name a text-only model)")
    return False


def char_gpt_shape(size: CharGptShape) -> ModelShape:
    """The built-in character model: GPT-2 blocks without biases, learned positions, tied head."""
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
