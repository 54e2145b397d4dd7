"""Paths of the tensor dialects: names with slashes, versions, actions."""

from __future__ import annotations

import pytest

from sie.frontend.tensors.model_paths import split_model_path, split_version

ACTIONS = {"infer", "ready", "config", "stats"}
KNOWN = {"m", "org/name", "org/name/infer", "a/versions/2"}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("m", ("m", "", "")), ("m/infer", ("m", "", "infer")), ("m/versions/3", ("m", "3", "")),
        ("m/versions/3/ready", ("m", "3", "ready")), ("m/versions/007/infer", ("m", "007", "infer")),
        ("org/name", ("org/name", "", "")), ("org/name/versions/1/infer", ("org/name", "1", "infer")),
        ("org/name/infer", ("org/name/infer", "", "")), ("org/name/infer/infer", ("org/name/infer", "", "infer")),
        ("a/versions/2", ("a/versions/2", "", "")), ("a/versions/2/ready", ("a/versions/2", "", "ready")),
        ("a/versions/2/versions/1/ready", ("a/versions/2", "1", "ready")),
        ("nobody", ("nobody", "", "")), ("nobody/infer", ("nobody", "", "infer")),
        ("no/body/versions/1/infer", ("no/body", "1", "infer")), ("no/body/explode", ("no/body/explode", "", "")),
        ("m/versions/x", None), ("m/versions/", None), ("m/versions", None), ("m/versions/-1/infer", None),
        ("m/versions/99999999999999999999", None), ("m/versions/9223372036854775808/infer", None), ("", None), ("/infer", None),
        ("m/", None), ("m/infer/", None), ("/", None),
    ],
)  # fmt: skip
def test_paths_below_models(tail: str, expected: tuple[str, str, str] | None):
    assert split_model_path(tail, ACTIONS, KNOWN) == expected


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("m", ("m", "", "")), ("m/1", ("m", "1", "")), ("org/name", ("org/name", "", "")), ("org/name/2", ("org/name", "2", "")),
        ("m/x", None), ("m/-1", None), ("m/99999999999999999999", ("m", "99999999999999999999", "")), ("nobody/7", ("nobody", "7", "")), ("", None),
        ("no/body", ("no/body", "", "")), ("m/1/x", None), ("m/x/1", None), ("org/name/1/2", None), ("mm/1/x", ("mm/1/x", "", "")),
    ],
)  # fmt: skip
def test_paths_of_the_first_api(tail: str, expected: tuple[str, str, str] | None):
    assert split_version(tail, KNOWN) == expected
