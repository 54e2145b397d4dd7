"""All images of a request: waiting, refusals, and the error that a client gets."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sie.config.limits import Limits
from sie.frontend.inputs import image_reader
from sie.frontend.inputs.image_reader import ImageReader, ReadImages
from sie.values.card import ImageRule
from sie.values.errors import BadRequest, DeadlineExceeded, Overloaded
from tests.unit.frontend.inputs.test_images import encoded, noise

NEVER_NS = 1 << 62
AS_IT_IS = ImageRule()
ORIENTED = b"MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"
"""EXIF that says: turn by 90 degrees."""
GARBAGE = memoryview(b"no image")


def png(height: int, width: int, seed: int = 0) -> memoryview:
    return memoryview(encoded(Image.fromarray(noise(height, width, seed=seed)), "PNG"))


def run(work: Coroutine[Any, Any, ReadImages]) -> ReadImages:
    return asyncio.run(work)


def test_images_keep_their_order_sizes_and_items():
    images = {2: [png(3, 5), png(4, 2, seed=1)], 0: [png(1, 1, seed=2)]}
    read = run(ImageReader(Limits(), 2).read(images, AS_IT_IS, NEVER_NS))
    expected = [noise(3, 5), noise(4, 2, seed=1), noise(1, 1, seed=2)]
    assert read.counts == {2: 2, 0: 1}
    assert read.sizes.tolist() == [[3, 5], [4, 2], [1, 1]]
    assert np.array_equal(read.pixels, np.concatenate([image.reshape(-1) for image in expected]))
    assert read.count_tokens(ImageRule(patch=2, extra_tokens=1)) == (6 + 1) + (2 + 1) + (1 + 1)


def test_the_first_wrong_image_is_named():
    images = {1: [png(2, 2)], 4: [png(2, 2), GARBAGE, GARBAGE]}
    with pytest.raises(BadRequest, match=r"items\[4\]\.images\[1\]\.data"):
        run(ImageReader(Limits(), 1).read(images, AS_IT_IS, NEVER_NS))


def test_images_in_their_own_sizes_are_counted_together():
    limits = Limits(max_image_pixels=20)
    reader = ImageReader(limits, 1)
    assert len(run(reader.read({0: [png(4, 5)]}, AS_IT_IS, NEVER_NS)).pixels) == 60
    with pytest.raises(BadRequest, match=r"max_image_pixels \(20\).*items\[1\]"):
        run(reader.read({0: [png(4, 4)], 1: [png(1, 5)]}, AS_IT_IS, NEVER_NS))
    fixed = ImageRule(height=2, width=2, resize=(2, 2))
    assert len(run(reader.read({0: [png(4, 4)], 1: [png(1, 5)]}, fixed, NEVER_NS)).pixels) == 24


def test_fitted_sizes_count_together_and_own_sizes_are_kept():
    reader = ImageReader(Limits(max_image_pixels=100), 1)
    fitted = ImageRule(resize=(2, 2), keep_aspect=True, longest=9)
    turned = memoryview(encoded(Image.fromarray(noise(4, 10)), "JPEG", exif=b"Exif\x00\x00" + ORIENTED))
    read = run(reader.read({0: [png(4, 12)], 2: [turned]}, fitted, NEVER_NS))
    assert read.sizes.tolist() == [[2, 6], [5, 2]]
    assert read.own_sizes.tolist() == [[4, 12], [10, 4]]
    with pytest.raises(BadRequest, match="max_image_pixels"):
        run(reader.read({item: [png(4, 12)] for item in range(9)}, fitted, NEVER_NS))


def test_a_passed_deadline_decodes_nothing():
    with pytest.raises(DeadlineExceeded):
        run(ImageReader(Limits(), 1).read({0: [GARBAGE]}, AS_IT_IS, 1))


def test_a_full_queue_is_an_answer_and_empties_again(monkeypatch: pytest.MonkeyPatch):
    started, may_go_on = threading.Event(), threading.Event()
    original = image_reader.open_image

    def slow(*args: Any) -> Image.Image:
        started.set()
        assert may_go_on.wait(60.0)
        return original(*args)

    monkeypatch.setattr(image_reader, "open_image", slow)

    async def fill() -> None:
        reader = ImageReader(Limits(max_images=2, max_queued_images=2), 1)
        first = asyncio.create_task(reader.read({0: [png(2, 2)]}, AS_IT_IS, NEVER_NS))
        async with asyncio.timeout(60.0):
            await asyncio.to_thread(started.wait, 60.0)
            with pytest.raises(Overloaded, match="max_queued_images"):
                await reader.read({0: [png(2, 2), png(2, 2)]}, AS_IT_IS, NEVER_NS)
            may_go_on.set()
            await first
            await reader.read({0: [png(2, 2), png(2, 2)]}, AS_IT_IS, NEVER_NS)

    asyncio.run(fill())


def test_what_pillow_thinks_of_an_image_is_not_told():
    """A client's TIFF of 60,000 damaged tags wrote 60,000 lines of log."""
    damaged = noise(2, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        reader = ImageReader(Limits(), 1)
        data = bytearray(encoded(Image.fromarray(damaged), "TIFF", tiffinfo={305: "a name of a program"}))
        entry = data.index(b"\x31\x01\x02\x00")
        data[entry + 4 : entry + 8] = b"\xff\xff\xff\x00"  # its length
        read = run(reader.read({0: [memoryview(data)]}, AS_IT_IS, NEVER_NS))
    assert np.array_equal(read.pixels, damaged.reshape(-1))
    assert told == []
