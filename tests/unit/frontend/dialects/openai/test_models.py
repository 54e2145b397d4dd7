from __future__ import annotations

import json

import anthropic
import msgspec
import pytest

from sie.frontend.dialects.openai.models import model_body, model_info, model_not_found_body, models_body
from sie.values.card import ModelCard
from sie.values.errors import NotFound
from sie.values.fallbacks import Fallback
from sie.values.generate import GenerateRule

CARD = ModelCard(id="org/m", kind="encoder", dims={"dense": 384}, max_sequence_length=256, revision="abc")


def test_a_card_serves_sie_openai_and_anthropic_readers():
    info = json.loads(model_body(model_info(CARD, "loaded", created=17)))
    profile = info["profiles"].pop("default")
    assert (profile["is_default"], profile["output_types"]) == (True, ["dense"])
    assert profile["output_similarity"] == {"dense": "cosine"}
    assert info == {
        "id": "org/m", "object": "model", "created": 17, "owned_by": "local", "type": "model", "display_name": "org/m",
        "created_at": "1970-01-01T00:00:17Z", "lifecycle": "active", "name": "org/m", "inputs": ["text"], "outputs": ["dense"], "dims": {"dense": 384}, "loaded": True,
        "max_sequence_length": 256, "profiles": {}, "state": "loaded", "last_error": None, "revision": "abc",
        "capabilities": None, "routing": {"policy": None, "upstream_kind": None}, "status": "loaded", "root": "org/m",
    }  # fmt: skip


def test_anthropic_s_type_of_a_model_is_complete():
    read = anthropic.types.ModelInfo.model_validate(model_info(CARD, "loaded", created=17))
    assert (read.created_at.timestamp(), read.lifecycle, read.type) == (17, "active", "model")


def test_settings_of_generation_without_an_effect_are_listed():
    rule = GenerateRule(context_length=8, unserved_settings=("num_beams",))
    assert model_info(msgspec.structs.replace(CARD, generate=rule))["unserved_settings"] == ["num_beams"]
    assert "unserved_settings" not in model_info(CARD)


def test_fallbacks_are_listed_with_their_reasons():
    fallbacks = (Fallback("no_graphs", "it waits for the device"),)
    assert model_info(CARD, fallbacks=fallbacks)["fallbacks"] == [
        {"name": "no_graphs", "reason": "it waits for the device"}
    ]
    assert "fallbacks" not in model_info(CARD)


def test_similarity_is_a_map_from_output_to_metric():
    every = ("dense", "sparse", "multivector", "score", "json")
    card = ModelCard(
        id="m", kind="encoder", outputs=every, dims={"dense": 8, "sparse": 90, "multivector": 8}, similarity="dot",
        profiles={"default": {}, "late": {"output_types": ["multivector"]}},
    )  # fmt: skip
    profiles = model_info(card)["profiles"]
    assert profiles["default"]["output_similarity"] == {"dense": "dot", "sparse": "dot", "multivector": "maxsim"}
    assert profiles["late"]["output_similarity"] == {"multivector": "maxsim"}
    late = ModelCard(id="m", kind="encoder", outputs=("multivector",), dims={"multivector": 8}, similarity="maxsim")
    assert model_info(late)["profiles"]["default"]["output_similarity"] == {"multivector": "maxsim"}


def test_a_format_of_weights_is_shown_where_it_was_asked_for():
    assert "encoder_weights" not in model_info(CARD)
    assert model_info(msgspec.structs.replace(CARD, encoder_weights="int8"))["encoder_weights"] == "int8"


def test_a_model_that_takes_token_ids_says_so():
    assert "accept_token_ids" not in model_info(CARD)
    assert model_info(msgspec.structs.replace(CARD, accept_token_ids=True))["accept_token_ids"] is True


def test_every_profile_is_shown_with_its_outputs():
    card = ModelCard(
        id="m", kind="encoder", outputs=("dense", "sparse"), profiles={"default": {}, "s": {"output_types": ["sparse"]}}
    )
    profiles = model_info(card)["profiles"]
    assert {name: (profile["is_default"], profile["output_types"]) for name, profile in profiles.items()} == {
        "default": (True, ["dense", "sparse"]),
        "s": (False, ["sparse"]),
    }


def test_loaded_is_true_in_one_state_only():
    states = ("available", "loading", "loaded", "unloading", "failed")
    assert [model_info(CARD, state)["loaded"] for state in states] == [False, False, True, False, False]


def test_the_default_model_is_an_entry_of_data_only():
    infos = [model_info(CARD), model_info(ModelCard(id="b", kind="stub"))]
    body = json.loads(models_body(infos, default="org/m"))
    assert [entry["id"] for entry in body["models"]] == ["org/m", "b"]
    assert [entry["id"] for entry in body["data"]] == ["org/m", "b", "default"]
    assert (body["object"], body["has_more"], body["first_id"], body["last_id"]) == ("list", False, "org/m", "default")
    assert [entry["id"] for entry in json.loads(models_body(infos))["data"]] == ["org/m", "b"]


def test_an_empty_list_has_null_ends():
    body = json.loads(models_body([]))
    assert (body["models"], body["data"], body["first_id"], body["last_id"]) == ([], [], None, None)


def test_not_found_speaks_to_both_readers():
    body = json.loads(model_not_found_body(NotFound("Model 'x' not found")))
    assert body["detail"] == {"code": "MODEL_NOT_FOUND", "message": "Model 'x' not found"}
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["message"] == "Model 'x' not found"


@pytest.mark.parametrize(
    ("state", "is_reloading", "status"),
    [
        ("available", False, "unloaded"), ("loading", False, "reloading"), ("loaded", False, "loaded"),
        ("unloading", False, "unloaded"), ("failed", False, "unloaded"), ("unloading", True, "reloading"),
        ("available", True, "reloading"), ("loaded", True, "loaded"), ("failed", True, "unloaded"),
    ],
)  # fmt: skip
def test_a_card_has_what_readers_of_the_generation_api_look_for(state, is_reloading, status):
    rule = GenerateRule(context_length=8, chat_template="{{ tools }}")
    info = model_info(ModelCard(id="g", kind="stub", generate=rule), state, is_reloading=is_reloading)
    assert (info["status"], info["root"], info["tools_available"]) == (status, "g", True)
    info = model_info(CARD, state, is_reloading=is_reloading)
    assert (info["status"], info["root"], "tools_available" in info) == (status, "org/m", False)


def test_the_openai_librarys_type_accepts_a_card():
    types = pytest.importorskip("openai.types")
    model = types.Model.model_validate(model_info(CARD, created=17))
    assert (model.id, model.created, model.object) == ("org/m", 17, "model")
