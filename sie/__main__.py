"""Lets `python -m sie` be the command `sie`, and ends an early Ctrl-C without a traceback."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        gc.disable()  # collections during the imports, and the one at the end, take a quarter of their time
        _open_closed_streams()
        from sie.commands.cli import main as run  # takes a while; Ctrl-C in the meantime ends quietly, too

        gc.freeze()
        gc.enable()
        return run()
    except KeyboardInterrupt:
        return 130


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed. Else a socket would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
