from __future__ import annotations

import tomllib
from collections import Counter
from importlib.resources import files

import pytest

from sie.catalog.cards import complete_card, make_card
from sie.catalog.options import check_profile_options
from sie.catalog.profiles import (
    Profile,
    entry_cards,
    entry_ids,
    flatten,
    fold_default,
    known_dimensions,
    known_profiles,
    model_of,
)
from sie.catalog.spec import ModelSpec, parse_model_spec
from sie.frontend.inputs.prompts import apply_prompt
from sie.values.card import LateInteraction, ModelCard
from sie.values.errors import BadRequest, ModelLoadFailed

E5_TASK = "Given a web search query, retrieve relevant passages that answer the query"
BGE = "Represent this sentence for searching relevant passages: "


def written() -> list[dict]:
    return tomllib.loads(files("sie.catalog").joinpath("profiles.toml").read_text())["model"]


def test_every_built_in_model_stands_in_one_entry_and_every_profile_is_valid():
    counts = Counter(model.lower() for entry in written() for model in entry["models"])
    assert len(counts) > 30
    assert {model for model, count in counts.items() if count > 1} == set()
    for model in counts:
        profiles = known_profiles(model)
        assert "default" in profiles, model
        for options in profiles.values():
            check_profile_options(options)


@pytest.mark.parametrize(
    ("model", "profile", "query", "document"),
    [
        ("intfloat/e5-small-v2", "default", "query: x", "passage: x"),
        ("INTFLOAT/multilingual-e5-base", "default", "query: x", "passage: x"),
        ("intfloat/multilingual-e5-large-instruct", "default", f"Instruct: {E5_TASK}\nQuery: x", "x"),
        ("Qwen/Qwen3-Embedding-0.6B", "default", f"Instruct: {E5_TASK}\nQuery:x", "x"),
        ("NovaSearch/stella_en_1.5B_v5", "default", f"Instruct: {E5_TASK}.\nQuery: x", "x"),
        ("NovaSearch/stella_en_1.5B_v5", "s2s", "Instruct: Retrieve semantically similar text.\nQuery: x", "x"),
        ("BAAI/bge-base-en-v1.5", "default", f"{BGE}x", "x"),
        ("mixedbread-ai/mxbai-embed-large-v1", "default", f"{BGE}x", "x"),
        ("Snowflake/snowflake-arctic-embed-l-v2.0", "default", "query: x", "x"),
        ("nomic-ai/nomic-embed-text-v1.5", "default", "search_query: x", "search_document: x"),
        ("nomic-ai/nomic-embed-text-v1.5", "clustering", "clustering: x", "clustering: x"),
    ],
)
def test_built_in_models_are_asked_as_their_authors_say(model, profile, query, document):
    card = make_card(parse_model_spec(f"{model}=stub:"), "")
    options = card.profiles[profile]
    asked = [apply_prompt(card, ["x"], options, None, is_query)[0] for is_query in (True, False)]
    assert asked == [query, document]


def test_an_instruction_of_the_request_goes_where_the_template_has_its_place():
    options = known_profiles("Qwen/Qwen3-Embedding-4B")["default"]
    card = ModelCard(id="m", kind="encoder")
    assert apply_prompt(card, ["x"], options, "Find it", True) == ["Instruct: Find it\nQuery:x"]
    assert apply_prompt(card, ["x"], options, "", True) == ["Instruct: \nQuery:x"], "it suppresses the default one"


def test_a_model_that_is_not_known_has_no_profiles():
    assert known_profiles("org/never-heard-of") == {}


# --- extends ----------------------------------------------------------------------------------------------------------


def test_a_profile_that_extends_has_the_other_s_options_unless_it_has_its_own():
    profiles = {
        "default": Profile(options={"normalize": True, "is_query": True}),
        "same": Profile(extends="default"),
        "other": Profile(extends="default", options={"normalize": False}),
        "inherits": Profile(extends="built-in"),
    }
    assert flatten(profiles, {"built-in": {"output_dtype": "int8"}}) == {
        "default": {"normalize": True, "is_query": True},
        "same": {"normalize": True, "is_query": True},
        "other": {"normalize": False},
        "inherits": {"output_dtype": "int8"},
    }


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ({"a": Profile(extends="b")}, "profile 'a': it extends 'b', which is not a profile of this model"),
        (
            {"a": Profile(extends="b"), "b": Profile(extends="c"), "c": Profile()},
            "profile 'a': it extends 'b', which itself extends another profile",
        ),
        ({"a": Profile(extends="a")}, "which itself extends another profile"),
        ({"a b": Profile()}, "profile 'a b': a name has 1 to 64"),
        ({"a": Profile(options={"normalise": True})}, "unknown option 'normalise'; did you mean normalize?"),
        ({"a": Profile(options={"normalize": 1})}, "Expected `bool | null`, got `int`"),
        ({"a": Profile(options={"lora": "x"})}, "does not support option 'lora'"),
        ({"a": Profile(options={"smve": {}})}, "does not support option 'smve'"),
        ({"a": Profile(options={"muvera": {"seed": "x"}})}, "Expected `int`, got `str` - at `options.muvera.seed`"),
        ({"a": Profile(options={"query_template": "{x}"})}, "Unknown template placeholder '{x}'"),
        ({"a": Profile(options={"output_dtype": "int4"})}, "unknown output_dtype 'int4'"),
        ({"a": Profile(options={"output_types": ["tokens"]})}, "output_types is ['tokens']"),
        ({"a": Profile(options={"output_types": []})}, "output_types is []"),
        ({"a": Profile(options={"overflow_policy": "cut"})}, "Invalid overflow_policy 'cut'"),
        ({"a": Profile(options={"max_seq_length": 0})}, "Expected `int` >= 1"),
    ],
)
def test_a_profile_that_no_request_could_use_is_refused(profiles, message):
    with pytest.raises(BadRequest) as caught:
        flatten(profiles, {})
    assert message in caught.value.message


@pytest.mark.parametrize("name", ["score_mode", "threshold", "hypothesis_template"])
def test_a_profile_carries_options_that_their_operation_judges(name):
    assert flatten({"a": Profile(options={name: "x"})}, {}) == {"a": {name: "x"}}


# --- entries ----------------------------------------------------------------------------------------------------------


def card_with(**profiles) -> ModelCard:
    return ModelCard(id="org/m", kind="encoder", profiles=profiles)


def test_every_profile_but_the_default_is_an_entry_of_its_own():
    card = card_with(sparse={"output_types": ["sparse"]}, default={"normalize": True})
    assert entry_ids(card.id, card.profiles) == ["org/m", "org/m:sparse"]
    own, sparse = entry_cards(card)
    assert own is card
    assert (sparse.id, sparse.profiles) == ("org/m:sparse", {"default": {"output_types": ["sparse"]}})


def test_a_model_without_a_default_profile_is_offered_as_its_profiles_only():
    assert [card.id for card in entry_cards(card_with(a={}, b={}))] == ["org/m:a", "org/m:b"]


def test_an_entry_that_encodes_multivectors_gives_dense_vectors():
    options = {"muvera": {"projection_dim": 8, "final_projection_dim": 4096}, "output_types": ["dense"]}
    late = ModelCard(
        id="org/m", kind="encoder", outputs=("multivector", "score"), dims={"multivector": 128},
        profiles={"default": {}, "muvera": options},
    )  # fmt: skip
    own, entry = entry_cards(late)
    assert (own.outputs, own.dims) == (late.outputs, late.dims)
    assert (entry.outputs, entry.dims["dense"]) == (("dense", "multivector", "score"), 4096)


def test_a_profile_that_encodes_multivectors_is_for_models_that_give_them():
    options = {"muvera": {}, "output_types": ["dense"]}
    assert stub("a=stub:multivector=4", profiles={"x": options}).profiles == {"x": options}
    with pytest.raises(ModelLoadFailed, match=r"profile 'x' is for output 'multivector'; the model has dense"):
        stub("a=stub:", profiles={"x": options})


def test_a_model_without_profiles_is_one_entry():
    card = card_with()
    assert entry_cards(card) == [card]
    assert entry_ids("org/m", {}) == ["org/m"]


def test_entries_lead_to_their_model():
    assert (model_of("org/m"), model_of("org/m:a")) == ("org/m", "org/m")
    assert (fold_default("org/m:default"), fold_default("org/m:a"), fold_default("org/m")) == (
        "org/m", "org/m:a", "org/m",
    )  # fmt: skip


# --- cards ------------------------------------------------------------------------------------------------------------


def stub(text: str, **own) -> ModelCard:
    spec = parse_model_spec(text)
    return make_card(type(spec)(id=spec.id, stub=spec.stub, **own), "")


def test_own_profiles_replace_built_in_ones_of_the_same_name():
    card = stub("BAAI/bge-m3=stub:dense=4,sparse=9", profiles={"sparse": {"output_dtype": "float16"}})
    assert card.profiles == {"default": {}, "sparse": {"output_dtype": "float16"}}, "multivector is not to be had"


def test_an_own_profile_for_an_output_that_the_model_has_not_is_refused():
    with pytest.raises(ModelLoadFailed, match=r"profile 'sparse' is for output 'sparse'; the model has dense"):
        stub("a=stub:", profiles={"sparse": {"output_types": ["sparse"]}})


@pytest.mark.parametrize(
    ("own", "default", "expected"),
    [(None, "auto", "auto"), (None, "int8", "int8"), ("auto", "int8", "auto"), ("int8", "auto", "int8")],
)
def test_a_model_s_own_format_of_weights_goes_before_the_setting(own, default, expected):
    spec = ModelSpec(id="a", encoder_weights=own, default_encoder_weights=default)
    assert complete_card(ModelCard(id="a", kind="encoder"), spec).encoder_weights == expected


def test_a_format_of_weights_is_for_encoders():
    with pytest.raises(
        ModelLoadFailed, match="encoder_weights is for encoders of texts and classifiers, not for a stub"
    ):
        stub("a=stub:", encoder_weights="int8")
    assert stub("a=stub:", default_encoder_weights="int8").encoder_weights == "auto"


def test_token_ids_are_accepted_where_the_operator_says_so():
    card = ModelCard(id="a", kind="encoder", tokenizer_file="t.json")
    assert not complete_card(card, ModelSpec(id="a")).accept_token_ids
    assert complete_card(card, ModelSpec(id="a", accept_token_ids=True)).accept_token_ids


def test_token_ids_are_for_models_that_turn_them_into_vectors():
    with pytest.raises(ModelLoadFailed, match="accept_token_ids is for models that give dense vectors of token ids"):
        stub("a=stub:", accept_token_ids=True)
    reranker = ModelCard(id="a", kind="cross-encoder", tokenizer_file="t.json", outputs=("score",))
    with pytest.raises(ModelLoadFailed, match="not for a cross-encoder"):
        complete_card(reranker, ModelSpec(id="a", accept_token_ids=True))


def test_a_maximum_length_only_lowers_the_model_s():
    card = stub("a=stub:max_tokens=100", max_sequence_length=10)
    assert (card.max_sequence_length, card.stub.max_tokens) == (10, 10)
    with pytest.raises(ModelLoadFailed, match="max_sequence_length is 101, but its own is 100"):
        stub("a=stub:max_tokens=100", max_sequence_length=101)


def test_a_maximum_length_holds_for_queries_that_are_filled_up(monkeypatch):
    late = LateInteraction(query_length=32, expand_to=32)
    known = ModelCard(id="a", kind="encoder", max_sequence_length=512, late=late)
    monkeypatch.setattr("sie.catalog.cards.stub_card", lambda _spec: known)
    late = stub("a=stub:", max_sequence_length=20).late
    assert (late.query_length, late.document_length, late.expand_to) == (20, 20, 20)


def _dense(**values) -> ModelCard:
    return ModelCard(id=values.pop("id", "org/model"), kind="encoder", dims={"dense": 768}, **values)


def test_shorter_dimensions_are_those_that_someone_declares():
    known = complete_card(_dense(id="Nomic-AI/nomic-embed-text-v1.5"), ModelSpec(id="nomic-ai/nomic-embed-text-v1.5"))
    assert known.matryoshka == known_dimensions("nomic-ai/nomic-embed-text-v1.5") == (64, 128, 256, 512)
    assert complete_card(_dense(), ModelSpec(id="org/model")).matryoshka is False
    assert complete_card(_dense(matryoshka=(32,)), ModelSpec(id="org/model")).matryoshka == (32,)
    assert complete_card(_dense(matryoshka=(32,)), ModelSpec(id="org/model", dimensions=(64,))).matryoshka == (64,)
    assert complete_card(_dense(matryoshka=True), ModelSpec(id="org/model", dimensions=False)).matryoshka is False
    with pytest.raises(ModelLoadFailed, match="dimensions to 1024, but its vectors have 768"):
        complete_card(_dense(), ModelSpec(id="org/model", dimensions=(1024, 64)))
    scorer = ModelCard(id="org/model", kind="cross-encoder", outputs=("score",))
    with pytest.raises(ModelLoadFailed, match="without dense vectors"):
        complete_card(scorer, ModelSpec(id="org/model", dimensions=True))
