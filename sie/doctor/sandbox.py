"""Checks whether this host can hold a sandbox for the code and commands of agents, by starting one."""

from __future__ import annotations

from collections.abc import Iterator

from sie.config.settings import Settings
from sie.doctor.finding import Finding
from sie.runtime.sandbox import find_sandbox

_FIX = "install bubblewrap or `ringserve[sandbox]`, and allow user namespaces; in a container its system call filter may be in the way"


def check_sandbox(settings: Settings) -> Iterator[Finding]:
    """Check the layers of a sandbox. It is needed only if agents may run code or commands."""
    agents = settings.agents
    is_needed = agents.has_code or agents.has_shell
    if is_needed and agents.sandbox == "off":
        text = "sandbox off: what models write runs as the server's user, with its files and network"
        yield Finding(area="sandbox", level="warn", message=text, fix="use it only where the whole host is a sandbox")
        return
    _, report = find_sandbox(has_network=agents.sandbox_network == "host")
    if report.problem:
        message = f"no sandbox for agents: {report.problem}"
        yield Finding(
            area="sandbox", level="error" if is_needed else "ok", message=message, fix=_FIX if is_needed else ""
        )
        return
    landlock = f"Landlock {report.landlock}" if report.landlock else "no Landlock"
    namespace = "user namespace" if report.user_namespace else "no user namespace"
    made = "made by root" if report.mode == "privileged" else "made by this user"
    message = (
        f"sandbox for agents: bubblewrap ({made}, {namespace}), {landlock}, seccomp; limits by rlimits and a watchdog"
    )
    yield Finding(area="sandbox", level="ok", message=message)
