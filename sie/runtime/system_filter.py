"""Filters the system calls of this process, for good. Must import nothing slow and nothing of the server's.

`compute_only` leaves a process the calls for computing (`sie.runtime.confined`). `ordinary_program` refuses a program
the calls that reach the kernel's rare parts, other processes' memory or new namespaces; it is the innermost layer of
`sie.runtime.sandbox`. Source: seccomp(2), linux/filter.h, linux/seccomp.h, and the kernel's tables of system calls.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

# A filter of system calls is a classic BPF program over (nr, arch, instruction pointer, args...).
_INSTRUCTION: Final = struct.Struct("<HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _MACHINE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_FOREIGN_NUMBERS: Final = 0x40000000
"""x86_64 accepts numbers from here on as calls of the x32 interface, past every comparison with the usual numbers."""
_MACHINES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's code of each machine."""
_COMPUTING: Final[dict[str, tuple[int, ...]]] = {
    # read write mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sched_yield mremap madvise getpid exit
    # gettimeofday sigaltstack gettid time futex restart_syscall clock_gettime exit_group getrandom rseq
    "x86_64": (0, 1, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 39, 60, 96, 131, 186, 201, 202, 219, 228, 231, 318, 334),
    "aarch64": (63, 64, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 172, 93, 169, 132, 178, 98, 128, 113, 94, 278, 293),
}  # fmt: skip
"""By machine: the numbers of the system calls for computing. Open files stay usable."""
_SPECIAL: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes: their memory, descriptors and traces
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "fanotify_init": (300, 262), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "lookup_dcookie": (212, 18), "personality": (135, 92), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None), "ustat": (136, None),
    "sysfs": (139, None), "_sysctl": (156, None), "nfsservctl": (180, 42),
    # clocks and keys of the host
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # memory that belongs to no process, which a watchdog of processes cannot see
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # leaving the idle class of the disk, and rules that the kernel keeps for a process without a bound
    "ioprio_set": (251, 30), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    # placement of other processes' memory
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
}  # fmt: skip
"""System calls that no ordinary program needs: their numbers on x86_64 and aarch64."""
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE3: Final = 435
_SETSID: Final = {"x86_64": 112, "aarch64": 157}
_SOCKET: Final = {"x86_64": 41, "aarch64": 198}
_NEW_NAMESPACES: Final = 0x7E020000
"""Every CLONE_NEW* flag that clone(2) takes."""
_FAMILIES: Final = (1, 2, 10)
"""Sockets of Unix, IPv4 and IPv6. Others, such as those of virtual machines, belong to no network namespace."""


class _Row(NamedTuple):
    code: int
    if_true: int
    if_false: int
    value: int


def compute_only() -> bool:
    """Allow only the calls for computing. Return False if the kernel cannot filter system calls."""
    machine = os.uname().machine
    return machine in _COMPUTING and _install(machine, _allowing(_COMPUTING[machine]))


def ordinary_program() -> bool:
    """Refuse the calls that no ordinary program needs. Return False if the kernel cannot filter system calls.

    Also refused: clone with a new namespace, and sockets other than Unix, IPv4 and IPv6. clone3, whose flags a filter
    cannot read, seems not to exist, so that C libraries use clone. setsid does nothing: the kernel gives each session a
    share of the processor, so that a program could take as many shares as it makes sessions.
    """
    machine = os.uname().machine
    return machine in _MACHINES and _install(machine, _refusing(machine))


def _allowing(numbers: Sequence[int]) -> list[_Row]:
    return [
        _Row(_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        *(_Row(_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        _refuse(_EPERM),
        _Row(_RETURN, 0, 0, _ALLOW),
    ]


def _refusing(machine: str) -> list[_Row]:
    """Return rows that each end in a decision or fall through to the next."""
    place = list(_MACHINES).index(machine)
    rows = [_Row(_LOAD_WORD, 0, 0, _NUMBER_OFFSET)]
    rows += [_Row(_JUMP_IF_AT_LEAST, 0, 1, _FOREIGN_NUMBERS), _refuse(_EPERM)]
    for numbers in _SPECIAL.values():
        if (number := numbers[place]) is not None:
            rows += [_Row(_JUMP_IF_EQUAL, 0, 1, number), _refuse(_EPERM)]
    rows += [_Row(_JUMP_IF_EQUAL, 0, 1, _CLONE3), _refuse(_ENOSYS)]
    rows += [_Row(_JUMP_IF_EQUAL, 0, 1, _SETSID[machine]), _refuse(0)]
    rows += _when(_CLONE[machine], [_Row(_JUMP_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse(_EPERM)])
    known = [_Row(_JUMP_IF_EQUAL, len(_FAMILIES) - index, 0, one) for index, one in enumerate(_FAMILIES)]
    rows += _when(_SOCKET[machine], [*known, _refuse(_EAFNOSUPPORT)])
    return [*rows, _Row(_RETURN, 0, 0, _ALLOW)]


def _when(number: int, rows: Sequence[_Row]) -> list[_Row]:
    """Return rows that judge the first argument of one call by `rows`, and allow it if they do not refuse it."""
    judged = [_Row(_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET), *rows, _Row(_RETURN, 0, 0, _ALLOW)]
    return [_Row(_JUMP_IF_EQUAL, 0, len(judged), number), *judged]


def _refuse(error: int) -> _Row:
    return _Row(_RETURN, 0, 0, _REFUSE | error)


def _install(machine: str, rows: Iterable[_Row]) -> bool:
    """Install rows that begin with the call's number, for this machine only. Needs PR_SET_NO_NEW_PRIVS or privilege."""
    if sys.byteorder != "little":
        return False
    head = [_Row(_LOAD_WORD, 0, 0, _MACHINE_OFFSET), _Row(_JUMP_IF_EQUAL, 1, 0, _MACHINES[machine]), _refuse(_EPERM)]
    program = b"".join(_INSTRUCTION.pack(*row) for row in (*head, *rows))
    buffer = ctypes.create_string_buffer(program, len(program))
    size = len(program) // _INSTRUCTION.size
    header = ctypes.create_string_buffer(struct.pack("@HP", size, ctypes.addressof(buffer)))
    arguments = [ctypes.c_ulong(value) for value in (_SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)]
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_SECCOMP, *arguments) == 0
