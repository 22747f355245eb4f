"""A manifest from a stranger is read or refused: no other exception, no long wait."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expert.core.errors import ExpertError, ManifestError
from expert.manifest.reader import interpret_document, read_manifest
from expert.manifest.text.document import Format, parse_document
from tests.each import each
from tests.manifest.reading import MINIMAL, files_in


def _laugh(line: str) -> str:
    """Thirty anchors, each of which names the one before it three times."""
    return "a0: &a0 [1, 2]\n" + "".join(
        f"a{n}: &a{n} {line.replace('#', f'*a{n - 1}')}\n" for n in range(1, 30)
    )


def _flat(line: str, size: int = 999_999) -> str:
    """Numbered lines, just below the largest file."""
    lines = "".join(line.replace("#", str(number)) for number in range(size // (len(line) + 3)))
    return lines[:size].rpartition("\n")[0]


_CONFIG = '"base_model": "X", "dataset": "a.jsonl", "training": {"config": {%s}}'
# Built only when its test runs: together they are 50 MB.
HOSTILE: dict[str, Any] = {
    "20_mb.json": lambda: "[" + "1," * 10_000_000 + "1]",
    "brackets.json": lambda: "[" * 999_999,
    "flat_keys.json": lambda: "{" + _flat('"k#": 1,\n')[:-1] + "}",
    "doubled_comments.json": lambda: "{" + ",".join(['"_c": 1'] * 4_998) + ', "x": 1}',
    "unknown_keys.json": lambda: "{" + ",".join(f'"epohcs{n}": 1' for n in range(4_990)) + "}",
    "wrong_entries.json": lambda: (
        "{" + _CONFIG % ('"target_modules": [' + ",".join(["1"] * 4_980) + "]") + "}"
    ),
    "comments.yaml": lambda: "#\n" * 499_000 + "a: 1\n",
    "laugh_mapping.yaml": lambda: _laugh("{p: #, q: #, r: #}"),
    "laugh_merge.yaml": lambda: "a0: &a0 {x: 1}\n" + _laugh("{<<: [#, #, #]}").partition("\n")[2],
    "recursive_merge.yaml": lambda: "a: &a {<<: *a}",
    "os_system.yaml": lambda: "a: !!python/object/apply:os.system ['touch hostile']",
    "huge_integer.json": lambda: '{"seed": ' + "9" * 900_000 + "}",
    "nan.json": lambda: '{"lr": NaN}',
    "nul_in_text.yaml": lambda: MINIMAL + 'name: "a\\0b"',
    "utf_16.yaml": lambda: MINIMAL.encode("utf-16"),
    "lone_surrogate.json": lambda: '{"name": "\\udc00"}',
    "long_key.json": lambda: '{"' + "k" * 990_000 + '": 1}',
    "climbing.yaml": lambda: "base_model: X\ndataset: ../../etc/passwd",
    "colons.yaml": lambda: ": " * 499_999,
}  # fmt: skip


@pytest.mark.fault(26)
@each("name", HOSTILE)
def test_a_hostile_file_is_refused_with_a_manifest_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    content = HOSTILE[name]()
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    assert len(str(caught.value).splitlines()[1]) < 1_000_500
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    path.unlink()


# --- what is not a file -----------------------------------------------------------------------


def _refusal(path: str | Path) -> str:
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    assert caught.value.source == str(path)
    return str(caught.value.problems[0])


def _made(folder: Path, kind: str) -> str | Path:
    """Something that is not a manifest file, by its kind."""
    path = folder / "m.json"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "below a file":
        path.write_text(MINIMAL)
    elif kind == "rows":
        path = folder / "rows.csv"
        path.write_text("question,answer\n1,2\n")
    others: dict[str, str | Path] = {
        "a folder": folder,
        "below a file": path / "b.json",
        "a device": "/dev/zero",
        "a NUL": "a\0b.json",
        "5000 letters": "a" * 5000,
    }
    return others.get(kind, path)


@each(
    ("kind", "refusal"),
    [
        ("missing", "no such file  (check the path)"),
        ("a folder", "is a folder  (name the manifest file inside it)"),
        ("below a file", "cannot be read: Not a directory"),
        ("a pipe", "is not a regular file"),
        ("a device", "is not a regular file"),
        ("a NUL", "cannot be read: embedded null byte"),
        ("5000 letters", "cannot be read: File name too long"),
        ("rows", "expert new NAME --from .*rows.csv makes a manifest"),
    ],
)
def test_what_is_not_a_file_is_refused(tmp_path: Path, kind: str, refusal: str):
    told = _refusal(_made(tmp_path, kind))
    assert re.search(refusal, told) if kind == "rows" else told == refusal


@each(
    ("content", "refusal"),
    [
        ("name: x\nauthor: René".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
        (b"name: x\n\nversion: \xed\xa0\x80", "line 3: byte 0xed is not UTF-8"),
        (MINIMAL.encode("utf-16-be"), "line 1: control character U+0000"),
        (b"\xfe\xff\x00{", "the file is UTF-16"),
    ],
)
def test_bytes_that_are_no_utf_8_are_refused_with_their_line(
    tmp_path: Path, content: bytes, refusal: str
):
    (tmp_path / "m.yaml").write_bytes(content)
    assert _refusal(tmp_path / "m.yaml").partition("  (")[0] == refusal


# --- anything at all --------------------------------------------------------------------------

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
_KEYS = st.sampled_from(
    [
        *("name", "version", "schema_version", "base_model", "base_models", "adapters", "model"),
        *("dataset", "data", "training", "config", "decoding", "soft_prompts", "tasks", "path"),
        *("dtype", "amp", "load_in_4bit", "use_dora", "adam_beta1", "betas", "lr"),
        *("quantization", "prompt_template", "target_modules", "report_to", "early_stopping"),
        *("save_every", "grad_clip", "architecture", "n_layer", "length", "tokens", "method"),
        *("adapter_type", "optim", "type", "field_mapping", "constraints", "load_order"),
        *("limitations", "rope_scaling", "vram_limit", "output_dir", "_comment", "x.y", "a[0]"),
        *("<<"),
    ]
) | st.text(max_size=4)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**13)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "X", "auto", "int4", "qlora", "dpo", "none", "../x", "$HOME", "16GB"])
    | st.text(max_size=5)
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=6),
    max_leaves=25,
)
_OVERRIDES = (
    st.text()
    | st.builds("{}={}".format, _KEYS | st.text(), st.text())
    | st.builds(
        lambda steps, value: ".".join(steps) + "=" + json.dumps(value),
        st.lists(_KEYS, min_size=1, max_size=4),
        _TREES,
    )
)
LAYOUT_2_0 = (files_in("good")[0].parent / "layout_2_0.json").read_text()


def _read_or_refuse(text: str, kind: Format, overrides: list[str] | None = None) -> None:
    """Reading ends well or in one of our errors; every other exception fails the test."""
    try:
        read = interpret_document(parse_document(text, kind), overrides=overrides or [])
    except ExpertError as error:
        assert str(error)  # noqa: PT017
    else:
        assert read.manifest.name
        assert all(str(notice) for notice in read.notices)


@pytest.mark.fault(26)
@FUZZ
@given(st.dictionaries(_KEYS, _TREES, max_size=8))
def test_any_tree_is_read_or_refused(tree: dict[str, Any]):
    _read_or_refuse(json.dumps(tree), "json")


@pytest.mark.fault(26)
@FUZZ
@given(st.text() | st.text("{}[]\":,'#&*!|>-?%@` \n\tab1", max_size=40))
def test_any_text_is_read_or_refused(text: str):
    _read_or_refuse(text, "json")
    _read_or_refuse(text, "yaml")


@pytest.mark.fault(26)
@FUZZ
@given(st.data())
def test_a_real_manifest_with_a_slip_of_the_pen_is_read_or_refused(data: st.DataObject):
    path = data.draw(st.sampled_from(files_in("good")))
    text = path.read_text(encoding="utf-8-sig")
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 5)))
    text = text[:start] + data.draw(st.text(max_size=3)) + text[end:]
    _read_or_refuse(text, "json" if path.suffix == ".json" else "yaml")


@pytest.mark.fault(26)
@FUZZ
@given(st.lists(_OVERRIDES, max_size=3))
def test_any_override_is_applied_or_refused(overrides: list[str]):
    _read_or_refuse(MINIMAL, "yaml", overrides)
    _read_or_refuse(LAYOUT_2_0, "json", overrides)
