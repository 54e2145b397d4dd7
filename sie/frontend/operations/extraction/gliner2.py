"""The rules of GLiNER2 requests: which names a schema may have, its prompt, and the join of its windows. Pure.

A schema has entities, relations and groups of labels, all read in one sequence with the text. Source: gliner2 2.1.0,
processor.py (`_transform_schema`, `_format_input_with_mapping`) and inference/chunking.py (`_merge_values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sie.frontend.inputs.text_windows import Window, merge_windows
from sie.frontend.operations.extraction.gliclass import answer_groups, check_groups
from sie.values.errors import BadRequest
from sie.values.extract import Entity, Extraction, ExtractTask

_ENTITIES: Final = "entities"
_MARKERS: Final = (
    "[P]", "[E]", "[R]", "[C]", "[L]", "[SEP_STRUCT]", "[SEP_TEXT]", "[DESCRIPTION]", "[EXAMPLE]", "[OUTPUT]",
)  # fmt: skip


def check_task(task: ExtractTask) -> None:
    """Raise BadRequest for a request without a name to look for, or with names that the schema cannot hold."""
    if not (task.labels or task.relation_labels or task.label_groups):
        raise BadRequest("The model needs 'labels', 'relation_labels' or 'label_groups' - at `$.params.labels`")
    check_groups(task)
    names = [*dict.fromkeys(task.relation_labels), *(group.name for group in task.label_groups)]
    if len(set(names)) < len(names) or _ENTITIES in names:
        raise BadRequest(f"Relations and label groups need names that differ, other than {_ENTITIES!r}")
    labels = [*task.labels, *names, *(label for group in task.label_groups for label in group.labels)]
    if any(marker in label for marker in _MARKERS for label in labels):
        raise BadRequest(f"Labels must not hold any of {', '.join(_MARKERS)}")


def prompt_words(task: ExtractTask) -> list[str]:
    """Return the words before a text: what the library tokenises one by one."""
    parts = [(_ENTITIES, "[E]", list(dict.fromkeys(task.labels)))] if task.labels else []
    parts += [(name, "[R]", ["head", "tail"]) for name in dict.fromkeys(task.relation_labels)]
    parts += [(group.name, "[L]", list(group.labels)) for group in task.label_groups]
    words: list[str] = []
    for name, marker, fields in parts:
        words += [
            "(",
            "[P]",
            name,
            "(",
            *(word for field in fields for word in (marker, field)),
            ")",
            ")",
            "[SEP_STRUCT]",
        ]
    return words


def join_entities(windows: Sequence[Window], found: Sequence[Extraction]) -> list[Entity]:
    """Return the entities of a text; those of the same label do not overlap, those of different labels may."""
    labels = dict.fromkeys(entity.label for extraction in found for entity in extraction.entities)
    own = [
        merge_windows(
            windows, [[e for e in one.entities if e.label == label] for one in found], flat=True, multi_label=False
        )
        for label in labels
    ]
    return sorted((entity for part in own for entity in part), key=lambda e: (e.start, e.end, e.label))


def join_groups(task: ExtractTask, found: Sequence[Extraction]) -> Extraction:
    """Return the scores of a text's groups: those of the surest window, or the best of each label if labels do not compete."""
    scores: list[list[float]] = []
    first = 0
    for group in task.label_groups:
        behind = first + len(group.labels)
        rows = [[one.score for one in extraction.classifications[first:behind]] for extraction in found]
        is_single = task.classification_type != "multi-label"
        scores.append(max(rows, key=max) if is_single else [max(column) for column in zip(*rows, strict=True)])
        first = behind
    return answer_groups(task, task.label_groups, scores)
