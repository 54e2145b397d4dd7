"""Owns the typed values that cross a layer or a process: model cards, typed requests and replies, extent headers.

Imports nothing of ours but `sie.extraction`; holds no behaviour beyond construction. Extent headers are `array_like` msgspec structs:
fields are only ever appended. Shapes: n items, t tokens, d dimensions.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sie.extraction import Extraction, ExtractRule, ExtractTask

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
OUTPUT_DTYPES: tuple[str, ...] = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


class StubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows `stub:` in a model spec, as `key=value` pairs separated by commas; a flag may stand by itself."""

    dense: int = 384
    """Width of the dense vector."""
    latency_ms: float = 0.0
    """Time each step takes, whatever its size."""
    per_token_us: float = 0.0
    """Further time each token of a step takes."""
    load_ms: float = 0.0
    """Time the load takes."""
    max_tokens: int = 8192
    """Maximum sequence length; a stub's token is four UTF-8 bytes, and an empty text is one token."""
    sparse: int = 0
    """Width of the sparse vector; 0 leaves that output out."""
    multivector: int = 0
    """Width of each token's vector; 0 leaves that output out."""
    score: bool = False
    """Whether it also scores pairs."""
    memory_mb: int = 0
    """MiB that it says its weights take; it takes none."""
    oom_tokens: int = 0
    """A step of more tokens than this finds no memory; 0: every step finds some."""
    lost_tokens: int = 0
    """A step of more tokens than this loses its device; 0: no step does."""
    extract: bool = False
    """Whether it also extracts."""
    image: bool = False
    """Whether it also takes images, as they are."""
    fail: Literal["", "load", "oom", "sticky", "nan"] = ""
    """What fails, on a server with `test`: its load, its steps (no memory, a lost device) or its values."""
    fail_on: str = ""
    """`fail` concerns only texts, or steps with a text, that hold this."""
    kill_on: str = ""
    """A step with a text that holds this aborts the worker, on a server with `test`."""
    hang_on: str = ""
    """A step with a text that holds this never ends, on a server with `test`."""

    @property
    def has_faults(self) -> bool:
        """Whether it fails on purpose."""
        return bool(self.fail or self.kill_on or self.hang_on)


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests to one model may name.

    It comes from a directory, from a stub's options, or (neither set) from the hub's repository `id`.
    """

    model: str
    id: str
    directory: str | None = None
    revision: str | None = None
    stub: StubOptions | None = None


class SparseOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's sparse vector is computed.

    splade pools the logits of a masked language model over the tokens: activation `relu` means log1p(relu(x)),
    `log1p_relu` a second log1p over it. lexical gives each token id the largest relu(linear(hidden)) of its tokens.
    """

    kind: Literal["splade", "lexical"]
    pooling: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    weights_file: str = ""
    """Absolute path of the linear layer's safetensors; lexical only."""


class StaticQueries(msgspec.Struct, frozen=True, kw_only=True):
    """A table that gives queries their sparse vector without a model: one weight for each token id."""

    tokenizer_file: str
    weights_file: str
    max_length: int | None = None


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's vectors of tokens are computed, and which tokens of a text have one."""

    steps: tuple[PipelineStep, ...] = ()
    """From hidden states to vectors, the last normalise left out: a request may turn it off."""
    linear_file: str = ""
    """Absolute path of the safetensors with the projection (`linear.weight`, or a layer's own `weight` and `bias`);
    used instead of steps."""
    normalize: bool = True
    """Whether the checkpoint itself ends in a normalise step."""
    drop_first: bool = False
    """Whether the first token has no vector."""
    mean_score: bool = False
    """Whether a score is the mean over the query's vectors of each one's best match, not the sum."""
    query_length: int | None = None
    document_length: int | None = None
    """Limits in tokens, special ones included, in place of the model's own."""
    expand_to: int = 0
    """Queries shorter than this are filled up with the expansion token; those tokens have vectors, too."""
    expansion_token: str = ""
    attend_to_expansion: bool = False
    """Whether the other tokens see the expansion tokens."""
    query_prefix: str = ""
    document_prefix: str = ""
    """Markers put before every text; one that the vocabulary knows becomes a single token."""
    skipped_words: tuple[str, ...] = ()
    """Tokens that have no vector, of documents and perhaps of queries."""
    skip_in_documents: bool = True
    skip_in_queries: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a model that a frontend or a worker needs before its weights are read.

    Written once by `sie.catalog`, sent to every process over its control channel.
    """

    id: str
    kind: Literal["encoder", "dual-encoder", "cross-encoder", "causal-reranker", "extractor", "stub"]
    directory: str = ""
    """Absolute path of the checkpoint; empty for a stub."""
    revision: str | None = None
    architecture: str = ""
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("dense",)
    dims: dict[str, int] = {}
    max_sequence_length: int | None = None
    vocab_size: int = 0
    num_weights: int = 0
    """Numbers in the checkpoint's safetensors; 0 when that is not known."""
    tokenizer_file: str = ""
    """Absolute path of the `tokenizer.json` to use; empty when the worker takes text."""
    lowercase: bool = False
    strip: bool = False
    """Whether texts lose surrounding white space before they are tokenised."""
    drop_punctuation: bool = False
    """Whether texts lose ASCII punctuation, and runs of white space become one space."""
    padding: TextPadding | None = None
    """How every text is filled up; None: it is not."""
    prompts: dict[str, str] = {}
    """The checkpoint's own prompts, by name (`query`, `document`, ...)."""
    default_prompt: str | None = None
    """The prompt put before a text when the request selects none."""
    similarity: str = "cosine"
    normalize: bool = False
    """Whether the checkpoint itself ends in a normalise step."""
    matryoshka: bool | tuple[int, ...] = False
    """Which shorter `dimensions` are allowed: none, any, or those listed."""
    pipeline: tuple[PipelineStep, ...] = ()
    stub: StubOptions | None = None
    score: ScoreRule | None = None
    """How pairs are read and scored; None for a model without scores, and for a stub."""
    extract: ExtractRule | None = None
    """How it extracts; None for a model that does not."""
    sparse: SparseOutput | None = None
    static_queries: StaticQueries | None = None
    late: LateInteraction | None = None
    image: ImageRule | None = None
    """How images are read; None for a model that takes none."""
    missing_outputs: dict[str, str] = {}
    """Outputs that the model is known for and that this checkpoint cannot give, with the reason."""
    profiles: dict[str, dict[str, Any]] = {}
    """The options of each profile by its name; none at all stands for one `default` without options."""

    @property
    def wire_outputs(self) -> list[str]:
        """The outputs as the API names them: what an extractor gives is `json`."""
        return ["json" if output == "extract" else output for output in self.outputs]

    @property
    def tells_queries(self) -> bool:
        """Whether the worker, and not only the prompt, treats queries unlike documents."""
        return self.late is not None or self.static_queries is not None

    @property
    def compares(self) -> bool:
        """Whether its scores compare the vectors of a query and a document, and no model reads the pair."""
        return self.kind == "encoder" and "score" in self.outputs


class TextPadding(msgspec.Struct, frozen=True, kw_only=True):
    """What fills every text up to one length, for a model whose texts see their padding."""

    token: str
    length: int
    side: Literal["left", "right"] = "right"


class ImageRule(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes a model's input: a frontend resizes and crops, a worker rescales and normalises.

    A value v of a channel becomes (v * rescale_factor - mean) / std.
    """

    height: int = 0
    width: int = 0
    """Size in pixels that crosses to the worker; 0: the image's own."""
    resize: tuple[int, int] = (0, 0)
    """(height, width) before the centre is cut out; with keep_aspect (edge, edge), the length of the shorter side."""
    keep_aspect: bool = False
    resample: int = 3
    """Pillow's number of the filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    rescale_factor: float = 1.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    patch: int = 16
    """Side of the squares that are a token each, in pixels."""
    extra_tokens: int = 0
    """Tokens of an image beside its patches."""

    def count_tokens(self, height: int, width: int) -> int:
        """Return what an image of that size costs, as it crosses to the worker."""
        return -(-height // self.patch) * -(-width // self.patch) + self.extra_tokens


class PipelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `modules.json` after the transformer: what is done to the hidden states."""

    kind: Literal["pooling", "dense", "normalize", "layer_norm"]
    directory: str = ""
    config: dict[str, Any] = {}


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """How a causal reranker reads a pair: texts that are tokenised one by one, without special tokens, and joined.

    `{query}`, `{document}` and `{instruction}` stand for the request's own; everything else is taken as it is.
    """

    parts: tuple[str, ...]
    """Exactly one holds `{document}`, the one that is cut when the pair is too long."""
    instructed_parts: tuple[str, ...] | None = None
    """What the parts are when the request has an instruction; None: they have a place for it."""
    default_instruction: str = ""


class ScoreRule(msgspec.Struct, frozen=True, kw_only=True):
    """How a model reads a pair, and how its logits become one float32."""

    activation: str
    """Name of an activation in torch.nn that needs no argument; it gets the logit in float32."""
    token_types: bool = False
    """Whether the model is told which of a pair's tokens belong to the document."""
    template: PairTemplate | None = None
    """None: the tokenizer's own form of a pair (or, while a card is prepared, a chat template not read yet)."""
    true_token_id: int | None = None
    """The token behind the pair whose logit is read; None: the logit is the classifier's."""
    false_token_id: int | None = None
    """The token whose logit is subtracted from that; None: nothing is."""


class MediaItems(msgspec.Struct, kw_only=True):
    """The items of a request in which some item is not a text, before it is known what its model takes."""

    texts: list[str | None]
    images: dict[int, list[memoryview]]
    """Encoded images by the item's number; an item without any is left out."""
    other: str | None = None
    """Path of the first audio, video or document."""


class EncodeRequest(msgspec.Struct, kw_only=True):
    """What every embedding dialect decodes to. Exactly one of texts and token_lists is set."""

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
    """All of its items, where non_text_item is set."""
    images: dict[int, list[memoryview]] | None = None
    """Encoded images by the item's number, for a model that takes them; such an item's text is not read."""
    image_tokens: int = 0
    """What its images cost, once they are decoded."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in milliseconds."""

    total_ms: float = 0.0
    queue_ms: float = 0.0
    tokenization_ms: float = 0.0
    inference_ms: float = 0.0
    postprocessing_ms: float = 0.0


class SparseRows(msgspec.Struct, frozen=True):
    """The sparse vectors of a reply: item i has entries offsets[i] .. offsets[i + 1].

    indices (int32) and values (dtype, a NumPy code) are memoryviews of unsigned bytes onto a reply extent.
    """

    dims: int
    dtype: str
    offsets: list[int]
    indices: memoryview
    values: memoryview


class TokenRows(msgspec.Struct, frozen=True):
    """The vectors of tokens of a reply: item i has rows offsets[i] .. offsets[i + 1].

    values is a memoryview of unsigned bytes onto a reply extent, rows of width elements of a NumPy code; dims is the
    model's own width.
    """

    dims: int
    dtype: str
    width: int
    offsets: list[int]
    values: memoryview


class EncodeReply(msgspec.Struct, kw_only=True):
    """Rows ready to be encoded by a dialect.

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
    sparse: SparseRows | None = None
    multivector: TokenRows | None = None
    num_images: int = 0


class ScoreRequest(msgspec.Struct, kw_only=True):
    """What every dialect's request for scores decodes to: one query against n documents."""

    model: str
    query: str
    documents: list[str]
    query_id: str | None = None
    ids: list[str | None] = []
    """Of the documents; empty when none had one."""
    instruction: str | None = None
    options: dict[str, Any] = {}
    non_text: str | None = None
    """Path of the first item without a text, or with media; query and documents are empty then."""
    compared: tuple[tuple[str, float], ...] = ()
    """As in `WorkHeader`; set when the request is judged against its card."""


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
    """What a request to extract decodes to. task is whole once the request was resolved against its model."""

    model: str
    texts: list[str]
    ids: list[str | None] = []
    """Echoed per item; empty when no item had one."""
    labels: tuple[str, ...] = ()
    output_schema: str = ""
    """JSON; empty when there was none."""
    instruction: str | None = None
    options: dict[str, Any] = {}
    non_text_item: int | None = None
    """Index of the first item without a text, or with media; texts is empty then."""
    task: ExtractTask = ExtractTask()


class ExtractReply(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in each item, in the request's order; entities have their texts."""

    model: str
    extractions: list[Extraction]
    input_tokens: int
    timing: Timing


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
    is `encode`, `score` or `extract`. An item of `score` is a pair, with `token_types` uint8 (t,) beside token_ids when
    the model wants them, and as text the length of the query's UTF-8 in four bytes (little-endian), query, document; with
    `compared` it is one text: item 0 the query, the others documents. One of `extract` is what the card's rule reads, pairs
    with their token_types, too.
    With images there are `pixels` uint8 (bytes,), the RGB rows of all images back to back, `image_sizes` int32 (m, 2),
    height and width of each, `image_offsets` int32 (n + 1,), the images of each item, and, where an item is a text,
    `token_offsets` int32 (n + 1,) beside token_ids: an item is images, or else a text.
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
    """An `ExtractTask` as msgpack, for a model whose worker answers with whole extractions."""
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
    or `score` float32 (n, 1), in which a row that belongs to a query is 0, or `logits` float32 (n, classes). All that
    changes from one reply of dense rows or scores to the next is in the arrays, so
    the header's bytes are the same for every such reply of one shape and are encoded and decoded once.
    """

    arrays: tuple[ArrayRef, ...]
