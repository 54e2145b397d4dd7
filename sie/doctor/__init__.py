"""The command `sie doctor`: its checks, their order and its report.

Each area is a function of the settings that yields findings. It looks at this process's host and changes nothing. No
area imports torch into this process, so the answer works even if torch is broken. It takes a second or two without GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from sie.config.settings import Loaded, Settings, default_settings
from sie.config.sources import SettingsError
from sie.doctor.finding import Finding

AREAS: Final = (
    "settings",
    "software",
    "kernel",
    "limits",
    "memory",
    "disk",
    "network",
    "access",
    "sandbox",
    "clock",
    "gpu",
)
_WAIT_STEP_S = 1.0
_COLOURS: Final = {"ok": "green", "warn": "yellow", "error": "red"}


def examine(load: Callable[[], Loaded], areas: Iterable[str], wait_s: float = 0.0) -> list[Finding]:
    """Return the findings in these areas; with wait_s, look again until there is no error or the time is over.

    load returns the settings. If it raises SettingsError, that is a finding, and defaults replace the settings.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        findings = list(_look(load, frozenset(areas)))
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or all(finding.level != "error" for finding in findings):
            return findings
        time.sleep(min(_WAIT_STEP_S, left_s))


def _look(load: Callable[[], Loaded], areas: frozenset[str]) -> Iterator[Finding]:
    from sie.doctor import access, gpu, host, kernel, sandbox, software  # imported here, because their imports are slow

    try:
        loaded = load()
    except SettingsError as error:
        settings = default_settings(os.environ)
        yield Finding(area="settings", level="error", message=str(error), fix="correct it; defaults are assumed below")
    else:
        settings = loaded.settings
        if "settings" in areas:
            yield from software.check_settings(loaded)
    checks: dict[str, Callable[[Settings], Iterator[Finding]]] = {
        "software": software.check_software,
        "kernel": kernel.check_kernel,
        "limits": host.check_limits,
        "memory": host.check_memory,
        "disk": host.check_disk,
        "network": host.check_network,
        "access": access.check_access,
        "sandbox": sandbox.check_sandbox,
        "clock": host.check_clock,
        "gpu": gpu.check_gpus,
    }
    for area, check in checks.items():
        if area in areas:
            yield from check(settings)


def render_text(findings: list[Finding]) -> str:
    """Return a line for each finding, with its fix below, and a line with the counts."""
    import click

    lines: list[str] = []
    for finding in findings:
        level = click.style(f"{finding.level:<5}", fg=_COLOURS[finding.level])
        lines.append(f"{level}  {finding.area:<8}  {finding.message}")
        if finding.fix:
            lines.append(f"{'':17}-> {finding.fix}")
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLOURS}
    lines.append(f"\n{counts['ok']} ok, {counts['warn']} to improve, {counts['error']} to mend")
    return "\n".join(lines) + "\n"


def render_json(findings: list[Finding]) -> str:
    """Return `{"ok": bool, "findings": [{"area", "level", "message", "fix"}]}`; ok means that there is no error."""
    page = {"ok": all(finding.level != "error" for finding in findings), "findings": findings}
    return msgspec.json.format(msgspec.json.encode(page)).decode() + "\n"
