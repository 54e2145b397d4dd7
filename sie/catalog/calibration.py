"""Recognises token classifiers whose classes are begin, inside, end and single, and reads their `viterbi_calibration.json`.

Source: openai/privacy-filter, whose decoder reads this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.values.extract import TransitionBiases

DEFAULT_POINT = "default"
NO_BIASES = TransitionBiases(
    background_stay=0.0, background_to_start=0.0, inside_to_continue=0.0, inside_to_end=0.0, end_to_background=0.0,
    end_to_start=0.0,
)  # fmt: skip
_FILE = "viterbi_calibration.json"
_TAGS = {"B", "I", "E", "S"}
_OUTSIDE = "O"


class _Point(msgspec.Struct):
    biases: TransitionBiases


class _Calibration(msgspec.Struct):
    operating_points: dict[str, _Point]


def is_bioes(labels: Sequence[str]) -> bool:
    """Tell whether labels are `O`, and `B-`, `I-`, `E-` and `S-` of each kind, every one once."""
    tags: dict[str, set[str]] = {}
    for label in labels:
        tag, dash, kind = label.partition("-")
        if dash:
            tags.setdefault(kind, set()).add(tag)
    is_whole = bool(tags) and all(found == _TAGS for found in tags.values())
    return is_whole and _OUTSIDE in labels and len(set(labels)) == len(labels) == 1 + len(_TAGS) * len(tags)


def read_operating_points(checkpoint: Checkpoint) -> dict[str, TransitionBiases]:
    """Return a checkpoint's biases by operating point; empty without the file.

    Raises ModelLoadFailed for a malformed file, and for one without the point `default`.
    """
    if checkpoint.find(_FILE) is None:
        return {}
    found = checkpoint.read_json(_FILE, _Calibration)
    assert found is not None
    points = {name: point.biases for name, point in found.operating_points.items()}
    if DEFAULT_POINT not in points:
        raise refuse(checkpoint.id, f"{_FILE} has no operating point {DEFAULT_POINT!r}; its points are {[*points]}")
    for name, biases in points.items():
        if not all(map(math.isfinite, msgspec.structs.astuple(biases))):
            raise refuse(checkpoint.id, f"{_FILE}: operating point {name!r} has a bias that is not finite")
    return points
