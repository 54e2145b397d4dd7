"""Knows the tasks of Florence-2: the prompt of each, and what its answer's text says about an image.

Places in an answer are tokens `<loc_0>` to `<loc_999>`, thousandths of the image's width and height. All functions take
time in proportion to the text. Source: transformers 5.23 processing_florence2.py; SIE API reference, section 19, for the
fields of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from sie.values.errors import BadRequest
from sie.values.extract import DetectedObject, Entity, Extraction

DEFAULT_TASK: Final = "<OCR_WITH_REGION>"
_Form = Literal["text", "caption", "answer", "quads", "boxes", "bare boxes", "phrases", "polygons", "boxes or polygons"]


class _Task(NamedTuple):
    """One task: its prompt, with `{}` for the instruction if it needs one, and the form of its answers."""

    prompt: str
    form: _Form


TASKS: Final = {
    "<OCR>": _Task("What is the text in the image?", "text"),
    "<OCR_WITH_REGION>": _Task("What is the text in the image, with regions?", "quads"),
    "<CAPTION>": _Task("What does the image describe?", "caption"),
    "<DETAILED_CAPTION>": _Task("Describe in detail what is shown in the image.", "caption"),
    "<MORE_DETAILED_CAPTION>": _Task("Describe with a paragraph what is shown in the image.", "caption"),
    "<OD>": _Task("Locate the objects with category name in the image.", "boxes"),
    "<DENSE_REGION_CAPTION>": _Task("Locate the objects in the image, with their descriptions.", "boxes"),
    "<REGION_PROPOSAL>": _Task("Locate the region proposals in the image.", "bare boxes"),
    "<CAPTION_TO_PHRASE_GROUNDING>": _Task("Locate the phrases in the caption: {}", "phrases"),
    "<REFERRING_EXPRESSION_SEGMENTATION>": _Task("Locate {} in the image with mask", "polygons"),
    "<REGION_TO_SEGMENTATION>": _Task("What is the polygon mask of region {}", "polygons"),
    "<OPEN_VOCABULARY_DETECTION>": _Task("Locate {} in the image.", "boxes or polygons"),
    "<REGION_TO_CATEGORY>": _Task("What is the region {}?", "caption"),
    "<REGION_TO_DESCRIPTION>": _Task("What does the region {} describe?", "caption"),
    "<REGION_TO_OCR>": _Task("What text is in the region {}?", "text"),
    "<DocVQA>": _Task("<DocVQA>{}", "answer"),
}
_SPECIAL: Final = re.compile(r"</?s>|<pad>")
_TAG: Final = re.compile(r"<[^<>]*>")
_PLACE: Final = re.compile(r"<loc_(\d+)>")
_EIGHT_PLACES: Final = re.compile(r"(?:<loc_\d+>){8}")
_BOXES: Final = re.compile(r"(?:<loc_\d+>){4,}")
_POLYGONS: Final = re.compile(r"(?:<loc_\d+>|<sep>|</?poly>){4,}")
_ONE_POLYGON: Final = re.compile(r"<poly>(.*?)</poly>")
_RING: Final = re.compile(r"((?:<loc_\d+>)+)(?:<sep>|$)")
_NUM_BINS: Final = 1000
_BOX: Final = 4
_TOO_VAGUE: Final = frozenset((
    "it", "I", "me", "mine", "you", "your", "yours", "he", "him", "his", "she", "her", "hers", "they", "them", "their",
    "theirs", "one", "oneself", "we", "us", "our", "ours", "its", "myself", "yourself", "himself", "herself", "itself",
    "ourselves", "yourselves", "themselves", "this", "that", "these", "those", "who", "whom", "whose", "which", "what",
    "all", "another", "any", "anybody", "anyone", "anything", "each", "everybody", "everyone", "everything", "few",
    "many", "nobody", "none", "several", "some", "somebody", "someone", "something", "each other", "one another",
    "the image", "image", "images", "the", "a", "an", "a group", "other objects", "lots", "a set",
))  # fmt: skip
"""Phrases whose boxes mean nothing, which the authors leave out of grounding."""


def check_task(model_id: str, name: str | None, instruction: str | None) -> None:
    """Raise BadRequest for an unknown task, and for one without its instruction or with one that it does not read."""
    task = TASKS.get(name or DEFAULT_TASK)
    if task is None:
        raise BadRequest(f"Model '{model_id}' has no task {name!r}. Available: {[*TASKS]} - at `$.params.options.task`")
    needs_text, has_text = "{}" in task.prompt, bool(instruction and instruction.strip())
    if needs_text and not has_text:
        raise BadRequest(f"Task {name!r} needs an instruction - at `$.params.instruction`")
    if has_text and not needs_text:
        raise BadRequest(f"Task {name or DEFAULT_TASK!r} takes no instruction - at `$.params.instruction`")


def prompt_of(name: str | None, instruction: str | None) -> str:
    """Return the prompt of a checked task."""
    return TASKS[name or DEFAULT_TASK].prompt.replace("{}", (instruction or "").strip())


def read_answer(name: str | None, text: str, height: int, width: int) -> Extraction:
    """Return what an answer to a checked task says about an image of this size in pixels."""
    form, text = TASKS[name or DEFAULT_TASK].form, _SPECIAL.sub("", text)
    if form in ("text", "caption", "answer"):
        return Extraction(entities=[Entity(form, text=text.strip())])
    scale = _Scale(height, width)
    if form == "quads":
        return Extraction(entities=[Entity("text", text=own.strip(), bbox=box) for own, box in _quads(text, scale)])
    if form == "polygons" or (form == "boxes or polygons" and "<poly>" in text):
        return _with_polygons(list(_polygons(text, scale, needs_phrase=form != "polygons")))
    found = _boxes(text, scale, needs_phrase=form != "bare boxes")
    return Extraction(
        objects=[
            DetectedObject(_plain(phrase), 1.0, box)
            for phrase, box in found
            if form != "phrases" or phrase not in _TOO_VAGUE
        ]
    )


class _Scale(NamedTuple):
    """The size of an image in pixels, to which places are scaled."""

    height: int
    width: int

    def points(self, bins: list[int]) -> list[int]:
        """Return x and y in turn, in whole pixels: the middle of each bin."""
        sizes = (self.width, self.height)
        return [int((place + 0.5) * (sizes[index % 2] / _NUM_BINS)) for index, place in enumerate(bins)]


def bounds_of(points: list[int]) -> tuple[int, int, int, int]:
    """Return [x, y, width, height] of the box around points, which are x and y in turn."""
    left, top, right, bottom = min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])
    return left, top, right - left, bottom - top


def _bins(places: str) -> list[int]:
    return [int(place) for place in _PLACE.findall(places)]


def _plain(phrase: str) -> str:
    return phrase.encode("ascii", "ignore").decode()


def _quads(text: str, scale: _Scale) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield each text before eight places, the corners around it, and the box around these."""
    start = at = 0
    while (found := _EIGHT_PLACES.search(text, at)) is not None:
        own = text[start : found.start()]
        if not own:
            at = found.start() + 1
            continue
        yield own, bounds_of(scale.points(_bins(found[0])))
        start, at = found.end(), found.end() + 1


def _boxes(text: str, scale: _Scale, *, needs_phrase: bool) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield the phrase before four places, or before several fours of them, and each box."""
    for phrase, places in _phrases(_BOXES, text, needs_phrase=needs_phrase):
        bins = _bins(places)
        for start in range(0, len(bins) - _BOX + 1, _BOX):
            yield phrase, bounds_of(scale.points(bins[start : start + _BOX]))


def _phrases(places: re.Pattern[str], text: str, *, needs_phrase: bool) -> Iterator[tuple[str, str]]:
    """Yield each run of places with the phrase between it and the last tag, which is empty unless it is needed.

    Places without a phrase that they need are left out; the library takes the first of them for the phrase.
    """
    start = 0
    for found in places.finditer(text):
        phrase = _TAG.split(text[start : found.start()])[-1].rpartition("<")[2].strip() if needs_phrase else ""
        start = found.end()
        if phrase or not needs_phrase:
            yield phrase, found[0]


def _polygons(text: str, scale: _Scale, *, needs_phrase: bool) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each phrase and the rings of one polygon: x and y in turn, in pixels."""
    for phrase, places in _phrases(_POLYGONS, text, needs_phrase=needs_phrase):
        is_marked = "<poly>" in places and "</poly>" in places
        for own in _ONE_POLYGON.findall(places) if is_marked else [places]:
            rings = [_bins(ring) for ring in _RING.findall(own)]
            if rings:
                yield phrase, [scale.points(ring[: len(ring) // 2 * 2]) for ring in rings]


def _with_polygons(found: list[tuple[str, list[list[int]]]]) -> Extraction:
    """Return an object for each polygon, and its rings at the same place in `data.polygons`."""
    kept = [(phrase, rings) for phrase, rings in found if any(rings)]
    objects = [DetectedObject(_plain(phrase), 1.0, bounds_of([*_joined(rings)])) for phrase, rings in kept]
    data: dict[str, Any] = {"polygons": [rings for _, rings in kept]}
    return Extraction(objects=objects, data=data)


def _joined(rings: list[list[int]]) -> Iterator[int]:
    for ring in rings:
        yield from ring
