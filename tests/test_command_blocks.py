"""Runs every command that a document shows, in its order."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from expert.planning.machine.machine import describe_machine
from tests.cli.running import Runner
from tests.command_blocks import (
    NOTES,
    ROOT,
    SAME_NUMBERS,
    Block,
    blocks_of,
    documents,
    missing_lines,
    needs_a_shell,
    words_of,
)
from tests.each import each
from tests.forked import start_server
from tests.warm import python

DOCUMENTS = documents()
GUIDE = ROOT / "docs" / "TRAINING_GUIDE.md"
MADE = ("runs", "datasets_optimized", ".pytest_cache", "__pycache__")
# The CPU on which the outputs were printed; replaced by the name of this machine's.
CPU_OF_THE_DOCUMENTS = "Intel(R) Xeon(R) Processor"
# How the fast tests shorten commands. The slow tests run them as written.
SHORT_ANSWERS = "--set training.decoding.max_new_tokens=16"
SHORTER = {
    r"--rows 8000\b": "--rows 400",
    r"(expert train dates)$": rf"\1 --epochs 2 {SHORT_ANSWERS}"
    " --set batch_size=4 --set learning_rate=1e-4 --set training.dataset.max_samples=60",
    r"(expert validate .* --baseline base --min-accuracy) 0.9$": r"\1 0",
}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def blocks(document: Path) -> list[Block]:
    return list(blocks_of(document.read_text(encoding="utf-8")))


def shortened(command: str) -> str:
    for written, short in SHORTER.items():
        command = re.sub(written, short, command)
    return command


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def cpu_here() -> str | None:
    """The CPU's name; None if there is a GPU, which changes the output."""
    here = describe_machine(ROOT)
    return None if here.gpus else here.cpu_model.value


class Reader:
    """Follows a document in a folder with the repository's examples."""

    def __init__(self, folder: Path, run: Runner) -> None:
        self.folder, self.run = folder, run

    def follow(self, document: Path, *, slow: bool) -> None:
        for block in blocks(document):
            if "not run" not in block.notes and ("slow" not in block.notes or slow):
                self.take(block, f"{named(document)}:{block.line}", hurry=not slow)

    def take(self, block: Block, where: str, *, hurry: bool = False) -> None:
        """Run a block; `hurry`: with shortened commands."""
        if "file" in block.notes:
            path = self.folder / block.notes["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            return
        printed = ""
        for number, command in enumerate(block.commands, 1):
            code, wrote = self.do(shortened(command) if hurry else command)
            expected = block.exit_code if number == len(block.commands) else 0
            assert code == expected, f"{where}: {command}\n{wrote}"
            printed += wrote
        here = cpu_here()
        if here is not None and "output differs" not in block.notes:
            shown = tuple(line.replace(CPU_OF_THE_DOCUMENTS, here) for line in block.output)
            missing = missing_lines(shown, printed, numbers=SAME_NUMBERS in block.notes)
            assert not missing, f"{where}: was not printed: {missing}\n{printed}"

    def do(self, command: str) -> tuple[int, str]:
        words = words_of(command)
        if needs_a_shell(command):
            return self.call(["bash", "-c", command])
        if words[0] in ("expert", "expert-cli"):
            ran = self.run(*words[1:])
            return ran.code, ran.out + ran.err
        if words[0] in ("python", "python3"):
            return self.call([python(), *words[1:]])
        assert words[0] == "make", f"cannot run {command!r}: say why above the block"
        assert set(words[1:]) <= set(TARGETS), f"{command}: there is no such target"
        return 0, ""

    def call(self, words: list[str]) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def reader(tmp_path, monkeypatch, capsys):
    """A reader in a folder with only the repository's examples and experts."""
    folder = tmp_path / "repository"
    for name in ("examples", "experts"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*MADE))
    for name, value in {
        "EXPERT_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    before = signal.getsignal(signal.SIGINT)
    yield Reader(folder, Runner(capsys, monkeypatch))
    signal.signal(signal.SIGINT, before)


def follows_the_guide(document: Path) -> bool:
    """Whether a document continues with the expert of the guide."""
    return document != GUIDE and "dates/" in document.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the guide's expert is kept for documents that continue with it."""
    return tmp_path_factory.mktemp("kept") / "dates"


def make_the_guides_expert(reader: Reader, kept: Path) -> None:
    """Create the files of the guide, and a run of two steps instead of its own; once."""
    if kept.exists():
        shutil.copytree(kept, reader.folder / "dates")
        return
    rows, *others = [block for block in blocks(GUIDE) if "file" in block.notes]
    reader.take(rows, "the guide")
    for command in (
        "python make_rows.py",
        "expert new dates --from rows.jsonl",
        f"expert train --manifest dates/manifest.json --set max_steps=2 {SHORT_ANSWERS}",
    ):
        code, wrote = reader.do(command)
        assert code == 0, wrote
    for block in others:
        reader.take(block, "the guide")
    shutil.copytree(reader.folder / "dates", kept)


def runnable(document: Path, *, slow: bool) -> bool:
    """Whether the fast tests run a block of it; `slow`: whether the fast tests shorten or skip
    one."""
    run = [each for each in blocks(document) if each.commands and "not run" not in each.notes]
    if slow:
        commands = [command for block in run for command in block.commands]
        hurried = [*map(shortened, commands)]
        return any("slow" in block.notes for block in run) or commands != hurried
    return any("slow" not in block.notes for block in run)


@pytest.mark.documents
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if runnable(path, slow=False)], ids=named
)
def test_the_commands_of_a_document_run_in_their_order(document, reader, kept):
    if follows_the_guide(document):
        make_the_guides_expert(reader, kept)
    reader.follow(document, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if runnable(path, slow=True)], ids=named
)
def test_the_long_commands_of_a_document_run_too(document, reader, kept):
    start_server()  # before `expert benchmark` starts one without the imports of other tests
    if follows_the_guide(document):
        make_the_guides_expert(reader, kept)
    reader.follow(document, slow=True)


def test_there_are_documents_with_commands():
    assert ROOT / "README.md" in DOCUMENTS
    assert GUIDE in DOCUMENTS
    assert sum(len(block.commands) for path in DOCUMENTS for block in blocks(path)) >= 40


@each("written", SHORTER)
def test_what_is_shortened_is_in_a_document(written):
    """After a rewording the guide's run was no longer shortened and took 100 s."""
    found = [command for path in DOCUMENTS for block in blocks(path) for command in block.commands]
    assert any(re.search(written, command) for command in found)


@each("document", DOCUMENTS, ids=named)
def test_what_is_not_run_or_not_compared_says_why(document):
    for block in blocks(document):
        for name, value in block.notes.items():
            where = f"{named(document)}:{block.line}"
            assert name in (*NOTES, "exits with"), f"{where}: <!-- {name} --> says nothing"
            assert value, f"{where}: {name}: the reason is missing"


@each(
    ("commands", "why"),
    [
        ("expert machine\npip install x", "cannot run 'pip install x': say why"),
        ("expert manifest check nowhere.yaml", r"nowhere\.yaml"),
    ],
)
def test_a_command_that_fails_or_cannot_run_without_a_reason_is_a_failure(reader, commands, why):
    [block] = blocks_of(f"```\n{commands}\n```\n")
    with pytest.raises(AssertionError, match=why):
        reader.take(block, "here")


def test_a_line_that_is_shown_and_not_printed_is_a_failure(reader):
    [block] = blocks_of("```\n$ expert --version\nexpert of another age\n```\n")
    if cpu_here() is None:
        pytest.skip("what is printed is compared on machines without a GPU")
    with pytest.raises(AssertionError, match="was not printed"):
        reader.take(block, "here")


@each(
    ("shown", "printed", "numbers", "missing"),
    [
        (("step 10/66  loss 0.48",), "step 20/66  loss 0.31\n", False, []),
        (("saved … 4 MiB",), "saved runs/x/step-000033  8 MiB\n", False, []),
        (("second", "first"), "first\nsecond\n", False, ["first"]),
        (("a lie",), "the truth\n", False, ["a lie"]),
        (("66 steps",), "82 steps\n", True, ["66 steps"]),
        (("82 steps, … parameters",), "82 steps, 9 parameters\n", True, []),
    ],
)
def test_numbers_may_differ_unless_a_document_says_otherwise_and_words_may_not(
    shown, printed, numbers, missing
):
    assert missing_lines(shown, printed, numbers=numbers) == missing


def test_comments_above_a_block_are_read_and_outputs_told_from_commands():
    notes = "<!-- exits with 2 -->\n<!-- output differs: x -->\n"
    text = f"{notes}```\n$ expert plan \\\n  -m x\nno\n```\n"
    [block] = blocks_of(text)
    assert block.notes == {"exits with": "2", "output differs": "x"}
    assert [words_of(command) for command in block.commands] == [["expert", "plan", "-m", "x"]]
    assert (block.output, block.exit_code) == (("no",), 2)
    text = "So:\n\n    expert plan -m x \\\n      --gpu y\n    expert machine\n\nend\n"
    [set_in] = blocks_of(text)
    assert [words_of(one)[1] for one in set_in.commands] == ["plan", "machine"]
    assert list(blocks_of("```\nloss 1.0\n```\n")) == []
    assert list(blocks_of("```yaml\nexpert: x\n```\n")) == []
