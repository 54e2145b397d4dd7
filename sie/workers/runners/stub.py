"""Owns the runner of a stub model: rows from a hash of the text, after the time its options ask for.

Never imports torch: a worker that serves only stubs stays small and starts at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sie.catalog.stub import count_stub_tokens
from sie.errors import Internal
from sie.types import ModelCard


class StubRunner:
    """Answer texts with `value i = int8(SHAKE-256(UTF-8 text)[i]) / 127` as float32, not normalised.

    A pair's score is the first three bytes, little-endian, of SHAKE-256(pair) over 2**24: exact in float32. The pair
    is the length of the query's UTF-8 in four bytes, little-endian, then the query and the document.

    Building it takes the card's `load_ms`.
    """

    takes: Literal["text"] = "text"
    memory_bytes = 0

    def __init__(self, card: ModelCard) -> None:
        if card.stub is None:
            raise Internal(f"model {card.id!r} is not a stub")
        self.card = card
        self._options = card.stub
        time.sleep(card.stub.load_ms / 1e3)

    def run_texts(self, texts: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        """Return (n, dense) float32 rows; sleeps `latency_ms` and `per_token_us` for each token of the step."""
        self._take_time(texts)
        width = self._options.dense
        digests = b"".join([hashlib.shake_256(text).digest(width) for text in texts])
        rows = np.frombuffer(digests, dtype=np.int8).reshape(len(texts), width)
        return np.true_divide(rows, np.float32(127), dtype=np.float32)

    def run_pairs(self, pairs: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, 0 to 1; takes as long as `run_texts`."""
        self._take_time(pairs)
        scores = [int.from_bytes(hashlib.shake_256(pair).digest(3), "little") / 2**24 for pair in pairs]
        return np.array(scores, dtype=np.float32)[:, None]

    def _take_time(self, texts: Sequence[bytes | memoryview]) -> None:
        options = self._options
        if options.latency_ms or options.per_token_us:
            tokens = sum(count_stub_tokens(len(text), options.max_tokens) for text in texts)
            time.sleep(options.latency_ms / 1e3 + tokens * options.per_token_us / 1e6)
