"""A Python that starts instantly: its processes are forks of one server, used by all test workers,
that has made all imports of a run.

`python()` returns a command to use like `sys.executable`. The process gets the arguments,
environment, folder and open files of the call, receives its signals, and ends with the same exit
code. Its process id differs, and it cannot test how Python starts, when modules are imported, or
variables that packages read on import, such as those of huggingface_hub.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "EXPERT_TESTS_PYTHON"  # passes the command to child processes of tests


def python() -> str:
    """The command; its server ends with the first process that called this."""
    if Path("/dev/nvidiactl").exists():  # CUDA cannot be used in forks once initialised
        return sys.executable
    if COMMAND not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="expert-warm-")
        command = Path(folder.name, "python")
        asks = Path(__file__).with_name("warm_client.py").read_text(encoding="utf-8")
        command.write_text(f"#!{sys.executable} -IS\n{asks}", encoding="utf-8")
        command.chmod(0o700)
        if not os.access(command, os.X_OK):  # programs in /tmp may be forbidden
            folder.cleanup()
            return sys.executable
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(command.with_name("socket")))
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                # Ctrl-C reaches the fork once, forwarded by the client that waits for it.
                start_new_session=True,
            )
        atexit.register(_end, server, folder)
        os.environ[COMMAND] = str(command)
    return os.environ[COMMAND]


def _end(server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    server.communicate()  # closing its input ends it
    folder.cleanup()


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """In a fork: the request to run; None when the server ends. Each client has a fork that waits
    for the process, so that requests never wait for each other."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those forks end
    asking: list[Any] = [0, listener]
    while 0 not in select.select(asking, [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _started(client)
        client.close()
    return None


def _started(client: socket.socket) -> dict[str, Any]:
    """In the new process: the request. The fork before it tells the client how it ends, and kills
    it if the client was killed."""
    head, opened, _, _ = socket.recv_fds(client, 8, 200)
    length = int.from_bytes(head, "big")
    with client.makefile("rb") as sent:
        what = sent.read(length)
    if not what or len(what) < length:  # the client was killed meanwhile
        os._exit(1)
    process = os.fork()
    if not process:
        client.close()
        asked: dict[str, Any] = marshal.loads(what)
        return asked | {"received": opened}
    for descriptor in opened:
        os.close(descriptor)

    def kill_without_client() -> None:
        with suppress(OSError):
            client.recv(1)  # nothing is ever sent
        os.kill(process, signal.SIGKILL)

    with suppress(OSError):  # killed since
        client.sendall(process.to_bytes(4, "big"))
    threading.Thread(target=kill_without_client, daemon=True).start()
    # Not reaped before this fork ends: its number cannot be that of another process.
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with suppress(OSError):
        client.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(asked: dict[str, Any]) -> None:
    """Take over the files, folder and environment of the client."""
    os.setsid()
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 500) for one in asked["received"]]
    for one in asked["received"]:
        os.close(one)
    for one, number in zip(high, asked["descriptors"], strict=True):
        os.dup2(one, number, inheritable=True)
        os.close(one)
    os.chdir(asked["folder"])
    os.environb.clear()
    os.environb.update(asked["environment"])
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *(one for one in found if one and one not in sys.path)]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the end
    sys.stdout, sys.stderr = _output(1, "strict"), _output(2, "backslashreplace")
    import numpy

    numpy.random.seed()  # a fresh process has another seed


def _output(number: int, errors: str) -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115 - open until the end
    return io.TextIOWrapper(
        raw,
        encoding="utf-8",
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )


def _do(arguments: list[str]) -> None:
    """Run the arguments as Python would."""
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):
        arguments = arguments[1:]
    kind, what, *given = arguments if arguments[0] in ("-c", "-m") else ("", *arguments)
    sys.modules["__main__"] = main = ModuleType("__main__")
    sys.argv[:] = [kind or what, *given]
    if not kind:
        runpy.run_path(what, run_name="__main__")
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        if "." in what:  # runpy would warn that it is imported already
            sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _exit_code(arguments: list[str]) -> int:
    try:
        _do(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as Python itself ends
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    # Before the garbage collector is frozen: this import searches its references.
    import hypothesis  # noqa: F401

    import tests.preloaded  # noqa: F401 - all that is imported

    for plug_in in {"anyio", "hypothesis", "_hypothesis_globals"} & sys.modules.keys():
        # pytest would warn that it is too late to rewrite their asserts.
        sys.modules[plug_in].__doc__ = "PYTEST_DONT_REWRITE"
    asked = _serve(listener)
    if asked is None:
        os._exit(0)
    _become(asked)
    code = _exit_code(asked["arguments"])
    # Shut down like Python, without tearing down the five thousand imported modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _main()
