"""The model card: everything known about a model, its adapters and its outputs before its weights are read.

Imports nothing of ours but `sie.values.extract`, `sie.values.generate` and `sie.values.tensor`; holds no behaviour beyond construction.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sie.values.extract import ExtractRule
from sie.values.generate import GenerateRule
from sie.values.tensor import TensorRule

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]
EncoderWeights = Literal["auto", "int8"]
"""Format of an encoder's linear layers: what `dtype` gives, or eight bits."""


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
    tensor: bool = False
    """Whether it takes tensors, and nothing else."""
    generate: bool = False
    """Whether it generates text, and nothing else."""
    blocks: int = 1024
    """Blocks of keys and values that it has, if it generates."""
    grammar_ms: float = 0.0
    """Time that each grammar takes to compile."""
    fail: Literal["", "load", "oom", "sticky", "nan"] = ""
    """What fails, on a server with `test`: its load, its steps (no memory, a lost device) or its values."""
    fail_on: str = ""
    """`fail` concerns only texts, or steps with a text, that hold this."""
    kill_on: str = ""
    """A step with a text that holds this aborts the worker, on a server with `test`."""
    hang_on: str = ""
    """A step with a text that holds this never ends, on a server with `test`."""
    kib_per_token: int = 0
    """KiB of memory that a step holds for each of its tokens while it runs."""
    lost_file: str = ""
    """While this file says `0`, the worker in slot 0 has no device, on a server with `test`: its steps and loads fail."""

    @property
    def takes_time(self) -> bool:
        """Whether the size of a step matters to it."""
        return bool(self.latency_ms or self.per_token_us or self.oom_tokens or self.lost_tokens or self.kib_per_token)

    @property
    def has_faults(self) -> bool:
        """Whether it fails on purpose."""
        return bool(self.fail or self.kill_on or self.hang_on or self.lost_file)


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
    kind: Literal[
        "encoder", "dual-encoder", "cross-encoder", "causal-reranker", "extractor", "tensor", "generator", "stub"
    ]
    directory: str = ""
    """Absolute path of the checkpoint; empty for a stub."""
    revision: str | None = None
    architecture: str = ""
    config_changes: dict[str, Any] = {}
    """What the model is built with in place of the values in config.json, for code that is not run."""
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("dense",)
    dims: dict[str, int] = {}
    max_sequence_length: int | None = None
    vocab_size: int = 0
    num_weights: int = 0
    """Numbers in the checkpoint's safetensors, a fourth of its bytes for a model of tensors; 0 when that is not known."""
    encoder_weights: EncoderWeights = "auto"
    """As it is wanted; a load fails where it cannot be had."""
    tokenizer_file: str = ""
    """Absolute path of the `tokenizer.json` to use; empty when the worker takes text."""
    first_token: str = ""
    last_token: str = ""
    """Tokens around every text that the tokenizer's configuration wants; a prepared card's tokenizer_file puts them."""
    accept_token_ids: bool = False
    """Whether clients may send token ids of this tokenizer in place of texts to embed."""
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
    tensor: TensorRule | None = None
    """What tensors it takes and gives; None for a model that has no tensors of its own."""
    generate: GenerateRule | None = None
    """How it generates text; None for a model that does not."""
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
    longest: int = 0
    """With keep_aspect, the most of the longer side, and nothing is cut; 0: the centre is cut out."""
    square: int = 0
    """Side of the square that the worker pads and resizes an image to, which crosses in its own size; 0: it does not."""
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
        if self.square:
            height = width = self.square
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
