"""Where a request's arrays lie: each part has to be as long as its place."""

from __future__ import annotations

import numpy as np
import pytest

from sie.frontend.engine.request_layout import lay_out, lay_out_bytes
from sie.shm.extent import write_extent, write_parts
from sie.shm.extent_headers import WorkHeader

HEADER = WorkHeader("m", "infer", 1, ())


def test_bytes_are_laid_out_as_arrays_of_bytes_are():
    parts = [b"x", b"a part of more than one cache line, so that the array behind it begins further back", b""]
    arrays = [(str(index), np.frombuffer(part, np.uint8)) for index, part in enumerate(parts)]
    layout = lay_out_bytes(HEADER, [len(part) for part in parts])
    assert layout == lay_out(HEADER, arrays)
    views = [memoryview(bytearray(layout.nbytes)) for _ in range(2)]
    assert write_extent(views[0], layout.header, layout.refs, [array for _, array in arrays]) <= layout.nbytes
    write_parts(views[1], layout.head, layout.places, parts)
    assert views[0] == views[1]


def test_part_that_is_not_as_long_as_its_place_is_refused():
    layout = lay_out_bytes(HEADER, [8, 3, 8])
    with pytest.raises(ValueError, match="structures"):
        write_parts(memoryview(bytearray(layout.nbytes)), layout.head, layout.places, [bytes(8), b"four", bytes(8)])
