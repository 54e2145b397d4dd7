"""The typed requests and replies that dialects decode to and encode from.

Imports only `sie.values` of our modules. Shapes: n items, d dimensions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from sie.values.extract import Entity, Extraction, ExtractTask
from sie.values.muvera import Muvera

OUTPUT_DTYPES: tuple[str, ...] = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


class MediaItems(msgspec.Struct, kw_only=True):
    """The items of a request with at least one item that is not a text, before the model's card is checked."""

    texts: list[str | None]
    images: dict[int, list[memoryview]]
    """Encoded images by item number; an item without images is left out."""
    other: str | None = None
    """Path of the first audio, video or document."""


class EncodeRequest(msgspec.Struct, kw_only=True):
    """The request of every embedding dialect.

    Exactly one of texts, token_lists and media is set until the request is checked against its card; then texts or
    token_lists is, or neither for images.
    """

    model: str
    texts: list[str] | None = None
    token_lists: list[list[int]] | None = None
    ids: list[str | None] = []
    """Echoed per item; empty when no item had one."""
    output_types: tuple[str, ...] | None = None
    output_dtype: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    options: dict[str, Any] = {}
    non_text_item: int | None = None
    """Index of the first item without a text, or with an image, audio, video or document; texts is None then."""
    media: MediaItems | None = None
    """All items, if non_text_item is set."""
    images: dict[int, list[memoryview]] | None = None
    """Encoded images by item number, for a model that accepts them; such an item's text is not read."""
    image_tokens: int = 0
    """Token cost of its images, set after decoding."""
    cuts: dict[int, int] = {}
    """Maps the number of each item that was cut to the most tokens that the model reads; set by tokenising."""
    prompt_tokens: int = 0
    """Tokens of the prompt before each text, if the model skips them; set by tokenising."""
    muvera: Muvera | None = None
    """As in `WorkHeader`; set when the request is checked against its card."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time of each stage of a request, in milliseconds; submitted_ns is when the frontend submitted it (CLOCK_MONOTONIC).

    num_earlier counts the rounds of an agent before the one whose stages these are.
    """

    total_ms: float = 0.0
    queue_ms: float = 0.0
    tokenization_ms: float = 0.0
    inference_ms: float = 0.0
    postprocessing_ms: float = 0.0
    submitted_ns: int = 0
    num_earlier: int = 0


class RowArray(msgspec.Struct, frozen=True):
    """One array of an output: a memoryview of unsigned bytes onto a reply extent.

    Each entry has width elements of dtype, a NumPy code.
    """

    dtype: str
    values: memoryview
    width: int = 1


class RaggedRows(msgspec.Struct, frozen=True):
    """An output of unknown size in a reply: item i has entries offsets[i] .. offsets[i + 1] of each array.

    The arrays are those of its `sie.values.output_kinds.OutputKind`, in that order. dims is the model's own width.
    """

    dims: int
    offsets: list[int]
    arrays: tuple[RowArray, ...]


class EncodeReply(msgspec.Struct, kw_only=True):
    """Rows for a dialect to encode.

    values is a C-contiguous (n, row_bytes) memoryview of unsigned bytes onto a reply extent: valid only until the
    dialect's encoder returns. dtype is the NumPy code of one element (`<f4`, `<f2`, `|i1`, `|u1`), width the number
    of elements in a row, dims the model's own width (they differ for binary). Without a dense output values is empty
    and width 0.
    """

    model: str
    ids: list[str | None]
    num_items: int
    values: memoryview
    dtype: str
    width: int
    dims: int
    output_dtype: str
    input_tokens: int
    timing: Timing
    ragged: dict[str, RaggedRows] = {}
    """The other outputs by name, in the order of `sie.values.output_kinds.KINDS`."""
    num_images: int = 0
    cuts: Collection[int] = ()
    """The numbers of the items whose texts were cut."""


class ScoreRequest(msgspec.Struct, kw_only=True):
    """The score request of every dialect: one query against n documents."""

    model: str
    query: str
    documents: list[str]
    queries: list[str] = []
    """The query of each document; empty if `query` is that of all."""
    is_raw: bool = False
    """Whether the score of a pair is the model's own number, without its activation."""
    max_document_tokens: int | None = None
    """Most tokens to read of a document, special ones left out; None means the limit of a pair alone."""
    query_id: str | None = None
    ids: list[str | None] = []
    """Ids of the documents; empty when no document had one."""
    instruction: str | None = None
    options: dict[str, Any] = {}
    non_text: str | None = None
    """Path of the first item without a text, or with other media than images; query and documents are empty then."""
    compared: tuple[tuple[str, float], ...] = ()
    """As in `WorkHeader`; set when the request is checked against its card."""
    cuts: dict[int, int] = {}
    """As in `EncodeRequest`, by document number; the document or the query was cut."""


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """One score for each document, in the request's order, all finite."""

    model: str
    scores: list[float]
    input_tokens: int
    timing: Timing

    def ranking(self) -> list[int]:
        """Return the documents' indices, best first; equal scores keep the request's order."""
        return sorted(range(len(self.scores)), key=lambda index: -self.scores[index])


class ExtractRequest(msgspec.Struct, kw_only=True):
    """An extract request. task is complete after the request is resolved against its model."""

    model: str
    texts: list[str]
    ids: list[str | None] = []
    """Echoed per item; empty when no item had one."""
    labels: tuple[str, ...] = ()
    output_schema: str = ""
    """JSON; empty if not given."""
    pairs: dict[int, str] = {}
    """The second text of each item that is a pair, by item number."""
    metadata: dict[int, msgspec.Raw] = {}
    """The metadata of each item that has some, by item number, as it was sent."""
    is_msgpack: bool = False
    """Whether the metadata are msgpack and not JSON."""
    given: dict[int, tuple[Entity, ...]] = {}
    """The entities in the metadata by item number, for a model that reads them."""
    by_class: bool = False
    """Whether the API has a place for the scores of a classifier's own classes, and for nothing else."""
    max_tokens: int | None = None
    """As in `ExtractTask`."""
    instruction: str | None = None
    options: dict[str, Any] = {}
    non_text_item: int | None = None
    """Index of the first item without a text, or with media; texts is empty then."""
    media: MediaItems | None = None
    """All items, if non_text_item is set."""
    images: dict[int, list[memoryview]] | None = None
    """The encoded image by item number, for a model that accepts them; such an item's text is not read."""
    task: ExtractTask = ExtractTask()
    cuts: dict[int, int] = {}
    """As in `EncodeRequest`."""


class ExtractReply(msgspec.Struct, frozen=True, kw_only=True):
    """The findings in each item, in the request's order; entities have their texts."""

    model: str
    extractions: list[Extraction]
    input_tokens: int
    timing: Timing
    num_images: int = 0
    num_chars: int = 0
    """Characters of texts that a worker's answer only refers to, so that its size does not show them."""


DEFAULT_MODEL = "default"
"""The model id of a request that does not name a model."""
