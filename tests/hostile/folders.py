"""Hostile model folders, made from the built-in tiny model."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from expert.planning.models.resolve import BUILT_IN, TINY
from tests.hostile.inputs import Make, link_to, sparse

SOUND = BUILT_IN / TINY
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def sound_copy(folder: Path) -> Path:
    """A folder with links to the files of the sound model, each of which can be replaced."""
    folder.mkdir(parents=True)
    for path in SOUND.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def _write(file: Path, content: bytes | str) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def _json(name: str, **changes: Any) -> Make:
    """A file of JSON with keys changed; None takes one away."""

    def make(folder: Path) -> None:
        file = folder / name
        values = json.loads(file.read_text()) if file.exists() else {}
        values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
        _write(file, json.dumps(values))

    return make


def _config(**changes: Any) -> Make:
    return _json("config.json", **changes)


def _text(name: str, content: bytes | str) -> Make:
    return lambda folder: _write(folder / name, content)


def _instead(name: str, make: Make) -> Make:
    """In place of a file, what `make` makes there."""

    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return replace


def _pipe(name: str) -> Make:
    return _instead(name, os.mkfifo)


def _device(name: str) -> Make:
    return _instead(name, link_to("/dev/zero"))


def _sparse(name: str, size: int) -> Make:
    return _instead(name, sparse(size, b""))


def _named(*names: str) -> Make:
    """An index that names these files for the weights."""

    def make(folder: Path) -> None:
        (folder / _WEIGHTS).unlink()
        (folder / "a.safetensors").symlink_to(SOUND / _WEIGHTS)
        (folder / "weights.bin").write_bytes(b"cos\nsystem\n(S'touch OWNED'\ntR.")
        weights = {f"model.layers.{n}.weight": name for n, name in enumerate(names)}
        _write(folder / _INDEX, json.dumps({"metadata": {}, "weight_map": weights}))

    return make


def _header(header: bytes | dict[str, Any], length: int | None = None, data: bytes = b"") -> Make:
    """Weights with a header of one's own."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = struct.pack("<Q", len(raw) if length is None else length) + raw + data
    return _text(_WEIGHTS, whole)


def _tensor(**changes: Any) -> Make:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return _header({"model.embed_tokens.weight": entry}, data=b"\0" * 16)


def _pattern(pattern: str) -> Make:
    """A tokenizer that cuts text by a pattern of one's own."""

    def make(folder: Path) -> None:
        values = json.loads((SOUND / "tokenizer.json").read_text())
        cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        both = [{**cut, "invert": False}, values["pre_tokenizer"]]
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
        _write(folder / "tokenizer.json", json.dumps(values))

    return make


def _both(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for one in makes:
            one(folder)

    return make


REFUSED: dict[str, Make] = {
    "an index names a pickle": _named("weights.bin"),
    "an index leads out of the folder": _named("../../a.safetensors"),
    "an index names an absolute path": _named("/etc/hostname"),
    "an index names another folder": _named("x/a.safetensors"),
    "an index is a list": _both(_named("a.safetensors"), _text(_INDEX, "[]")),
    "an index is nested deeply": _both(_named("a.safetensors"), _text(_INDEX, "[" * 10**6)),
    "an index maps to numbers": _both(_named("a"), _text(_INDEX, '{"weight_map": {"a": 1}}')),
    "the config names a pickle": _config(transformers_weights="weights.bin"),
    "the config leads out of the folder": _config(transformers_weights="../a.safetensors"),
    "it is an adapter of another model": _json(
        "adapter_config.json", base_model_name_or_path="evil/model", peft_type="LORA"
    ),
    "a billion layers": _config(num_hidden_layers=10**9),
    "a thousand layers": _config(num_hidden_layers=1000),
    "negative layers": _config(num_hidden_layers=-3),
    "no layers": _config(num_hidden_layers=0),
    "layers as text": _config(num_hidden_layers="5"),
    "layers as a list": _config(num_hidden_layers=[5]),
    "layers as a fraction": _config(num_hidden_layers=1e300),
    "layers true": _config(num_hidden_layers=True),
    "negative width": _config(hidden_size=-256),
    "a width of a million": _config(hidden_size=10**6, head_dim=10**5),
    "a petabyte of vocabulary": _config(vocab_size=10**12),
    "a gigabyte of vocabulary": _config(vocab_size=10**6),
    "no vocabulary": _config(vocab_size=0),
    "an absurd inner width": _config(intermediate_size=10**7),
    "no heads": _config(num_attention_heads=0),
    "a million heads": _config(num_attention_heads=10**6, num_key_value_heads=10**6),
    "more key heads than heads": _config(num_key_value_heads=7),
    "an absurd size of heads": _config(head_dim=10**5),
    "positions beyond count": _config(model_type="gpt2", n_positions=10**15),
    "a config in a config": _config(text_config={"num_hidden_layers": 10**9}),
    "a config that is a list": _text("config.json", "[]"),
    "a config nested deeply": _text("config.json", '{"a":' * 200_000),
    "a config of 6 MB": _text("config.json", '{"a": "' + "x" * 6_000_000 + '"}'),
    "a config that is not text": _text("config.json", b"\xff\xfe\x00{"),
    "a number of a million digits": _text(
        "config.json", '{"num_hidden_layers": ' + "9" * 10**6 + "}"
    ),
    "an unknown kind of model": _config(model_type="no-such-kind", architectures=["Evil"]),
    "code of its own": _config(model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
    "an encoder": _config(model_type="t5", is_encoder_decoder=True),
    "a config that is a pipe": _pipe("config.json"),
    "a config that is a device": _device("config.json"),
    "weights that are a pipe": _pipe(_WEIGHTS),
    "weights that are a device": _device(_WEIGHTS),
    "a tokenizer that is a pipe": _pipe("tokenizer.json"),
    "a tokenizer that is a device": _device("tokenizer.json"),
    "a tokenizer config that is a pipe": _pipe("tokenizer_config.json"),
    "a template that is a pipe": _pipe("chat_template.jinja"),
    "settings of answers that are a pipe": _pipe("generation_config.json"),
    "a tokenizer of 10 GB": _sparse("tokenizer.json", 10 * 2**30),
    "a template of 10 GB": _sparse("chat_template.jinja", 10 * 2**30),
    "an index of 10 GB": _sparse(_INDEX, 10 * 2**30),
    "weights of a terabyte of nothing": _sparse(_WEIGHTS, 2**40),
    "a header of 100 GB": _header(b"{}", length=100 * 2**30),
    "a header of negative length": _header(b"{}", length=2**64 - 1),
    "a header of 90 MB": _header(b" " * 90_000_000),
    "a header that is a list": _header(b"[]"),
    "a header nested deeply": _header(b'{"a":' * 200_000),
    "a header that is not text": _header(b"\xff" * 64),
    "a tensor past the end": _tensor(data_offsets=[0, 10**15], shape=[10**15 // 4]),
    "a tensor of another size": _tensor(shape=[10**6, 10**6]),
    "a tensor of negative size": _tensor(shape=[-2, -2]),
    "a tensor of text": _tensor(shape="evil"),
    "a tensor before its start": _tensor(data_offsets=[16, 0]),
    "a tensor of an unknown kind": _tensor(dtype="PICKLE"),
    "weights that end early": lambda folder: _write(
        folder / _WEIGHTS, (SOUND / _WEIGHTS).read_bytes()[:5000]
    ),
    "no bytes of weights": _text(_WEIGHTS, b""),
    "a pattern that explodes": _pattern(r"(a+)+$"),
    "a pattern that explodes on words": _pattern(r"(\w+\s?)*$"),
    "a pattern that is broken": _pattern(r"(((("),
    "a tokenizer that is text": _text("tokenizer.json", "evil"),
    "a tokenizer nested deeply": _text("tokenizer.json", "[" * 10**6),
    "a tokenizer without a model": _json("tokenizer.json", model=...),
    "a template without end": _text(
        "chat_template.jinja",
        "{% for a in range(999999) %}{% for b in range(999999) %}x{% endfor %}{% endfor %}",
    ),
    "a template of attributes": _text("chat_template.jinja", "{{ ''.__class__.__mro__ }}"),
    "a template list of numbers": _both(
        _json("tokenizer_config.json", chat_template=[1, 2]),
        _text("chat_template.jinja", "{{ 1/0 }}"),
    ),
}
"""What no command may use, by what is hostile about it."""

FEW = ("an index names a pickle", "a gigabyte of vocabulary")
"""Those that every test run takes."""

HARMLESS: dict[str, Make] = {
    "a kernel from the hub": _config(_attn_implementation="evil/kernel"),
    "a kernel from the hub, inside": _config(attn_implementation="evil/kernel"),
    "experts from the hub": _config(experts_implementation="evil/experts"),
    "code that is not needed": _config(auto_map={"AutoConfig": "evil.Config"}),
}
"""What a run does not follow, and does without."""


def hostile(name: str, folder: Path) -> Path:
    """One of them, in a folder of its own."""
    ({**REFUSED, **HARMLESS})[name](sound_copy(folder))
    return folder
