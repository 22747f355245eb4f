"""Many processes prepare one data set: whatever happens to them, its bytes are those of one."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expert.core.publish import DONE
from expert.core.rundir import waiting_lock
from expert.data.prepared import PartsLeft
from expert.data.records import SKIPPED_ROW, BadRow, DataError, Dropped, Row, RowsToSkip, Segment
from expert.data.tokens import prepare as module
from expert.data.tokens import shards
from expert.data.tokens.documents import open_shards, write_shard
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.prepare import Part, make_part, missing_parts, prepare, publish_parts
from expert.data.tokens.shards import Blocks, Piece, TokeniseJob
from tests.data.test_prepare import RECIPE, Crash, forks, work
from tests.data.tokenizers import small_encoder
from tests.each import each


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_part(work: TokeniseJob, folder: Path, part: Part) -> bool:
    """What one process does; whether the folder is published."""
    make_part(work, RECIPE, folder, part)
    if missing_parts(RECIPE, folder, part.of):
        return False
    publish_parts(work, RECIPE, folder)
    return True


KINDS = st.sampled_from(["good", "long", "bad", "dropped", "twice"])


def source(kinds: list[str], **changes: Any) -> TokeniseJob:
    """Rows of all kinds; what became of "twice" depends on the rows before."""

    def rows(rows_to_skip: RowsToSkip) -> Iterator[Row | BadRow]:
        for number, kind in enumerate(kinds):
            if rows_to_skip():
                yield SKIPPED_ROW
            elif kind == "bad":
                yield BadRow("rows.jsonl", number + 1, "broken", "{")
            else:
                yield Row({"kind": kind, "text": f"row {number}"}, "rows.jsonl", number + 1)

    def formatter() -> Callable[[Row], Any]:
        seen: set[str] = set()

        def segments_of(row: Row) -> list[Segment] | BadRow | Dropped:
            kind, text = row.values["kind"], row.values["text"]
            if kind == "twice" and kind in seen:
                return Dropped("occurred before")
            seen.add(kind)
            if kind == "dropped":
                return Dropped("too short" if row.line % 2 else "too long")
            answer = "ship ahoy " * (30 if kind == "long" else 1)
            return [Segment(text, False), Segment(f"{answer}<|im_end|>", True)]

        return segments_of

    asked: dict[str, Any] = {
        "rows": rows,
        "formatter": formatter,
        "encoder": small_encoder(),
        "in_order": "twice" in kinds,
        "row_count": len(kinds),
        "shard_rows": 8,
        "max_bad_rows": len(kinds),
        "made_for": "train rows.jsonl",
    }
    return TokeniseJob(**asked | changes)


class Moments:
    """Raises at the n-th moment at which something was written or is about to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in (
            (shards, "write_shard"),
            (shards, "sync_file"),
            (shards, "write_hashed"),
            (module, "write_hashed"),
            (module, "write_shards"),
            (module, "write_dataset_files"),
            (os, "replace"),
            (os, "link"),
            (os, "rename"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._or_crash(getattr(owner, name)))

    def _or_crash(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def crash_or(*args: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Crash
            return real(*args, **more)

        return crash_or


@pytest.fixture
def moments(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 900)
    with monkeypatch.context() as patched:
        yield Moments(patched)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(kinds=st.lists(KINDS, max_size=60), parts=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_parts_that_crash_and_repeat_in_any_order_give_the_bytes_of_one_process(
    kinds, parts, seed, moments, tmp_path_factory
):
    chance, place = random.Random(seed), tmp_path_factory.mktemp("p")
    whole = source([*kinds, "good"])
    prepare(whole, RECIPE, place / "alone")
    folder, published = place / "tokens", False
    left = [*range(1, parts + 1), *(chance.randint(1, parts) for _ in range(chance.randint(0, 3)))]
    chance.shuffle(left)
    while left:
        moments.left = chance.randint(1, 25) if chance.random() < 0.6 else -1
        try:
            published |= run_part(whole, folder, Part(left[-1], parts))
            left.pop()
        except Crash:
            if chance.random() < 0.5:
                chance.shuffle(left)
        moments.left = -1
    assert published
    assert files(folder) == files(place / "alone")
    assert sorted(path.name for path in place.iterdir() if not path.name.startswith(".")) == [
        "alone",
        "tokens",
    ]


def test_each_part_formats_its_own_rows_only_and_one_that_is_done_reads_nothing_again(tmp_path):
    formatted: list[int] = []

    def counting() -> Callable[[Row], Any]:
        def segments_of(row: Row) -> list[Segment]:
            formatted.append(row.line - 1)
            return [Segment("q", False), Segment("a<|im_end|>", True)]

        return segments_of

    def no_rows() -> Iterator[Row]:
        raise AssertionError("rows are read")

    shares = []
    for part in (1, 2, 3):
        formatted.clear()
        run_part(work(100, formatter=counting, row_count=100), tmp_path / "t", Part(part, 3))
        shares.append(sorted(formatted))
        run_part(work(rows=no_rows, row_count=100), tmp_path / "t", Part(part, 3))
    assert sorted(row for share in shares for row in share) == list(range(100))
    assert all(28 <= len(share) <= 40 for share in shares)


def test_another_number_of_parts_is_refused_with_what_to_do(tmp_path, monkeypatch):
    tokens, whole = tmp_path / "tokens", work(row_count=100)
    run_part(whole, tokens, Part(2, 3))
    with pytest.raises(DataError) as caught:
        run_part(whole, tokens, Part(1, 4))
    [place] = tmp_path.glob("tokens.parts-*")
    assert str(caught.value) == (
        f"{tokens}: the work was started in 3 parts (1 done), not 4  (use --part K/3; "
        f"to divide it differently, stop them and remove {place})"
    )
    for_parts, later = Blocks.for_parts, tmp_path / "later"

    def while_another_begins(parts: int, work: TokeniseJob) -> Blocks:
        module._pieces_folder(later, RECIPE, for_parts(3, work)).mkdir()
        return for_parts(parts, work)

    monkeypatch.setattr(Blocks, "for_parts", while_another_begins)
    with pytest.raises(DataError, match="--part K/3"):
        run_part(whole, later, Part(1, 4))
    assert len(list(tmp_path.glob("later.parts-*"))) == 1


def test_one_process_finishes_what_was_begun_in_parts(tmp_path, monkeypatch):
    prepare(work(row_count=100), RECIPE, tmp_path / "alone")
    for part in (1, 3):
        run_part(work(row_count=100), tmp_path / "tokens", Part(part, 3))
    made = []
    write = Piece.write

    def noted(piece: Piece, *rest: Any) -> int:
        made.append(piece.first)
        return write(piece, *rest)

    monkeypatch.setattr(Piece, "write", noted)
    prepare(work(row_count=100), RECIPE, tmp_path / "tokens")
    blocks = replace(Blocks.for_parts(3, work(row_count=100)), part=1)
    assert made == [row for row in range(0, 100, blocks.rows) if blocks.has(row)]
    assert files(tmp_path / "tokens") == files(tmp_path / "alone")


@each("damage", ["flip", "cut", "remove"])
def test_damaged_pieces_are_made_again_by_whoever_publishes(tmp_path, damage):
    prepare(work(row_count=100), RECIPE, tmp_path / "alone")
    run_part(work(row_count=100), tmp_path / "tokens", Part(1, 2))
    for file in sorted(tmp_path.glob("tokens.parts-*/*.arrow"))[1:4]:
        whole = bytearray(file.read_bytes())
        [(shard, _)] = open_shards(file)
        whole[whole.index(shard.tokens[:4].tobytes())] ^= 1
        if damage == "remove":
            file.unlink()
        else:
            file.write_bytes(whole if damage == "flip" else whole[:-8])
    assert run_part(work(row_count=100), tmp_path / "tokens", Part(2, 2))
    assert files(tmp_path / "tokens") == files(tmp_path / "alone")


def test_bad_rows_of_all_parts_together_may_be_too_many(tmp_path):
    kinds = ["good", "good", "bad", "bad"] * 2  # two of them in each part

    def limited(most: int) -> TokeniseJob:
        return source(kinds, max_bad_rows=most)

    assert not run_part(limited(3), tmp_path / "tokens", Part(1, 2))
    with pytest.raises(DataError, match="4 rows cannot be used"):
        run_part(limited(3), tmp_path / "tokens", Part(2, 2))
    assert run_part(limited(4), tmp_path / "tokens", Part(2, 2))
    prepare(limited(4), RECIPE, tmp_path / "alone")
    assert files(tmp_path / "tokens") == files(tmp_path / "alone")


def test_missing_parts_are_listed():
    assert str(PartsLeft((2, 5, 6, 7, 8), 8)) == "3 of 8 parts done; parts 2, 5-8 are still to do"
    assert str(PartsLeft((4,), 8)) == "7 of 8 parts done; part 4 is still to do"


# --- real processes ------------------------------------------------------------------------------

ROWS = ["good", "long", "bad", "twice", "good"] * 30


class Gated:
    """An encoder that notes what it encodes and stops before the n-th piece until it may resume."""

    fingerprint, vocabulary = "t", 400

    def __init__(self, place: Path, most: int) -> None:
        self.inner, self.place, self.left = small_encoder(), place, most

    def encode(self, documents: list[list[Segment]]) -> EncodedBatch:
        self.left -= 1
        while self.left < 0 and not (self.place / "go").exists():
            time.sleep(0.01)
        with (self.place / "log").open("a", encoding="utf-8") as log:
            log.write("encoded\n")
        return self.inner.encode(documents)


def note(place: Path, text: str) -> None:
    with (place / f"told-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def told(place: Path, process: Any) -> list[str]:
    file = place / f"told-{process.pid}"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def in_a_process(place: Path, part: Part | None, *, most: int = sys.maxsize) -> Any:
    """A process that prepares everything or a part, and notes what it has to say."""

    def main() -> None:
        whole = source(ROWS, encoder=Gated(place, most), waits=lambda text: note(place, text))
        if part is not None:
            run_part(whole, place / "tokens", part)
        else:
            note(place, "hit" if prepare(whole, RECIPE, place / "tokens").hit else "made")

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


@pytest.fixture
def expected(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 900)
    return files(prepare(source(ROWS), RECIPE, tmp_path / "alone").folder)


def encoded(place: Path) -> int:
    return len((place / "log").read_text(encoding="utf-8").splitlines())


@forks
def test_a_part_that_is_killed_and_one_that_runs_twice_give_the_bytes_of_one_process(
    tmp_path, expected
):
    killed = in_a_process(tmp_path, Part(1, 2), most=3)
    twice = [in_a_process(tmp_path, Part(2, 2)) for _ in range(2)]
    until(lambda: len(list(tmp_path.glob("tokens.parts-*/*.json"))) > 3)
    killed.kill()
    for process in (killed, *twice):
        process.join(60)
    assert [process.exitcode for process in (killed, *twice)] == [-signal.SIGKILL, 0, 0]
    assert not (tmp_path / "tokens").exists()
    before = encoded(tmp_path)
    again = [in_a_process(tmp_path, Part(1, 2)) for _ in range(2)]
    for process in again:
        process.join(60)
    assert [process.exitcode for process in again] == [0, 0]
    assert encoded(tmp_path) > before
    assert files(tmp_path / "tokens") == expected
    assert not list(tmp_path.glob("tokens.parts-*"))


@forks
def test_of_three_processes_one_prepares_and_when_it_dies_the_next_takes_over(tmp_path, expected):
    first = in_a_process(tmp_path, None, most=3)
    until(lambda: len(list(tmp_path.glob("tokens.parts-*/*.json"))) == 3)
    others = [in_a_process(tmp_path, None) for _ in range(2)]
    until(lambda: all(told(tmp_path, other) for other in others))
    host = socket.gethostname()
    waiting = (
        "waiting while another process is preparing train rows.jsonl: process "
        f"{first.pid} on {host}"
    )
    assert [told(tmp_path, other) for other in others] == [[waiting], [waiting]]
    first.kill()
    for process in (first, *others):
        process.join(60)
    assert sorted(told(tmp_path, other)[-1] for other in others) == ["hit", "made"]
    assert files(tmp_path / "tokens") == expected
    assert encoded(tmp_path) == len([name for name in expected if name.endswith(".arrow")])


def test_without_locks_the_work_is_done_all_the_same(tmp_path, monkeypatch):
    import filelock

    def no_locks(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    told: list[str] = []
    with waiting_lock(tmp_path / "x", "training", told.append):
        pass
    assert told == [f"{tmp_path}: no file locks here; other processes may do the same work"]
    run_part(work(row_count=100), tmp_path / "tokens", Part(1, 2))
    assert run_part(work(row_count=100), tmp_path / "tokens", Part(2, 2))
    assert (tmp_path / "tokens" / DONE).is_file()


def test_the_same_part_on_two_machines_with_one_process_number_does_not_mix(tmp_path, monkeypatch):
    """Names of files that are being written differ even then."""
    seen: list[str] = []
    write = write_shard

    def noted(path: Path, *rest: Any) -> None:
        seen.append(path.name)
        write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", noted)
    piece = Piece(0)
    piece.add([Segment("a<|im_end|>", True)])
    for machine in ("one", "other"):
        (tmp_path / machine).mkdir()
        piece.write(tmp_path / machine, small_encoder())
    assert len(set(seen)) == 2
    assert all(re.fullmatch(rf"\.{re.escape(piece.name)}\.[0-9a-f]{{32}}", name) for name in seen)
