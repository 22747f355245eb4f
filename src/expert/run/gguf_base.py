"""Takes a GGUF file as a base: read once by transformers, saved as a model folder.

The weights of such a file are usually rounded to 4 to 8 bits; the folder holds the rounded values
in bfloat16.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import sha256_of
from expert.core.install import pip_install
from expert.core.publish import damage, publishing
from expert.planning.models.resolve import home_models


def base_from_gguf(file: Path, name: str | None = None) -> Path:
    """The model folder made from a GGUF file, made on first use. It lies in Expert's folder of
    models, under `name` or that of the file."""
    if not file.is_file():
        raise ExpertError(f"{file}: there is no such file  (name a .gguf file or a model)")
    own = re.sub(r"[^\w.-]+", "-", file.stem)
    folder = home_models(os.environ) / (name or f"{own}-{sha256_of(file)[:8]}")
    if folder.exists():
        fault = damage(folder, contents=False)
        if fault:
            raise ExpertError(f"{folder}: {fault}  (remove the folder; it will be made again)")
        return folder
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ExpertError(f"{file}: needs the package gguf  ({pip_install('gguf')})") from None
    try:
        fields = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
        with publishing(folder) as place:
            _write(file, fields, place)
    except ExpertError:
        raise
    except Exception as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"transformers cannot read it: {words}"
        raise ExpertError(f"{file}: {what}  (name the model it was made from)") from error
    return folder


def _write(file: Path, fields: dict[str, Any], folder: Path) -> None:
    """Write weights, config and tokenizer as a transformers model folder."""
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    there: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, **there
    )
    config, weights = model.config, dict(model.named_parameters())  # tied weights once
    if hasattr(config, "quantization_config"):  # the weights are no longer those of the file
        del config.quantization_config
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, **there)
    # transformers 5.17 takes the start of a turn for its end; the file knows better.
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = ("bos", "eos", "padding")
    ids = {kind: fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds}
    config.bos_token_id, config.eos_token_id = ids["bos"], ids["eos"]
    config.pad_token_id = ids["eos"] if ids["padding"] is None else ids["padding"]
    tokenizer.bos_token = None if ids["bos"] is None else tokens[ids["bos"]]
    tokenizer.eos_token = tokens[ids["eos"]]
    tokenizer.pad_token = tokens[config.pad_token_id]
    config.save_pretrained(folder)
    contiguous = {key: weight.detach().contiguous() for key, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", "utf-8")
