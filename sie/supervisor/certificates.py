"""Keeps in-memory copies of the TLS files in force, which frontends start with, and renews them when the files change.

Frontends never read the operator's files. A restarted frontend could otherwise find a half-written or broken
certificate while the others still serve with the previous one.
"""

from __future__ import annotations

import os
from typing import Final

from sie.config.sections import Access
from sie.ipc.messages import Certificates
from sie.runtime.logs import get_logger
from sie.supervisor.host_resources import StartError
from sie.supervisor.key_file import FileMark, file_mark
from sie.supervisor.listen import check_certificates, read_tls_file

_log = get_logger(__name__)
_NAMES: Final = ("tls_cert", "tls_key", "tls_client_ca")


class CertificateFiles:
    """The certificate, key and client CAs that `access` names. Its methods block on disk reads."""

    def __init__(self, access: Access) -> None:
        """Read and check the files. Raises StartError for files that cannot be served with."""
        self._paths = {name: str(getattr(access, name)) for name in _NAMES}
        self._access = access
        self._seen = self._read_marks = self._marks()
        self._contents, self._fds = self._read()
        self.problem = ""
        """The reason why the latest change of the files was refused; the previous files then stay in force."""

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors that a child inherits."""
        return tuple(self._fds.values())

    @property
    def launch_paths(self) -> dict[str, str]:
        """The paths under which a child that inherits `fds` opens them, keyed by the field names of `Launch`."""
        return {name: _path(fd) for name, fd in self._fds.items()}

    @property
    def message(self) -> Certificates:
        """The message for a process that applies a renewed certificate without a restart."""
        return Certificates(*(self._contents.get(name, b"") for name in _NAMES))

    def poll(self, *, at_once: bool = False) -> bool:
        """Check the files and return whether new ones are in force now.

        A change must stay the same for one more poll, because a certificate and its key are written one after the
        other. at_once skips that wait when the operator says that both are in place.
        """
        marks = self._marks()
        is_settled, self._seen = marks == self._seen or at_once, marks
        if not is_settled or (marks == self._read_marks and not (at_once and self.problem)):
            return False
        self._read_marks = marks
        try:
            contents, fds = self._read()
        except StartError as error:
            self.problem = str(error)
            _log.error("the certificate in force stays: %s", error)  # without a traceback: the message is enough
            return False
        self.problem = ""
        before, self._contents = self._contents, contents
        self._fds, stale = fds, self._fds
        for fd in stale.values():  # children that inherited them have their own descriptors
            os.close(fd)
        return contents != before

    def close(self) -> None:
        """Close the in-memory copies."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _marks(self) -> tuple[FileMark, ...]:
        return tuple(file_mark(path) for path in self._paths.values() if path)

    def _read(self) -> tuple[dict[str, bytes], dict[str, int]]:
        contents = {name: read_tls_file(name, path) for name, path in self._paths.items() if path}
        fds: dict[str, int] = {}
        try:
            for name, content in contents.items():
                fds[name] = _copy(content)
            check_certificates(self._access, {name: _path(fd) for name, fd in fds.items()})
        except BaseException as error:
            for fd in fds.values():
                os.close(fd)
            if isinstance(error, OSError):
                raise StartError(f"tls_cert, tls_key: they cannot be copied to memory: {error.strerror}") from error
            raise
        return contents, fds


def _copy(content: bytes) -> int:
    fd = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def open_certificates(access: Access) -> CertificateFiles | None:
    """Return the TLS files to serve with, or None without TLS. Raises StartError."""
    return CertificateFiles(access) if access.tls_cert else None
