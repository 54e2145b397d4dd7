from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.cards import make_card
from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def _read(directory: Path) -> ModelCard:
    return read_card(ModelSpec(id="test/model"), str(directory))


def _refusal(directory: Path) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        _read(directory)
    assert "test/model" in caught.value.message
    return caught.value


def _modules(*kinds: str, style: str = "sentence_transformers.models.{}") -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": style.format(kind)}
        for i, kind in enumerate(("Transformer", *kinds))
    ]


def test_bare_checkpoint_is_mean_pooled(write_files: Any) -> None:
    directory = write_files()
    card = _read(directory)
    assert card.kind == "encoder"
    assert card.directory == str(directory)
    assert card.tokenizer_file == str(directory / "tokenizer.json")
    assert (card.architecture, card.vocab_size, card.dims) == ("BertModel", 100, {"dense": 32})
    assert [(step.kind, step.config) for step in card.pipeline] == [("pooling", {"modes": ["mean"]})]
    assert (card.normalize, card.strip, card.lowercase, card.similarity) == (False, False, False, "cosine")


@pytest.mark.parametrize(("is_causal", "mode"), [(None, "lasttoken"), (True, "lasttoken"), (False, "mean")])
def test_bare_causal_checkpoint_is_pooled_by_its_last_token(write_files: Any, is_causal: Any, mode: str) -> None:
    config = {**CONFIG, "architectures": ["Qwen3ForCausalLM"]}
    if is_causal is not None:
        config["is_causal"] = is_causal
    assert _read(write_files({"config.json": config})).pipeline[0].config == {"modes": [mode]}


@pytest.mark.parametrize(
    "style",
    [
        "sentence_transformers.models.{}",
        "sentence_transformers.models.folder.{}",
        "sentence_transformers.base.modules.whatever.{}",
        "sentence_transformers.sentence_transformer.modules.whatever.{}",
    ],
)
def test_old_and_new_module_names_are_known(write_files: Any, style: str) -> None:
    files = {
        "modules.json": _modules("Pooling", "Dense", "Normalize", style=style),
        "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": ["cls", "mean"]},
        "2_Dense/config.json": {
            "in_features": 64,
            "out_features": 16,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "2_Dense/model.safetensors": b"weights",
    }
    card = _read(write_files(files))
    assert [step.kind for step in card.pipeline] == ["pooling", "dense"]
    assert card.dims == {"dense": 16}
    assert card.normalize


def test_legacy_pooling_flags_are_put_in_the_order_of_the_vectors(write_files: Any) -> None:
    config = {
        "word_embedding_dimension": 32,
        "pooling_mode_lasttoken": True,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": True,
        "pooling_mode_max_tokens": False,
    }
    card = _read(write_files({"modules.json": _modules("Pooling"), "1_Pooling/config.json": config}))
    assert card.pipeline[0].config == {"modes": ["cls", "mean", "lasttoken"]}
    assert card.dims == {"dense": 96}


@pytest.mark.parametrize(
    ("tokenizer", "positions", "sentence", "limit"),
    [
        ({"model_max_length": 256}, 512, None, 256),
        ({"model_max_length": 512}, 128, None, 128),
        ({"model_max_length": 1e30}, 512, None, 512),
        ({"model_max_length": 1e30}, -1, None, None),
        ({"max_len": 77}, 512, None, 77),
        ({}, 512, None, 512),
        ({}, -1, None, None),
        ({"model_max_length": 256}, 512, {"max_seq_length": 64}, 64),
        ({"model_max_length": 256}, 512, {"max_seq_length": 1024}, 1024),
        ({"model_max_length": 256}, 512, {"max_seq_length": None}, 256),
        ({"model_max_length": 256}, 512, {"max_seq_length": 64, "tokenizer_args": {"model_max_length": 32}}, 32),
    ],
)
def test_maximum_length_follows_sentence_transformers(
    write_files: Any, tokenizer: dict[str, Any], positions: int, sentence: Any, limit: int | None
) -> None:
    files = {
        "tokenizer_config.json": tokenizer,
        "config.json": {**CONFIG, "max_position_embeddings": positions},
        "sentence_bert_config.json": sentence,
    }
    assert _read(write_files(files)).max_sequence_length == limit


def test_older_name_of_the_transformer_settings_is_read(write_files: Any) -> None:
    card = _read(write_files({"sentence_roberta_config.json": {"max_seq_length": 99, "do_lower_case": True}}))
    assert (card.max_sequence_length, card.lowercase) == (99, True)


def test_prompts_and_similarity_are_read(write_files: Any) -> None:
    sentence = {
        "prompts": {"query": "query: ", "document": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    card = _read(write_files({"config_sentence_transformers.json": sentence}))
    assert card.prompts == {"query": "query: ", "document": ""}
    assert (card.default_prompt, card.similarity) == ("query: ", "dot")


@pytest.mark.parametrize(
    ("config", "allowed"),
    [({}, False), ({"is_matryoshka": True}, True), ({"matryoshka_dimensions": [8, 16]}, (8, 16))],
)
def test_shorter_vectors_are_allowed_where_the_checkpoint_says_so(
    write_files: Any, config: dict[str, Any], allowed: bool | tuple[int, ...]
) -> None:
    assert _read(write_files({"config.json": {**CONFIG, **config}})).matryoshka == allowed


def test_checkpoint_without_a_tokenizer_json_leaves_it_open(write_files: Any) -> None:
    assert _read(write_files({"tokenizer.json": None})).tokenizer_file == ""


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.ckpt"])
def test_pickled_weights_are_refused_by_name(write_files: Any, name: str) -> None:
    error = _refusal(write_files({"model.safetensors": None, name: b"pickle"}))
    assert name in error.message
    assert error.extras == {"error_class": "CONFIG"}


def test_pickled_weights_beside_safetensors_are_left_alone(write_files: Any) -> None:
    assert _read(write_files({"pytorch_model.bin": b"pickle"})).kind == "encoder"


def test_pickled_weights_of_a_module_are_refused(write_files: Any) -> None:
    files = {
        "modules.json": _modules("Pooling", "Dense"),
        "1_Pooling/config.json": {},
        "2_Dense/config.json": {"in_features": 32, "out_features": 8},
        "2_Dense/pytorch_model.bin": b"pickle",
    }
    assert "2_Dense" in _refusal(write_files(files)).message


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "model-2.safetensors is missing"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not a safetensors file beside it"),
        ({"weight_map": {"a": "pytorch_model-1.bin"}}, "not a safetensors file beside it"),
        ({"weight_map": {}}, "names no weights"),
    ],
)
def test_index_of_shards_is_checked(write_files: Any, index: Any, reason: str) -> None:
    files = {"model.safetensors": None, "model.safetensors.index.json": index, "model-1.safetensors": b"x"}
    assert reason in _refusal(write_files(files)).message


def test_whole_set_of_shards_is_taken(write_files: Any) -> None:
    files = {
        "model.safetensors": None,
        "model.safetensors.index.json": {"weight_map": {"a": "model-1.safetensors"}},
        "model-1.safetensors": b"x",
    }
    assert _read(write_files(files)).kind == "encoder"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": None}, "model_type"),
        ({"config.json": b"{"}, "cannot be read"),
        ({"config.json": b"[" * 100_000}, "cannot be read"),
        ({"config.json": []}, "Expected `object`"),
        ({"config.json": {**CONFIG, "architectures": ["BertForQuestionAnswering"]}}, "not a text encoder"),
        ({"config.json": {"model_type": "vit", "hidden_size": 8}}, "not a text encoder"),
        ({"config.json": {**CONFIG, "vision_config": {}}}, "BertModel reads images beside text"),
        ({"config.json": {**CONFIG, "vision_config": {}, "audio_config": None}}, "BertModel reads images beside text"),
        ({"config.json": {"model_type": "bert", "vocab_size": 9}}, "hidden_size"),
        ({"adapter_config.json": {}}, "adapter"),
        ({"tokenizer_config.json": {"model_max_length": 0.5}}, "maximum sequence length"),
        ({"sentence_bert_config.json": {"transformer_task": "text-generation"}}, "text-generation"),
        ({"sentence_bert_config.json": {"config_kwargs": {"is_causal": False}}}, "config_kwargs"),
        ({"sentence_bert_config.json": {"query_expansion": {"length": 32}}}, "query_expansion"),
        ({"sentence_bert_config.json": {"tokenizer_args": {"add_eos": True}}}, "add_eos"),
        ({"sentence_bert_config.json": {"modality_config": {"text": {"method": "embed"}}}}, "modality_config"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "default_prompt_name"),
        ({"config_sentence_transformers.json": {"truncate_dim": 8}}, "truncate_dim"),
        ({"modules.json": {}}, "Expected `array`"),
        ({"modules.json": []}, "begins with nothing"),
        ({"modules.json": _modules()}, "exactly one Pooling"),
        ({"modules.json": _modules("Pooling", style="my_module.{}")}, "code of its own"),
        ({"modules.json": _modules("Pooling", "LSTM"), "1_Pooling/config.json": {}}, "LSTM"),
        ({"modules.json": _modules("Pooling"), "1_Pooling/config.json": {"embedding_dimension": 8}}, "expects 8"),
        ({"modules.json": _modules("Pooling"), "1_Pooling/config.json": {"pooling_mode": "median"}}, "median"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(write_files: Any, files: dict[str, Any], reason: str) -> None:
    error = _refusal(write_files(files))
    assert reason in error.message
    assert error.extras == {"error_class": "CONFIG"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"in_features": 8, "out_features": 8}, "in_features is 8"),
        ({"in_features": 32}, "out_features is None"),
        ({"in_features": 32, "out_features": 8, "activation_function": "os.system"}, "os.system"),
        ({"in_features": 32, "out_features": 8, "module_input_name": "token_embeddings"}, "token_embeddings"),
    ],
)
def test_dense_layer_that_cannot_be_run_is_refused(write_files: Any, config: dict[str, Any], reason: str) -> None:
    files = {
        "modules.json": _modules("Pooling", "Dense"),
        "1_Pooling/config.json": {},
        "2_Dense/config.json": config,
        "2_Dense/model.safetensors": b"weights",
    }
    assert reason in _refusal(write_files(files)).message


def test_missing_directory_is_not_a_permanent_failure(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "missing")
    assert error.extras == {"error_class": "STORAGE"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_link_out_of_the_directory_is_refused(write_files: Any, tmp_path: Path, name: str) -> None:
    directory = write_files()
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert "leads out" in _refusal(directory).message


@pytest.mark.parametrize("path", ["../outside", "/etc"])
def test_module_outside_the_directory_is_refused(write_files: Any, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").mkdir()
    modules = _modules("Pooling")
    modules[0]["path"] = path
    assert "leads out" in _refusal(write_files({"modules.json": modules})).message


def test_links_of_the_hub_cache_are_followed(write_files: Any, tmp_path: Path) -> None:
    snapshot = write_files(directory=tmp_path / "models--a--b" / "snapshots" / ("0" * 40))
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(os.path.relpath(blobs / path.name, snapshot))
    assert _read(snapshot).kind == "encoder"
    (snapshot / "config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    (snapshot / "config.json").symlink_to(tmp_path / "config.json")
    assert "leads out" in _refusal(snapshot).message


@pytest.mark.parametrize(("pooling", "mode"), [(None, "mean"), ("cls", "cls")])
def test_bare_masked_language_model_has_dense_and_sparse_vectors(write_files: Any, pooling: Any, mode: str) -> None:
    directory = write_files({"config.json": {**CONFIG, "architectures": ["BertForMaskedLM"]}})
    card = make_card(ModelSpec(id="org/model", pooling=pooling), str(directory))
    assert (card.outputs, card.dims) == (("dense", "sparse"), {"dense": 32, "sparse": 100})
    assert card.pipeline[0].config == {"modes": [mode]}
    assert not card.compares


def test_pooling_is_for_checkpoints_that_do_not_say_it(write_files: Any) -> None:
    plain = make_card(ModelSpec(id="org/model", pooling="cls"), str(write_files()))
    assert plain.pipeline[0].config == {"modes": ["cls"]}
    files = {
        "modules.json": [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    }
    with pytest.raises(ModelLoadFailed, match="its own files say how it pools"):
        make_card(ModelSpec(id="org/model", pooling="cls"), str(write_files(files)))
