"""Confines a process that reads untrusted files, and runs its answer loop.

`give_up_privileges` is for every such process, including those that fetch and convert. `main` runs a process that only
computes: `python -m sie.runtime.confined MODULE PARENT`. It imports MODULE, gives up files, network, processes and
signals, and answers each request with MODULE's `answer(request: bytes) -> bytes`. Must import nothing slow.
`sie.runtime.helper` starts it and bounds its memory and time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sie.runtime import child_setup

SIZE: Final = struct.Struct("<I")
"""The prefix of each request and answer: its size."""
_CHANNEL: Final = 0
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_EPERM: Final = 1

# A filter of system calls is a classic BPF program over (nr, arch, ...).
# Source: seccomp(2), linux/filter.h, linux/seccomp.h.
_INSTRUCTION: Final = struct.Struct("<HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_OFFSET, _MACHINE_OFFSET = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | _EPERM
_CALLS: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    # read write mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sched_yield mremap madvise getpid exit
    # gettimeofday sigaltstack gettid time futex restart_syscall clock_gettime exit_group getrandom rseq
    "x86_64": (0xC000003E, (0, 1, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 39, 60, 96, 131, 186, 201, 202, 219, 228, 231, 318, 334)),
    "aarch64": (0xC00000B7, (63, 64, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 172, 93, 169, 132, 178, 98, 128, 113, 94, 278, 293)),
}  # fmt: skip
"""By machine: the kernel's code for it, and the numbers of the system calls for computing. Open files stay usable."""


def give_up_privileges(parent_pid: int | None = None) -> None:
    """Die with the parent, be the first to die if memory is short, leave no core dump, and never gain a privilege."""
    child_setup.die_with_parent(parent_pid)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def give_up_everything() -> bool:
    """Only compute from now on. Return False if the kernel cannot filter system calls; the limits still apply."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    machine, numbers = _CALLS.get(os.uname().machine, (0, ()))
    if not numbers or sys.byteorder != "little":
        return False
    program = _filter_of(machine, numbers)
    size = len(program) // _INSTRUCTION.size
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", size, ctypes.addressof(buffer)))
    try:
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))
    except OSError:
        return False
    return True


def _filter_of(machine: int, numbers: tuple[int, ...]) -> bytes:
    """Return a filter that allows these system calls on this machine; every other one fails with EPERM."""
    rows = [
        (_LOAD_WORD, 0, 0, _MACHINE_OFFSET),
        (_JUMP_IF_EQUAL, 0, len(numbers) + 1, machine),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        *((_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*row) for row in rows)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *padded) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main(arguments: list[str]) -> int:
    """Answer requests until the parent closes the channel, which is standard input in both directions."""
    module, parent = arguments
    answer: Callable[[bytes], bytes] = importlib.import_module(module).answer
    give_up_privileges(int(parent))
    give_up_everything()
    _write(b"")  # ORDER: after the last privilege is given up; the parent sends nothing before
    while (request := _read()) is not None:
        _write(answer(request))
    return 0


def _read() -> bytes | None:
    head = _read_exactly(SIZE.size)
    return None if head is None else _read_exactly(SIZE.unpack(head)[0])


def _read_exactly(size: int) -> bytes | None:
    """Return this many bytes, or None at the end of the channel."""
    parts: list[bytes] = []
    while size:
        part = os.read(_CHANNEL, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(reply: bytes) -> None:
    view = memoryview(SIZE.pack(len(reply)) + reply)
    while view:
        view = view[os.write(_CHANNEL, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
