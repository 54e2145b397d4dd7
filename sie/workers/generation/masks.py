"""Computes the tokens that grammars forbid in a step's draws, on a thread beside the forward pass.

A matcher belongs to one thread at a time. The caller may use the step's matchers again only after their masks are
ready, even if the forward pass fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from sie.values.errors import SieError
from sie.workers.model_api import Draw, Matcher

Hidden = NDArray[np.bool_] | SieError
"""The tokens that a draw must not choose, (vocabulary,), or the error that prevented the mask."""
FindHidden = Callable[[], Sequence[Hidden]]
"""Waits for the masks, and returns one for each draw with a matcher, in order."""
FillMasks = Callable[[Sequence[Matcher], NDArray[np.int32]], Sequence[SieError | None]]
"""Writes each matcher's mask (`Matcher.fill_mask`) to its row (k, words), and returns its error."""


class MaskThread:
    """A thread for the masks of one model. The first mask starts it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "masks")

    @contextmanager
    def beside(self, find: FindHidden) -> Generator[FindHidden]:
        """Find masks while the caller does other work. Leaving the context always waits for them."""
        found = self._pool.submit(find)
        try:
            yield found.result
        finally:
            wait([found])


def fill_each(matchers: Sequence[Matcher], words: NDArray[np.int32]) -> list[SieError | None]:
    """Write one mask after another (`FillMasks`)."""
    errors: list[SieError | None] = []
    for matcher, row in zip(matchers, words, strict=True):
        try:
            matcher.fill_mask(row)
            errors.append(None)
        except SieError as error:
            errors.append(error)
    return errors


def find_hidden(draws: Sequence[Draw], vocab_size: int, fill: FillMasks = fill_each) -> Sequence[Hidden]:
    """Return the tokens that each draw with a matcher must not choose; a grammar's only choice is never forbidden."""
    own = [draw for draw in draws if draw.matcher is not None]
    words = np.empty((len(own), -(-vocab_size // 32)), np.int32)
    errors = fill([draw.matcher for draw in own if draw.matcher is not None], words)
    hidden = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].view(np.bool_)
    for draw, row in zip(own, hidden, strict=True):
        _forbid(row, [token_id for token_id in draw.forbidden if token_id < vocab_size])
    return [row if error is None else error for row, error in zip(hidden, errors, strict=True)]


def _forbid(hidden: NDArray[np.bool_], forbidden: Sequence[int]) -> None:
    """Hide these tokens too, unless no other token is allowed."""
    allowed = [token_id for token_id in forbidden if not hidden[token_id]]
    hidden[allowed] = True
    if allowed and hidden.all():
        hidden[allowed] = False
