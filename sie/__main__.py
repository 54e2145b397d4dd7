"""Lets `python -m sie` be the command `sie`, and ends an early Ctrl-C without a traceback."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from sie.commands.cli import main as run  # takes a while, in which a user may change their mind

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
