"""Lets `python -m sie` be the command `sie`, and ends an early Ctrl-C without a traceback."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        gc.disable()  # collections during the imports, and the one at the end, take a quarter of their time
        from sie.commands.cli import main as run  # takes a while; Ctrl-C in the meantime ends quietly, too

        gc.freeze()
        gc.enable()
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
