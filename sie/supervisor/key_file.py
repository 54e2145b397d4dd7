"""Watches the file of API keys. New keys are in force within two seconds; a faulty file never is.

If the file is missing, broken, empty or writable by others, an alarm is raised and the previous keys stay.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final, NamedTuple

from sie.ipc.messages import Keys
from sie.runtime.logs import get_logger
from sie.values.api_key import ApiKey, KeyFileError, read_key_file

POLL_S: Final = 0.4
"""A change must stay the same for one more poll, so it is in force after two to three polls."""

_log = get_logger(__name__)


class FileMark(NamedTuple):
    """The metadata that identifies one state of a file; all zeros for a missing file."""

    inode: int = 0
    changed_ns: int = 0
    status_changed_ns: int = 0
    num_bytes: int = 0


class KeyFileWatch:
    """The keys in force, read from `path`. Its methods block on disk reads: do not call them on an event loop."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises KeyFileError if it cannot be used."""
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._problem = ""
        self._seen = self._read_mark = file_mark(path)
        self._keys: tuple[ApiKey, ...] = self._read()

    @property
    def message(self) -> Keys:
        """The message that carries the keys to frontends."""
        return Keys(self._keys, self._secret, self._problem)

    def poll(self) -> bool:
        """Check the file and return whether `message` has changed."""
        mark = file_mark(self._path)
        is_settled, self._seen = mark == self._seen, mark
        if mark == self._read_mark or not is_settled:
            return False
        self._read_mark = mark
        before = self.message
        try:
            self._keys = self._read()
        except KeyFileError as error:
            self._problem = str(error)
            _log.error("the API keys in force stay: %s", error)  # without a traceback: the message is enough
        else:
            self._problem = ""
            _log.info("API keys reloaded: %d in force", len(self._keys))
        return self.message != before

    def _read(self) -> tuple[ApiKey, ...]:
        found = read_key_file(self._path)
        if found.is_world_readable:
            _log.warning("%s: every user of this host may read the names and scopes in it; chmod o-r", self._path)
        return found.keys


def file_mark(path: str) -> FileMark:
    """Return the state of a file; two equal marks mean that it was not written in between."""
    try:
        found = Path(path).stat()
    except OSError:
        return FileMark()
    return FileMark(found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
