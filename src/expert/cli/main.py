"""Runs the command line: errors in plain words, exit codes, and one line after Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert import __version__
from expert.cli.show.display import (
    flush_outputs,
    output_descriptors,
    reader_has_left,
    show_problems,
    silence,
)
from expert.core.errors import EXIT_INTERNAL, EXIT_NO_SPACE, EXIT_OK, EXIT_USAGE, ExpertError
from expert.core.resources import (
    check_memory_limit,
    disk_full_cause,
    disk_full_message,
    resource_shortage,
)
from expert.core.secrets import redacted
from expert.core.world import record_failure

if TYPE_CHECKING:
    from expert.core.interrupts import Interrupted

STARTS_OVER = "the same command starts over"
AFTER_INTERRUPT = {
    "train": f"no run was started; {STARTS_OVER}",
    "pretokenize": "finished data sets are kept; the same command prepares the rest",
    "validate": f"no verdict was written; {STARTS_OVER}",
    "improve": "what was answered and trained is kept; the same command with --resume continues",
    "benchmark": f"no result was written; {STARTS_OVER}",
    "export": f"nothing was exported; {STARTS_OVER}",
    "watch": "the run itself continues",
    "board": "runs and commands that it started continue",
    "serve": "nothing is served any more",
}


def run() -> None:
    """Run the command; errors are shown in plain words, never as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the C locale has no ✓ or ×
            stream.reconfigure(encoding="utf-8", errors="replace")
    watched = output_descriptors()
    try:
        _run_command(watched)
    except ExpertError as error:
        _show_failure(str(error), error.exit_code, of_another=error.of_another)
        sys.exit(error.exit_code)
    except BrokenPipeError as error:
        sys.exit(_broken_pipe_exit_code(error, watched))
    except OSError as error:
        _show_shortage(error)
        full = disk_full_cause(error)
        code = EXIT_NO_SPACE if full or disk_full_message(error) else EXIT_USAGE
        text = str(full or f"{error.filename or 'output'}: {error.strerror or error}")
        _show_failure(text, code)
        sys.exit(code)
    except BaseException as error:  # the last net: users see words and a file name
        # A panic in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _show_shortage(error)
        sys.exit(_report_internal_error(error))
    finally:
        with contextlib.suppress(OSError):  # already shown, or nobody is left to read it
            flush_outputs()
        gc.freeze()  # or Python would scan all of torch for garbage at exit: seconds


def _run_command(watched: list[int]) -> None:
    """Run the command and flush its output here, where a closed pipe is noticed."""
    from expert.cli.app import command

    check_memory_limit(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
    try:
        command()()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich turn it into exit code 1
            sys.exit(_broken_pipe_exit_code(end.__context__, watched))
        flush_outputs()  # the exit code stays that of the command
        raise


def _show_shortage(error: BaseException) -> None:
    """Exit with a message if an error comes from a lack of memory, threads or open files."""
    found = resource_shortage(error)
    if found is not None:
        _show_failure(str(found), found.exit_code)
        sys.exit(found.exit_code)


def _broken_pipe_exit_code(error: BrokenPipeError, watched: list[int]) -> int:
    """The exit code after the reader of a pipe has left: 0, since it has read what it wanted. An
    error keeps its own code."""
    if not any(map(reader_has_left, watched)):  # another pipe, so not an intended end
        return _report_internal_error(error)
    for stream in (sys.stdout, sys.stderr):  # Python would complain at exit
        silence(stream)
    return int(getattr(error.__context__, "exit_code", EXIT_OK))


def _show_failure(text: str, exit_code: int, *, of_another: bool = False) -> None:
    """Show a failure, and record it for the process that started this one as one of several ranks,
    which reports the first failure."""
    from expert.parallel.launch import LAUNCH_FOLDER

    record_failure(text, exit_code=exit_code, of_another=of_another)
    if not (of_another and LAUNCH_FOLDER in os.environ):
        show_problems(text)


def _report_internal_error(error: BaseException) -> int:
    handle, name = tempfile.mkstemp(prefix="expert-fault-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        head = f"expert {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n"
        stream.write(redacted(head + traceback.format_exc()))
    what = f"Internal error in expert: {type(error).__name__}: {error}"
    _show_failure(f"{what}\nDetails are in {name}; please report them.", EXIT_INTERNAL)
    return EXIT_INTERNAL


def show_interrupted(end: Interrupted, words: Sequence[str]) -> None:
    """Write once to standard error what was interrupted; `words` come after `expert`."""
    if end.shown:
        return
    end.shown = True
    command = next((word for word in words if not word.startswith("-")), "")
    left = end.left or AFTER_INTERRUPT.get(command, STARTS_OVER)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
        sys.stderr.write(f"{' '.join(['expert', command]).strip()}: stopped by {end.by}: {left}\n")
        sys.stderr.flush()
