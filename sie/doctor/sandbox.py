"""Checks whether this host can hold a sandbox for the code and commands of agents, by starting one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from sie.config.settings import Settings
from sie.doctor.finding import Finding
from sie.runtime.control_groups import find_delegated
from sie.runtime.sandbox import find_sandbox

_CONNECT_TIMEOUT_S = 5.0
_FIX = "install bubblewrap or `ringserve[sandbox]`, and allow user namespaces; in a container its system call filter may be in the way"


def check_sandbox(settings: Settings) -> Iterator[Finding]:
    """Check the layers of a sandbox. It is needed only if agents may run code or commands."""
    agents = settings.agents
    is_needed = agents.has_code or agents.has_shell
    if is_needed and agents.sandbox == "off":
        text = "sandbox off: what models write runs as the server's user, with its files and network"
        yield Finding(area="sandbox", level="warn", message=text, fix="use it only where the whole host is a sandbox")
        return
    if agents.agent_socket:
        yield _of_service(agents.agent_socket)
        return
    _, report = find_sandbox(has_network=agents.sandbox_network == "host", python=agents.agent_python)
    if report.problem:
        message = f"no sandbox for agents: {report.problem}"
        yield Finding(
            area="sandbox", level="error" if is_needed else "ok", message=message, fix=_FIX if is_needed else ""
        )
        return
    landlock = f"Landlock {report.landlock}" if report.landlock else "no Landlock"
    namespace = "user namespace" if report.user_namespace else "no user namespace"
    made = "made by root" if report.mode == "privileged" else "made by this user"
    limits = "control groups" if find_delegated() else "rlimits"
    message = (
        f"sandbox for agents: bubblewrap ({made}, {namespace}), {landlock}, seccomp; limits by {limits} and a watchdog"
    )
    yield Finding(area="sandbox", level="ok", message=message)


def _of_service(path: str) -> Finding:
    """Say whether another service's agent process listens; its own log says what its sandboxes hold."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_CONNECT_TIMEOUT_S)
            sock.connect(path)
    except OSError as error:
        message = f"no agent process listens at agent_socket {path}: {error.strerror or error}"
        return Finding(area="sandbox", level="error", message=message, fix="systemctl enable --now sie-agents.socket")
    return Finding(area="sandbox", level="ok", message=f"agents run in another service, at {path}")
