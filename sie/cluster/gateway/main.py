"""Starts a gateway's frontend slot: the same HTTP server as a host's, with operations that run on hosts."""

from __future__ import annotations

import sys

from sie.cluster.gateway.gateway import Gateway
from sie.frontend.main import run_slot


def main() -> int:
    """Run one frontend slot of a gateway. The launch record is the only argument."""
    return run_slot(Gateway)


if __name__ == "__main__":
    sys.exit(main())
