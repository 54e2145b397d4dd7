from __future__ import annotations

import pytest

from sie.frontend.inputs.profile_options import check_cuts, gives, is_own_entry, merge_options, token_limit
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong

PROFILES = {
    "default": {"query_template": "q: {text}", "normalize": True},
    "sparse": {"output_types": ["sparse"], "normalize": False},
    "both": {"output_types": ["dense", "sparse"]},
}
CARD = ModelCard(id="org/m", kind="encoder", outputs=("dense", "sparse"), profiles=PROFILES)
PLAIN = ModelCard(id="org/m", kind="encoder")


def merge(options, card=CARD):
    return merge_options(card, options, "$.params.options")


def refusal(options, card=CARD) -> str:
    with pytest.raises(BadRequest) as caught:
        merge(options, card)
    return caught.value.message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROFILES["default"]),
        ({"profile": None}, PROFILES["default"]),
        ({"profile": "default"}, PROFILES["default"]),
        ({"profile": "sparse"}, PROFILES["sparse"]),
        ({"normalize": False}, {"query_template": "q: {text}", "normalize": False}),
        ({"query_template": None}, {"query_template": None, "normalize": True}),
        ({"profile": "sparse", "is_query": True}, {"output_types": ["sparse"], "normalize": False, "is_query": True}),
        ({"profile": "both", "output_types": ["dense"]}, {"output_types": ["dense"]}),
        ({"profile": "both", "output_types": None}, {"output_types": ["dense", "sparse"]}),
        ({"anything": [1]}, {**PROFILES["default"], "anything": [1]}),
    ],
)
def test_the_request_s_options_lie_on_top_of_its_profile_s(options, expected):
    before = dict(options)
    assert merge(options) == expected
    assert options == before
    assert CARD.profiles == PROFILES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "fast"}, "Profile 'fast' not found. Available: ['default', 'sparse', 'both']"),
        ({"profile": ""}, "Option 'profile' must be a non-empty string or null"),
        ({"profile": 5}, "Option 'profile' must be a non-empty string or null"),
        ({"profile": ["sparse"]}, "Option 'profile' must be a non-empty string or null"),
        (
            {"profile": "sparse", "output_types": ["dense"]},
            "Profile 'sparse' does not give output type 'dense'. Available: ['sparse']",
        ),
        (
            {"profile": "sparse", "output_types": [{}]},
            "Profile 'sparse' does not give output type {}. Available: ['sparse']",
        ),
        ({"profile": "sparse", "pooling": "cls"}, "Model 'org/m' does not support option 'pooling'"),
        ({"max_seq_length": "8"}, "Expected `int | null`, got `str` - at `$.params.options.max_seq_length`"),
        ({"max_seq_length": True}, "Expected `int | null`, got `bool` - at `$.params.options.max_seq_length`"),
        ({"query_max_length": 0}, "Expected `int` >= 1 - at `$.params.options.query_max_length`"),
        ({"smve": {}}, "sparse encodings of multivectors"),
        ({"muvera": []}, "Expected `object | null`, got `list` - at `$.params.options.muvera`"),
        ({"muvera": {"seeds": 1}}, "Object contains unknown field `seeds` - at `$.params.options.muvera`"),
        ({"muvera": {"num_repetitions": 0}}, "Expected `int` >= 1 - at `$.params.options.muvera.num_repetitions`"),
    ],
)
def test_what_a_model_cannot_serve_is_refused_by_name(options, message):
    assert message in refusal(options)


def test_a_model_without_profiles_has_a_default_without_options():
    assert merge({"profile": "default", "normalize": True}, PLAIN) == {"normalize": True}
    assert refusal({"profile": "fast"}, PLAIN) == "Profile 'fast' not found. Available: ['default']"


@pytest.mark.parametrize(
    ("options", "is_query", "limit"),
    [
        ({}, True, None),
        ({"max_seq_length": 9}, False, 9),
        ({"max_seq_length": 9}, True, 9),
        ({"query_max_length": 5}, False, None),
        ({"query_max_length": 5}, True, 5),
        ({"query_max_length": 5, "max_seq_length": 3}, True, 3),
        ({"query_max_length": None, "max_seq_length": None}, True, None),
    ],
)
def test_limits_of_length_are_for_all_texts_or_for_queries(options, is_query, limit):
    assert token_limit(options, is_query) == limit


def test_a_default_profile_narrows_what_a_plain_request_gets():
    narrowed = ModelCard(
        id="m", kind="encoder", outputs=("dense", "sparse", "score"), profiles={"default": {"output_types": ["sparse"]}}
    )
    assert [gives(narrowed, output) for output in ("dense", "sparse", "score", "multivector")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert gives(CARD, "dense")


def test_an_entry_of_a_profile_counts_as_a_model_only_where_the_model_is_not_offered():
    entry = ModelCard(id="org/m:sparse", kind="encoder")
    assert is_own_entry(PLAIN, {"org/m": PLAIN})
    assert not is_own_entry(entry, {"org/m": PLAIN, "org/m:sparse": entry})
    assert is_own_entry(entry, {"org/m:sparse": entry})


def test_a_text_that_must_not_be_cut_is_refused_with_the_fields_that_let_it_be_cut():
    check_cuts(PLAIN, "default", {2: 8})
    with pytest.raises(InputTooLong) as caught:
        check_cuts(PLAIN, "error", {2: 8, 5: 8})
    message = caught.value.message
    assert message.startswith(
        "Model 'org/m': item 2 has more than the 8 tokens that the model reads at once; shorten it"
    )
    # Each route has one of them, and its clients know no other.
    assert all(field in message for field in ("overflow_policy", "truncate_prompt_tokens", "truncate "))
