"""Writes what `sie doctor --bundle` collects for a report: settings, versions, findings, logs and a minute of status.

Must write no secret: keys, and passwords and queries in addresses, are masked in every text. Changes nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from sie.commands.http_client import ServerError, call, frames
from sie.config.display import render_json
from sie.config.settings import Loaded, Settings, default_settings
from sie.config.sources import KEY_VARIABLE, URL_VARIABLE, SettingsError
from sie.doctor import render_text
from sie.doctor.finding import Finding
from sie.loadgen.target import Target, TargetError, parse_target

STATUS_S: Final = 60.0
_LOG_LINES: Final = 5000
_LOG_BYTES: Final = 4 << 20
_JOURNAL_S: Final = 30.0
_PAGES: Final = {"metrics.txt": "/metrics", "models.json": "/v1/models", "ready.txt": "/readyz"}
_NAME: Final = r"(?:key|token|(?:secret|passw|passphrase|authorization|credential)\w{0,40})"
"""The end of a name whose value is a secret. Plurals such as `max_tokens` and `api_keys` are counts and paths."""
_MASKS: Final = (
    (re.compile(r"\bsie_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"), "sie_***"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s\"']{1,500}@"), r"\1***@"),  # a password may have any of @ / ? #
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^\s?\"']{1,500}\?)[^\s\"']+"), r"\1***"),
    (
        re.compile(
            r"(?i)(\bbearer\s+|(?:\bpassword|\bsecret|--[\w-]{0,40}(?:key|token|secret|password))\s+)[^\s\"',;}:=]+"
        ),
        r"\1***",
    ),
    (
        re.compile(
            rf"""(?ix) ( {_NAME} \\? ["']? (?: \s*[:=]\s* | ,\s*(?=b?["']) ) (?:bearer\s+)? (?:b(?=["']))? )
            (?: (\\") (?:(?!\\")[^\n])*      # quoted in a JSON text that is itself quoted
              | (") (?:[^"\\\n]|\\.)*
              | (') (?:[^'\\\n]|\\.)*
              | (?<=[=]) [^\s"'}}\]]+
              | (?<![=]) [^\s"'{{\[}}\]] [^"'\n}}\]]* )"""
        ),
        r"\1\2\3\4***",
    ),
)


def mask(text: str) -> str:
    """Return a text without keys of this server, values of secret names, and passwords and queries in addresses."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text


def write_bundle(
    path: str, load: Callable[[], Loaded], findings: list[Finding], *, log_file: str = "", status_s: float = STATUS_S
) -> list[str]:
    """Write a gzipped tar file to `path`, mode 0600, and return the names of its files. It takes status_s.

    A part that is not there, such as the answers of a server that does not run, is a text that says why. Raises
    SettingsError if the file cannot be written.
    """
    try:
        # A file that is there may be open in, or readable by, another user's process.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            parts = dict(_parts(load, findings, log_file, status_s))
            for name, text in parts.items():
                _add(archive, f"sie-bundle/{name}", mask(text).encode(errors="replace"))
    except OSError as error:
        raise SettingsError(f"bundle: {path} cannot be written: {error.strerror}") from error
    return list(parts)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))


def _parts(
    load: Callable[[], Loaded], findings: list[Finding], log_file: str, status_s: float
) -> Iterator[tuple[str, str]]:
    try:
        loaded = load()
    except SettingsError as error:
        settings = default_settings(os.environ)
        yield "settings.json", f"{error}\n"
    else:
        settings = loaded.settings
        yield "settings.json", render_json(loaded)
    yield "versions.txt", _versions()
    yield "findings.txt", render_text(findings)
    yield "log.txt", _log(log_file)
    yield from _answers(settings, status_s)


def _versions() -> str:
    """Return the versions of this host's kernel, of Python, and of every installed distribution."""
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    lines = [f"{name} {version}" for name, version in sorted(found.items(), key=lambda pair: str(pair[0]).lower())]
    return "\n".join([platform.platform(), f"Python {sys.version}", *lines]) + "\n"


def _log(log_file: str) -> str:
    """Return the end of a log: of a file, or what the journal has of the service."""
    try:
        if log_file:
            with Path(log_file).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                return file.read().decode(errors="replace")
        journalctl = shutil.which("journalctl")
        if journalctl is None:
            return "no journal on this host; name a file with --bundle-log\n"
        command = [journalctl, "--unit", "sie", "--lines", str(_LOG_LINES), "--no-pager", "--output", "short-iso"]
        done = subprocess.run(command, capture_output=True, timeout=_JOURNAL_S, check=False)  # noqa: S603  # no shell
        return (done.stdout or done.stderr).decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the log cannot be read: {error}\n"


def _answers(settings: Settings, status_s: float) -> Iterator[tuple[str, str]]:
    """Yield what the running server answers: some pages, and the frames of its live feed for status_s."""
    try:
        target = _target(settings)
    except TargetError as error:
        yield "status.jsonl", f"{error}\n"
        return
    for name, path in _PAGES.items():
        try:
            status, body = call(target, "GET", path)
            text = body.decode(errors="replace")
            yield name, text if status < 400 else f"status {status}\n{text}".rstrip() + "\n"
        except (TargetError, ServerError) as error:
            yield name, f"{error}\n"
    yield "status.jsonl", "".join(f"{line}\n" for line in _feed(target, status_s))


def _target(settings: Settings) -> Target:
    """Return the server of SIE_URL, or else of the settings, with the key of SIE_API_KEY. Raises TargetError."""
    server, access = settings.server, settings.access
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104  # not listened at
    shown = f"[{host}]" if ":" in host else host
    own = f"unix:{access.uds}" if access.uds else f"http{'s' if access.tls_cert else ''}://{shown}:{server.port}"
    return parse_target(os.environ.get(URL_VARIABLE) or own, key=os.environ.get(KEY_VARIABLE, ""))


def _feed(target: Target, status_s: float) -> Iterator[str]:
    until_s = time.monotonic() + status_s
    try:
        with contextlib.closing(frames(target)) as feed:
            for frame in feed:
                yield msgspec.json.encode(msgspec.json.decode(frame)).decode()
                if time.monotonic() >= until_s:
                    return
    except (TargetError, ServerError, msgspec.DecodeError) as error:
        yield str(error)
