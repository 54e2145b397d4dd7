"""Pieces of a load's work are done at the same time on idle cores, each once."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from sie.workers.device.cores import on_all_cores


@pytest.mark.parametrize(("num_cores", "most"), [(1, 1), (3, 3), (64, 8)])
def test_each_piece_is_worked_on_once_by_no_more_threads_than_cores(
    num_cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    done: list[tuple[int, int]] = []
    on_all_cores(lambda piece: done.append((piece, threading.get_ident())), range(100))
    assert sorted(piece for piece, _ in done) == list(range(100))
    assert len({thread for _, thread in done}) <= most


def test_torchs_own_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found: list[int] = []
    on_all_cores(lambda _: found.append(threading.get_ident()), range(3))
    assert found == [threading.get_ident()] * 3


@pytest.mark.parametrize("num_cores", [1, 2])
def test_the_first_error_of_a_piece_is_raised(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        on_all_cores(lambda piece: 1 // piece, range(4))
