"""How cores are divided, on machines that are drawn in /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie.supervisor.core_shares import CorePlace, read_places, share_cores, share_near


def draw(root: Path, *, num_sockets: int, per_socket: int, num_threads: int = 1) -> list[int]:
    """Write the topology of a machine whose threads are numbered 0..N-1, N..2N-1; return its logical cores."""
    num_cores = num_sockets * per_socket
    for core in range(num_cores * num_threads):
        socket, own = divmod(core % num_cores, per_socket)
        folder = root / f"cpu{core}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "physical_package_id").write_text(f"{socket}\n")
        (folder / "topology" / "core_id").write_text(f"{own}\n")
        (folder / f"node{socket}").mkdir()
    return list(range(num_cores * num_threads))


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "shares"),
    [
        (4, 1, [(0, 1, 2, 3)]),
        (4, 2, [(0, 1), (2, 3)]),
        (5, 2, [(0, 1, 2), (3, 4)]),
        (3, 3, [(0,), (1,), (2,)]),
        (2, 3, [(0,), (1,), (0,)]),
        (1, 2, [(0,), (0,)]),
    ],
)
def test_cores_are_shared_evenly_in_runs(num_cores, num_workers, shares, tmp_path):
    cores = draw(tmp_path, num_sockets=1, per_socket=num_cores)
    assert share_cores(cores, num_workers, read_places(cores, tmp_path)) == shares
    assert share_cores(cores, num_workers) == shares


@pytest.mark.parametrize(
    ("num_workers", "shares"),
    [
        (2, [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),  # a socket each
        (4, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        (3, [(0, 1, 2, 8, 9, 10), (3, 4, 5, 11, 12, 13), (6, 7, 14, 15)]),
        (8, [(i, i + 8) for i in range(8)]),
        (16, [(i,) for pair in zip(range(8), range(8, 16), strict=True) for i in pair]),
    ],
)
def test_the_threads_of_a_core_stay_together(num_workers, shares, tmp_path):
    cores = draw(tmp_path, num_sockets=2, per_socket=4, num_threads=2)
    assert share_cores(cores, num_workers, read_places(cores, tmp_path)) == shares


def test_eight_gpus_get_cores_of_their_own_socket(tmp_path):
    """As on a host of two sockets with four GPUs each, whose bus order alternates between them."""
    cores = draw(tmp_path, num_sockets=2, per_socket=16, num_threads=2)
    places = read_places(cores, tmp_path)
    sockets = [frozenset(core for core, place in places.items() if place.node == node) for node in (0, 1)]
    near = [sockets[number % 2] for number in range(8)]
    shares = share_near(cores, near, places)
    assert sorted(core for share in shares for core in share) == cores
    for share, own in zip(shares, near, strict=True):
        assert set(share) <= own
        assert {core % 32 for core in share[:4]} == {core % 32 for core in share[4:]}, "both threads of each core"


@pytest.mark.parametrize("near", [[{0, 1}, set()], [{0, 1}, {70, 71}]])
def test_without_a_usable_core_near_each_gpu_all_cores_are_divided(near):
    assert share_near([0, 1, 2, 3], [frozenset(one) for one in near], {}) == [(0, 1), (2, 3)]


def test_gpus_of_one_socket_leave_the_other_alone():
    near = [frozenset({0, 1, 2, 3})] * 2
    assert share_near(range(8), near, {}) == [(0, 1), (2, 3)]


def test_places_are_those_of_the_kernel_or_none(tmp_path):
    cores = draw(tmp_path, num_sockets=2, per_socket=1)
    assert read_places(cores, tmp_path) == {0: CorePlace(0, 0, 0), 1: CorePlace(1, 1, 0)}
    (tmp_path / "cpu0" / "node0").rmdir()
    assert read_places([0], tmp_path) == {0: CorePlace(0, 0, 0)}
    assert read_places([0, 5], tmp_path) == {}
