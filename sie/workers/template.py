"""The template of CPU workers: it imports what they import, and forks them. It loads no model and starts no thread.

`sie.supervisor.worker_template` is the other side and describes the exchange. A worker is a fork of a fork whose parent
has ended, so the kernel makes it a child of the supervisor, as every other worker is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

from sie.runtime import child_setup
from sie.runtime.own_modules import run_module
from sie.workers import main as worker
from sie.workers.loading import light_imports

_MAX_BYTES: Final = 1 << 16
_FAILED: Final = 70
"""Exit status of a fork whose code raised; EX_SOFTWARE of sysexits.h."""
_ARGUMENTS: Final = slice(45, 47)
"""Where /proc/self/stat says in which memory the command line lies, counted from the state. Source: proc_pid_stat(5)."""


def main() -> int:
    """Fork a worker for each request on a socket until it closes. Arguments: its descriptor, the supervisor's pid."""
    number, supervisor_pid = int(sys.argv[1]), int(sys.argv[2])
    child_setup.die_with_parent(supervisor_pid)
    gc.disable()  # a quarter of the imports' time: they make objects to keep, and next to no garbage
    try:
        _import_libraries()
    except ImportError:  # the worker that loads a model says which library is missing
        return 1
    if len(list(Path("/proc/self/task").iterdir())) != 1:  # of several threads, a fork has one, and the locks of all
        return 1
    gc.freeze()  # a collection would write into all objects, and so copy them for each worker
    gc.enable()
    with socket.socket(fileno=number) as requests:
        requests.send(b"ready")
        while request := requests.recv(_MAX_BYTES):
            num_threads, _, launch = request.decode().partition(" ")
            requests.send(b"%d" % _fork_worker(launch, int(num_threads), requests))
    return 0


def _import_libraries() -> None:
    light_imports.prepare(has_shapes=False)
    import sie.workers.device.capture
    import sie.workers.loading.loader
    import sie.workers.loading.shared_weights  # noqa: F401  # forks find them imported


def _fork_worker(launch: str, num_threads: int, requests: socket.socket) -> int:
    """Return the process id of a new worker. Raises OSError if the system has no process for it."""
    told, telling = os.pipe()
    pid_from, pid_to = os.pipe()
    try:
        between = os.fork()
        if not between:
            with _ending():
                if pid := os.fork():
                    os.write(pid_to, b"%d" % pid)
                    os._exit(0)
                for fd in (telling, pid_from, pid_to):
                    os.close(fd)
                requests.close()
                _become_worker(launch, num_threads, told)
        if os.waitpid(between, 0)[1]:
            raise OSError("the system has no process to give")
        os.write(telling, b"!")
        return int(os.read(pid_from, 16))
    finally:
        for fd in (told, telling, pid_from, pid_to):
            os.close(fd)


def _become_worker(launch: str, num_threads: int, told: int) -> NoReturn:
    """Run a worker. ORDER: only after the template has seen the end of the process between: until then it is the parent."""
    if not os.read(told, 1):
        os._exit(0)  # the template has ended, so nobody knows of this process
    os.close(told)
    os.setpgid(0, 0)
    _set_threads(num_threads)
    sys.argv = [worker.__name__, launch]
    _show_command([*run_module(worker.__name__), launch])
    os._exit(worker.main())


def _set_threads(number: int) -> None:
    """Set the size of the pools, which start with the first computation. The template was started for one thread."""
    if number != 1:
        import torch

        torch.set_num_threads(number)
        os.environ.update(dict.fromkeys(child_setup.THREAD_VARIABLES, str(number)))


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End a fork whatever happens in it: what follows the block belongs to the template."""
    try:
        yield
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else _FAILED)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_FAILED)


def _show_command(words: Sequence[str]) -> None:
    """Write a command line where `ps` reads this process's own from, if it fits; the supervisor has left room."""
    place = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[_ARGUMENTS]
    first, end = map(int, place)
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(data) < end - first:
        ctypes.memmove(first, data.ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    os._exit(main())  # as a worker's
