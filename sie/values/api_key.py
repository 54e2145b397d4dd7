"""Defines an API key, reads and writes a file of keys, and makes keys.

A key is `sie_` and 32 random bytes. The file contains only its SHA-256, which is enough for a secret that cannot be
guessed (docs/decisions/010). The file is TOML, one `[[key]]` for each key; names are unique. Never imports slow
modules.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sie.values.trusted_file import read_trusted_file

Scope = Literal["infer", "admin", "metrics"]
SCOPES: Final[tuple[Scope, ...]] = ("infer", "admin", "metrics")
KEY_PREFIX: Final = "sie_"
LIMITS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
"""The fields of a key that are limits; None for no limit."""
MAX_KEYS: Final = 1000
MAX_FILE_BYTES: Final = 1 << 20

_KEY_BYTES: Final = 32
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
RequestsPerMinute = Annotated[int, Meta(ge=1, le=100_000_000)]
TokensPerMinute = Annotated[int, Meta(ge=1, le=10_000_000_000)]
MaxConcurrent = Annotated[int, Meta(ge=1, le=1_000_000)]
Weight = Annotated[int, Meta(ge=1, le=1_000)]


class KeyFileError(Exception):
    """A file of keys that cannot be used; the message names the file and the fault, and never shows a key."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key as a server knows it: digest is the SHA-256 of its text. None means no limit.

    expires_s is the Unix time from which it is refused. weight is its share of a cluster's hosts beside other keys while
    their work waits in gateways.
    """

    name: str
    digest: bytes
    scopes: tuple[Scope, ...]
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    expires_s: int | None = None
    weight: int = 1

    @property
    def shown_expiry(self) -> str:
        """The time from which it is refused, in UTC as a key file has it; empty if it does not expire."""
        return "" if self.expires_s is None else f"{datetime.fromtimestamp(self.expires_s, UTC):%Y-%m-%dT%H:%M:%SZ}"

    def is_expired(self, now_s: float) -> bool:
        """Return whether it is refused at a Unix time."""
        return self.expires_s is not None and now_s >= self.expires_s


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    hash: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=len(SCOPES))]
    requests_per_minute: RequestsPerMinute | None = None
    tokens_per_minute: TokensPerMinute | None = None
    max_concurrent: MaxConcurrent | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    weight: Weight = 1


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[list[_Entry], Meta(max_length=MAX_KEYS)] = []


class KeyFile(NamedTuple):
    """The keys in a file, and whether every user of the host may read it."""

    keys: tuple[ApiKey, ...]
    is_world_readable: bool


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key's text, 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def make_key() -> str:
    """Return a new key: a prefix that secret scanners recognise, and 256 random bits as base64url."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def read_key_file(path: str) -> KeyFile:
    """Return the keys in the file at `path`.

    Raises KeyFileError when it cannot be read, is malformed, contains no key, or a name or hash twice. Also raises it
    when other users than its owner may write to it, because a writer could add a key.
    """
    text, mode = _read(path)
    return KeyFile(parse_keys(text, path), bool(mode & stat.S_IROTH))


def parse_keys(text: str, where: str) -> tuple[ApiKey, ...]:
    """Return the keys in a TOML text. Raises KeyFileError as `read_key_file` does; `where` names the source."""
    entries = _parse_entries(text, where)
    if not entries:
        raise KeyFileError(f"{where}: has no key; `sie keys new` makes one")
    for field in ("name", "hash"):
        _check_unique([getattr(entry, field) for entry in entries], field, where)
    return tuple(
        ApiKey(
            name=entry.name,
            digest=bytes.fromhex(entry.hash.removeprefix("sha256:")),
            scopes=entry.scopes,
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            max_concurrent=entry.max_concurrent,
            expires_s=None if entry.expires is None else int(entry.expires.timestamp()),
            weight=entry.weight,
        )
        for entry in entries
    )


def _parse_entries(text: str, where: str) -> list[_Entry]:
    import tomllib  # imported here, so that only servers with keys load the parser

    try:
        tables: dict[str, Any] = tomllib.loads(text)
        return msgspec.convert(tables, _Tables).key
    except tomllib.TOMLDecodeError as error:
        raise KeyFileError(f"{where}: is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{where}: {error}") from None


def render_entry(key: ApiKey) -> str:
    """Return the lines of a key in a file."""
    scopes = ", ".join(f'"{scope}"' for scope in key.scopes)
    lines = ["[[key]]", f'name = "{key.name}"', f'hash = "sha256:{key.digest.hex()}"', f"scopes = [{scopes}]"]
    limits = {name: getattr(key, name) for name in LIMITS}
    lines += [f"{name} = {value}" for name, value in limits.items() if value is not None]
    lines += [f"expires = {key.shown_expiry}"] if key.expires_s is not None else []
    lines += [f"weight = {key.weight}"] if key.weight != 1 else []
    return "\n".join(lines) + "\n"


def add_entry(path: str, key: ApiKey) -> None:
    """Append a key to the file at `path`, which is created (0600) if it does not exist.

    It is one write at the end of the file, so a server that reads it meanwhile sees all of it or nothing. Raises
    KeyFileError, and leaves the file as it was, when the file is not a file of keys, has a key of that name or MAX_KEYS
    keys, or cannot take the whole entry.
    """
    entry = render_entry(key)
    try:
        exists = Path(path).exists()
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from None
    if exists:
        text, _ = _read(path)
        if text.strip():
            entry = ("\n" if text.endswith("\n") else "\n\n") + entry
            if key.name in [known.name for known in _parse_entries(text, path)]:
                raise KeyFileError(f"{path}: has a key called {key.name!r} already; choose another name")
            parse_keys(text + entry, path)
    try:
        _append(path, entry.encode())
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written: {error.strerror}") from None


def _append(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        num_bytes = os.fstat(fd).st_size
        if os.write(fd, data) < len(data):  # a full disk takes the beginning without an error
            os.ftruncate(fd, num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: str) -> tuple[str, int]:
    """Return a file's text and mode, both from the same open file."""
    try:
        data, mode = read_trusted_file(path, MAX_FILE_BYTES)
        return data.decode(), mode
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path}: is not UTF-8 text") from None
    except ValueError as error:
        raise KeyFileError(f"{path}: {error}") from None


def _check_unique(values: list[str], field: str, where: str) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            shown = f" {value!r}" if field == "name" else ""
            raise KeyFileError(f"{where}: {field}{shown} appears twice - at `$.key[{index}].{field}`")
        seen.add(value)


Need = Scope | Literal["any", "open"]
"""The key that a route needs when API keys are configured: one with this scope, any key, or none (`open`)."""
