"""Renders the files with which a host runs the server: units, drop-ins, user, directories, kernel settings.

The templates are beside this file; `systemd/` in the repository has their texts for the default paths. Pure: takes a
template and a host's facts, and returns a text. `sie.commands.service` writes the files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

MARKER: Final = "# Written by `sie service`"
"""The beginning of the first line of each file. A file without it was not written by us."""

DEFAULT_CONFIG: Final = "/etc/sie/sie.toml"
GPU_DROP_IN: Final = "sie.service.d/gpu.conf"
GATEWAY_DROP_IN: Final = "sie.service.d/gateway.conf"
AGENTS_DROP_IN: Final = "sie.service.d/agents.conf"
AGENTS: Final = (
    "sie-agents.service",
    "sie-agents.socket",
    AGENTS_DROP_IN,
    "sie-agents.sysusers.conf",
    "sie-agents.tmpfiles.conf",
)
"""The files of an agent process with a user of its own."""
PLACES: Final = {
    "sie.service": "etc/systemd/system/sie.service",
    GPU_DROP_IN: "etc/systemd/system/sie.service.d/gpu.conf",
    GATEWAY_DROP_IN: "etc/systemd/system/sie.service.d/gateway.conf",
    "sie.sysusers.conf": "etc/sysusers.d/sie.conf",
    "sie.tmpfiles.conf": "etc/tmpfiles.d/sie.conf",
    "sie.sysctl.conf": "etc/sysctl.d/60-sie.conf",
    "sie-agents.service": "etc/systemd/system/sie-agents.service",
    "sie-agents.socket": "etc/systemd/system/sie-agents.socket",
    AGENTS_DROP_IN: "etc/systemd/system/sie.service.d/agents.conf",
    "sie-agents.sysusers.conf": "etc/sysusers.d/sie-agents.conf",
    "sie-agents.tmpfiles.conf": "etc/tmpfiles.d/sie-agents.conf",
}
"""Each file's name, and its place beneath the root directory."""
_STOP_MARGIN_S: Final = 15
"""After a drain, every process ends within half of this time."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The values that differ between hosts. Paths are absolute, without characters that systemd would interpret."""

    executable: str
    config: str = DEFAULT_CONFIG
    user: str = "sie"
    drain_timeout_s: float = 25.0


def render(name: str, host: Host) -> str:
    """Return the text of the file `name`, one of PLACES."""
    template = Path(__file__).with_name(f"{name.rpartition('/')[2]}.in").read_text(encoding="utf-8")
    values = {
        "EXECUTABLE": host.executable,
        "CONFIG": host.config,
        "USER": host.user,
        "STOP_S": str(math.ceil(host.drain_timeout_s) + _STOP_MARGIN_S),
    }
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    return template
