"""The in-memory copies of the TLS files: none stays open after a failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sie.config.sections import Access
from sie.supervisor import certificates
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.host_resources import StartError


def _copies() -> list[str]:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # not that of the listing itself
    return [name for name in (str(link.readlink()) for link in links) if "memfd:tls" in name]


@pytest.mark.parametrize("failing", ["memfd_create", "write"])
def test_a_copy_that_fails_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    paths = [tmp_path / name for name in ("cert", "key")]
    for path in paths:
        path.write_text("PEM")
    real = getattr(os, failing)
    calls: list[tuple[object, ...]] = []

    def fail_second(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments)

    monkeypatch.setattr(certificates.os, failing, fail_second)
    with pytest.raises(StartError, match="Too many open files"):
        CertificateFiles(Access(tls_cert=str(paths[0]), tls_key=str(paths[1])))
    assert len(calls) == 2
    assert _copies() == []
