"""The Python of `tests/warm.py` starts and ends like Python."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.each import each
from tests.warm import python

pytestmark = pytest.mark.skipif(
    python() == sys.executable, reason="programs in the temporary folder may not be run"
)

DOES = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), os.read(int(sys.argv[1]), 9))
sys.exit(3)
"""


def test_a_process_has_what_it_was_given_and_its_imports_made(tmp_path: Path):
    def told(command: str, what: str) -> tuple[int, str]:
        reads, writes = os.pipe()
        os.write(writes, b"a pipe")
        os.close(writes)
        environment = os.environ | {"GIVEN": "ü"}
        process = subprocess.Popen(
            [command, "-c", what, str(reads)],
            cwd=tmp_path,
            env=environment,
            pass_fds=[reads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(reads)
        out, _ = process.communicate("input")
        return process.returncode, out

    assert told(python(), DOES) == told(sys.executable, DOES)
    assert told(python(), "import sys; print('torch' in sys.modules)") == (0, "True\n")


@each(
    "does, code",
    [
        ("pass", 0),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit; atexit.register(lambda: print('left last'))", 0),
    ],
)
def test_it_ends_as_python_ends(does: str, code: int):
    command = [python(), "-c", does]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ("words" in ended.stderr) == ("words" in does)
    assert ("left last" in ended.stdout) == ("atexit" in does)


def test_a_signal_reaches_it_and_it_dies_with_what_waits_for_it():
    waits = "import time; print('now', flush=True); time.sleep(600)"
    for sent in (signal.SIGTERM, signal.SIGKILL):
        command = [python(), "-c", waits]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            process.send_signal(sent)
            assert process.stdout.read() == ""  # the process itself has ended
        assert process.returncode == -sent


def test_callers_that_are_killed_while_they_ask_leave_it_to_the_next():
    asked = marshal.dumps(
        {"arguments": ["-c", ""], "environment": {}, "folder": "/", "descriptors": []}
    )
    head = len(asked).to_bytes(8, "big")
    for sent in (b"", head, head + asked[:9], head + asked):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(Path(python()).with_name("socket")))
            caller.sendall(sent)
    assert subprocess.run([python(), "-c", "pass"], check=False).returncode == 0
