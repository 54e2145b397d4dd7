"""Names the socket of the agent process."""

from __future__ import annotations

from pathlib import Path


def socket_path(control_path: str) -> str:
    """Return the path of the agent process's socket, beside the supervisor's own."""
    return str(Path(control_path).with_name("agents"))
