"""The findings about limits, memory, disk, port, clock, kernel and libraries of a host that lacks them."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.config.limits import MIB
from sie.config.settings import Settings
from sie.doctor import host, kernel, software
from sie.doctor.finding import Finding


def settings(**sections: dict[str, Any]) -> Settings:
    """Return the defaults with these values changed, by section."""
    defaults = Settings()
    changed = {name: msgspec.structs.replace(getattr(defaults, name), **values) for name, values in sections.items()}
    return msgspec.structs.replace(defaults, **changed)


def bad(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return (level, message) of what is not ok; everything of that kind says how to mend it."""
    worse = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.fix for finding in worse)
    return [(finding.level, finding.message) for finding in worse]


@pytest.mark.parametrize(
    ("soft", "level"), [(100_000, None), (resource.RLIM_INFINITY, None), (1024, "warn"), (100, "error")]
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, level: str | None):
    limits = {resource.RLIMIT_NOFILE: soft}
    monkeypatch.setattr(host.resource, "getrlimit", lambda number: (limits.get(number, -1), -1))
    found = bad(host.check_limits(settings()))
    assert found == ([] if level is None else [(level, f"open files: {soft}, at least 8192 are wanted")])


def test_locked_memory_matters_with_a_gpu_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.resource, "getrlimit", lambda number: (0 if number == resource.RLIMIT_MEMLOCK else -1, -1))
    assert bad(host.check_limits(settings(devices={"devices": "cpu"}))) == []
    ((level, message),) = bad(host.check_limits(settings(devices={"devices": "cuda"})))
    assert (level, message.split(":")[0]) == ("warn", "locked memory")


def test_segments_that_do_not_fit_are_an_error_with_the_bytes():
    small = settings(server={"frontends": 1}, devices={"devices": "cpu"})
    ok, *rest = host.check_memory(small)
    assert (ok.level, ok.message, rest) == ("ok", "99 MiB of shared memory fit", [])
    huge = settings(server={"frontends": 1}, devices={"devices": "cpu:2"}, memory={"request_segment_bytes": 1 << 46})
    ((level, message),) = bad(host.check_memory(huge))
    assert level == "error"
    assert str((1 << 46) + 2 * 32 * MIB + 4 * 4096 * 64 + 4 * MIB) in message


def test_large_payloads_that_may_not_fit_are_a_warning():
    ((level, message),) = bad(host.check_memory(settings(memory={"max_large_bytes": 1 << 46})))
    assert level == "warn"
    assert message.startswith("large payloads may not fit: ")


def writing_to(tmp_path: Path) -> Settings:
    return settings(
        server={"runtime_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")},
        models={"cache_dir": str(tmp_path / "new" / "deep")},
    )


def test_directories_that_are_there_or_can_be_made_are_fine(tmp_path: Path):
    assert bad(host.check_disk(writing_to(tmp_path))) == []
    (tmp_path / "run").mkdir(mode=0o700)
    assert bad(host.check_disk(writing_to(tmp_path))) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "the doctor changes nothing"


def test_a_runtime_directory_that_others_may_write_to_is_an_error(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    ((level, message),) = bad(host.check_disk(writing_to(tmp_path)))
    assert level == "error"
    assert "others may write to it" in message


def test_a_directory_that_cannot_be_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.os, "access", lambda path, _mode: path != tmp_path)
    found = bad(host.check_disk(writing_to(tmp_path)))
    assert [level for level, _ in found] == ["error", "error", "error"]
    assert found[1][1] == f"cache_dir: {tmp_path}/new/deep cannot be written to"
    assert found[2][1] == f"state_dir: {tmp_path}/state cannot be written to"


@pytest.mark.parametrize(("free", "level"), [(1 << 20, "warn"), (1000, "error")])
def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = dict(reversed(pair) for pair in bad(host.check_disk(writing_to(tmp_path))))
    assert found[f"cache_dir: {tmp_path}/new/deep, 0.0 GiB free"] == level


def test_models_from_the_hub_want_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    asked = writing_to(tmp_path)
    assert bad(host.check_disk(asked)) == []
    models = msgspec.structs.replace(asked.models, preload=("org/name",))
    ((level, message),) = bad(host.check_disk(msgspec.structs.replace(asked, models=models)))
    assert level == "warn"
    assert message.startswith("models from the hub (HF_HOME): ")


def test_a_port_is_free_taken_or_this_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sie.runtime.server_locks.SERVICE_DIRECTORY", str(tmp_path / "elsewhere"))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        asked = settings(server={"port": port, "runtime_dir": str(tmp_path)})
        holder.listen()
        ((level, message),) = bad(host.check_network(asked))
        assert (level, str(port) in message) == ("error", True)
        with (tmp_path / f"sie-{port}.lock").open("w+") as lock:
            lock.write("4711\n")
            lock.flush()
            assert len(bad(host.check_network(asked))) == 1, "a lock that nobody holds"
            fcntl.flock(lock, fcntl.LOCK_EX)
            (finding,) = host.check_network(asked)
            assert (finding.level, "pid 4711" in finding.message) == ("ok", True)
    (finding,) = host.check_network(asked)
    assert (finding.level, finding.message) == ("ok", f"127.0.0.1:{port} is free")


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "warn"), (-1, "warn")])
def test_the_clock_is_as_the_kernel_says(monkeypatch: pytest.MonkeyPatch, state: int, level: str):
    libc = SimpleNamespace(adjtimex=lambda _buffer: state)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda *_args, **_kwargs: libc)
    (finding,) = host.check_clock(settings())
    assert finding.level == level


# --- kernel -----------------------------------------------------------------------------------------------------------


def test_this_kernel_has_what_the_server_needs():
    assert [level for level, _ in bad(kernel.check_kernel(settings())) if level == "error"] == []


def test_what_a_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    found = bad(kernel.check_kernel(settings(server={"frontends": 1, "backlog": 128})))
    assert [(level, message.split(" ")[0]) for level, message in found] == [("error", "sealed"), ("error", "process")]


@pytest.mark.parametrize(
    ("value", "frontends", "fix"),
    [
        ("1", 2, ""),
        ("0", 2, "sysctl -w net.ipv4.tcp_migrate_req=1"),
        (None, 2, "Linux 5.14 or newer can hand them on"),
        ("0", 1, ""),
    ],
)
def test_connections_move_on_where_the_kernel_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, frontends: int, fix: str
):
    monkeypatch.setattr(kernel, "_SYSCTL", tmp_path)
    if value is not None:
        (tmp_path / "ipv4").mkdir()
        (tmp_path / "ipv4/tcp_migrate_req").write_text(f"{value}\n")
    found = list(kernel.check_kernel(settings(server={"frontends": frontends})))
    assert found[-2].fix == fix
    assert found[-2].level == ("warn" if fix else "ok")


def test_a_backlog_over_the_kernels_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(kernel, "_SYSCTL", tmp_path)
    (tmp_path / "core").mkdir()
    (tmp_path / "core/somaxconn").write_text("128\n")
    found = bad(kernel.check_kernel(settings(server={"frontends": 1, "backlog": 256})))
    assert found == [("warn", "backlog 256 is cut to 128 (net.core.somaxconn)")]


# --- software ---------------------------------------------------------------------------------------------------------


def test_what_is_installed_here_is_new_enough():
    assert bad(software.check_software(settings())) == []


def test_a_library_that_is_missing_or_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        if name == "granian":
            raise software.importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.10.1+cu126", "uvloop": "0.22"}.get(name, "99.0")

    monkeypatch.setattr(software.importlib.metadata, "version", version)
    required = ["torch>=2.11", "uvloop >= 0.21", "peft>=100; extra == 'test'"]
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda _: required)
    found = bad(software.check_software(settings()))
    assert found == [("error", "torch 2.10.1+cu126 is older than 2.11"), ("error", "granian is not installed")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda: Optional[str] = None\n", ""),
        ("__version__ = '2.11'\ncuda = '13.0'\n", "13.0"),
    ],
)
def test_the_cuda_of_torch_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: str
):
    (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(software, "find_spec", lambda _: spec)
    assert software.torch_cuda() == expected
    monkeypatch.setattr(software, "find_spec", lambda _: None)
    assert software.torch_cuda() is None


def test_the_cuda_of_the_torch_that_is_here():
    torch = pytest.importorskip("torch")
    assert software.torch_cuda() == (torch.version.cuda or "")
