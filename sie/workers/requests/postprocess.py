"""Converts a runner's outputs into each request's dtype, width and normalisation.

Pure. Requests with equal options are converted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.errors import NonFinite
from sie.values.output_kinds import KINDS
from sie.values.work import WorkHeader
from sie.workers.model_api import StepOutputs
from sie.workers.requests.fixed_encoding import fixed_encoding
from sie.workers.requests.quantise import check_scores, finish_rows

_to_msgpack = msgspec.msgpack.Encoder().encode


class Finished(NamedTuple):
    """Finished rows of one output: those of wants[members[0]], then those of wants[members[1]], and so on."""

    members: list[int]
    rows: NDArray[np.generic]


def finish_rows_of(
    card: ModelCard, wants: Sequence[WorkHeader], outputs: StepOutputs, counts: Sequence[int] = ()
) -> list[Finished]:
    """Finish the outputs with rows of a fixed size: scores, logits or dense vectors. Raises NonFinite.

    counts has the number of adjacent items of the step for each of wants; empty: one each, as for all other outputs.
    """
    if outputs.logits is not None:
        _check_finite(card, outputs.logits)
        return [Finished(list(range(len(wants))), outputs.logits)]
    if outputs.scores is not None:
        check_scores(card.id, outputs.scores)
        return [Finished(list(range(len(wants))), outputs.scores)]
    rows = [] if outputs.dense is None else finish_dense(card, wants, outputs.dense, counts)
    vectors = outputs.ragged.get("multivector")
    return rows if vectors is None else [*rows, *_finish_encodings(card, wants, vectors)]


def finish_dense(
    card: ModelCard, wants: Sequence[WorkHeader], rows: NDArray[np.float32], counts: Sequence[int] = ()
) -> list[Finished]:
    """Finish dense rows (n, d), one for each item of the step; items without a dense output are left out.

    counts as in `finish_rows_of`.
    """
    finished: list[Finished] = []
    for (normalize, truncate_dim, output_dtype), members in _group_by_format(wants, "dense"):
        own = rows if len(members) == len(wants) else rows[_places(members, counts or [1] * len(wants))]
        done = finish_rows(own, normalize=normalize if normalize is not None else card.normalize,
                           truncate_dim=truncate_dim, output_dtype=output_dtype)  # fmt: skip
        finished.append(Finished(members, done))
    return finished


def _places(members: list[int], counts: Sequence[int]) -> NDArray[np.bool_]:
    """Return (n,): whether an item of the step belongs to the members."""
    is_member = np.zeros(len(counts), np.bool_)
    is_member[members] = True
    return np.repeat(is_member, counts)


def _finish_encodings(
    card: ModelCard, wants: Sequence[WorkHeader], vectors: Sequence[NDArray[np.float32] | None]
) -> Iterator[Finished]:
    """Yield the dense row of each item whose dense output is an encoding of its vectors."""
    for item, (want, own) in enumerate(zip(wants, vectors, strict=True)):
        if want.muvera is not None and own is not None and "dense" in want.output_types:
            tokens = finish_rows(own, normalize=_normalizes_tokens(card, want.normalize))
            row = fixed_encoding(tokens.astype(np.float32, copy=False), want.muvera, is_query=want.is_query)[None]
            done = finish_rows(row, normalize=False, truncate_dim=want.truncate_dim, output_dtype=want.output_dtype)
            yield Finished([item], done)


def _normalizes_tokens(card: ModelCard, normalize: bool | None) -> bool:
    """Return whether vectors of tokens get unit length: the request's choice, or else the checkpoint's."""
    return normalize if normalize is not None else card.late is None or card.late.normalize


def finish_ragged(
    card: ModelCard, wants: Sequence[WorkHeader], outputs: StepOutputs
) -> Iterator[tuple[int, str, tuple[NDArray[Any], ...]]]:
    """Yield (item, output, arrays) of every output of unknown size that an item of the step wants."""
    for output, values in outputs.ragged.items():
        finish = _finish_all_rows if KINDS[output].rounding == "rows" else _finish_weights
        yield from finish(card, wants, output, values)
    for item, extraction in enumerate(outputs.extract or ()):
        yield item, "extract", (np.frombuffer(_to_msgpack(extraction), np.uint8),)
    for item, logits in enumerate(outputs.token_logits or ()):
        _check_finite(card, logits)
        yield item, "token_logits", (logits,)
    for item, boxes in enumerate(outputs.boxes or ()):
        _check_finite(card, boxes)
        yield item, "boxes", (boxes,)
    for item, token_ids in enumerate(outputs.generated or ()):
        if isinstance(token_ids, np.ndarray):
            yield item, "generated", (token_ids,)


def _check_finite(card: ModelCard, logits: NDArray[np.float32]) -> None:
    if not np.isfinite(logits).all():
        raise NonFinite(f"Model '{card.id}' produced non-finite logits")


def _finish_weights(
    _card: ModelCard, wants: Sequence[WorkHeader], output: str, values: Sequence[Any]
) -> Iterator[tuple[int, str, tuple[NDArray[Any], ...]]]:
    for item, (want, value) in enumerate(zip(wants, values, strict=True)):
        if value is not None and output in want.output_types:
            indices, weights = value
            yield item, output, finish_sparse(indices, weights, want.output_dtype)


def finish_sparse(
    indices: NDArray[np.int32], values: NDArray[np.float32], output_dtype: str
) -> tuple[NDArray[np.int32], NDArray[np.generic]]:
    """Return the entries with values in float16 if requested, else unchanged: never below float16.

    A weight above float16's range becomes its largest value, not infinity. Source: SIE API reference, section 5.
    """
    if output_dtype != "float16":
        return indices, values
    return indices, np.minimum(values, np.finfo(np.float16).max).astype(np.float16)


def _finish_all_rows(
    card: ModelCard, wants: Sequence[WorkHeader], output: str, vectors: Sequence[NDArray[np.float32] | None]
) -> Iterator[tuple[int, str, tuple[NDArray[Any], ...]]]:
    """Quantise row by row, all rows of requests with equal options at once."""
    for (normalize, _, output_dtype), members in _group_by_format(wants, output):
        parts = [vectors[item] for item in members]
        own = [part for part in parts if part is not None]
        assert len(own) == len(members), "a runner left a wanted output out"
        wanted = _normalizes_tokens(card, normalize)
        done = finish_rows(np.concatenate(own), normalize=wanted, output_dtype=output_dtype)
        start = 0
        for item, part in zip(members, own, strict=True):
            yield item, output, (done[start : start + len(part)],)
            start += len(part)


def _group_by_format(
    wants: Sequence[WorkHeader], output: str
) -> Iterable[tuple[tuple[bool | None, int | None, str], list[int]]]:
    """Return the items that want an output, grouped by normalisation, width and dtype."""
    groups: dict[tuple[bool | None, int | None, str], list[int]] = {}
    for item, want in enumerate(wants):
        if output in want.output_types and (want.muvera is None or output != "dense"):
            groups.setdefault((want.normalize, want.truncate_dim, want.output_dtype), []).append(item)
    return groups.items()
