"""Prepares texts and reads replies for models that read text and answer with whole extractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from numpy.typing import NDArray

from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.profile_options import check_cuts
from sie.frontend.inputs.stub_texts import encode_stub_texts
from sie.values.card import ModelCard
from sie.values.errors import Internal
from sie.values.extract import Extraction

_decoder: Final = msgspec.msgpack.Decoder(Extraction)


class TextReading:
    """A request whose work has one item for each text."""

    def __init__(self, card: ModelCard, policy: str) -> None:
        self._card = card
        self._policy = policy
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for a text that is not valid Unicode, InputTooLong with overflow_policy `error`.
        """
        text, text_offsets, cu_seqlens = encode_stub_texts(self._card, texts, cuts=self.cuts)
        check_cuts(self._card, self._policy, self.cuts)
        return [("cu_seqlens", cu_seqlens), ("text", text), ("text_offsets", text_offsets)]

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the extractions; pieces are their msgpack, uint8. Raises Internal for a malformed piece."""
        return read_whole(pieces)


def read_whole(pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
    """Return extractions from their msgpack, uint8. Raises Internal for a malformed piece."""
    try:
        return [_decoder.decode(piece.tobytes()) for piece in pieces]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Internal("the worker's reply could not be read") from error
