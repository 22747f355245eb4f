"""Entry point of `python -m expert`, `expert` and `expert-cli`."""

from __future__ import annotations

import sys

from expert.core.interrupts import Interrupted, exit_on_signals, raise_on_signals


def main() -> None:
    """Install the signal handlers before slow imports, then run the command line."""
    raise_on_signals()
    code: object = 1
    try:
        from expert.cli.main import run

        run()
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(end, Interrupted):
            from expert.cli.main import show_interrupted

            show_interrupted(end, sys.argv[1:])
        raise
    finally:
        exit_on_signals(code)


if __name__ == "__main__":
    main()
