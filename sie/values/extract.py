"""The typed values of the extract operation: the task for a text, a model's answer, and the reply.

Imports none of our modules. Types sent between processes are `array_like`: fields are only ever appended.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

ReadsForm = Literal["tokens", "pairs", "text", "image"]
"""The form in which a worker gets an item. tokens: one sequence for each window of the text; pairs: one sequence for
each label, or for each text with the text beside it; text: its UTF-8; image: its pixels. With tokens and pairs, a worker gets more items than the client sent."""
GivesForm = Literal["extract", "token_logits", "logits", "boxes", "generated"]
"""The form of a worker's answer (`sie.values.work.ReplyHeader`): whole extractions, or numbers to decode.
generated: token ids."""

AGGREGATION_STRATEGIES = ("none", "simple", "first", "average", "max")
"""Those of transformers' pipeline."""
VITERBI = "viterbi"
"""The strategy of models whose classes are begin, inside, end and single: the best path of allowed classes."""
ClassFunction = Literal["softmax", "sigmoid", "none"]
"""The function that turns a classifier's logits into scores."""


class Entity(msgspec.Struct, array_like=True, frozen=True):
    """A named piece of a text. start and end are code points of the item's text.

    text None: the frontend takes it from the item's text. bbox is [x, y, width, height] in pixels.
    """

    label: str
    score: float = 1.0
    start: int | None = None
    end: int | None = None
    text: str | None = None
    bbox: tuple[int, int, int, int] | None = None


class Relation(msgspec.Struct, array_like=True, frozen=True):
    """A named relation between two pieces of a text, given as the pieces' texts."""

    head: str
    tail: str
    relation: str
    score: float


class Classification(msgspec.Struct, array_like=True, frozen=True):
    """A label for the whole text, and its score."""

    label: str
    score: float


class DetectedObject(msgspec.Struct, array_like=True, frozen=True):
    """An object in an image. bbox is [x, y, width, height] in pixels."""

    label: str
    score: float
    bbox: tuple[int, int, int, int]


class ItemError(msgspec.Struct, array_like=True, frozen=True):
    """The error of one item whose neighbours have answers: `INVALID_INPUT`, `INFERENCE_ERROR`, ..."""

    code: str
    message: str


class Extraction(msgspec.Struct, array_like=True, frozen=True):
    """All findings in one item. data contains only JSON values."""

    entities: list[Entity] = []
    relations: list[Relation] = []
    classifications: list[Classification] = []
    objects: list[DetectedObject] = []
    data: dict[str, Any] = {}
    error: ItemError | None = None


class LabelGroup(msgspec.Struct, array_like=True, frozen=True):
    """Labels with one common set of scores, which a classifier returns under the group's name."""

    name: str
    labels: tuple[str, ...]


class LabelledExample(msgspec.Struct, array_like=True, frozen=True):
    """A text with its labels, shown to a classifier as an example."""

    text: str
    labels: tuple[str, ...]


class ExtractTask(msgspec.Struct, array_like=True, frozen=True):
    """The task of a request, the same for all its items. Hashable: items with equal tasks may share a forward pass.

    None and an empty tuple mean that the request did not set the field, so the model's default applies. A field that is
    not among a rule's options is never set.
    """

    labels: tuple[str, ...] = ()
    threshold: float | None = None
    flat_ner: bool | None = None
    multi_label: bool | None = None
    merge_adjacent_entities: bool | None = None
    relation_labels: tuple[str, ...] = ()
    relation_threshold: float | None = None
    classification_type: str | None = None
    label_groups: tuple[LabelGroup, ...] = ()
    examples: tuple[LabelledExample, ...] = ()
    overflow_policy: str = "default"
    hypothesis_template: str | None = None
    aggregation_strategy: str | None = None
    stride: int | None = None
    score_threshold: float | None = None
    box_threshold: float | None = None
    text_threshold: float | None = None
    instruction: str | None = None
    output_schema: str = ""
    """JSON."""
    function_to_apply: str | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    """Most tokens to read of a text; it can only lower the model's limit."""
    operating_point: str | None = None
    by_class: bool = False
    """Whether each class of a classifier is returned, in the order of the classes."""
    task: str | None = None
    """The task of a model that generates text about an image, such as `<OD>`."""
    max_new_tokens: int | None = None
    num_beams: int | None = None
    score_floor: float | None = None
    window_words: int | None = None
    window_overlap: int | None = None
    propagate_label: str | None = None
    name_min_letters: int | None = None


class StubExtract(msgspec.Struct, frozen=True, kw_only=True, tag="stub"):
    """Entities and classifications from digests of the text: `sie.catalog.stub`."""

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"
    options: ClassVar[frozenset[str]] = frozenset({"threshold"})
    needs_labels: ClassVar[bool] = False


class TransitionBiases(msgspec.Struct, frozen=True, kw_only=True, rename=lambda name: f"transition_bias_{name}"):
    """The gain of a path of classes at each step from one token to the next. Names as in `viterbi_calibration.json`."""

    background_stay: float
    background_to_start: float
    inside_to_continue: float
    inside_to_end: float
    end_to_background: float
    end_to_start: float


class TokenClassification(msgspec.Struct, frozen=True, kw_only=True, tag="token_classification"):
    """A class for each token, joined to entities as in transformers' TokenClassificationPipeline."""

    reads: ClassVar[ReadsForm] = "tokens"
    gives: ClassVar[GivesForm] = "token_logits"
    needs_labels: ClassVar[bool] = False

    labels: tuple[str, ...]
    """By class: `B-PER`, `I-PER`, ..., `O`."""
    unknown_token: str = ""
    """The token for text outside the vocabulary; it always begins a word."""
    default_strategy: str = "simple"
    operating_points: dict[str, TransitionBiases] = {}
    """Biases of the strategy `viterbi` by name, `default` among them. Empty for classes without that strategy."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """The values of `aggregation_strategy`."""
        return (*AGGREGATION_STRATEGIES, VITERBI) if self.operating_points else AGGREGATION_STRATEGIES

    @property
    def options(self) -> frozenset[str]:
        """The options it serves."""
        return _TOKEN_OPTIONS | {"operating_point"} if self.operating_points else _TOKEN_OPTIONS


_TOKEN_OPTIONS = frozenset({"threshold", "aggregation_strategy", "stride", "overflow_policy"})


class TextClassification(msgspec.Struct, frozen=True, kw_only=True, tag="text_classification"):
    """A score for each class of a text, or of a pair of texts, as in transformers' TextClassificationPipeline."""

    reads: ClassVar[ReadsForm] = "pairs"
    gives: ClassVar[GivesForm] = "logits"
    options: ClassVar[frozenset[str]] = frozenset({"threshold", "top_k", "function_to_apply", "overflow_policy"})
    needs_labels: ClassVar[bool] = False

    labels: tuple[str, ...]
    """By class."""
    function: ClassFunction = "softmax"
    token_types: bool = False
    """Whether the model reads token types, which mark the second text's tokens in a pair."""


class ZeroShot(msgspec.Struct, frozen=True, kw_only=True, tag="zero_shot"):
    """Whether a text entails a sentence with the label, as in transformers' ZeroShotClassificationPipeline."""

    reads: ClassVar[ReadsForm] = "pairs"
    gives: ClassVar[GivesForm] = "logits"
    options: ClassVar[frozenset[str]] = frozenset(
        {"threshold", "multi_label", "hypothesis_template", "overflow_policy"}
    )
    needs_labels: ClassVar[bool] = True

    labels: tuple[str, ...]
    """By class: `contradiction`, `neutral`, `entailment`."""
    entailment: int
    contradiction: int
    token_types: bool = False
    """Whether the model reads token types, which mark the hypothesis's tokens in a pair."""
    function: ClassFunction = "softmax"
    """The function for its classes as such, without the labels of a request."""

    @property
    def classes(self) -> TextClassification:
        """The rule for its own classes."""
        return TextClassification(labels=self.labels, function=self.function, token_types=self.token_types)


class Gliner(msgspec.Struct, frozen=True, kw_only=True, tag="gliner"):
    """Entities for labels in plain words, and relations between them, found by the library `gliner` or `gliner2`.

    A work item is a window of a text: at most the words and tokens that the model reads at once. GLiNER2 also scores
    groups of labels, for each window.
    """

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"

    max_words: int
    """Most words of a window; its tokens, labels included, are at most the card's max_sequence_length."""
    relations: bool = False
    """Whether it also finds relations."""
    reads_labels_apart: bool = False
    """Whether a separate encoder reads the labels, so that they take no room in the window."""
    library: Literal["gliner", "gliner2"] = "gliner"

    @property
    def needs_labels(self) -> bool:
        """Whether labels are required; GLiNER2 also accepts relations or groups of labels alone."""
        return self.library == "gliner"

    @property
    def options(self) -> frozenset[str]:
        """The options it serves; relation options only if it finds relations."""
        own = _GLINER_OPTIONS if self.library == "gliner" else _GLINER2_OPTIONS
        return own | _RELATION_OPTIONS if self.relations else own


class UnionMember(msgspec.Struct, frozen=True, kw_only=True):
    """One of the GLiNER models of a union."""

    directory: str
    """Absolute path of its checkpoint."""
    rule: Gliner
    merge_adjacent_entities: bool = False
    """Whether its neighbouring entities of one label become one, for a model that names single words."""


class GlinerUnion(msgspec.Struct, frozen=True, kw_only=True, tag="gliner_union"):
    """Entities for labels in plain words that any of several GLiNER models finds, and names wherever they recur.

    A work item is a window of a text, which each member reads with its own defaults. The entities of the worker's
    answer are those of the first member, then of the second, ...; `members` in its data has their numbers.
    """

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"
    options: ClassVar[frozenset[str]] = frozenset(
        {"score_floor", "window_words", "window_overlap", "propagate_label", "name_min_letters", "default_labels",
         "overflow_policy"}
    )  # fmt: skip
    needs_labels: ClassVar[bool] = True

    members: tuple[UnionMember, ...]

    @property
    def max_words(self) -> int:
        """Most words of a window, which every member reads at once."""
        return min(member.rule.max_words for member in self.members)


_GLINER_OPTIONS = frozenset({"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "overflow_policy"})
_GLINER2_OPTIONS = frozenset(
    {"threshold", "merge_adjacent_entities", "label_groups", "classification_type", "overflow_policy"}
)
_RELATION_OPTIONS = frozenset({"relation_labels", "relation_threshold"})


class Glirel(msgspec.Struct, frozen=True, kw_only=True, tag="glirel"):
    """Relations, named in plain words, between the entities that a request has for each text.

    A work item is a `sie.values.glirel_items.GlirelItem` as JSON. The ends of the relations in the worker's answer are
    numbers of entities.
    """

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"
    options: ClassVar[frozenset[str]] = frozenset({"threshold", "top_k"})
    needs_labels: ClassVar[bool] = True

    max_words: int
    """Most words of a text."""


class Gliclass(msgspec.Struct, frozen=True, kw_only=True, tag="gliclass"):
    """A logit for each label, read in one sequence with the text; for the `gliclass` library's models.

    A work item is a text with the labels of one group. Its logits are (labels, 1).
    """

    reads: ClassVar[ReadsForm] = "tokens"
    gives: ClassVar[GivesForm] = "token_logits"
    options: ClassVar[frozenset[str]] = frozenset(
        {"threshold", "classification_type", "label_groups", "examples", "overflow_policy", "instruction"}
    )
    needs_labels: ClassVar[bool] = True

    label_token_id: int
    """The token that begins each label."""
    max_labels: int | None = None
    """Most labels of a sequence; None means no limit."""
    prompt_first: bool = False
    """Whether the labels come before the text instead of after it."""


class Detection(msgspec.Struct, frozen=True, kw_only=True, tag="detection"):
    """Boxes around objects in an image that match the labels: OWL-ViT, OWLv2 or Grounding DINO.

    An item is one image; all items of a request share the labels. OWL reads each label separately. Grounding DINO reads
    all labels as one text, and the tokens of this text tell which label a box has.
    """

    reads: ClassVar[ReadsForm] = "image"
    gives: ClassVar[GivesForm] = "boxes"

    family: Literal["owlvit", "owlv2", "grounding-dino"]
    strides: tuple[int, ...] = ()
    """Stride in pixels of each level of Grounding DINO's features."""
    num_boxes: int = 0
    """Number of boxes that Grounding DINO chooses among an image's feature places; an image needs at least as many."""

    @property
    def needs_labels(self) -> bool:
        """Whether labels are required; Grounding DINO also accepts a text instead."""
        return self.family != "grounding-dino"

    @property
    def options(self) -> frozenset[str]:
        """The options it serves."""
        return _OWL_OPTIONS if self.needs_labels else _GROUNDING_OPTIONS

    def count_places(self, height: int, width: int) -> int:
        """Return the number of feature places of an image of this size, from which Grounding DINO chooses boxes."""
        return sum(-(-height // stride) * -(-width // stride) for stride in self.strides)


_OWL_OPTIONS = frozenset({"threshold", "score_threshold", "overflow_policy"})
_GROUNDING_OPTIONS = frozenset({"box_threshold", "text_threshold", "instruction", "overflow_policy"})


class ImageToText(msgspec.Struct, frozen=True, kw_only=True, tag="image_to_text"):
    """Text that an encoder and a decoder generate of an image and a prompt, read by the task: Florence-2 or Donut.

    An item is one image; all items of a request share the prompt. Florence-2's encoder reads the prompt, Donut's
    decoder begins with it. Each next token is the likeliest one (greedy).
    """

    reads: ClassVar[ReadsForm] = "image"
    gives: ClassVar[GivesForm] = "generated"
    options: ClassVar[frozenset[str]] = frozenset({"task", "max_new_tokens", "num_beams", "instruction"})
    needs_labels: ClassVar[bool] = False

    family: Literal["florence2", "donut"]
    max_new_tokens: int
    """Most tokens of an answer, and the default of the option with this name."""
    start_ids: tuple[int, ...] = ()
    """Tokens that every answer begins with. The first one is left out of the answer, the others belong to it. Empty for Donut."""
    end_ids: tuple[int, ...]
    last_id: int | None = None
    """The token that an answer of max_new_tokens ends with; None: any."""
    forbidden_ids: tuple[int, ...] = ()
    no_repeat_ngram: int = 0
    """Sequences of this many tokens occur only once in an answer; 0: any."""


ExtractRule = (
    StubExtract
    | TokenClassification
    | TextClassification
    | ZeroShot
    | Gliner
    | GlinerUnion
    | Glirel
    | Gliclass
    | Detection
    | ImageToText
)
"""A model's extraction rule, one type for each family. Every family has these class attributes:

reads, gives       the form in which the worker gets an item, and the form of its answer
options            the fields of `ExtractTask` that it serves besides labels, `instruction` and `output_schema`
included;
                   the others are refused by name
needs_labels       whether a request without labels is refused
"""
