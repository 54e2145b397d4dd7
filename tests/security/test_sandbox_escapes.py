"""The table of escapes: what code in a sandbox tries against the server, its keys, its sessions and its host.

Each row runs in each kind of sandbox that this user can have: as root, with and without a user namespace's mapping.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sie.agents import tools
from sie.agents.host import sandboxed
from sie.agents.host.main import hidden_paths
from sie.config.sections import Access, Server
from sie.config.settings import Settings
from sie.runtime.sandbox import Program, Sandbox, _find_python, find_bwrap, make_home
from tests.agent_rig import Host, modes, open_directory, start_host
from tests.process.harness import eventually

CANARY = "the-key-of-the-server"
MIB = 1 << 20


@pytest.fixture(scope="module", params=modes())
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    os.environ["SIE_CANARY"] = CANARY
    try:
        with open_directory() as directory:
            (directory / "keys.toml").write_text(CANARY)
            with start_host(
                request.param, directory, code_timeout_s=100, shell_timeout_s=100, sandbox_memory_bytes=256 * MIB,
                sandbox_processes=32, sandbox_file_bytes=4 * MIB, sandbox_disk_bytes=8 * MIB, sandbox_files=200,
                sandbox_output_bytes=2 * MIB,
            ) as host:  # fmt: skip
                yield host
    finally:
        del os.environ["SIE_CANARY"]


CALLS = """
import ctypes, os, platform, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return "done" if result >= 0 else os.strerror(ctypes.get_errno())
def attempt(work):
    try:
        return work() or "done"
    except BaseException as error:
        return type(error).__name__
def beside(top, *shown):
    found, places = [], [top] * os.path.isdir(top)
    for place in places:
        for path in {os.path.join(place, name) for name in os.listdir(place)} - set(shown):
            (places if any(one.startswith(path + "/") for one in shown) else found).append(path)
    return str(found)
"""
NOT_PERMITTED = "Operation not permitted"

ATTEMPTS = {
    # the host's processes and their memory
    "ptrace": ("call(101, 117, 16, 1, 0, 0)", {NOT_PERMITTED}),
    "process_vm_readv": ("call(310, 270, 1, 0, 0, 0, 0, 0)", {NOT_PERMITTED}),
    "pidfd_getfd": ("call(438, 438, 0, 0, 0)", {NOT_PERMITTED}),
    "signal a host process": ("attempt(lambda: os.kill({host_pid}, 9))", {"ProcessLookupError"}),
    "look at a host process": ("attempt(lambda: open('/proc/{host_pid}/environ').read())", {"FileNotFoundError"}),
    "see only its own processes": ("str(all(int(p) < 1000 for p in os.listdir('/proc') if p.isdigit()))", {"True"}),
    "read the environment of init": (
        "attempt(lambda: str('the-key' in open('/proc/1/environ').read()))", {"False", "PermissionError"}
    ),
    "memory of init": ("attempt(lambda: open('/proc/1/mem', 'rb').read(1))", {"PermissionError", "OSError"}),
    "the root of init": ("str(os.path.exists('/proc/1/root/{agent_dir}'))", {"False"}),
    # namespaces, mounts and privilege
    "a new user namespace": ("call(272, 97, 0x10000000)", {NOT_PERMITTED}),
    "a new mount namespace": ("call(272, 97, 0x20000)", {NOT_PERMITTED}),
    "clone with a namespace": ("call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)", {NOT_PERMITTED}),
    "clone3": ("call(435, 435, 0, 0)", {"Function not implemented"}),
    "mount": ("call(165, 40, b'x', b'/tmp', b'tmpfs', 0, 0)", {NOT_PERMITTED}),
    "setns": ("call(308, 268, 0, 0)", {NOT_PERMITTED}),
    "pivot_root": ("call(155, 41, b'/', b'/')", {NOT_PERMITTED}),
    "become root": ("attempt(lambda: os.setuid(0))", {"PermissionError", "OSError"}),
    "hold a capability": ("str(all(int(l.split()[1], 16) == 0 for l in open('/proc/self/status') if l.startswith('Cap')))",
                          {"True"}),
    "gain a privilege": ("str('NoNewPrivs:\\t1' in open('/proc/self/status').read())", {"True"}),
    "write beside the skills": ("attempt(lambda: open('/skills/x', 'w').write('x'))", {"OSError", "PermissionError"}),
    # the kernel
    "bpf": ("call(321, 280, 0, 0, 0)", {NOT_PERMITTED}),
    "io_uring": ("call(425, 425, 1, 0)", {NOT_PERMITTED}),
    "userfaultfd": ("call(323, 282, 0)", {NOT_PERMITTED}),
    "perf": ("call(298, 241, 0, 0, -1, -1, 0)", {NOT_PERMITTED}),
    "keyring": ("call(250, 219, 0, 0)", {NOT_PERMITTED}),
    "module": ("call(313, 273, 0, 0, 0)", {NOT_PERMITTED}),
    "numbers of another interface": ("call(0x40000000 | 101, 117, 16, 1, 0, 0)", {NOT_PERMITTED}),
    "the clock": ("call(227, 112, 0, 0)", {NOT_PERMITTED}),
    "settings of the kernel": ("attempt(lambda: open('/proc/sys/kernel/core_pattern', 'w'))",
                               {"PermissionError", "OSError"}),
    "sysfs": ("str(os.path.exists('/sys'))", {"False"}),
    "a device": ("attempt(lambda: os.mknod('/workspace/disk', 0o60666, os.makedev(8, 0)))", {"PermissionError"}),
    "rules of Landlock": ("call(444, 444, 0, 0, 1)", {NOT_PERMITTED}),
    "handles of files": ("call(303, 264, -100, b'/', 0, 0, 0)", {NOT_PERMITTED}),
    "watch every file": ("call(300, 262, 0, 0)", {NOT_PERMITTED}),
    "the kernel's memory": ("attempt(lambda: open('/proc/kcore', 'rb').read(1))", {"FileNotFoundError", "PermissionError"}),
    "the kernel's messages": ("attempt(lambda: open('/dev/kmsg').read(1))", {"FileNotFoundError"}),
    "the kernel's keys": ("attempt(lambda: open('/proc/sysrq-trigger', 'w'))", {"FileNotFoundError", "PermissionError"}),
    "alarms of the kernel": ("attempt(lambda: open('/proc/pressure/cpu', 'w'))", {"PermissionError", "FileNotFoundError"}),
    "its own memory by a file": ("attempt(lambda: open('/proc/self/mem', 'r+b'))", {"PermissionError"}),
    "another map of users": ("attempt(lambda: open('/proc/self/uid_map', 'w').write('0 0 1'))", {"PermissionError"}),
    "the namespaces of init": ("attempt(lambda: os.listdir('/proc/1/root'))", {"PermissionError"}),
    "type into a terminal": ("attempt(lambda: open('/dev/tty'))", {"OSError"}),
    # memory that no process shows
    "memfd": ("attempt(lambda: os.memfd_create('x'))", {"PermissionError"}),
    "shared memory of System V": ("call(29, 194, 0, 1 << 20, 0o1600)", {NOT_PERMITTED}),
    "message queue": ("call(68, 186, 0, 0o1600)", {NOT_PERMITTED}),
    # files
    "the server's keys": ("attempt(lambda: open('{directory}/keys.toml').read())", {"FileNotFoundError"}),
    "the server's state": ("attempt(lambda: os.listdir('{directory}'))", {"FileNotFoundError"}),
    "other sessions": ("attempt(lambda: os.listdir('{agent_dir}'))", {"FileNotFoundError"}),
    "users of the host": ("str(open('/etc/passwd').read().count(chr(10)))", {"1"}),
    "passwords": ("attempt(lambda: open('/etc/shadow').read())", {"FileNotFoundError"}),
    "homes": ("beside('/home', {shown})", {"[]"}),
    "the home of root": ("beside('/root', {shown})", {"[]"}),
    "a log": ("beside('/var', {shown})", {"[]"}),
    "files of others beside the interpreter": ("beside('{place}', {shown})", {"[]"}),
    "write to the system": ("attempt(lambda: open('/usr/bin/sie', 'w'))", {"OSError", "PermissionError"}),
    "write to the root": ("attempt(lambda: open('/x', 'w'))", {"OSError", "PermissionError"}),
    "write to the devices": ("attempt(lambda: open('/dev/x', 'w'))", {"OSError", "PermissionError"}),
    "write to our code": ("attempt(lambda: open('/run/sie/sie/__init__.py', 'w'))", {"OSError", "PermissionError"}),
    "be less likely to die": ("attempt(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000'))", {"PermissionError"}),
    # limits and priority
    "more processor time": ("attempt(lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)))",
                            {"PermissionError"}),
    "a greater share of the processor": ("attempt(lambda: open('/proc/self/autogroup', 'w').write('0'))",
                                         {"PermissionError", "FileNotFoundError"}),
    "a class of real time": ("attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5)))",
                             {"PermissionError"}),
    "more of the disk": ("call(251, 30, 1, 0, 2 << 13)", {NOT_PERMITTED}),
    "a share for each session": (
        "attempt(lambda: [os.setsid(), open('/proc/self/autogroup').read().split()[-1]][1])", {"10", "FileNotFoundError"}
    ),
    "more processes": ("attempt(lambda: __import__('resource').setrlimit(6, (1000, 1000)))",
                       {"PermissionError", "ValueError"}),
    # network
    "a port of the host": ("attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 2))",
                           {"ConnectionRefusedError", "OSError"}),
    "the network": ("attempt(lambda: socket.create_connection(('192.0.2.1', 80), 2))", {"OSError", "TimeoutError"}),
    "an abstract socket": ("attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0{abstract}'))",
                           {"ConnectionRefusedError", "PermissionError"}),
    "names": ("attempt(lambda: socket.getaddrinfo('example.com', 80))", {"gaierror"}),
    "netlink": ("attempt(lambda: socket.socket(16, socket.SOCK_RAW, 0))", {"OSError"}),
    "sockets of virtual machines": ("attempt(lambda: socket.socket(40, socket.SOCK_STREAM))", {"OSError"}),
    "the kernel's ciphers": ("attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET))", {"OSError"}),
    "raw packets": ("attempt(lambda: socket.socket(17, socket.SOCK_RAW, 0))", {"OSError", "PermissionError"}),
    "an environment": ("str('SIE_CANARY' in os.environ)", {"False"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> Iterator[dict[str, object]]:
    """What a sandbox would have to know: a listening port, an abstract socket and a process of the host."""
    abstract = f"sie-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0{abstract}")
        named.listen()
        yield {"port": server.getsockname()[1], "abstract": abstract, "host_pid": os.getpid()}


def attempt(host: Host, facts: dict[str, object], name: str) -> None:
    """Try one row of the table, from the interpreter of this host."""
    python, directory = host.settings.agents.agent_python or sys.executable, Path(host.settings.server.state_dir)
    shown = _find_python(python).paths
    known = facts | {
        "directory": directory, "agent_dir": directory / "agents", "shown": ", ".join(map(repr, shown)),
        "place": Path(*Path(python).parts[:3]),
    }  # fmt: skip
    expression, answers = ATTEMPTS[name]
    for key, value in known.items():
        expression = expression.replace("{" + key + "}", str(value))
    ran = host.python(CALLS + expression, "attempts")
    assert ran.get("result", "").strip("'") in answers, ran


@pytest.mark.parametrize("name", ATTEMPTS)
def test_code_cannot(host: Host, facts: dict[str, object], name: str) -> None:
    attempt(host, facts, name)


# --- an interpreter below /tmp, of which each sandbox has its own ------------------------------------------------------


@pytest.fixture(scope="module", params=modes())
def below_tmp(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host whose interpreter is in a clone in a private directory in /tmp."""
    with tempfile.TemporaryDirectory(prefix="sie-python-", dir="/tmp") as place, open_directory() as directory:
        environment = Path(place, "clone", ".venv")
        venv.create(environment, symlinks=True)
        Path(place, "clone", "keys.toml").write_text(CANARY)
        (directory / "keys.toml").write_text(CANARY)
        with start_host(request.param, directory, agent_python=str(environment / "bin" / "python")) as host:
            yield host


def place_of(host: Host) -> Path:
    return Path(*Path(host.settings.agents.agent_python).parts[:3])


@pytest.mark.parametrize("name", ATTEMPTS)
def test_code_of_a_python_below_tmp_cannot(below_tmp: Host, facts: dict[str, object], name: str) -> None:
    attempt(below_tmp, facts, name)


def test_a_python_below_tmp_has_its_packages_and_a_tmp_to_write_to(below_tmp: Host) -> None:
    code = "import sys, tempfile\nwith tempfile.NamedTemporaryFile() as file:\n    name = file.name\n(sys.prefix, name[:5])"
    ran = below_tmp.python(code, "own")
    assert ran["result"] == repr((str(place_of(below_tmp) / "clone" / ".venv"), "/tmp/")), ran


def test_no_program_takes_the_place_of_a_python_below_tmp(below_tmp: Host) -> None:
    """The next sandbox of a session starts the interpreter before anything confines it."""
    place = place_of(below_tmp)
    tries = [
        f"mv {place} /tmp/other", f"rmdir {place}", f"rm -rf {place}", f"ln -sfT /workspace {place}", f"touch {place}/x",
        f"mkdir -p /tmp/own && mv -T /tmp/own {place}", f"chmod 777 {place}", f"mv {place}/clone {place}/x",
    ]  # fmt: skip
    for one in tries:
        ran = below_tmp.shell(f"({one}) || echo refused", session="place")
        assert ran["stdout"] == "refused\n", (one, ran)
    ran = below_tmp.python("import sys; sys.prefix", "place")
    assert ran["result"] == repr(f"{place}/clone/.venv"), ran


@pytest.mark.skipif(not os.access(sys.prefix, os.W_OK), reason="needs to write beside the interpreter")
def test_what_the_server_keeps_is_covered_even_within_what_is_shown() -> None:
    """A key file, and a state directory, in the directory of the interpreter."""
    with tempfile.TemporaryDirectory(prefix=".sie-test-", dir=sys.prefix) as shown, open_directory() as directory:
        Path(shown).chmod(0o755)
        (Path(shown) / "keys.toml").write_text(CANARY)
        (Path(shown) / "state").mkdir()
        (Path(shown) / "state" / "responses.db").write_text(CANARY)
        settings = Settings(server=Server(state_dir=f"{shown}/state"), access=Access(api_keys=f"{shown}/keys.toml"))
        sandbox = Sandbox(mode=modes()[0], bwrap=find_bwrap(), hidden=tuple(hidden_paths(settings)))
        home = directory / "home"
        make_home(home, sandbox)
        code = f"cat {shown}/keys.toml; ls -A {shown}/state; ls {shown} | wc -l"
        ran = subprocess.run(sandbox.command(home, Program(command=("/bin/sh", "-c", code))), capture_output=True,
                             check=False, text=True)  # fmt: skip
        assert CANARY not in ran.stdout, ran
        assert ran.stdout.split() == ["2"], ran


# --- what takes too much --------------------------------------------------------------------------------------------


# As root without the privileged sandbox the host ends it, not the kernel: at idle priority the host had no turn.
@pytest.mark.timing(alone=True)
def test_a_fork_bomb_stays_in_its_sandbox(host: Host) -> None:
    host.python("x = 41", "beside")
    ran = host.python("import os\nwhile True:\n    os.fork()", "bomb")
    assert "BlockingIOError" in ran["exception"] or "sandbox_processes" in ran["exception"], ran
    ran = host.shell("bomb() { bomb | bomb & }; bomb; sleep 0.2", session="bomb2")
    assert ran["status"] in {"success", "error"}, ran
    assert host.python("x + 1", "beside")["result"] == "42"


def test_a_sandbox_that_cannot_be_looked_at_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb that had taken all processes of the host left no thread for the look that would have ended it."""

    def look(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sandboxed, "measure", look)
    ran = host.python("import time\ntime.sleep(200)", "unseen")
    assert "the host could not look at what it holds (can't start new thread)" in ran["exception"]


def test_memory_of_all_processes_together_is_bounded(host: Host) -> None:
    code = "import os, time\nfor _ in range(4):\n    if not os.fork():\n        b = bytearray(100 << 20)\n        time.sleep(200)\ntime.sleep(200)"
    ran = host.python(code, "memory")
    assert "sandbox_memory_bytes" in ran["exception"], ran
    assert "MemoryError" in host.python("bytearray(300 << 20)", "memory")["exception"]


def test_shared_memory_counts(host: Host) -> None:
    code = "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(200)"
    assert "sandbox_memory_bytes" in host.python(code, "shared")["exception"]


def test_memory_of_sockets_counts(host: Host) -> None:
    """The kernel holds what waits in a socket, and no process shows it: 256 MiB were 3 GiB."""
    code = (
        "import os, socket, time\nfor _ in range(8):\n    if not os.fork():\n        kept = []\n        try:\n"
        "            while True: kept.append(socket.socketpair())\n        except OSError: time.sleep(200)\ntime.sleep(200)"
    )
    assert "sandbox_memory_bytes" in host.python(code, "sockets")["exception"]


def test_memory_of_connections_counts(host: Host) -> None:
    """Buffers of TCP grow beyond those of other sockets."""
    code = (
        "import os, socket, time\nserver = socket.create_server(('127.0.0.1', 0))\nkept = []\nfor _ in range(100):\n"
        "    one = socket.create_connection(server.getsockname()); kept += [one, server.accept()[0]]\n"
        "    one.setblocking(False)\n    try:\n        while True: one.send(bytes(1 << 20))\n    except BlockingIOError: pass\n"
        "time.sleep(200)"
    )
    assert "sandbox_memory_bytes" in host.python(code, "tcp")["exception"]


def test_a_large_file_ends_at_its_limit(host: Host) -> None:
    ran = host.python("open('large', 'wb').write(bytes(5 << 20))", "large")
    assert "OSError" in ran["exception"], ran


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("files", "for i in range(9):\n    open(f'f{i}', 'wb').write(bytes(3 << 20))"),
        (
            "deleted",
            "import os\nk = []\nfor i in range(9):\n    f = open('f', 'wb'); k.append(f); f.write(bytes(3 << 20)); f.flush(); os.unlink('f')",
        ),
        ("tmp", "for i in range(9):\n    open(f'/tmp/f{i}', 'wb').write(bytes(3 << 20))"),
        ("shm", "for i in range(9):\n    open(f'/dev/shm/f{i}', 'wb').write(bytes(3 << 20))"),
        ("inodes", "for i in range(300):\n    open(f'f{i}', 'w')"),
        ("deep", "import os\nfor i in range(300):\n    os.mkdir('d'); os.chdir('d')"),
    ],
)
def test_disk_is_bounded(host: Host, name: str, code: str) -> None:
    ran = host.python(f"{code}\nimport time; time.sleep(200)", f"disk {name}")
    assert "sandbox_disk_bytes" in ran["exception"] or "sandbox_files" in ran["exception"], ran


def test_a_directory_that_its_owner_closes_hides_nothing(host: Host) -> None:
    """Root reads it all the same; another user cannot tell what it holds, and ends the sandbox."""
    wait_s = 1 if os.geteuid() == 0 else 200  # it is ended when the host looks
    code = "import os, time\nos.mkdir('d')\nopen('d/f', 'wb').write(bytes(3 << 20))\nos.chmod('d', 0)\n"
    ran = host.python(f"{code}time.sleep({wait_s})\n1", "closed")
    assert ran.get("result") == "1" if os.geteuid() == 0 else "cannot be read" in ran["exception"], ran


def test_a_flood_of_output_ends(host: Host) -> None:
    ran = host.shell("yes", session="flood")
    assert ran["status"] == "error", ran
    assert "sandbox_output_bytes" in ran["stderr"]
    assert len(ran["stdout"]) < 20_000
    assert "sandbox_output_bytes" in host.python("while True: print('x' * 1000)", "flood")["exception"]


def test_signals_to_everybody_reach_its_own_alone(host: Host) -> None:
    host.python("x = 41", "beside")
    ran = host.python("import os, signal\nos.kill(-1, signal.SIGKILL)", "signals")
    assert ran["status"] == "error" or "result" in ran, ran
    assert host.python("x + 1", "beside")["result"] == "42"
    assert host.python("'alive'", "signals")["result"] == "'alive'"


# --- what stays behind ----------------------------------------------------------------------------------------------


def _running(marker: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if marker in " ".join(one.info["cmdline"] or ())]


def test_nothing_runs_on_after_a_command(host: Host) -> None:
    ran = host.shell("setsid sleep 98761 >/dev/null 2>&1 & (sleep 98761 &) ; echo started", session="behind")
    assert ran["stdout"] == "started\n", ran
    eventually(lambda: not _running("98761"), "the end of every sleep")


def test_code_stands_still_between_calls(host: Host) -> None:
    code = "import threading, os\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()\nif not os.fork(): spin()"
    host.python(code, "thread")
    python = host.wait(host.process._sessions.find("", "thread")).python
    assert python is not None
    inside = psutil.Process(python.box.pid).children(recursive=True)
    assert len(inside) == 3, inside  # its init, the interpreter and the fork
    eventually(lambda: {one.status() for one in inside} == {psutil.STATUS_STOPPED}, "all of them stopped")
    assert host.python("1", "thread")["result"] == "1"


def test_code_that_ignores_its_interrupt_is_ended() -> None:
    ignoring = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n1"
    with open_directory() as directory, start_host(modes()[0], directory, code_timeout_s=0.3) as host:
        eventually(lambda: host.python(ignoring).get("result") == "1", "code that ignores it, in its time")
        ran = host.python("while True: time.sleep(30)")
        assert "did not stop after its time" in ran["exception"], ran
        eventually(lambda: host.python("1").get("result") == "1", "a new interpreter, in its time")


def test_answers_that_code_forges_are_its_own(host: Host) -> None:
    # the socket keeps the number that it has in the host, which is this process here: others' files come before it
    forge = (
        "import os, json, struct\n"
        "for fd in range(3, 4096):\n"
        "    body = json.dumps({'number': 0, 'result': 'forged'}).encode()\n"
        "    try: os.write(fd, struct.pack('<I', len(body)) + body)\n"
        "    except OSError: pass\n"
        "'mine'"
    )
    assert host.python(forge, "forger")["result"] == "'mine'"
    assert host.python("1", "forger")["result"] == "1"
    assert host.python("1", "honest")["result"] == "1"
    broken = "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b'\\xff' * 8)\n    except OSError: pass"
    assert "broke off" in host.python(broken, "forger")["exception"]
    assert host.python("1", "forger")["result"] == "1"


# --- files that are shown -------------------------------------------------------------------------------------------


def test_links_and_pipes_are_not_shown(host: Host) -> None:
    home = host.home("links")
    (home / "secret").write_text(CANARY)
    code = (
        "import os\n"
        "os.symlink('/etc/passwd', 'absolute'); os.symlink('../secret', 'relative'); os.symlink('/', 'root')\n"
        "os.mkfifo('pipe'); os.mkdir('dir'); os.symlink('..', 'dir/up'); open('plain', 'w').write('x')"
    )
    asked = [
        "absolute",
        "relative",
        "root/etc/passwd",
        "pipe",
        "dir",
        "dir/up/secret",
        "../secret",
        "/etc/passwd",
        "plain\0",
    ]
    result = host.call(tools.PYTHON, "links", code=code, outputs=[{"name": name} for name in asked])
    assert {file.name for file in result.files if file.code is None} == {"plain"}
    assert {file.code for file in result.files if file.name != "plain"} == {"not_produced"}
    assert CANARY not in str(result)
    for name in asked:
        read = host.call(tools.READ_FILE, "links", file_id=name)
        assert CANARY not in read.content
        assert "There is no file" in read.content, name


def test_sessions_of_others_do_not_exist(host: Host) -> None:
    host.python("x = 1; open('mine', 'w').write('x')", "same name", owner="one")
    ran = host.python("import os\n('x' in globals(), os.listdir())", "same name", owner="other")
    assert ran["result"] == "(False, [])", ran
