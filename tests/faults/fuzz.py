"""`make fuzz`: every parser that we wrote, given files that were damaged at random.

    python -m tests.faults.fuzz --minutes 5 [--only csv] [--seed 1]

A parser reads what it is given or raises one of our errors, within seconds. Anything else, a crash
of the process included, is kept in tests/faults/finds/ as TARGET-HASH, and tried again by
test_fuzz.py ever after.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError

TESTS = Path(__file__).parents[1]
FINDS = Path(__file__).parent / "finds"
SECONDS = 10.0
"""Of a core, for one input; what is slower is a find."""
SPACE_BYTES = 6 * 2**30
IN_A_CHILD = 200
CRASHED, FOUND = 3, 4
Read = Callable[[Path, bytes], Any]
"""Reads these bytes, which are in that file as well."""
WORDS = [
    *(b'"', b"'", b"{", b"}", b"[", b"]", b":", b",", b"\n", b"\r", b"\0", b"\\", b"\\u", b"#"),
    *(b"null", b"true", b"nan", b"-1", b"0", b"1e999", b"9" * 30, b"0x", b"..", b"/", b"~", b"&a"),
    *(b"*a", b"!!", b"<<", b"- ", b"|", b">", b"\xff", b"\xef\xbb\xbf", b"\xf0\x9f\x98\x80", b";"),
    *(b"{{", b"}}", b"{%", b"%}", b"(", b")", b" for x in range(9) ", b"~", b"**", b"|join"),
    *(b"[" * 50, b'{"a":' * 50, b"a" * 5000, b"\x80", b"\xed\xa0\x80", b"=", b".", b"[0]", b"\t"),
]
NUMBERS = (b"-1", b"0", b"1e99", b"4294967296", b"9" * 25)


def _manifest(file: Path, raw: bytes) -> None:
    from expert.manifest.reader import interpret_document
    from expert.manifest.text.document import parse_document

    kind: Any = file.suffix[1:]
    found = interpret_document(parse_document(raw.decode("utf-8", "replace"), kind))
    assert found.manifest.name
    assert all(str(notice) for notice in found.notices)


def _upgrade(file: Path, raw: bytes) -> None:
    from expert.jobs.manifest import upgrade
    from expert.manifest.text.document import read_document

    upgrade(read_document(file))


def _override(file: Path, raw: bytes) -> None:
    from expert.manifest.reader import interpret_document
    from expert.manifest.text.document import parse_document

    text = (TESTS / "manifests" / "good" / "minimal.yaml").read_text()
    interpret_document(parse_document(text, "yaml"), overrides=[raw.decode("utf-8", "replace")])


def _rows(file: Path, raw: bytes) -> None:
    from expert.data.read.rows import read_rows

    for row in read_rows(file):
        assert row is not None


def _template(file: Path, raw: bytes) -> None:
    from expert.data.template.chat_template import ChatTemplate

    ChatTemplate(raw.decode("utf-8", "replace"))


def _stored(file: Path, raw: bytes) -> None:
    from expert.core.stored_json import read_object, read_object_or_empty

    assert read_object_or_empty(file) is not None
    read_object(file)


def _hashed(file: Path, raw: bytes) -> None:
    from expert.core.hashed import file_integrity, hash_file

    kept = file.with_name("plan.json")
    kept.write_text("{}")
    hash_file(kept).write_bytes(raw)
    told = hashlib.sha256(b"{}").hexdigest().encode() in raw.split()
    assert (file_integrity(kept) == "sound") <= told


def _events(file: Path, raw: bytes) -> None:
    from expert.core.events import follow, read_events
    from expert.insight.event_text import lines_of

    found = list(read_events(file))
    assert list(follow(file, lambda: True)) == found or not raw.endswith(b"\n")
    for event in found:
        assert all(line is not None for line in lines_of(event))


def _done(file: Path, raw: bytes) -> None:
    from expert.core.publish import damage, weights_hash

    assert damage(file.parent)
    weights_hash(file.parent)


def _model(file: Path, raw: bytes) -> None:
    from expert.planning.models.model_files import check_model_files

    check_model_files(file.parent)


def _good(*endings: str) -> list[bytes]:
    found = sorted((TESTS / "manifests").glob("*/*"))
    return [path.read_bytes() for path in found if path.suffix in endings]


def _files(*names: str) -> list[bytes]:
    return [(TESTS / "data" / "files" / name).read_bytes() for name in names]


def _tiny(name: str) -> bytes:
    """The beginning of a file is enough: of weights, the header and a little more."""
    return (TESTS.parent / "src" / "expert" / "model" / "tiny" / name).read_bytes()[:20_000]


OVERRIDES = [
    b"training.config.epochs=3",
    b"base_models[0].name=tiny",
    b'training.dataset={"path": "a.jsonl"}',
    b"lr=1e-4",
    b"training.config.betas=[0.9, 0.99]",
]
EVENTS = [
    b'{"event": "step", "time": 1.5, "step": 3, "loss": 0.25, "rate": 1e-4}\n'
    b'{"event": "saved", "time": 1.5, "step": 3, "path": "x", "crc32": "00000000"}\n'
    b'{"event": "eval", "time": 1.5, "step": 3, "split": "validation", "loss": "nan"}\n'
]
STORED = [b'{"a": [1, 2.5, {"b": null}], "c": "text"}', b"[]", b"{}"]
DONE_FILE = [b'{"model.safetensors": {"size": 4, "sha256": "' + b"0" * 64 + b'"}}']
TEMPLATES = [
    b"{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    b"{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    b"{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    b"{% if add_generation_prompt %}{{ '<|a|>' ~ 'b' * 3 }}{% endif %}",
]


TARGETS: dict[str, tuple[str, Read, Callable[[], list[bytes]]]] = {
    "manifest-json": ("m.json", _manifest, lambda: _good(".json")),
    "manifest-yaml": ("m.yaml", _manifest, lambda: _good(".yaml", ".yml")),
    "upgrade": ("m.yaml", _upgrade, lambda: _good(".yaml", ".yml", ".json")),
    "override": ("m.txt", _override, lambda: OVERRIDES),
    "csv": ("r.csv", _rows, lambda: _files("rivers.csv", "rivers.tsv")),
    "jsonl": ("r.jsonl", _rows, lambda: _files("messages.jsonl", "rivers.jsonl")),
    "json": ("r.json", _rows, lambda: _files("rivers.json", "rivers_under_data.json")),
    "parquet": ("r.parquet", _rows, lambda: _files("rivers.parquet")),
    "arrow": ("r.arrow", _rows, lambda: _files("rivers.arrow", "rivers_file.arrow")),
    "template": ("t.jinja", _template, lambda: TEMPLATES),
    "stored-json": ("plan.json", _stored, lambda: STORED),
    "hash": ("h.txt", _hashed, lambda: [hashlib.sha256(b"{}").hexdigest().encode()]),
    "events": ("events.jsonl", _events, lambda: EVENTS),
    "done": ("DONE", _done, lambda: DONE_FILE),
    "safetensors": ("model.safetensors", _model, lambda: [_tiny("model.safetensors")]),
    "config": ("config.json", _model, lambda: [_tiny("config.json")]),
}
"""By name: the file that is read, its parser, and what is sound."""


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """One of the sound ones with a few changes."""
    raw = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        place = chance.randrange(len(raw) + 1)
        end = min(len(raw), place + chance.choice((0, 1, 1, 4, 40)))
        match chance.randrange(7):
            case 0 if raw:
                raw[min(place, len(raw) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                del raw[place:end]
            case 2:
                raw[place:end] = chance.choice(WORDS)
            case 3:
                raw[place:place] = raw[place:end] * chance.choice((1, 2, 20))
            case 4:
                raw[place:end] = chance.randbytes(end - place)
            case 5:
                del raw[place:]
            case 6:
                numbers = list(re.finditer(rb"\d+", bytes(raw)))
                if numbers:
                    start, stop = chance.choice(numbers).span()
                    raw[start:stop] = chance.choice(NUMBERS)
    return bytes(raw)


def attempt(name: str, raw: bytes, folder: Path) -> str:
    """What went wrong with one input; "" where it was read or refused."""
    file, reader, _ = TARGETS[name]
    path = folder / file
    path.write_bytes(raw)
    if name in ("safetensors", "config"):
        other = "config.json" if name == "safetensors" else "model.safetensors"
        (folder / other).write_bytes(_tiny(other))

    def too_slow(number: int, frame: Any) -> None:
        raise TimeoutError(f"slower than {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader(path, raw)
    except ExpertError as error:
        return "" if str(error).strip() else f"{type(error).__name__} without a word"
    except BaseException:  # noqa: BLE001 - whatever it is, it is a find
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return ""


def _child(name: str, seed: int, folder: Path) -> int:
    """Some inputs, in a process of their own; the one that ended it is in `last`."""
    resource.setrlimit(resource.RLIMIT_AS, (SPACE_BYTES, SPACE_BYTES))
    chance, seeds = random.Random(f"{name} {seed}"), TARGETS[name][2]()
    for _ in range(IN_A_CHILD):
        raw = mutated(chance, seeds)
        (folder / "last").write_bytes(raw)
        place = folder / "place"
        place.mkdir(exist_ok=True)
        told = attempt(name, raw, place)
        if told:
            (folder / "told").write_text(told)
            return FOUND
    return 0


def fuzzed(name: str, seconds: float, seed: int) -> Iterator[tuple[int, bytes, str]]:
    """After every child: inputs so far, and the find with what went wrong; b"" for none."""
    until, tried = time.monotonic() + seconds, 0
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as made:
        folder = Path(made)
        while time.monotonic() < until:
            seed += 1
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    os._exit(_child(name, seed, folder))
                os._exit(CRASHED)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            tried += IN_A_CHILD
            if code == FOUND:
                yield tried, (folder / "last").read_bytes(), (folder / "told").read_text()
            elif code:
                yield tried, (folder / "last").read_bytes(), f"the process ended with {code}"
            shutil.rmtree(folder / "place", ignore_errors=True)
        yield tried, b"", ""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--minutes", type=float, default=1.0, help="for each parser")
    asked.add_argument("--only", choices=list(TARGETS), action="append")
    asked.add_argument("--seed", type=int, default=int(time.time()))
    told = asked.parse_args()
    total = 0
    for name in told.only or TARGETS:
        with tempfile.TemporaryDirectory() as made:  # imported once, before the forks
            attempt(name, TARGETS[name][2]()[0], Path(made))
        kinds: dict[str, int] = {}
        count = 0
        for tried, raw, why in fuzzed(name, 60 * told.minutes, told.seed):
            count = tried
            last = why.strip().splitlines()[-1][:160] if why else ""
            if why and last not in kinds:
                FINDS.mkdir(exist_ok=True)
                kept = FINDS / f"{name}-{hashlib.sha256(raw).hexdigest()[:8]}"
                kept.write_bytes(raw)
                print(f"{kept.name}: {why}", flush=True)  # noqa: T201
            if why:
                kinds[last] = kinds.get(last, 0) + 1
        total += len(kinds)
        print(f"{name}: tried {count:,}, finds {len(kinds)} {kinds or ''}", flush=True)  # noqa: T201
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
