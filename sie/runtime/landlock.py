"""Bounds the files that this process may use, by Landlock. Must import nothing slow and nothing of the server's.

The layer beneath the mounts of `sie.runtime.sandbox`: it holds where a mount was forgotten. Source: landlock(7),
linux/landlock.h. Kernels without it answer 0 to `version`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG: Final = 1
_RULE_PATH_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS: Final = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""Every right about files, by the version of the interface; later ones have no more."""
_DEVICE: Final = _READ_FILE | _WRITE_FILE | _READ_DIR
_SCOPES: Final = 3
"""No abstract Unix sockets and no signals beyond this process and its children, from version 6 on."""
_SCOPE_VERSION: Final = 6


def version() -> int:
    """Return the version of the kernel's interface, or 0 without one."""
    return max(0, _call(_CREATE_RULESET, None, 0, _VERSION_FLAG))


def restrict(read: Iterable[Path], write: Iterable[Path], devices: Iterable[Path]) -> bool:
    """Allow reading and running files beneath `read`, everything beneath `write`, and reading and writing `devices`.

    Return False if the kernel has no Landlock. Raises OSError if it refuses the rules. Needs PR_SET_NO_NEW_PRIVS.
    """
    found = version()
    if not found:
        return False
    every = _FILE_RIGHTS[min(found, len(_FILE_RIGHTS) - 1)]
    attributes = struct.pack("=QQQ", every, 0, _SCOPES) if found >= _SCOPE_VERSION else struct.pack("=Q", every)
    ruleset = _checked(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        for paths, rights in ((read, _READ), (write, every), (devices, _DEVICE)):
            for path in paths:
                _allow(ruleset, path, rights & every)
        _checked(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: Path, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _checked(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(fd)


def _checked(number: int, *arguments: object) -> int:
    result = _call(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
