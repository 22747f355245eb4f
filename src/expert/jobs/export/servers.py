"""Servers that can load an export: their commands, and what prevents it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from expert.jobs.export.exported import Kind
from expert.jobs.export.portable_base import PortableBase
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.run_plan import RunPlan

FOLDER = "PATH/TO/THIS/FOLDER"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank (default 16)."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class ModelServer(NamedTuple):
    """A server, the command that starts it with an export, and how clients ask for that."""

    server: str
    command: str
    asked: str


def engines(
    plan: RunPlan, kind: Kind, dtype: str, base: PortableBase, *, template: bool, name: str
) -> list[ModelServer]:
    """Commands, if the servers can load it. `template`: the export has its own chat template."""
    if plan.model.name == CHAR_GPT or problems(plan, kind):
        return []
    own_dtype = _DTYPES[plan.kernels.precision if kind == "adapter" else dtype]
    # TGI computes in 16 bits only, and so do the LoRA kernels of the others.
    narrow = "bfloat16" if own_dtype == "float32" else own_dtype
    short, before = shlex.quote(name), ""
    if kind != "adapter":
        model, names = FOLDER, (name, name, "tgi")
        vllm = sglang = f"--dtype {own_dtype} --served-model-name {short}"
    else:
        in_folder = f"{FOLDER}/base" if plan.model.place == "built-in" else "PATH/TO/THE/BASE"
        model = shlex.quote(base.hub_id or in_folder)
        names, before = (name, f"{model}:{name}", name), f"LORA_ADAPTERS={short}={FOLDER} "
        rank = plan.adapter.rank or 1
        vllm_rank = min(allowed for allowed in VLLM_RANKS if allowed >= rank)
        more = f" --chat-template {FOLDER}/chat_template.jinja" if template else ""
        more += " --quantization bitsandbytes" if plan.model.quantization == "int4" else ""
        lora = f"--dtype {narrow} --enable-lora --max-lora-rank"
        vllm = f"{lora} {vllm_rank} --lora-modules {short}={FOLDER}{more}"
        sglang = f"{lora} {rank} --lora-paths {short}={FOLDER}{more}"
    tgi = f"{before}text-generation-launcher --model-id {model} --dtype {narrow}"
    python = "python -m sglang.launch_server --model-path"
    return [
        ModelServer("vLLM", f"vllm serve {model} {vllm}", f"port 8000, model {names[0]}"),
        ModelServer("SGLang", f"{python} {model} {sglang}", f"port 30000, model {names[1]}"),
        ModelServer("TGI", tgi, f"port 3000, model {names[2]}"),
    ]


def gguf_commands(file: str, name: str, *, plain: bool, lora: bool, base: str) -> list[ModelServer]:
    """Commands for a GGUF file; `lora`: it is an adapter for the GGUF file `base`."""
    model = f"-m {shlex.quote(base if lora else file)}"
    model += f" --lora {shlex.quote(file)}" if lora else ""
    ask = "-no-cnv -p 'The beginning of a text'" if plain else "--jinja -st -p 'Your question'"
    short = shlex.quote(name)
    server = f"llama-server {model}{'' if plain else ' --jinja'} --temp 0"
    ollama = f"ollama create {short} -f Modelfile && ollama run {short}"
    return [
        ModelServer("llama.cpp", f"llama-cli {model} {ask} --temp 0", "one question in a terminal"),
        ModelServer("llama.cpp server", server, "port 8080, any model name"),
        ModelServer("Ollama", ollama, f"port 11434, model {name}"),
    ]


def problems(plan: RunPlan, kind: Kind, folder: Path | None = None) -> list[str]:
    """Why vLLM, SGLang and TGI cannot load an export; `folder`: the export, if written."""
    if plan.model.name == CHAR_GPT:
        return []  # its model card names the only program that can
    adapter, found = plan.adapter, list[str]()
    if adapter.soft_prompts:
        found.append("they do not support soft prompts")
    if kind == "adapter" and adapter.type != "none":
        if adapter.type != "lora":
            only = f"they support LoRA adapters only, not {adapter.type}"
            found.append(f"{only}: export with --merged")
        elif (adapter.rank or 0) > VLLM_RANKS[-1]:
            found.append(f"vLLM supports ranks up to {VLLM_RANKS[-1]}, not {adapter.rank}")
        if plan.model.quantization == "int8":
            base = "they cannot load the base in 8 bits as in training"
            found.append(f"{base}: export with --merged")
    config = "adapter_config.json" if kind == "adapter" else "config.json"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", config):
        if folder is not None and not (folder / name).is_file():
            found.append(f"{name} is missing")
    return found
