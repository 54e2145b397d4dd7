"""Refuses foreign `Host` and `Origin` headers on a loopback address without API keys. Pure. Must stay cheap: one look-up.

Pages in a browser on this host can reach such a server, too. A foreign page sends its own `Origin`. If a page's host
name was rebound to a loopback address, the page has the server's origin, and only its `Host` differs from that of our
own pages. Clients other than browsers may omit both headers.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any, Final

from sie.config.settings import Settings
from sie.ipc.messages import Launch
from sie.values.errors import Forbidden

_AUTHORITY: Final = re.compile(
    r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?|([0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)"
)
_MAX_CHARS: Final = 300
"""Longer than any host name with a port. Longer headers are refused and never cached."""
_MAX_KEPT: Final = 256


class HostCheck:
    """The check of one frontend process."""

    def __init__(self, own_hosts: tuple[str, ...], allowed_hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
        """own_hosts: the names of the listening address. Pages of allowed_hosts and of origins (or `*`) are allowed."""
        self._allowed = frozenset(map(host_of, allowed_hosts))
        self._own = self._allowed | frozenset(map(host_of, own_hosts)) - {""}
        self._origins = frozenset(origins)
        self._find_cached_fault = lru_cache(maxsize=_MAX_KEPT)(self._find_fault)

    def check(self, headers: Any) -> None:
        """Raise Forbidden for a request with a foreign Host or Origin."""
        host, origin = headers.get("host") or "", headers.get("origin")
        is_short = len(host) <= _MAX_CHARS and (origin is None or len(origin) <= _MAX_CHARS)
        fault = (self._find_cached_fault if is_short else self._find_fault)(host, origin)
        if fault:
            raise Forbidden(fault)

    def _find_fault(self, host: str, origin: str | None) -> str:
        """Return the reason to refuse, or an empty text."""
        if host and not (is_loopback(host) or host_of(host) in self._own):
            return _refusal("Host", host, "allowed_host")
        if origin is None or origin in self._origins or "*" in self._origins:
            return ""
        authority = origin.partition("://")[2].lower()
        if authority and (authority == host.lower() or host_of(authority) in self._allowed):
            return ""
        return _refusal("Origin", origin, "cors_origin or allowed_host")


def open_host_check(settings: Settings, launch: Launch) -> HostCheck | None:
    """Return the check, or None if API keys, a Unix socket, another address or `allowed_host = "*"` make it unnecessary."""
    access, server = settings.access, settings.server
    if access.api_keys or launch.listen_fd >= 0 or not is_loopback(launch.host) or "*" in access.allowed_hosts:
        return None
    return HostCheck((server.host, server.grpc_host), access.allowed_hosts, access.cors_origins)


def host_of(authority: str) -> str:
    """Return the host of `host`, `host:port`, `v6` or `[v6]:port` in lower case, or an empty text for anything else."""
    match = _AUTHORITY.fullmatch(authority)
    return (match[1] or match[2] or match[3]).lower().removesuffix(".") if match is not None else ""


def is_loopback(authority: str) -> bool:
    """Tell whether the host of an authority is `localhost` or a loopback address."""
    host = host_of(authority)
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _refusal(header: str, value: str, setting: str) -> str:
    shown = value if len(value) <= _MAX_CHARS else f"{value[:_MAX_CHARS]}..."
    return (
        f"{header} is {shown!r}. Without api_keys a server on a loopback address refuses other hosts' names and pages; "
        f"to allow it, add it to the setting {setting}"
    )
