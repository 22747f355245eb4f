"""Finds or downloads a base model's folder and checks that it can be loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from expert.core.files import read_json, read_text
from expert.core.publish import DONE, SHOWN_FAULTS, cached_damage, faults
from expert.manifest.schema.manifest import CHAR_GPT
from expert.model.errors import ModelError
from expert.planning.models.model_files import (
    MAX_CONFIG_BYTES,
    check_model_files,
    load_tokenizer_json,
)
from expert.planning.models.resolve import hub_id_of, is_hub_id, is_text_part, reads_images
from expert.planning.run_plan import ModelPlan

MXFP4 = "mxfp4"
_MODEL = "base_models[].name"
INSIDE = "model.language_model."
"""Where a model that also reads images has its language model."""
TO_TEXT_ALONE = {r"^model\.language_model\.": "model."}
"""PEFT's names of weights there, and in the language model alone."""
# Never pickled weights, even if they are next to the safetensors.
_FETCHED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]
# Copies of the weights in other formats.
_NOT_FETCHED = ["consolidated*", "original/*", "onnx/*"]


def built_in_folder(name: str) -> Path | None:
    """The folder of a model that ships with the package; None if there is none."""
    folder = Path(__file__).parent / name
    return folder if (folder / "config.json").is_file() else None


def base_reference(model: ModelPlan) -> tuple[str, str | None]:
    """How others can find the base, and its revision: a hub id if it has one, else its folder on
    this machine. A hub cache folder is named by its repository and commit."""
    if model.place == "built-in":
        return str(built_in_folder(model.name) or model.location), None
    if model.place == "hub":
        return model.location, model.revision
    here = str(Path(model.location).absolute())
    if model.place == "folder":
        return here, model.revision
    if model.place == "hf cache":
        folder = Path(model.location)
        return hub_id_of(folder), folder.name
    return model.name if is_hub_id(model.name) else here, model.revision


def model_folder(model: ModelPlan, *, allow_remote_code: bool = False) -> Path | None:
    """The folder of the base on this machine, downloaded if needed and checked; None for a model
    built from scratch."""
    if model.place == "built-in":
        folder = built_in_folder(model.name)
        if folder is None and model.name != CHAR_GPT:
            what = f"{model.name} does not come with this version"
            raise ModelError(_MODEL, what, f"use {CHAR_GPT}, a folder or a hub id")
        return folder
    folder = fetched(model) if model.place == "hub" else Path(model.location)
    if model.place not in ("hub", "hf cache"):  # their files are links named by content
        _refuse_damaged(folder)
    needs_remote_code(model, folder, allowed=allow_remote_code)
    config = read_config(folder)
    check_model_files(folder)
    is_text_part(config, folder / "config.json")
    own = config.get("quantization_config")
    if own and quantised_by(config) != MXFP4:
        # Layers quantised by other tools do not merge or train like ours.
        what = f"its weights are quantised already ({quantised_by(config) or 'unknown'})"
        raise ModelError(str(folder), what, "name the model they were made from, and quantization")
    if not any(folder.glob("*.safetensors")):
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        what = "it contains no weights"
        if pickled:
            names = ", ".join(pickled[:3])
            what = f"its weights are pickled ({names}), which can run code when loaded"
        fix = "convert them to model.safetensors, or name a model that has it"
        raise ModelError(str(folder), what, fix)
    return folder


def quantised_by(config: Mapping[str, Any]) -> str:
    """How the weights of a folder were quantised, by its config.json; "": they were not."""
    own = config.get("quantization_config")
    return str(own.get("quant_method", "unknown")) if isinstance(own, Mapping) else ""


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = read_json(file, MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        what = f"no readable config.json: {error}"
        fix = "name the folder of a transformers model, or a hub id"
        raise ModelError(str(folder), what, fix) from error
    return config


def inside_of(folder: Path | None) -> str:
    """Where a folder's model has the language model that is loaded alone, as the name of a module
    with a dot; "": it is one itself."""
    whole = folder is not None and reads_images(folder / "config.json")
    return INSIDE if whole else ""


def refuse_unknown_model_type(folder: Path, *, allow_remote_code: bool) -> None:
    """Raise ModelError if transformers does not know the model_type and the model's code may not be
    run instead. Reads transformers' tables as text: importing them imports torch."""
    config = read_config(folder)
    kind, own = config.get("model_type"), bool(config.get("auto_map"))
    spec = find_spec("transformers")
    tables = Path(spec.origin).parent / "models" / "auto" if spec and spec.origin else Path()
    texts = [read_text(file) for file in tables.glob("*auto*.py")]
    if kind == CHAR_GPT or (own and allow_remote_code) or not texts:
        return
    if isinstance(kind, str) and any(f'"{kind}"' in text for text in texts):
        return
    if own:
        raise _remote_code_error(folder)
    what = f"transformers does not know the model_type {str(kind)[:100]!r} of its config.json"
    raise ModelError(str(folder), what, "pip install -U transformers, or name another model")


def _remote_code_error(folder: Path) -> ModelError:
    what = "its config.json (auto_map) asks to run code that comes with the model"
    fix = "pin a commit you have read as revision and add --allow-remote-code, or use another model"
    return ModelError(str(folder), what, fix)


def needs_remote_code(model: ModelPlan, folder: Path, *, allowed: bool) -> bool:
    """Whether the model needs code of its own, and that code may run: it is allowed and pinned to a
    commit. Raises if it needs code that may not run."""
    from transformers import CONFIG_MAPPING

    config = read_config(folder)
    # If transformers knows the model_type, it uses its own classes and ignores auto_map.
    if not config.get("auto_map") or config.get("model_type") in CONFIG_MAPPING:
        return False
    pinned = re.fullmatch(r"[0-9a-f]{40}", model.revision or "") is not None
    # A snapshot folder is named after its commit; the contents of other folders are not pinned.
    if allowed and pinned and folder.name == model.revision:
        return True
    raise _remote_code_error(folder)


def _refuse_damaged(folder: Path) -> None:
    """Raise if files that Expert wrote, as in an export, have changed. The model card may be
    edited, and files may be added."""
    if not (folder / DONE).is_file() or not cached_damage(folder):
        return
    changed = [
        text for text in faults(folder, more_files=True) if not text.startswith("README.md ")
    ]
    if changed:
        fix = f"export it again; or remove {DONE} if you changed it yourself"
        raise ModelError(str(folder), "; ".join(changed[:SHOWN_FAULTS]), fix)


def fetched(model: ModelPlan) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            model.location,
            revision=model.revision,
            allow_patterns=_FETCHED,
            ignore_patterns=_NOT_FETCHED,
        )
    # OSError: no network, repository, permission or space; the hub's errors are OSErrors.
    except (OSError, ValueError, HFValidationError) as error:
        what = f"it is not on this machine and could not be fetched: {first_line(error)}"
        fix = "check the name and the network, or put its folder into models/"
        raise ModelError(model.location, what, fix) from error
    return Path(folder)


def first_line(error: BaseException) -> str:
    """The first line of an error message, or the error's class if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of `source`; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def text_encoder(folder: Path) -> Callable[[str], list[int]]:
    """A function that encodes text without special tokens; reads tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        what = "there is no tokenizer.json to encode the init_text of a soft prompt with"
        raise ModelError(str(folder), what, "use init_method: random or vocab_sample")
    tokenizer = load_tokenizer_json(file)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
