"""Defines the form of work for a model and of its answer: headers in which a frontend and a worker describe arrays.

They are `array_like` msgspec structs: fields are only ever appended. Shapes: n items, t tokens, d dimensions.
`sie.values.work_bytes` reads their bytes.
"""

from __future__ import annotations

import msgspec

from sie.values.muvera import Muvera


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

    An item is, by the operation
        encode    a text, or images
        score     a pair of texts. With `compared` it is one text: item 0 is the query, the others are documents
        extract   the form in the card's rule: a text, a pair or an image
        generate  the token ids of a prompt; there is one item
        infer     the tensors of the request; there is one item. task is a `TensorTask`, and each tensor is one array
                  uint8 (bytes,), in order. There are no other arrays
    Arrays of all operations except infer:
        cu_seqlens       int32 (n + 1,), first 0: its differences are the cost of each item in tokens
        token_ids        int32 (t,), the items back to back
        token_types      uint8 (t,), of pairs, if the model reads them
        text             uint8 (bytes,), instead of token_ids, for a model that reads text. A pair is the length of the
                         query's UTF-8 in four bytes (little-endian), the query and the document
        text_offsets     int32 (n + 1,), the bounds of each item in text
    With images also:
        pixels           uint8 (bytes,), the RGB rows of all images back to back
        image_sizes      int32 (m, 2), height and width of each image
        image_offsets    int32 (n + 1,), the bounds of each item in image_sizes
        token_offsets    int32 (n + 1,), the bounds of each item in token_ids, if some items are texts
    With a detector's queries, which count for every item:
        query_ids        int32 (t,), their token ids
        query_offsets    int32 (q + 1,), the bounds of each query
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
    """Set only if the worker treats queries differently from documents: by its model, or with `muvera`."""
    compared: tuple[tuple[str, float], ...] = ()
    """Outputs that compare item 0 of a score with the others, each with its weight in the sum."""
    task: bytes = b""
    """An `ExtractTask` as msgpack, for a worker that answers with whole extractions or boxes; a `TensorTask`; or a `GenerateTask`."""
    expand_to: int | None = None
    """Length of query expansion that replaces the card's; None: the card's."""
    lora: str = ""
    """Id of the adapter for all items; empty for the model without an adapter."""
    is_raw: bool = False
    """Whether scores of pairs are wanted without the model's activation."""
    skipped_tokens: int = 0
    """First tokens of each text that the pooling leaves out, for a card that skips prompts."""
    muvera: Muvera | None = None
    """Parameters by which the dense output is computed from the multivector; None: it is the model's own."""


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a reply extent.

    Arrays: `times` int64 (3,), nanoseconds: start of the first step (CLOCK_MONOTONIC), time in forward passes, time
    after them; and for each requested output
        dense         `dense` (n, width)
        other kinds of vectors (`sie.values.output_kinds`)  `NAME_offsets` int32 (n + 1,), then the kind's arrays, such as
                      `sparse_indices` int32 (e,), `sparse_values` (e,) or `multivector` (rows, width)
        extract       `extract_offsets` int32 (n + 1,), `extract` uint8 (bytes,), each item's `Extraction` as msgpack
        token_logits  `token_logits_offsets` int32 (n + 1,), `token_logits` float32 (t, classes)
        boxes         `boxes_offsets` int32 (n + 1,), `boxes` float32 (b, 5 + k): score, centre x and y, width, height
                      as fractions of the model's image; then the number of the query (k = 1), or the score of each
                      token of the query text
        generated     `generated_offsets` int32 (n + 1,), `generated` int32 (t,): each answer's tokens, without its end
    or `score` float32 (n, 1), in which the row of a query is 0, or `logits` float32 (n, classes). In replies of dense
    rows or scores, all changing values are in the arrays. So the header's bytes are the same for every such reply of
    one shape, and are encoded and decoded once.
    """

    arrays: tuple[ArrayRef, ...]


class TensorForm(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of an extent, stored as a separate array of bytes: name, protocol datatype, full shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class TensorTask(msgspec.Struct, array_like=True, frozen=True):
    """The task of a request to `infer`."""

    inputs: tuple[TensorForm, ...]
    outputs: tuple[str, ...]
    """The requested outputs, in this order; empty: all, in the model's order."""
    cost: int
    """Cost in the scheduler's tokens."""
    priority: int = 0
    """From 1, which runs first; 0 for a model without priorities."""
    timeout_us: int = 0
    """The request's own limit on its wait for a step, if the model has queue policies; 0: no limit."""


class TensorReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of the reply to a request to `infer`.

    Arrays: `times` int64 (3,), as in `ReplyHeader`; then for each tensor, in order, one uint8 (bytes,).
    """

    arrays: tuple[ArrayRef, ...]
    tensors: tuple[TensorForm, ...]
