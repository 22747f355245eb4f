"""Checks the files of a model folder before anything is built from them.

A folder may come from anyone. Its contents decide what is opened and how much memory is used, so
its config.json is compared with the headers of its weights, and may name no files outside.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import open_regular, read_json
from expert.core.process import filtered_stderr
from expert.core.text import count, gib
from expert.planning.models.shapes import UnknownShape, shape_from_config

MAX_CONFIG_BYTES = 5_000_000
_MAX_HEADER_BYTES = 16_000_000
_MAX_TOKENIZER_BYTES = 100_000_000
_SHOWN = 5

_TOKENIZER = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
_TEXTS = (".json", ".jinja", ".txt")
_INDEX, _CONFIG = "model.safetensors.index.json", "config.json"
_PLAIN = re.compile(r"[\w][\w.\-]*\.safetensors")

# Upper bounds of config.json numbers that sizes are built from; no model comes near.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 10**6),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 10**4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "vocab_size"), 10**7),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 10**4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 10**9),
    "head_dim": 10**5,
}
_FROM_ZERO = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "vocab_size")
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?")
_OUR_KERNELS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
}


class InvalidModelFolder(ExpertError):
    """A model folder that is refused, with all reasons."""


class _Unfit(Exception):
    """One reason to refuse a file."""


def check_model_files(folder: Path) -> tuple[str, ...]:
    """Kernels that the folder requests by name, which are ignored; raises InvalidModelFolder if a
    file is not acceptable."""
    problems, kernels = _inspected(str(folder), _state(folder))
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        shown = [f"  - {text}" for text in (*problems[:_SHOWN], *more)]
        head, fix = f"{folder}: no model is built from these files", "use a copy that you trust"
        raise InvalidModelFolder("\n".join([head, *shown, f"  ({fix})"]))
    return kernels


# Repetitions with an end that does not match: a regular expression with catastrophic backtracking
# already fails on these.
_TRIED = (
    "a" * 60 + "!",
    " " * 60 + "a",
    "1" * 60 + "a",
    "word " * 40 + "!",
    "!" * 60 + "a",
    "\n\t" * 30,
)


def load_tokenizer_json(file: Path) -> Any:
    """Load a tokenizer.json; InvalidModelFolder if it is invalid or takes forever."""
    from tokenizers import Tokenizer

    with tokenizer_errors(str(file)):
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise InvalidModelFolder(f"{file}: not a tokenizer: {error}") from None
        with filtered_stderr(b""):  # a panic prints pages
            for text in _TRIED:
                tokenizer.encode(text, add_special_tokens=False)
    return tokenizer


@contextmanager
def tokenizer_errors(where: str) -> Iterator[None]:
    """Turn a panic of a tokenizer, which is not an Exception in Python, into an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        what, fix = f"its tokenizer crashed: {error}", "use a copy from a source you trust"
        raise InvalidModelFolder(f"{where}: {what}  ({fix})") from None


def _own_kernels(config: Mapping[str, Any]) -> Iterator[str]:
    """Kernels that a config.json requests by name, at any depth; some are programs."""
    for key, value in config.items():
        if _IMPLEMENTATION.fullmatch(key) and value not in (*_OUR_KERNELS, None, True, False):
            yield f"{key}: {json.dumps(value)[:100]}"
        elif isinstance(value, Mapping):
            yield from _own_kernels(value)


def _state(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Every entry of a folder with its kind, size and time, so that an unchanged folder is checked
    only once per process."""
    entries = []
    for path in sorted(folder.iterdir()):
        try:
            status = path.stat()
        except OSError:  # a broken link: reported by whoever needs the file
            continue
        entries.append((path.name, status.st_mode, status.st_size, status.st_mtime_ns))
    return tuple(entries)


@lru_cache(maxsize=64)
def _inspected(
    folder: str, state: tuple[tuple[str, int, int, int], ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The problems of the files, and the kernels they request."""
    place, problems = Path(folder), []
    for name, mode, size, _ in state:
        most = MAX_CONFIG_BYTES if name == "config.json" else _MAX_HEADER_BYTES
        most = _MAX_TOKENIZER_BYTES if name in _TOKENIZER else most
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            problems.append(f"{name} is not a regular file")
        elif name.endswith(_TEXTS) and size > most:
            problems.append(f"{name} has {gib(size)}; no more than {gib(most)} are read")
    if problems:
        return tuple(problems), ()
    names = {name for name, *_ in state}
    try:
        config = read_json(place / "config.json", MAX_CONFIG_BYTES) if _CONFIG in names else {}
    except (OSError, ValueError) as error:
        return (f"config.json cannot be read: {error}",), ()
    if not isinstance(config, dict):
        return ("config.json cannot be read: config.json is not an object",), ()
    problems += [*_faults_of_names(place, names, config), *_faults_of_sizes(place, names, config)]
    return tuple(problems), tuple(_own_kernels(config))


def _faults_of_names(folder: Path, names: set[str], config: Mapping[str, Any]) -> Iterator[str]:
    """References to weights that are not safetensors files of this folder."""
    own = config.get("transformers_weights")
    named = {str(own): "config.json (transformers_weights)"} if own else {}
    if _INDEX in names:
        try:
            weights = read_json(folder / _INDEX, _MAX_HEADER_BYTES)["weight_map"]
            named |= dict.fromkeys(map(str, weights.values()), _INDEX)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            yield f"{_INDEX} has no weight_map that can be read"
    for name, by in named.items():
        if not _PLAIN.fullmatch(name):
            yield f"{by} names {name[:100]!r}; only safetensors files in the same folder are read"
    if config.get("is_encoder_decoder") is True:
        yield "config.json: is_encoder_decoder; only decoder-only models can be trained"
    if config and "adapter_config.json" in names:
        yield "adapter_config.json makes it an adapter; name the model it was trained on instead"


def _faults_of_sizes(folder: Path, names: set[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the numbers in a config.json, alone and compared with the weights."""
    tensors: dict[str, list[int]] = {}
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        try:
            tensors |= _header(folder / name)
        except (OSError, ValueError, _Unfit) as error:
            yield f"{name}: {error}"
            return
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    faults = list(_faults_of_numbers(config))
    yield from faults
    if tensors and not faults and not config.get("quantization_config"):
        yield from _faults_beside(config, tensors)


def _faults_of_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    for key, most in _MOST.items():
        value, least = config.get(key), 0 if key in _FROM_ZERO else 1
        if value is None:
            continue
        if type(value) is not int or not least <= value <= most:
            shown = json.dumps(value)[:40]
            yield f"config.json: {key} is {shown}; a number from {least} to {most:,} is expected"
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared:
        yield f"config.json: {heads} attention heads cannot share {shared} key heads evenly"


def _faults_beside(config: Mapping[str, Any], tensors: Mapping[str, list[int]]) -> Iterator[str]:
    """Where a config.json describes more than the files hold: the rest would be random."""
    sizes = [size for shape in tensors.values() for size in shape]
    largest, stored = max(sizes, default=0), sum(map(math.prod, tensors.values()))
    limits = {**dict.fromkeys(_LAYERS, len(tensors)), **dict.fromkeys(_WIDTHS, largest)}
    for key, most in limits.items():
        if (config.get(key) or 0) > most:
            weights = f"have {most:,} tensors"
            if key in _WIDTHS:
                weights = f"have no dimension above {most:,}"
            yield f"config.json: {key} is {config[key]:,}, but the weights {weights}"
            return
    try:
        described = shape_from_config(config).parameters
    except UnknownShape:
        return
    # Sizes of unusual models are not exact; those of a malicious one are far beyond.
    if described > 2 * stored:
        weights = f"the weights have {count(stored)}"
        yield f"config.json describes {count(described)} parameters, but {weights}"


def _header(file: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a safetensors file; all must lie within the file."""
    with open_regular(file) as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise _Unfit("not a safetensors file, or cut off")
        if length > _MAX_HEADER_BYTES:
            most = gib(_MAX_HEADER_BYTES)
            raise _Unfit(f"its header has {gib(length)}; no more than {most} are read")
        try:
            header = json.loads(stream.read(length))
        except RecursionError:
            raise _Unfit("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise _Unfit("its header is not an object")
    header.pop("__metadata__", None)
    return {name: _shape(name, entry, size - 8 - length) for name, entry in header.items()}


def _shape(name: str, entry: Any, end: int) -> list[int]:
    """The shape of one tensor, whose bytes must match it and lie within the file."""
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            whole = all(type(size) is int and size >= 0 for size in shape)
            bits = _BITS.get(kind)
            fits = whole and 0 <= first <= last <= end
            if fits and (bits is None or math.prod(shape) * bits == 8 * (last - first)):
                return shape
    raise _Unfit(f"the tensor {name[:100]!r} does not match its bytes")
