"""The effective options of a request, against a reference that follows the specification's text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.inputs.profile_options import merge_options
from sie.values.card import ModelCard
from sie.values.errors import BadRequest

OUTPUTS = ("dense", "sparse", "multivector")
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "normalize": st.none() | st.booleans(),
        "instruction": st.none() | st.sampled_from(["", "find"]),
        "doc_template": st.none() | st.just("d: {text}"),
        "max_seq_length": st.none() | st.integers(1, 512),
        "output_types": st.lists(st.sampled_from(OUTPUTS), min_size=1, max_size=3, unique=True),
        "made_up": st.integers(),
    },
)
NAMES = st.sampled_from(["default", "a", "b", "none of them"])


def expected_of(profiles, options):
    """Return the effective options, None for a refusal."""
    name = options.get("profile") or "default"
    if name not in (profiles or {"default": {}}):
        return None
    runtime = (profiles or {"default": {}})[name]
    narrowed = runtime.get("output_types")
    effective = runtime | {key: value for key, value in options.items() if key != "profile"}
    if narrowed is not None and not set(effective["output_types"]) <= set(narrowed):
        return None
    return effective


@given(
    named=st.dictionaries(st.sampled_from(["a", "b"]), OPTIONS),
    default=OPTIONS,
    request=OPTIONS,
    profile=st.none() | NAMES,
    has_profiles=st.booleans(),
)
def test_merging_follows_the_specification(named, default, request, profile, has_profiles):
    profiles = {"default": default, **named} if has_profiles else {}
    options = {**request, "profile": profile}
    try:
        merged = merge_options(ModelCard(id="m", kind="encoder", profiles=profiles), options, "$.options")
    except BadRequest:
        merged = None
    assert merged == expected_of(profiles, options)
