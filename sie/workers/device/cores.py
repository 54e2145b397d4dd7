"""Spreads work of NumPy and torch, which releases the interpreter lock, over the cores that this thread may use."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

PieceT = TypeVar("PieceT")
_MAX_THREADS: Final = 8
"""Work on weights is bounded by memory: more threads would wait for it, and their temporary arrays take some."""


def on_all_cores(work: Callable[[PieceT], object], pieces: Sequence[PieceT]) -> None:
    """Call work with each piece, on several threads if this one may use more cores than torch uses for one piece.

    It may during a load that uses lent cores. Raises the first error of a piece.
    """
    num_threads = min(len(os.sched_getaffinity(0)) // torch.get_num_threads(), _MAX_THREADS, len(pieces))
    if num_threads < 2:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(num_threads, "weights") as threads:
        deque(threads.map(work, pieces), 0)
