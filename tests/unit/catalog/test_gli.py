from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.hub import ALLOWED
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed
from sie.values.extract import Gliclass, Gliner

BERT = {"model_type": "bert", "max_position_embeddings": 512, "vocab_size": 100}
DEBERTA = {"model_type": "deberta-v2", "max_position_embeddings": 512, "vocab_size": 100}
GLINER = {"model_name": "someone/encoder", "max_len": 300, "encoder_config": DEBERTA}
GLICLASS = {
    "model_type": "GLiClass",
    "encoder_config": BERT,
    "class_token_index": 97,
    "architecture_type": "uni-encoder",
}
UNLIMITED = {"model_max_length": 10**30}


@pytest.fixture
def read(write_files: Any) -> Any:
    def run(files: dict[str, Any]) -> Any:
        return read_card(ModelSpec(id="test/model"), str(write_files({"config.json": None, **files})))

    return run


def refusal(read: Any, files: dict[str, Any]) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read(files)
    assert caught.value.extras["error_class"] == "CONFIG"
    return caught.value.message


def test_gliner_card_says_how_much_is_read_at_once(read: Any) -> None:
    card = read({"gliner_config.json": GLINER, "tokenizer_config.json": UNLIMITED})
    assert (card.kind, card.architecture, card.outputs) == ("extractor", "GLiNER", ("extract",))
    assert card.extract == Gliner(max_words=300)
    assert card.tokenizer_file.endswith("tokenizer.json")
    assert card.max_sequence_length is None
    assert "relation_labels" not in card.extract.options


def test_gliner_encoder_with_positions_has_a_limit(read: Any) -> None:
    gliner = {**GLINER, "encoder_config": BERT}
    assert read({"gliner_config.json": gliner, "tokenizer_config.json": UNLIMITED}).max_sequence_length == 510
    assert read({"gliner_config.json": gliner}).max_sequence_length == 256  # the tokenizer's own


def test_gliner_relations_and_bi_encoder_are_told_apart(read: Any) -> None:
    rule = read({"gliner_config.json": {**GLINER, "relations_layer": "dot"}}).extract
    assert rule.relations
    assert {"relation_labels", "relation_threshold"} <= rule.options
    apart = {
        "gliner_config.json": {**GLINER, "labels_encoder": "someone/labels", "labels_encoder_config": BERT},
        "labels_tokenizer/tokenizer.json": {},
        "labels_tokenizer/tokenizer_config.json": {},
    }
    assert read(apart).extract.reads_labels_apart


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder_config": None}, "no encoder_config.*--convert"),
        ({"labels_encoder": "a/b"}, "labels_encoder_config"),
        ({"labels_encoder": "a/b", "labels_encoder_config": BERT}, "no directory labels_tokenizer"),
        ({"labels_decoder": "gpt2"}, "decoder are not served"),
        ({"model_type": "gliner_streaming_span"}, "decoder are not served"),
        ({"precomputed_prompts_mode": True}, "precomputed_prompts_mode"),
        ({"words_splitter_type": "stanza"}, "'stanza'"),
        ({"encoder_config": {**BERT, "auto_map": {"AutoModel": "a.B"}}}, "code of its own"),
    ],
)
def test_gliner_that_cannot_be_served_is_refused(read: Any, changes: dict[str, Any], reason: str) -> None:
    message = refusal(read, {"gliner_config.json": {**GLINER, **changes}})
    assert re.search(reason, message)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"tokenizer_config.json": None}, "no tokenizer_config.json"),
        ({"tokenizer_config.json": {"auto_map": {}}}, "code of its own"),
        ({"adapter_config.json": {}}, "adapter"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, "pytorch_model.bin"),
    ],
)
def test_files_that_a_library_would_look_for_elsewhere_are_needed(
    read: Any, files: dict[str, Any], reason: str
) -> None:
    for own in ({"gliner_config.json": GLINER}, {"config.json": GLICLASS}):
        assert reason in refusal(read, {**own, **files})


def test_gliclass_card_says_what_a_sequence_holds(read: Any) -> None:
    card = read({"config.json": {**GLICLASS, "prompt_first": True}, "tokenizer_config.json": {}})
    assert (card.kind, card.architecture, card.outputs) == ("extractor", "GLiClass", ("extract",))
    assert card.extract == Gliclass(label_token_id=97, prompt_first=True)
    assert card.max_sequence_length == 510
    fixed = {**GLICLASS, "encoder_config": DEBERTA, "max_labels_alloc": "fixed", "max_num_classes": 7}
    card = read({"config.json": fixed, "tokenizer_config.json": UNLIMITED})
    assert (card.extract.max_labels, card.max_sequence_length) == (7, 1024)


GLINER2 = {"config.json": {"model_type": "extractor"}, "encoder_config/config.json": BERT}


@pytest.mark.parametrize(
    ("config", "relations"),
    [
        ({}, True),
        ({"architecture": "boundary"}, False),
        ({"architecture": "boundary", "config_version": 3}, True),
        ({"architecture": " Boundary", "config_version": 3, "boundary_head": {"enable_relations": False}}, False),
        ({"architecture": "boundary", "config_version": "x", "boundary_head": 7, "max_len": -1}, False),
    ],
)
def test_gliner2_card_says_whether_it_finds_relations(read: Any, config: dict[str, Any], relations: bool) -> None:
    card = read({**GLINER2, "config.json": {"model_type": "extractor", **config}, "tokenizer_config.json": UNLIMITED})
    assert card.extract == Gliner(max_words=384, relations=relations, library="gliner2")
    assert card.max_sequence_length == 510
    assert "label_groups" in card.extract.options
    assert ("relation_labels" in card.extract.options) == relations


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"encoder_config/config.json": None}, "no encoder_config/config.json"),
        ({"encoder_config/config.json": {**BERT, "auto_map": {"AutoModel": "a.B"}}}, "code of its own"),
        ({"tokenizer_config.json": {"auto_map": {}}}, "code of its own"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, "pytorch_model.bin"),
    ],
)
def test_gliner2_that_cannot_be_served_is_refused(read: Any, files: dict[str, Any], reason: str) -> None:
    assert reason in refusal(read, {**GLINER2, **files})


@pytest.mark.parametrize("architecture", ["bi-encoder", "bi-encoder-fused", "encoder-decoder", "decoder-kv"])
def test_gliclass_of_another_architecture_is_refused(read: Any, architecture: str) -> None:
    assert architecture in refusal(read, {"config.json": {**GLICLASS, "architecture_type": architecture}})


@pytest.mark.parametrize(
    ("files", "family"),
    [
        ({"gliformer_config.json": {}}, "GLiFormer"),
    ],
)
def test_their_relatives_are_refused_by_name(read: Any, files: dict[str, Any], family: str) -> None:
    assert f"{family} models are not served by this version" in refusal(read, files)


@pytest.mark.parametrize("name", ["gliner_config.json", "labels_tokenizer/tokenizer.json"])
def test_what_they_need_is_fetched(name: str) -> None:
    assert any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED)
