from __future__ import annotations

import ctypes
import os

import pytest

from sie.shm.core_board import CoreBoard
from sie.shm.layout import ALIGNMENT, ProtocolError
from sie.shm.segment import Segment


@pytest.fixture
def board():
    made = CoreBoard.create(2, 3)
    yield made
    made.close()


def write(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def read(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def test_a_need_is_seen_by_another_process_s_mapping(board: CoreBoard):
    other = CoreBoard.open(os.dup(board.fd))
    other.set_needed(1, needed=True)
    assert [board.is_needed(worker) for worker in (0, 1)] == [False, True]
    assert read(board.needed_address(1)) == 1
    other.set_needed(1, needed=False)
    assert not board.is_needed(1)
    assert other.num_cores == 3
    other.close()


def test_a_reader_sees_needs_and_cannot_write(board: CoreBoard):
    reader = CoreBoard.open(board.read_only_fd(), writable=False)
    board.set_needed(1, needed=True)
    assert reader.is_needed(1)
    with pytest.raises(TypeError):
        reader.set_needed(0, needed=True)
    reader.close()
    with pytest.raises(PermissionError):
        CoreBoard.open(board.read_only_fd())


def test_words_lie_in_cache_lines_of_their_own(board: CoreBoard):
    addresses = [*map(board.needed_address, range(2)), *map(board.borrower_address, range(3))]
    assert len({address // ALIGNMENT for address in addresses}) == 5


def test_a_dead_worker_needs_no_core_and_uses_none(board: CoreBoard):
    board.set_needed(0, needed=True)
    board.set_needed(1, needed=True)
    for core, user in enumerate((1, 2, 1)):
        write(board.borrower_address(core), user)
    board.forget(0)
    assert [board.is_needed(worker) for worker in (0, 1)] == [False, True]
    assert [read(board.borrower_address(core)) for core in range(3)] == [0, 2, 0]


def test_a_board_without_cores_is_one_of_workers_on_other_devices():
    board = CoreBoard.create(1, 0)
    board.set_needed(0, needed=True)
    board.forget(0)
    assert (board.num_cores, board.is_needed(0)) == (0, False)
    board.close()


@pytest.mark.parametrize(("version", "workers"), [(1, 1), (2, 9)])
def test_memory_that_is_no_board_is_refused(version: int, workers: int):
    segment = Segment.create("cores", 2 * ALIGNMENT, reopenable=True)
    write(ctypes.addressof(ctypes.c_char.from_buffer(segment.view)), version)
    write(ctypes.addressof(ctypes.c_char.from_buffer(segment.view)) + 4, workers)
    with pytest.raises(ProtocolError):
        CoreBoard.open(os.dup(segment.fd))
    segment.close()
