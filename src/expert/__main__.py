"""`python -m expert`, and where the commands `expert` and `expert-cli` start."""

from __future__ import annotations

import signal
import sys

from expert.core.errors import EXIT_INTERRUPTED


def main() -> None:
    """Make Ctrl-C quiet before anything slow is imported, then run the command line."""
    signal.signal(signal.SIGINT, _stop)
    from expert.cli.main import run

    run()


def _stop(*_: object) -> None:
    sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
