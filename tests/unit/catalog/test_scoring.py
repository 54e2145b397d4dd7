from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "id2label": {"0": "LABEL_0"},
}
CAUSAL = {**CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40_960}
QWEN = "Qwen/Qwen3-Reranker-0.6B"


def _config(**changes: Any) -> dict[str, Any]:
    return {"config.json": {**CONFIG, **changes}}


def _read(directory: Path, model_id: str = "test/model") -> ModelCard:
    return read_card(ModelSpec(id=model_id), str(directory))


def _tokenizer(*words: str) -> bytes:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).to_str().encode()


def test_classifier_with_one_label_is_a_cross_encoder(write_files: Any) -> None:
    card = _read(write_files(_config()))
    assert (card.kind, card.outputs, card.dims) == ("cross-encoder", ("score",), {})
    assert (card.architecture, card.max_sequence_length) == ("BertForSequenceClassification", 256)
    assert card.score is not None
    assert (card.score.activation, card.score.token_types, card.score.template) == ("Sigmoid", True, None)


def test_classifier_between_a_transformer_and_a_pooling_is_an_encoder(write_files: Any) -> None:
    files = {
        **_config(),
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    }
    assert _read(write_files(files)).outputs == ("dense",)


@pytest.mark.parametrize(
    ("tokenizer", "type_vocab_size", "expected"),
    [
        ({"tokenizer_class": "BertTokenizer"}, 2, True),
        ({"tokenizer_class": "BertTokenizer"}, 1, False),
        ({"tokenizer_class": "BertTokenizer"}, None, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, 2, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, 2, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, 2, False),
    ],
)
def test_token_types_are_read_where_the_tokenizer_gives_them(
    write_files: Any, tokenizer: dict[str, Any], type_vocab_size: int | None, expected: bool
) -> None:
    card = _read(write_files({**_config(type_vocab_size=type_vocab_size), "tokenizer_config.json": tokenizer}))
    assert card.score is not None
    assert card.score.token_types is expected


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (_config(id2label={"0": "a", "1": "b", "2": "c"}), "3 labels"),
        ({"config.json": {key: value for key, value in CONFIG.items() if key != "id2label"}}, "2 labels"),
        (_config(sbert_ce_default_activation_function="evil.Activation"), "evil.Activation"),
        ({**_config(), "tokenizer_config.json": {"chat_template": "{{ messages }}"}}, "chat template"),
        ({**_config(), "chat_template.jinja": b"{{ messages }}"}, "chat template"),
        ({**_config(), "config_sentence_transformers.json": {"default_prompt_name": "q"}}, "not one of its prompts"),
        ({**_config(), "sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "fill-mask"),
        ({**_config(), "model.safetensors": None}, "model.safetensors"),
    ],
)
def test_what_cannot_be_scored_exactly_is_refused(write_files: Any, files: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadFailed, match=part) as caught:
        _read(write_files(files))
    assert caught.value.extras["error_class"] == "CONFIG"


def test_activation_of_its_own_file_wins(write_files: Any) -> None:
    card = _read(
        write_files(
            {
                **_config(sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh"),
                "config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"},
            }
        )
    )
    assert card.score is not None
    assert card.score.activation == "Identity"


@pytest.mark.parametrize("model_id", [QWEN, QWEN.lower(), "Qwen/Qwen3-Reranker-8B"])
def test_causal_reranker_is_known_by_its_id(write_files: Any, model_id: str) -> None:
    files = {
        "config.json": CAUSAL,
        "tokenizer.json": _tokenizer("<unk>", "no", "yes"),
        "tokenizer_config.json": {"model_max_length": 131_072, "chat_template": "{{ messages }}"},
    }
    card = _read(write_files(files), model_id)
    assert (card.kind, card.outputs, card.max_sequence_length) == ("causal-reranker", ("score",), 8192)
    assert card.score is not None
    assert (card.score.true_token_id, card.score.false_token_id) == (2, 1)
    assert _read(write_files(files), "Qwen/Qwen3-0.6B").kind == "generator"


def test_causal_reranker_without_its_tokens_is_refused(write_files: Any) -> None:
    files = {"config.json": CAUSAL, "tokenizer.json": _tokenizer("<unk>", "no")}
    with pytest.raises(ModelLoadFailed, match="'yes'"):
        _read(write_files(files), QWEN)
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json"):
        _read(write_files({**files, "tokenizer.json": json.dumps({}).encode()}), QWEN)
