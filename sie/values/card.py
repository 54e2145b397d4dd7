"""The model card: all facts about a model, its adapters and its outputs that are known before its weights are read.

Imports only `sie.values.extract`, `sie.values.generate` and `sie.values.tensor` of our modules.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from sie.values.extract import ExtractRule
from sie.values.generate import GenerateRule
from sie.values.tensor import TensorRule

Side = Literal["left", "right"]
"""A side of a text: where it loses tokens, or gets padding."""

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How the vectors of a text's tokens become one, as sentence-transformers names it."""
ClassifierTask = Literal["text-classification", "text-ranking", "zero-shot-classification"]
"""The service of a sequence classifier: scores of its classes, a score of a pair, or entailment of any labels."""
EncoderWeights = Literal["auto", "int8"]
"""Format of an encoder's linear layers: as set by `dtype`, or eight bits."""


class StubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options after `stub:` in a model spec: `key=value` pairs separated by commas; a flag needs no value."""

    dense: int = 384
    """Width of the dense vector."""
    latency_ms: float = 0.0
    """Time that each step takes, independent of its size."""
    per_token_us: float = 0.0
    """Additional time for each token of a step."""
    load_ms: float = 0.0
    """Time that the load takes."""
    max_tokens: int = 8192
    """Maximum sequence length. A stub's token is four UTF-8 bytes; an empty text costs one token."""
    widths: dict[str, int] = {}
    """Widths of its other outputs, by the names in `sie.values.output_kinds.RAGGED`, each of which is an option."""
    score: bool = False
    """Whether it also scores pairs."""
    memory_mb: int = 0
    """Size in MiB that it reports for its weights; it uses no memory for them."""
    oom_tokens: int = 0
    """A step of more tokens than this runs out of memory; 0: no step does."""
    lost_tokens: int = 0
    """A step of more tokens than this loses its device; 0: no step does."""
    extract: bool = False
    """Whether it also extracts."""
    image: bool = False
    """Whether it also accepts images, in their own size."""
    tensor: bool = False
    """Whether it accepts tensors only."""
    generate: bool = False
    """Whether it generates text only."""
    scripted: bool = False
    """Whether it says the texts that its prompt holds in `[[ ]]`, one a turn, if it generates."""
    blocks: int = 1024
    """Number of its key/value cache blocks, if it generates."""
    grammar_ms: float = 0.0
    """Time that each grammar takes to compile."""
    fail: Literal["", "load", "oom", "sticky", "worn", "nan"] = ""
    """The part that fails, on a server with `test`: its load, its steps (no memory, a lost or worn device) or its values."""
    fail_on: str = ""
    """Limits `fail` to texts, or steps with a text, that contain this."""
    kill_on: str = ""
    """A step with a text that contains this aborts the worker, on a server with `test`."""
    hang_on: str = ""
    """A step with a text that contains this never ends, on a server with `test`."""
    kib_per_token: int = 0
    """KiB of memory that a running step uses for each of its tokens."""
    lost_file: str = ""
    """While this file contains `0`, the worker in slot 0 has no device: its steps and loads fail. Needs `test`."""

    @property
    def takes_time(self) -> bool:
        """Whether its steps simulate time, memory or faults."""
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
    """The rule to compute a checkpoint's sparse vector.

    splade pools the logits of a masked language model over the tokens. Activation `relu` means log1p(relu(x));
    `log1p_relu` applies log1p once more. lexical gives each token id the largest relu(linear(hidden)) of its tokens.
    """

    kind: Literal["splade", "lexical"]
    pooling: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    max_entries: int | None = None
    """How many of a vector's largest values are kept; None keeps all."""
    weights_file: str = ""
    """Absolute path of the linear layer's safetensors; lexical only."""


class StaticQueries(msgspec.Struct, frozen=True, kw_only=True):
    """A table to compute a query's sparse vector without a model: one weight for each token id."""

    tokenizer_file: str
    weights_file: str
    max_length: int | None = None


class StaticVectors(msgspec.Struct, frozen=True, kw_only=True):
    """A table of one vector for each token id, whose mean is a text's dense vector; there is no transformer."""

    weights_file: str
    """Absolute path of its safetensors: `embedding.weight`, or `embeddings` with perhaps `mapping` and `weights`."""
    skipped_id: int | None = None
    """A token id that does not count."""


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """The rule to compute a checkpoint's token vectors, and to choose the tokens that have one."""

    steps: tuple[PipelineStep, ...] = ()
    """Steps from hidden states to vectors, without a final normalise, because a request may turn it off."""
    linear_file: str = ""
    """Absolute path of the safetensors with the projection (`linear.weight`, or a layer's own `weight` and `bias`);
    used instead of steps."""
    normalize: bool = True
    """Whether the checkpoint itself ends in a normalise step."""
    drop_first: bool = False
    """Whether the first token has no vector."""
    mean_score: bool = False
    """Whether a score is the mean of the best matches of the query's vectors, instead of their sum."""
    query_length: int | None = None
    document_length: int | None = None
    """Limits in tokens, special ones included, that replace the model's own."""
    expand_to: int = 0
    """Shorter queries are padded to this length with the expansion token; those tokens have vectors too."""
    expansion_token: str = ""
    attend_to_expansion: bool = False
    """Whether other tokens attend to the expansion tokens."""
    query_prefix: str = ""
    document_prefix: str = ""
    """Markers added before every text; a marker in the vocabulary becomes a single token."""
    skipped_words: tuple[str, ...] = ()
    """Tokens without a vector, in documents and perhaps in queries."""
    skip_in_documents: bool = True
    skip_in_queries: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a model that a frontend or a worker needs before its weights are read.

    `sie.catalog` writes it once. Every process receives it over its control channel.
    """

    id: str
    kind: Literal[
        "encoder", "dual-encoder", "cross-encoder", "causal-reranker", "extractor", "tensor", "generator", "stub"
    ]
    directory: str = ""
    """Absolute path of the checkpoint; empty for a stub."""
    revision: str | None = None
    architecture: str = ""
    config_part: str = ""
    """The key of config.json with the configuration of the part that is served; empty for the whole."""
    config_changes: dict[str, Any] = {}
    """Values that replace those in config.json when the model is built, in place of the checkpoint's own code."""
    weight_names: tuple[tuple[str, ...], ...] = ()
    """Rules that rename weights, in order: a pattern and its replacement. A weight that matches a rule with several
    replacements is split into as many equal parts, by rows. One that matches a rule without a replacement is left out."""
    merged_adapter: tuple[int, float] | None = None
    """Number and scale of the adapter among its weights that is added to the others at load; None adds none."""
    layers: Literal["", "alibi", "experts", "latent", "layerwise"] = ""
    """Layers that differ from those of the library's class; see `sie.workers.loading.variants`."""
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("dense",)
    dims: dict[str, int] = {}
    max_sequence_length: int | None = None
    vocab_size: int = 0
    num_weights: int = 0
    """Number of weights in the checkpoint's safetensors; for a tensor model a fourth of its bytes; 0 if unknown."""
    quantised: str = ""
    """Name of the method that its weights are quantised with, and dequantised from at load; empty for plain ones."""
    gguf_file: str = ""
    """Absolute path of a GGUF file with its weights; empty for safetensors in the card's directory."""
    encoder_weights: EncoderWeights = "auto"
    """The requested format; a load fails if the format is not available."""
    tensor_parallel: int = 1
    """Number of devices that each hold a part of a generating model and run its steps together."""
    tokenizer_file: str = ""
    """Absolute path of the `tokenizer.json` to use; empty when the worker reads text."""
    first_token: str = ""
    last_token: str = ""
    """Tokens that the tokenizer's configuration adds to every text; a prepared card's tokenizer_file adds them."""
    accept_token_ids: bool = False
    """Whether clients may send token ids of this tokenizer instead of texts to embed."""
    splits_special_tokens: bool = False
    """Whether special tokens in a text are read as plain text."""
    truncation_side: Side = "right"
    """The side on which a text that is too long loses tokens."""
    lowercase: bool = False
    """Whether texts are lowered before they are tokenised; a prepared card's tokenizer_file does it, except for towers."""
    strip: bool = False
    """Whether texts lose surrounding white space before they are tokenised."""
    drop_punctuation: bool = False
    """Whether texts lose ASCII punctuation, and runs of white space become one space."""
    splits_underscores: bool = False
    """Whether an underscore is a space, before punctuation is dropped."""
    padding: TextPadding | None = None
    """Padding of every text; None means no padding."""
    prompts: dict[str, str] = {}
    """The checkpoint's own prompts, by name (`query`, `document`, ...)."""
    default_prompt: str | None = None
    """The prompt before a text when the request does not select one."""
    similarity: str = "cosine"
    normalize: bool = False
    """Whether the checkpoint itself ends in a normalise step."""
    matryoshka: bool | tuple[int, ...] = False
    """The shorter `dimensions` that are allowed: none, any, or those listed."""
    pipeline: tuple[PipelineStep, ...] = ()
    stub: StubOptions | None = None
    score: ScoreRule | None = None
    """Rule to read and score pairs; None for a model without scores, and for a stub."""
    listwise: Listwise | None = None
    """How it reads all documents of a query as a list; None for a model that does not."""
    extract: ExtractRule | None = None
    """Extraction rule; None for a model that does not extract."""
    sparse: SparseOutput | None = None
    static_queries: StaticQueries | None = None
    static_vectors: StaticVectors | None = None
    """Table of a model without a transformer; its texts have no special tokens."""
    late: LateInteraction | None = None
    image: ImageRule | None = None
    """Rule to read images; None for a model that does not accept them."""
    tensor: TensorRule | None = None
    """Input and output tensors; None for a model that is not a tensor model."""
    generate: GenerateRule | None = None
    """Generation rule; None for a model that does not generate text."""
    skips_prompt: bool = False
    """Whether the pooling leaves out the tokens of the prompt before a text."""
    missing_outputs: dict[str, str] = {}
    """Known outputs of the model that this checkpoint cannot give, with the reason."""
    profiles: dict[str, dict[str, Any]] = {}
    """The options of each profile by name; empty means one `default` without options."""

    @property
    def wire_outputs(self) -> list[str]:
        """The API's names of the outputs; an extractor's output is `json`."""
        return ["json" if output == "extract" else output for output in self.outputs]

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it generates text, and an encoder reads the prompt."""
        return self.generate is not None and self.generate.is_encoder_decoder

    @property
    def tells_queries(self) -> bool:
        """Whether the worker treats queries differently from documents, in addition to the prompt."""
        return self.late is not None or self.static_queries is not None

    @property
    def compares(self) -> bool:
        """Whether its scores compare the vectors of a query and a document, instead of reading the pair."""
        return self.kind == "encoder" and "score" in self.outputs


class TextPadding(msgspec.Struct, frozen=True, kw_only=True):
    """The padding of every text to one length, for a model that attends to padding."""

    token: str
    length: int
    side: Side = "right"


class ImageRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule to turn an image into a model's input: a frontend resizes and crops, a worker rescales and normalises.

    A value v of a channel becomes (v * rescale_factor - mean) / std.
    """

    height: int = 0
    width: int = 0
    """Size in pixels of the image sent to the worker; 0: its own size."""
    resize: tuple[int, int] = (0, 0)
    """(height, width) before the centre crop; with keep_aspect (edge, edge), the length of the shorter side."""
    keep_aspect: bool = False
    longest: int = 0
    """With keep_aspect, the limit of the longer side, without a crop; 0: the centre is cropped."""
    square: int = 0
    """Side of the square to which the worker pads and resizes; the image is sent in its own size. 0: no square."""
    frames: bool = False
    """With keep_aspect, whether the image is resized further to fit into height and width, with black around it."""
    resample: int = 3
    """Pillow's filter number: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    rescale_factor: float = 1.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    patch: int = 16
    """Side in pixels of the square of one token."""
    extra_tokens: int = 0
    """Tokens of an image beside its patches."""

    def count_tokens(self, height: int, width: int) -> int:
        """Return the token cost of an image that is sent to the worker in this size."""
        if self.square:
            height = width = self.square
        return -(-height // self.patch) * -(-width // self.patch) + self.extra_tokens


class PipelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `modules.json` after the transformer: one operation on the hidden states."""

    kind: Literal["pooling", "dense", "normalize", "layer_norm"]
    directory: str = ""
    config: dict[str, Any] = {}


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """A template of a pair: texts that are tokenised separately, without special tokens, and joined.

    `{query}`, `{document}` and `{instruction}` are replaced by the request's texts; all other text is unchanged.
    """

    parts: tuple[str, ...]
    """Exactly one part contains `{document}`; this part is cut when the pair is too long."""
    instructed_parts: tuple[str, ...] | None = None
    """The parts for a request with an instruction; None: `parts` have a place for it."""
    default_instruction: str = ""


class Listwise(msgspec.Struct, frozen=True, kw_only=True):
    """The rule to score all documents of a query in one sequence, by the hidden states at marks behind the texts."""

    after_document: ClassVar[str] = "<|embed_token|>"
    after_query: ClassVar[str] = "<|rerank_token|>"
    """The texts of the two marks in the prompt."""
    document_mark: int
    query_mark: int
    """The token ids of the two marks."""
    max_documents: int = 125
    """Most documents of a list; more are read as several lists."""
    max_document_tokens: int = 2048
    max_query_tokens: int = 512
    """A longer text is cut."""


class ScoreRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule to read a pair, and to turn its logits into one float32."""

    activation: str
    """Name of an activation in torch.nn without arguments; it gets the logit in float32."""
    token_types: bool = False
    """Whether the model reads token types, which mark the document's tokens in a pair."""
    divisor: float = 1.0
    """The logit is divided by this before the activation."""
    template: PairTemplate | None = None
    """None: the tokenizer's own form of a pair."""
    from_chat: bool = False
    """Whether the preparation reads the template from the checkpoint's chat template."""
    true_token_id: int | None = None
    """The token whose logit after the pair is read; None: the logit is the classifier's."""
    false_token_id: int | None = None
    """The token whose logit is subtracted from it; None: no subtraction."""
