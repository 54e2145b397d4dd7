"""The texts of the files by which a host runs the server: unit, drop-in for GPUs, user, directories, kernel settings.

The templates lie beside this file; `systemd/` in the repository is what they come to for the default paths. Pure: a
template and a host's facts in, texts out. `sie.service` puts them in place.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

MARKER: Final = "# Written by `sie service`"
"""How the first line of each file begins. A file without it is somebody else's."""

DEFAULT_CONFIG: Final = "/etc/sie/sie.toml"
GPU_DROP_IN: Final = "sie.service.d/gpu.conf"
PLACES: Final = {
    "sie.service": "etc/systemd/system/sie.service",
    GPU_DROP_IN: "etc/systemd/system/sie.service.d/gpu.conf",
    "sie.sysusers.conf": "etc/sysusers.d/sie.conf",
    "sie.tmpfiles.conf": "etc/tmpfiles.d/sie.conf",
    "sie.sysctl.conf": "etc/sysctl.d/60-sie.conf",
}
"""Each file's name, and where it belongs beneath the root directory."""
_STOP_MARGIN_S: Final = 15
"""From the end of a drain to the end of every process takes at most half of this."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between hosts. Paths are absolute and of plain characters: systemd gives some a meaning."""

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
