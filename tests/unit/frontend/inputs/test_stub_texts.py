from __future__ import annotations

import numpy as np
import pytest

from sie.frontend.inputs.stub_texts import encode_stub_texts
from sie.values.card import ModelCard, StubOptions
from sie.values.errors import BadRequest

STUB_CARD = ModelCard(id="stub", kind="stub", stub=StubOptions())
STUB = ModelCard(id="s", kind="stub", stub=StubOptions(max_tokens=10))


def test_stub_texts_cost_a_token_for_four_bytes():
    text, offsets, cu_seqlens = encode_stub_texts(STUB, ["", "abcd", "abcde", "é" * 3, "x" * 1000])
    assert text.tobytes() == ("abcdabcde" + "é" * 3 + "x" * 1000).encode()
    assert offsets.tolist() == [0, 0, 4, 9, 15, 1015]
    assert np.diff(cu_seqlens).tolist() == [1, 1, 2, 2, 10]
    assert (text.dtype, offsets.dtype, cu_seqlens.dtype) == (np.uint8, np.int32, np.int32)


def test_stub_refuses_a_lone_surrogate_and_a_card_that_is_no_stub():
    with pytest.raises(BadRequest, match="Text 1"):
        encode_stub_texts(STUB, ["a", "\ud800"])
    with pytest.raises(BadRequest, match="not a stub"):
        encode_stub_texts(ModelCard(id="m", kind="encoder"), ["a"])


def test_a_lower_limit_cuts_a_stub_s_text_at_four_bytes_a_token():
    text, offsets, cu_seqlens = encode_stub_texts(STUB_CARD, ["0123456789", "ab"], 2)
    assert bytes(text) == b"01234567ab"
    assert (offsets.tolist(), cu_seqlens.tolist()) == ([0, 8, 10], [0, 2, 3])
