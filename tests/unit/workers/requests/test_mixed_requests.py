"""Images on their way from a frontend's arrays to a runner's inputs."""

from __future__ import annotations

import numpy as np
import pytest

from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.mixed import mix_items
from sie.shm.layout import ProtocolError
from sie.values.card import ImageRule
from sie.workers.model_api import ImageItem, SearchedImage
from tests.unit.workers.requests.test_worker_request import MemoryLink, extent_of, request_of

RULE = ImageRule(patch=2, extra_tokens=1)
IMAGES = [np.arange(3 * h * w, dtype=np.uint8).reshape(h, w, 3) for h, w in ((2, 4), (3, 3), (1, 1))]
TEXTS = [("cu_seqlens", np.array([0, 2, 3], np.int32)), ("token_ids", np.array([7, 8, 9], np.int32))]


def read_images(counts: dict[int, int]) -> ReadImages:
    sizes = np.array([image.shape[:2] for image in IMAGES], np.int32)
    return ReadImages(np.concatenate([image.reshape(-1) for image in IMAGES]), sizes, counts, sizes)


def test_images_and_tokens_arrive_as_the_items_they_were():
    arrays = mix_items(4, read_images({1: 2, 3: 1}), RULE, TEXTS)

    request = request_of(MemoryLink(extent_of(4, **dict(arrays))))

    assert request.costs == [2, 3 + 5, 1, 2]  # patches of 2 x 2, and one for each image
    assert [ids.tolist() for ids in (request.inputs[0], request.inputs[2])] == [[7, 8], [9]]
    first, second = request.inputs[1], request.inputs[3]
    assert isinstance(first, ImageItem)
    for found, expected in zip((*first.images, *second.images), IMAGES, strict=True):
        assert np.array_equal(found, expected)
        assert not found.flags.owndata


def test_a_request_of_images_alone_needs_no_text():
    arrays = mix_items(3, read_images({0: 1, 1: 1, 2: 1}), RULE, None)

    request = request_of(MemoryLink(extent_of(3, **dict(arrays))))

    assert [item.images[0].shape for item in request.inputs] == [(2, 4, 3), (3, 3, 3), (1, 1, 3)]


def test_text_of_a_stub_stays_text():
    texts = [
        ("cu_seqlens", np.array([0, 1], np.int32)),
        ("text", np.frombuffer(b"hi", np.uint8)),
        ("text_offsets", np.array([0, 2], np.int32)),
    ]
    arrays = mix_items(2, read_images({0: 3}), RULE, texts)

    request = request_of(MemoryLink(extent_of(2, **dict(arrays))))

    assert bytes(request.inputs[1]) == b"hi"
    assert request.costs[1] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_sizes": [[2, 4]]},
        {"image_sizes": [[2, 4], [3, 3], [1, 2]]},
        {"image_sizes": [[2, 4], [3, 3], [-1, -1]]},
        {"image_sizes": [[2, 4], [3, 3], [0, 1]]},
        {"image_offsets": [0, 1, 2]},
        {"image_offsets": [0, 3, 2, 3]},
        {"token_offsets": [0, 1, 1, 2]},
        {"token_ids": None, "token_offsets": None},
    ],
)
def test_what_does_not_fit_together_is_a_protocol_error(wrong: dict):
    arrays = dict(mix_items(3, read_images({1: 3}), RULE, TEXTS))
    arrays.update(wrong)

    with pytest.raises(ProtocolError):
        request_of(MemoryLink(extent_of(3, **{name: value for name, value in arrays.items() if value is not None})))


QUERIES = {"query_ids": np.array([4, 5, 6], np.int32), "query_offsets": np.array([0, 1, 3], np.int32)}


def test_what_is_looked_for_goes_with_every_image():
    arrays = dict(mix_items(3, read_images({0: 1, 1: 1, 2: 1}), RULE, None))

    request = request_of(MemoryLink(extent_of(3, **arrays, **QUERIES)))

    for item, expected in zip(request.inputs, IMAGES, strict=True):
        assert isinstance(item, SearchedImage)
        assert np.array_equal(item.pixels, expected)
        assert [ids.tolist() for ids in item.queries] == [[4], [5, 6]]
    others = dict(QUERIES, query_offsets=np.array([0, 2, 3], np.int32))
    other = request_of(MemoryLink(extent_of(3, **arrays, **others)))
    assert request.inputs[0].key == request.inputs[1].key != other.inputs[0].key


@pytest.mark.parametrize(
    "wrong",
    [
        {"query_offsets": None},
        {"query_offsets": np.array([0], np.int32)},
        {"query_offsets": np.array([0, 3, 3], np.int32)},
        {"query_offsets": np.array([0, 1, 2], np.int32)},
    ],
)
def test_queries_that_do_not_fit_are_a_protocol_error(wrong: dict):
    arrays = {**dict(mix_items(3, read_images({0: 1, 1: 1, 2: 1}), RULE, None)), **QUERIES, **wrong}

    with pytest.raises(ProtocolError):
        request_of(MemoryLink(extent_of(3, **{name: value for name, value in arrays.items() if value is not None})))


def test_queries_beside_a_text_are_a_protocol_error():
    arrays = dict(mix_items(3, read_images({1: 3}), RULE, TEXTS))

    with pytest.raises(ProtocolError, match="not one image"):
        request_of(MemoryLink(extent_of(3, **arrays, **QUERIES)))
