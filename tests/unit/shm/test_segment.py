from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sie.shm.layout import ProtocolError
from sie.shm.segment import ReservationError, Segment, check_reservation, read_memory


def test_peer_sees_what_the_owner_writes_after_it_mapped() -> None:
    owner = Segment.create("t", 4096)
    peer = Segment.map_peer(os.dup(owner.fd), 4096)
    owner.view[10:14] = b"ping"

    assert bytes(peer.view[10:14]) == b"ping"
    assert peer.view.readonly
    peer.close()
    owner.close()


def test_peer_can_neither_write_nor_change_the_size() -> None:
    owner = Segment.create("t", 4096)

    with pytest.raises(PermissionError):
        mmap.mmap(owner.fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(owner.fd, b"x", 0)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(owner.fd, size)
    owner.close()


def test_every_page_is_reserved_at_once() -> None:
    owner = Segment.create("t", 1 << 20)

    assert os.fstat(owner.fd).st_blocks * 512 >= 1 << 20
    owner.close()


def test_memory_that_its_owner_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)

    with pytest.raises(ProtocolError, match="seals"):
        Segment.map_peer(fd, 4096)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))

    with pytest.raises(ProtocolError, match="not a memfd"):
        Segment.map_peer(os.open(path, os.O_RDWR), 4096)


@pytest.mark.parametrize("announced", [0, 4095, 8192, 1 << 62])
def test_another_size_than_announced_is_refused(announced: int) -> None:
    owner = Segment.create("t", 4096)

    with pytest.raises(ProtocolError, match="were announced"):
        Segment.map_peer(os.dup(owner.fd), announced)
    owner.close()


def test_refused_memory_leaves_no_descriptor_open(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    with pytest.raises(ProtocolError):
        Segment.map_peer(os.memfd_create("unsealed"), 4096)

    assert num_fds() == before


def test_closed_segment_leaves_no_descriptor_open_and_can_be_closed_again(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    owner = Segment.create("t", 4096)
    owner.close()
    owner.close()

    assert num_fds() == before


def test_array_stays_readable_after_its_segment_closed() -> None:
    owner = Segment.create("t", 4096)
    owner.view[:4] = b"\x01\x02\x03\x04"
    array = np.frombuffer(owner.view[:4], np.uint8)
    owner.close()

    assert array.tolist() == [1, 2, 3, 4]


def test_reopenable_segment_can_be_continued_but_not_resized() -> None:
    owner = Segment.create("t", 4096, reopenable=True)
    successor = Segment.reopen(os.dup(owner.fd), writable=True)
    successor.view[0] = 7

    assert owner.view[0] == 7
    with pytest.raises(PermissionError):
        os.ftruncate(owner.fd, 0)
    successor.close()
    owner.close()


def test_read_only_fd_cannot_be_mapped_writable() -> None:
    owner = Segment.create("t", 4096, reopenable=True)
    fd = owner.read_only_fd()

    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    owner.close()


def _fake_host(root: Path, *, available_kib: int, cgroup: str) -> dict[str, Path]:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "sys").mkdir()
    return {"proc": root / "proc", "sysfs": root / "sys"}


def _limit(group: Path, names: tuple[str, str, str], limit: str, usage: int, cache: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_reservation_over_available_memory_names_the_bytes_needed(tmp_path: Path) -> None:
    host = _fake_host(tmp_path, available_kib=1000, cgroup="0::/\n")

    check_reservation(1_024_000, **host)
    with pytest.raises(ReservationError, match=r"needs 1024001 bytes.*available memory leaves 1024000") as caught:
        check_reservation(1_024_001, **host)
    assert caught.value.needed_bytes == 1_024_001


@pytest.mark.parametrize(
    ("line", "directory", "names"),
    [("0::/a/b\n", "a", _V2), ("0::/a\n", "a", _V2), ("4:cpu,memory:/a/b\n", "memory/a", _V1)],
)
def test_reservation_over_a_control_groups_limit_is_refused(
    tmp_path: Path, line: str, directory: str, names: tuple[str, str, str]
) -> None:
    host = _fake_host(tmp_path, available_kib=1 << 30, cgroup=line)
    _limit(host["sysfs"] / directory, names, "10000", 4000, 1000)

    check_reservation(7000, **host)
    with pytest.raises(ReservationError, match=f"{names[0]} leaves 7000"):
        check_reservation(7001, **host)


def test_control_group_without_a_limit_allows_what_is_free(tmp_path: Path) -> None:
    host = _fake_host(tmp_path, available_kib=1000, cgroup="0::/a\n")
    _limit(host["sysfs"] / "a", _V2, "max", 4000, 0)

    check_reservation(1_024_000, **host)


def test_memory_is_the_tightest_of_the_host_s_and_the_control_groups(tmp_path: Path) -> None:
    host = _fake_host(tmp_path, available_kib=1000, cgroup="0::/a\n")
    assert read_memory(**host) == (99999999 * 1024, 1_024_000)
    _limit(host["sysfs"] / "a", _V2, "10000", 4000, 1000)
    assert read_memory(**host) == (10000, 7000)
    _limit(host["sysfs"] / "a", _V2, "10000", 20000, 0)
    assert read_memory(**host) == (10000, 0)
    (host["proc"] / "meminfo").unlink()
    (host["proc"] / "self" / "cgroup").unlink()
    assert read_memory(**host) is None


def test_reservation_on_this_machine() -> None:
    check_reservation(1)
    with pytest.raises(ReservationError):
        check_reservation(1 << 60)
