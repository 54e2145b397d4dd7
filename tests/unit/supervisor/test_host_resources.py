from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sie.runtime.server_locks import lock_holder, locked_ports
from sie.supervisor import host_resources
from sie.supervisor.host_resources import (
    StartError,
    make_runtime_dir,
    reserve_port,
    take_lock,
    usable_cores,
)

WAIT_S = 30.0


def test_usable_cores_are_those_of_the_affinity_bounded_by_the_cgroup(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5, 3, 9})
    for quota, cores in ((None, [3, 5, 9]), (2.5, [3, 5]), (0.5, [3]), (64.0, [3, 5, 9])):
        monkeypatch.setattr(host_resources, "_cgroup_cpu_quota", lambda quota=quota: quota)
        assert usable_cores() == cores


# --- the port ------------------------------------------------------------------------------------------------------------


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


def test_port_zero_reserves_a_free_one_that_frontends_can_share():
    with reserve_port("127.0.0.1", 0) as held:
        for _ in range(2):
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port_of(held)))
            listener.listen()
            listener.close()


def test_second_server_is_refused_before_the_first_one_listens():
    with reserve_port("127.0.0.1", 0) as held, pytest.raises(StartError, match=str(port_of(held))):
        reserve_port("127.0.0.1", port_of(held))


def test_a_port_of_another_server_is_refused_with_the_ways_out(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        reason = f"`sie stop --port {port_of(other)}` stops it, `--port` chooses another"
        with take_lock(tmp_path, port_of(other)), pytest.raises(StartError, match=reason):
            reserve_port("127.0.0.1", port_of(other), tmp_path)


@pytest.mark.parametrize("shares_port", [False, True])
def test_foreign_listener_is_refused(shares_port):
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares_port)
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with pytest.raises(StartError, match="in use"):
            reserve_port("127.0.0.1", port_of(foreign))


def test_reserved_port_takes_no_connection():
    with reserve_port("127.0.0.1", 0) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(held)), timeout=5)


def test_port_can_be_reserved_again_after_connections_that_still_linger():
    with reserve_port("127.0.0.1", 0) as held:
        port = port_of(held)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Granian does
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                accepted, _ = listener.accept()
                accepted.close()  # first to close, so that its end stays in TIME_WAIT
    reserve_port("127.0.0.1", port).close()


def test_address_that_is_not_ours_is_refused_by_name():
    with pytest.raises(StartError, match=r"host/port: .*192\.0\.2\.1"):
        reserve_port("192.0.2.1", 0)


# --- the lock and the directory ------------------------------------------------------------------------------------------


def test_second_lock_names_the_holder(tmp_path):
    with take_lock(tmp_path, 8080):
        with pytest.raises(StartError, match=rf"8080.*pid {os.getpid()}"), take_lock(tmp_path, 8080):
            pass
        with take_lock(tmp_path, 8081):
            assert locked_ports(tmp_path) == [8080, 8081]
    with take_lock(tmp_path, 8080):
        assert lock_holder(tmp_path, 8080) == os.getpid()
    assert not list(tmp_path.iterdir())


def test_lock_that_is_somebody_s_link_is_refused(tmp_path):
    (tmp_path / "sie-1.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="runtime_dir"), take_lock(tmp_path, 1):
        pass
    assert not (tmp_path / "elsewhere").exists()


KILLED = """
import os, signal, stat, sys
from pathlib import Path
from sie.supervisor.host_resources import make_runtime_dir, take_lock
with make_runtime_dir(Path(sys.argv[1])) as path, take_lock(Path(sys.argv[1]), int(sys.argv[2])):
    for name in ("control", "agents"):
        os.mknod(path / name, stat.S_IFSOCK | 0o600)
    (path / "regions").mkdir()
    (path / "regions/one").touch()
    print(path, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_removes_what_killed_servers_left_and_nothing_else(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed, living = (
        subprocess.Popen([*command, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for port in ("1", "2")
    )
    made = [Path(process.stdout.readline().strip()) for process in (killed, living)]
    killed.communicate(timeout=WAIT_S)
    others = [tmp_path / "run-of-others", tmp_path / "sie-notes.lock"]
    others[0].mkdir()
    (others[0] / "data").touch()
    others[1].touch()
    assert made[0].exists()
    with make_runtime_dir(tmp_path) as path:
        left = {*others, made[1], tmp_path / "sie-2.lock"}
        assert set(tmp_path.iterdir()) == {*left, path}
        assert list(made[1].iterdir())
    living.communicate(timeout=WAIT_S)
    assert set(tmp_path.iterdir()) == left


def test_runtime_dir_is_private_and_fresh_each_time(tmp_path):
    with make_runtime_dir(tmp_path / "base") as first, make_runtime_dir(tmp_path / "base") as second:
        assert first != second
        made = [first, second, tmp_path / "base"]
        assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3
    assert not list((tmp_path / "base").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_runtime_dir_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(StartError, match=r"runtime_dir.*others"), make_runtime_dir(tmp_path):
        pass


def test_runtime_dir_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StartError, match="another user"), make_runtime_dir(tmp_path):
        pass


def test_runtime_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="runtime_dir"), make_runtime_dir(tmp_path / "file"):
        pass


def test_runtime_dir_whose_sockets_would_have_too_long_a_path_is_refused(tmp_path):
    room = 107 - len("/run-12345678/control") - len(str(tmp_path)) - 1
    with make_runtime_dir(tmp_path / ("a" * room)) as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "control"))
    with (
        pytest.raises(StartError, match=r"^runtime_dir: .* is longer than \d+ bytes"),
        make_runtime_dir(tmp_path / ("a" * (room + 1))),
    ):
        pass
    assert not list((tmp_path / ("a" * (room + 1))).iterdir())
