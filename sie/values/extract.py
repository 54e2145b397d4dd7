"""The typed values of the extract operation: the task for a text, a model's answer, and the reply.

Imports nothing of ours. What crosses a process is `array_like`: fields are only ever appended.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

ReadsForm = Literal["tokens", "pairs", "text", "image"]
"""In which form a worker gets an item. tokens: one sequence for each window of the text; pairs: one sequence for each
label; text: its UTF-8; image: its pixels. Of the first two a request has more items for the worker than for the client."""
GivesForm = Literal["extract", "token_logits", "logits", "boxes"]
"""What a worker answers with (`sie.shm.extent_headers.ReplyHeader`): whole extractions, or numbers that the frontend reads."""

OVERFLOW_POLICIES = ("default", "error", "truncate_text")
AGGREGATION_STRATEGIES = ("none", "simple", "first", "average", "max")


class Entity(msgspec.Struct, array_like=True, frozen=True):
    """A named piece of a text. start and end are code points of the item's text.

    text None: the frontend cuts it from the item's text. bbox is [x, y, width, height] in pixels.
    """

    label: str
    score: float = 1.0
    start: int | None = None
    end: int | None = None
    text: str | None = None
    bbox: tuple[int, int, int, int] | None = None


class Relation(msgspec.Struct, array_like=True, frozen=True):
    """A named tie between two pieces of a text, given as the pieces' texts."""

    head: str
    tail: str
    relation: str
    score: float


class Classification(msgspec.Struct, array_like=True, frozen=True):
    """How well a label fits the whole text."""

    label: str
    score: float


class DetectedObject(msgspec.Struct, array_like=True, frozen=True):
    """A thing seen in an image. bbox is [x, y, width, height] in pixels."""

    label: str
    score: float
    bbox: tuple[int, int, int, int]


class ItemError(msgspec.Struct, array_like=True, frozen=True):
    """Why one item has no answer while its neighbours have: `INVALID_INPUT`, `INFERENCE_ERROR`, ..."""

    code: str
    message: str


class Extraction(msgspec.Struct, array_like=True, frozen=True):
    """All that was found in one item. data holds only what JSON can."""

    entities: list[Entity] = []
    relations: list[Relation] = []
    classifications: list[Classification] = []
    objects: list[DetectedObject] = []
    data: dict[str, Any] = {}
    error: ItemError | None = None


class LabelGroup(msgspec.Struct, array_like=True, frozen=True):
    """Labels of which a classifier answers with one set of scores under the group's name."""

    name: str
    labels: tuple[str, ...]


class LabelledExample(msgspec.Struct, array_like=True, frozen=True):
    """A text that a classifier is shown with its labels."""

    text: str
    labels: tuple[str, ...]


class ExtractTask(msgspec.Struct, array_like=True, frozen=True):
    """What a request asks of each of its items. Hashable: items with equal tasks may share a forward pass.

    None and an empty tuple mean that the request did not say, so the model's default counts; a field that a rule does
    not list among its options is never set.
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


class StubExtract(msgspec.Struct, frozen=True, kw_only=True, tag="stub"):
    """Entities and classifications from digests of the text: `sie.catalog.stub`."""

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"
    options: ClassVar[frozenset[str]] = frozenset({"threshold"})
    needs_labels: ClassVar[bool] = False


class TokenClassification(msgspec.Struct, frozen=True, kw_only=True, tag="token_classification"):
    """A class for each token, joined to entities as transformers' TokenClassificationPipeline does it."""

    reads: ClassVar[ReadsForm] = "tokens"
    gives: ClassVar[GivesForm] = "token_logits"
    options: ClassVar[frozenset[str]] = frozenset({"threshold", "aggregation_strategy", "stride", "overflow_policy"})
    needs_labels: ClassVar[bool] = False

    labels: tuple[str, ...]
    """By class: `B-PER`, `I-PER`, ..., `O`."""
    unknown_token: str = ""
    """The token for what the vocabulary lacks; it always begins a word."""


class ZeroShot(msgspec.Struct, frozen=True, kw_only=True, tag="zero_shot"):
    """Whether a text entails a sentence with the label in it, as transformers' ZeroShotClassificationPipeline does it."""

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
    """Whether the model is told which of a pair's tokens belong to the hypothesis."""


class Gliner(msgspec.Struct, frozen=True, kw_only=True, tag="gliner"):
    """Pieces of a text for labels in plain words, and ties between them, found by the `gliner` library.

    An item of the work is a window of a text: no more words and tokens than the model reads at once.
    """

    reads: ClassVar[ReadsForm] = "text"
    gives: ClassVar[GivesForm] = "extract"
    needs_labels: ClassVar[bool] = True

    max_words: int
    """Most words of a window; its tokens, the labels' included, are at most the card's max_sequence_length."""
    relations: bool = False
    """Whether it also finds relations."""
    reads_labels_apart: bool = False
    """Whether labels are read by an encoder of their own, and take no room in the window."""

    @property
    def options(self) -> frozenset[str]:
        """The options it serves; those of relations only where it finds some."""
        return _GLINER_OPTIONS | _RELATION_OPTIONS if self.relations else _GLINER_OPTIONS


_GLINER_OPTIONS = frozenset({"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "overflow_policy"})
_RELATION_OPTIONS = frozenset({"relation_labels", "relation_threshold"})


class Gliclass(msgspec.Struct, frozen=True, kw_only=True, tag="gliclass"):
    """A logit for each label, read in one sequence with the text; the `gliclass` library's models.

    An item of the work is a text with the labels of one group. Its logits are (labels, 1).
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
    """Most labels of a sequence; None: any number."""
    prompt_first: bool = False
    """Whether the labels stand before the text, not behind it."""


class Detection(msgspec.Struct, frozen=True, kw_only=True, tag="detection"):
    """Boxes around what a picture shows of the labels: OWL-ViT, OWLv2 or Grounding DINO.

    An item is one image; all items of a request share what is looked for. OWL reads each label by itself, Grounding DINO
    reads all of them as one text, whose tokens its boxes are told apart by.
    """

    reads: ClassVar[ReadsForm] = "image"
    gives: ClassVar[GivesForm] = "boxes"

    family: Literal["owlvit", "owlv2", "grounding-dino"]
    strides: tuple[int, ...] = ()
    """Pixels a side of the places in each level of Grounding DINO's features."""
    num_boxes: int = 0
    """How many boxes Grounding DINO chooses among the places of an image, which cannot have fewer."""

    @property
    def needs_labels(self) -> bool:
        """Whether labels are all that can be looked for; Grounding DINO takes a text instead."""
        return self.family != "grounding-dino"

    @property
    def options(self) -> frozenset[str]:
        """The options it serves."""
        return _OWL_OPTIONS if self.needs_labels else _GROUNDING_OPTIONS

    def count_places(self, height: int, width: int) -> int:
        """Return among how many places of an image of that size Grounding DINO chooses its boxes."""
        return sum(-(-height // stride) * -(-width // stride) for stride in self.strides)


_OWL_OPTIONS = frozenset({"threshold", "score_threshold", "overflow_policy"})
_GROUNDING_OPTIONS = frozenset({"box_threshold", "text_threshold", "instruction", "overflow_policy"})


ExtractRule = StubExtract | TokenClassification | ZeroShot | Gliner | Gliclass | Detection
"""How a model extracts, one type a family. Every family says, without a value of its own:

reads, gives       the form in which the worker gets an item, and that of its answer
options            the fields of `ExtractTask` that it can serve beside labels; the others are refused by name.
                   `instruction` and `output_schema` count among them
needs_labels       whether a request without labels is refused
"""
