"""Checks the access to the server: API keys, certificate files, and addresses that other hosts can reach."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sie.config.settings import Settings
from sie.doctor.finding import Finding
from sie.supervisor.host_resources import StartError
from sie.supervisor.listen import check_tls, exposure_warnings, resolve_host
from sie.values.api_key import KeyFileError, read_key_file

_SOON_S = 7 * 24 * 3600
_EXPOSED_FIX = "see docs/security.md: `sie keys new`, --api-keys, --tls-cert; or bind to 127.0.0.1"


def check_access(settings: Settings) -> Iterator[Finding]:
    """Check that keys and certificates are usable, and whether the server is exposed without them."""
    access = settings.access
    if access.api_keys:
        yield _check_keys(access.api_keys)
    try:
        check_tls(access)
        address = "" if access.uds else resolve_host(settings.server.host)
    except StartError as error:
        yield Finding(area="access", level="error", message=str(error), fix="correct that setting")
        return
    warnings = exposure_warnings(address, access)
    for warning in warnings:
        yield Finding(area="access", level="warn", message=warning, fix=_EXPOSED_FIX)
    if not warnings:
        where = access.uds or address
        yield Finding(area="access", level="ok", message=f"{where}: nobody gets in who is not meant to")


def _check_keys(path: str) -> Finding:
    try:
        found = read_key_file(path)
    except KeyFileError as error:
        fix = "`sie keys new NAME --file FILE` makes a file; it belongs to root or the server's user, mode 640 or less"
        return Finding(area="access", level="error", message=f"api_keys: {error}", fix=fix)
    if found.is_world_readable:
        message = f"{path}: every user of this host may read the names and scopes in it"
        return Finding(area="access", level="warn", message=message, fix=f"chmod o-r {path}")
    if expiring := [f"{key.name} ({key.shown_expiry})" for key in found.keys if key.is_expired(time.time() + _SOON_S)]:
        message = f"{path}: keys that have expired, or will within a week: {', '.join(expiring)}"
        fix = "`sie keys new NAME --file FILE` makes new ones; remove the old entries"
        return Finding(area="access", level="warn", message=message, fix=fix)
    return Finding(area="access", level="ok", message=f"{len(found.keys)} API keys in {path}")
