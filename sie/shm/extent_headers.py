"""The headers of request and reply extents: how a frontend and a worker describe arrays to one another.

They are `array_like` msgspec structs: fields are only ever appended. Shapes: n items, t tokens, d dimensions.
"""

from __future__ import annotations

import msgspec


class ArrayRef(msgspec.Struct, array_like=True, frozen=True):
    """One array of an extent, in C order.

    offset counts bytes from the start of the payload (the first multiple of 64 after the header), a multiple of 64.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WorkHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a request extent.

    Arrays: `cu_seqlens` int32 (n + 1,), first 0, the cost of each item in tokens as differences; and `token_ids`
    int32 (t,), or for a model that takes text `text` uint8 (bytes,) with `text_offsets` int32 (n + 1,). operation
    is `encode`, `score`, `extract` or `infer`. An item of `score` is a pair, with `token_types` uint8 (t,) beside token_ids when
    the model wants them, and as text the length of the query's UTF-8 in four bytes (little-endian), query, document; with
    `compared` it is one text: item 0 the query, the others documents. One of `extract` is what the card's rule reads, pairs
    with their token_types, too.
    With images there are `pixels` uint8 (bytes,), the RGB rows of all images back to back, `image_sizes` int32 (m, 2),
    height and width of each, `image_offsets` int32 (n + 1,), the images of each item, and, where an item is a text,
    `token_offsets` int32 (n + 1,) beside token_ids: an item is images, or else a text.
    A request to `infer` is one item with none of these arrays: task is a `TensorTask`, and each of its tensors is an array
    uint8 (bytes,), in order.
    What a detector looks for in all of them is `query_ids` int32 (t,), token ids, with `query_offsets` int32 (q + 1,).
    """

    model: str
    operation: str
    num_items: int
    arrays: tuple[ArrayRef, ...]
    output_dtype: str = "float32"
    normalize: bool | None = None
    truncate_dim: int | None = None
    output_types: tuple[str, ...] = ("dense",)
    is_query: bool = False
    """Only ever set for a model whose worker treats queries unlike documents."""
    compared: tuple[tuple[str, float], ...] = ()
    """Outputs by which item 0 of a score is compared with the others, each with its weight in the sum."""
    task: bytes = b""
    """An `ExtractTask` as msgpack, for a model whose worker answers with whole extractions or with boxes; or a `TensorTask`."""
    expand_to: int | None = None
    """Length that queries are filled up to in place of the card's own; None: the card's."""
    lora: str = ""
    """Id of the adapter that all items run with; empty for the model as it is."""


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a reply extent.

    Arrays: `times` int64 (3,), nanoseconds: when the first step started (CLOCK_MONOTONIC), time in forward passes,
    time after them; and for each output that was asked for
        dense         `dense` (n, width)
        sparse        `sparse_offsets` int32 (n + 1,), `sparse_indices` int32 (e,), `sparse_values` (e,)
        multivector   `multivector_offsets` int32 (n + 1,), `multivector` (rows, width)
        extract       `extract_offsets` int32 (n + 1,), `extract` uint8 (bytes,), each item's `Extraction` as msgpack
        token_logits  `token_logits_offsets` int32 (n + 1,), `token_logits` float32 (t, classes)
        boxes         `boxes_offsets` int32 (n + 1,), `boxes` float32 (b, 5 + k): score, centre x and y, width, height
                      as parts of the image as the model sees it; then the number of the query (k = 1), or the score of
                      each token of the text that was looked for
    or `score` float32 (n, 1), in which a row that belongs to a query is 0, or `logits` float32 (n, classes). All that
    changes from one reply of dense rows or scores to the next is in the arrays, so
    the header's bytes are the same for every such reply of one shape and are encoded and decoded once.
    """

    arrays: tuple[ArrayRef, ...]


class TensorForm(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of an extent, whose bytes are an array of their own: name, protocol datatype, full shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class TensorTask(msgspec.Struct, array_like=True, frozen=True):
    """What a request to `infer` asks for."""

    inputs: tuple[TensorForm, ...]
    outputs: tuple[str, ...]
    """What it wants, in this order; empty: all, in the model's order."""
    cost: int
    """In the scheduler's tokens."""
    priority: int = 0
    """From 1, which goes first; 0 for a model without priorities."""
    timeout_us: int = 0
    """The request's own limit to its wait for a step, where the model has queue policies; 0: none."""


class TensorReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of the reply to a request to `infer`.

    Arrays: `times` int64 (3,), as in `ReplyHeader`; then for each tensor, in order, one uint8 (bytes,).
    """

    arrays: tuple[ArrayRef, ...]
    tensors: tuple[TensorForm, ...]
