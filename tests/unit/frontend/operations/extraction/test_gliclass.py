"""Scores of label groups as answers: classes, and the labels that a group selects."""

from __future__ import annotations

import pytest

from sie.frontend.operations.extraction.gliclass import answer_groups
from sie.values.extract import ExtractTask, LabelGroup


@pytest.mark.parametrize(
    ("threshold", "selected"), [(None, ["sport"]), (0.0, ["sport", "news"]), (0.2, ["sport", "news"]), (1.0, [])]
)
def test_a_group_selects_labels_by_the_threshold_of_the_request(threshold: float | None, selected: list[str]):
    groups = (LabelGroup("topic", ("sport", "news")),)
    task = ExtractTask(label_groups=groups, classification_type="multi-label", threshold=threshold)
    found = answer_groups(task, groups, [[0.9, 0.2]])
    assert found.data["topic"] == {"labels": selected, "probabilities": {"sport": 0.9, "news": 0.2}}
