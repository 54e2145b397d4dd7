"""Computes fixed dimensional encodings: the vectors of an item's tokens become one vector. Pure NumPy.

The dot product of a query's encoding and a document's estimates their MaxSim. Source: MUVERA, arXiv 2405.19504,
section 2; order and seeds of the random numbers: SIE API reference, section 11.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.values.muvera import Muvera

_MIN_NORM: Final = 1e-12
_VALUES_PER_TOKEN: Final = 1 << 17
"""Values that are read in the time of a token: 6 ns each, as measured on one core, where a small encoder's token takes
0.5 ms and a large one's 9 ms."""
_VALUES_PER_REPETITION: Final = 8192
"""The fixed cost of a repetition, as the number of values that cost the same."""
Floats = NDArray[np.float32]


class _Tables(NamedTuple):
    """The random numbers of one kind of encoding. r repetitions, k hyperplanes, d elements of a token's vector."""

    hyperplanes: Floats
    """(d, r * k)."""
    projections: tuple[Floats, ...]
    """For each repetition (d, cluster width); empty without a projection."""
    places: NDArray[np.int32] | None
    """(r * 2^k, cluster width): for each element, the index in the final encoding to which it is added; None: no sketch."""
    signs: NDArray[np.int8] | None
    """Shaped as places: the sign with which it is added."""
    distances: NDArray[np.uint8]
    """(2^k, 2^k): the number of hyperplanes between two clusters."""


def fixed_encoding(vectors: Floats, muvera: Muvera, *, is_query: bool) -> Floats:
    """Return the encoding (width,) float32 of an item's vectors (t, d); zeros without vectors.

    A cluster's vector is the sum of its tokens' vectors in a query, and their mean in a document.
    """
    num_tokens, dims = vectors.shape
    if not num_tokens:
        return np.zeros(muvera.width(dims), np.float32)
    if muvera.center_tokens:
        vectors = vectors - vectors.mean(axis=0, keepdims=True)
    tables = _tables(muvera, dims)
    num_clusters = 1 << muvera.num_simhash_projections
    clusters = _clusters(vectors, tables, muvera)
    encoding = np.zeros(muvera.width(dims), np.float32)
    for repetition, own in enumerate(clusters):
        projected = vectors @ tables.projections[repetition] if tables.projections else vectors
        occupied, found = _cluster_vectors(projected, own, is_query=is_query)
        if muvera.fill_empty_partitions and not is_query:
            occupied, found = _filled(projected, own, (occupied, found), tables.distances)
        _add(encoding, occupied + repetition * num_clusters, found, tables)
    return _unit(encoding) if muvera.normalize else encoding


def encoding_cost(muvera: Muvera, num_tokens: int, dims: int, *, is_query: bool) -> int:
    """Return what the encoding of an item costs beside its tokens, in tokens; dims is the width of a token's vector.

    Its parameters may make it cost a thousand times as much as the model on a GPU, so steps must not count tokens alone.
    """
    num_clusters, width = 1 << muvera.num_simhash_projections, muvera.cluster_width(dims)
    num_values = num_tokens * width
    if muvera.fill_empty_partitions and not is_query:  # every cluster is compared with those that have tokens
        num_values += num_clusters * (width + min(num_tokens, num_clusters))
    return muvera.num_repetitions * (_VALUES_PER_REPETITION + num_values) // _VALUES_PER_TOKEN


def _clusters(vectors: Floats, tables: _Tables, muvera: Muvera) -> NDArray[np.int64]:
    """Return (r, t): the cluster of each token, numbered so that neighbours differ in one bit (Gray code)."""
    count = muvera.num_simhash_projections
    bits = (vectors @ tables.hyperplanes > 0).reshape(len(vectors), muvera.num_repetitions, count)
    clusters = np.zeros(bits.shape[:2], np.int64)
    for plane in range(count):
        clusters = (clusters << 1) + (bits[:, :, plane] ^ (clusters & 1))
    return clusters.T


def _cluster_vectors(
    projected: Floats, clusters: NDArray[np.int64], *, is_query: bool
) -> tuple[NDArray[np.int64], Floats]:
    """Return the clusters that have tokens, ascending, and the vector of each."""
    order = clusters.argsort(kind="stable")
    occupied, starts, counts = np.unique(clusters[order], return_index=True, return_counts=True)
    sums: Floats = np.add.reduceat(projected[order], starts, axis=0)
    if not is_query:
        sums /= counts[:, None].astype(np.float32)
    return occupied, sums


def _filled(
    projected: Floats,
    clusters: NDArray[np.int64],
    found: tuple[NDArray[np.int64], Floats],
    distances: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], Floats]:
    """Return every cluster with its vector: that of the nearest token, the first of equals, where it has none."""
    occupied, vectors = found
    _, first = np.unique(clusters, return_index=True)
    first.sort()
    nearest = first[distances[:, clusters[first]].argmin(axis=1)]
    filled = projected[nearest]
    filled[occupied] = vectors
    return np.arange(len(distances)), filled


def _add(encoding: Floats, rows: NDArray[np.int64], values: Floats, tables: _Tables) -> None:
    """Put the vectors of some clusters side by side, or add their count sketch."""
    if tables.places is None or tables.signs is None:
        encoding.reshape(-1, values.shape[1])[rows] = values
    else:
        np.add.at(encoding, tables.places[rows].ravel(), (values * tables.signs[rows]).ravel())


def _unit(encoding: Floats) -> Floats:
    return encoding / np.float32(max(float(np.linalg.norm(encoding)), _MIN_NORM))


@lru_cache(maxsize=4)
def _tables(muvera: Muvera, dims: int) -> _Tables:
    """Return the random numbers of an encoding. They are kept for a few kinds, because a server has few profiles."""
    count, repetitions = muvera.num_simhash_projections, range(muvera.num_repetitions)
    seeded = [np.random.default_rng(muvera.seed + repetition) for repetition in repetitions]
    hyperplanes = np.concatenate([rng.normal(size=(dims, count)).astype(np.float32) for rng in seeded], axis=1)
    width = muvera.projection_dim
    projections = () if width is None else tuple([_projection(muvera.seed + own, dims, width) for own in repetitions])
    places: NDArray[np.int32] | None = None
    signs: NDArray[np.int8] | None = None
    if muvera.width(dims) < muvera.unsketched_width(dims):
        shape = (muvera.num_repetitions << count, muvera.cluster_width(dims))
        drawn = _hashes(muvera.seed, shape[0] * shape[1], muvera.width(dims))
        places, signs = drawn[0].astype(np.int32).reshape(shape), drawn[1].astype(np.int8).reshape(shape)
    codes = np.arange(1 << count, dtype=np.uint16)
    codes ^= codes >> 1
    distances = np.bitwise_count(codes[:, None] ^ codes)
    return _Tables(hyperplanes, projections, places, signs, distances)


def _projection(seed: int, dims: int, width: int) -> Floats:
    """Return (dims, width): each element is added to one element of the result, with a sign."""
    matrix = np.zeros((dims, width), np.float32)
    places, signs = _hashes(seed, dims, width)
    matrix[np.arange(dims), places] = signs
    return matrix


def _hashes(seed: int, count: int, width: int) -> tuple[NDArray[Any], Floats]:
    """Return a random place below width and a random sign for each of count elements."""
    rng = np.random.default_rng(seed)
    places = rng.integers(0, width, size=count)
    return places, rng.choice(np.array([-1.0, 1.0], np.float32), size=count)
