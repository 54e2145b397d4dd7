"""Owns what the step loop may ask of a loaded model, whatever kind it is.

A runner turns one step's inputs into rows and knows nothing of rings, requests or output types: the loop passes its
rows on to `sie.workers.runners.quantise.finish_rows`, once per request. It is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sie.types import ModelCard


class Pair(NamedTuple):
    """One query and document as token ids (t_i,) int32; token_types (t_i,) uint8 where the model wants them."""

    token_ids: NDArray[np.int32]
    token_types: NDArray[np.uint8] | None = None


class TokenRunner(Protocol):
    """A model that reads token ids."""

    takes: Literal["tokens"]
    card: ModelCard
    memory_bytes: int

    def run_tokens(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, C order, the caller's to keep; the checkpoint's last normalise not applied.

        Each item is (t_i,), at most the card's maximum; one without a token has a row of zeros. Raises BadRequest for an id outside the
        vocabulary.
        """
        ...


class TextRunner(Protocol):
    """A model that reads UTF-8 text."""

    takes: Literal["text"]
    card: ModelCard
    memory_bytes: int

    def run_texts(self, texts: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, C order, the caller's to keep."""
        ...


class PairRunner(Protocol):
    """A model that scores pairs, beside or instead of encoding."""

    card: ModelCard
    memory_bytes: int

    def run_pairs(self, pairs: Sequence[Any]) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, C order, the caller's to keep.

        A pair is a `Pair`, or UTF-8 bytes for a model that reads text (WorkHeader says in which form).
        """
        ...


Runner = TokenRunner | TextRunner | PairRunner
"""What a loaded model is to the loop; its card's outputs say which operations it may be asked for."""
