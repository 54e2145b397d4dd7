"""Where a request's arrays lie: what is written as bytes is what is written as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from sie.frontend.engine.request_layout import lay_out, lay_out_text
from sie.shm.extent import write_extent, write_parts
from sie.values.work import WorkHeader

WORDS = ("m", "float16", True, 4, ("dense", "sparse"))
HEADER = WorkHeader("m", "encode", 1, (), "float16", True, 4, ("dense", "sparse"))


@pytest.mark.parametrize("text", [b"", b"x", b"a text of more than one cache line, so that what follows moves by one"])
def test_one_text_is_laid_out_as_its_arrays_are(text):
    bounds, cost = np.array([0, len(text)], np.int32), np.array([0, 2], np.int32)
    arrays = [("cu_seqlens", cost), ("text", np.frombuffer(text, np.uint8)), ("text_offsets", bounds)]
    check(lay_out_text(WORDS, 2, len(text)), arrays, [cost.tobytes(), text, bounds.tobytes()])


@pytest.mark.parametrize("count", [0, 1, 12, 40])
def test_one_row_of_ids_is_laid_out_as_its_arrays_are(count):
    cost, ids = np.array([0, count], np.int32), np.arange(count, dtype=np.int32)
    check(lay_out_text(WORDS, count, None), [("cu_seqlens", cost), ("token_ids", ids)], [cost.tobytes(), ids.tobytes()])


def check(layout, arrays, parts):
    expected = lay_out(HEADER, arrays)
    assert layout == expected
    views = [memoryview(bytearray(expected.nbytes)) for _ in range(2)]
    length = write_extent(views[0], expected.header, expected.refs, [array for _, array in arrays])
    write_parts(views[1], layout.head, layout.places, parts)
    assert length <= layout.nbytes
    assert views[0] == views[1]


def test_part_that_is_not_as_long_as_its_place_is_refused():
    layout = lay_out_text(WORDS, 2, 3)
    with pytest.raises(ValueError, match="structures"):
        write_parts(memoryview(bytearray(layout.nbytes)), layout.head, layout.places, [bytes(8), b"four", bytes(8)])
