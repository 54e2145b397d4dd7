"""Reads images on threads, and bounds the number of waiting images.

The event loop only submits tasks and collects results. Each image is one task, so a request with many images shares the
threads with other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.images import decode_image, fitted_size, open_image, prepare_image, silence_decoders
from sie.values.card import ImageRule
from sie.values.errors import BadRequest, DeadlineExceeded, Overloaded, SieError, untied

T = TypeVar("T")


class ReadImages(NamedTuple):
    """The m images of a request; images of one item are adjacent."""

    pixels: NDArray[np.uint8]
    """(bytes,): each image's RGB rows."""
    sizes: NDArray[np.int32]
    """(m, 2): height and width."""
    counts: dict[int, int]
    """Number of images of each item, by item number, in order."""
    own_sizes: NDArray[np.int32]
    """(m, 2): height and width of each upright image before it was resized."""

    def count_tokens(self, rule: ImageRule) -> int:
        """Return the token cost of all images."""
        return sum(rule.count_tokens(height, width) for height, width in self.sizes.tolist())


class _Prepared(NamedTuple):
    """One image as sent to the worker, and its original height and width."""

    rows: NDArray[np.uint8]
    """(h, w, 3)"""
    own_size: tuple[int, int]


class ImageReader:
    """Decode and resize images of all requests of one frontend."""

    def __init__(self, limits: Limits, num_threads: int) -> None:
        silence_decoders()
        self._limits = limits
        self._pool = ThreadPoolExecutor(num_threads, "images")
        self._num_waiting = 0

    async def read(self, images: dict[int, list[memoryview]], rule: ImageRule, deadline_ns: int) -> ReadImages:
        """Return a request's images prepared by the rule. images maps item numbers to encoded images.

        Raises BadRequest that names the first bad image, DeadlineExceeded, and Overloaded when too many images wait.
        """
        counts = {item: len(encoded) for item, encoded in images.items()}
        with self._waiting(sum(counts.values())):
            own = _Reading(rule, self._limits.max_image_pixels, deadline_ns)
            loop = asyncio.get_running_loop()
            tasks = [loop.run_in_executor(self._pool, own.read, data, path) for path, data in _with_paths(images)]
            prepared = _unless_failed(await asyncio.gather(*tasks))
            sizes = np.array([image.rows.shape[:2] for image in prepared], np.int32)
            own_sizes = np.array([image.own_size for image in prepared], np.int32)
            flat = [image.rows.reshape(-1) for image in prepared]
            pixels = flat[0] if len(flat) == 1 else await loop.run_in_executor(self._pool, np.concatenate, flat)
            return ReadImages(pixels, sizes, counts, own_sizes)

    async def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run one task for each image and return the results. Raises Overloaded when too many images wait."""
        with self._waiting(len(tasks)):
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*[loop.run_in_executor(self._pool, task) for task in tasks])

    @contextmanager
    def _waiting(self, num_images: int) -> Generator[None]:
        if self._num_waiting + num_images > self._limits.max_queued_images:
            raise Overloaded("The server is busy: max_queued_images wait to be decoded", retry_after_s=1)
        self._num_waiting += num_images
        try:
            yield
        finally:
            self._num_waiting -= num_images

    def close(self) -> None:
        """Stop the threads and cancel waiting tasks."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Reading:
    """The reading of one request's images. Its tasks run on several threads."""

    def __init__(self, rule: ImageRule, max_pixels: int, deadline_ns: int) -> None:
        self._rule = rule
        self._max_pixels = max_pixels
        self._left_pixels = max_pixels
        self._deadline_ns = deadline_ns
        self._has_failed = False

    def read(self, data: memoryview, path: str) -> _Prepared | SieError | None:
        """Return the image or its error; None when another image of the request has failed."""
        if self._has_failed:
            return None
        try:
            return self._read(data, path)
        except SieError as error:
            self._has_failed = True
            return untied(error)

    def _read(self, data: memoryview, path: str) -> _Prepared:
        if time.monotonic_ns() > self._deadline_ns:
            raise DeadlineExceeded("the request's deadline passed before its images were decoded")
        image = open_image(data, path, self._max_pixels)
        if not self._rule.height:
            height, width = image.height, image.width
            if self._rule.longest:
                height, width = fitted_size(height, width, self._rule)
            self._left_pixels -= height * width
            if self._left_pixels < 0:
                raise BadRequest(
                    f"the request's images have more pixels together than max_image_pixels ({self._max_pixels}); "
                    f"split it - at `{path}`"
                )
        upright = decode_image(image, path)
        return _Prepared(prepare_image(upright, self._rule), (upright.height, upright.width))


def _with_paths(images: dict[int, list[memoryview]]) -> Iterator[tuple[str, memoryview]]:
    for item, encoded in images.items():
        for number, data in enumerate(encoded):
            yield f"$.items[{item}].images[{number}].data", data


def _unless_failed(results: list[_Prepared | SieError | None]) -> list[_Prepared]:
    """Return the images, or raise the first error."""
    for result in results:
        if isinstance(result, SieError):
            raise untied(result)
    return [result for result in results if isinstance(result, _Prepared)]
