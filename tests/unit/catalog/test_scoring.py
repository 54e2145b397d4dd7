from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sie.catalog.cards import make_card
from sie.catalog.rerankers import Reranker
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


def _read(directory: Path, model_id: str = "test/model", reranker: Reranker | None = None) -> ModelCard:
    return make_card(ModelSpec(id=model_id, reranker=reranker), str(directory))


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
        (_config(sbert_ce_default_activation_function="evil.Activation"), "evil.Activation"),
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


CHAT = {"tokenizer_config.json": {"chat_template": "{{ messages }}"}}
TEXT_ONLY = {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (CHAT, True),
        ({"chat_template.jinja": b"{{ messages }}"}, True),
        ({**CHAT, "sentence_bert_config.json": TEXT_ONLY}, False),
        ({}, False),
    ],
)
def test_classifier_reads_chats_where_sentence_transformers_does(
    write_files: Any, files: dict[str, Any], expected: bool
) -> None:
    card = _read(write_files({**_config(), **files}))
    assert card.score is not None
    assert card.score.from_chat is expected


DESCRIBED = Reranker(parts=("{query}", "{document}"), true_token="yes")


def test_operators_description_replaces_the_checkpoints_own(write_files: Any) -> None:
    files = {"config.json": CAUSAL, "tokenizer.json": _tokenizer("<unk>", "no", "yes")}
    card = _read(write_files(files), QWEN, DESCRIBED)
    assert card.score is not None
    assert (card.score.false_token_id, card.max_sequence_length) == (None, 256)
    chat = _read(write_files({**_config(), **CHAT}), reranker=Reranker(parts=("{query} {document}",)))
    assert chat.score is not None
    assert (chat.kind, chat.score.from_chat, chat.score.token_types) == ("cross-encoder", False, False)


@pytest.mark.parametrize(
    ("config", "entry", "part"),
    [
        (CAUSAL, Reranker(parts=("{query}", "{document}")), "needs a true_token"),
        (CAUSAL, Reranker(parts=("{query}", "{document}"), true_token="Ja"), "no token 'Ja'"),
        ({**CONFIG, "id2label": {"0": "a", "1": "b"}}, DESCRIBED, "2 labels"),
    ],
)
def test_description_that_does_not_fit_is_refused(
    write_files: Any, config: dict[str, Any], entry: Reranker, part: str
) -> None:
    files = {"config.json": config, "tokenizer.json": _tokenizer("<unk>", "no", "yes")}
    with pytest.raises(ModelLoadFailed, match=part):
        _read(write_files(files), reranker=entry)


def test_own_modules_come_before_an_entry_for_bare_checkpoints(write_files: Any) -> None:
    files = {"config.json": CAUSAL, "tokenizer.json": _tokenizer("<unk>", "no", "yes")}
    bare = _read(write_files(files), "tencent/R3-rerank-0.6b")
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
    ]
    own = {**files, "modules.json": modules, "1_LogitScore/config.json": {"true_token_id": 2, "false_token_id": 1}}
    saved = _read(write_files(own), "tencent/R3-rerank-0.6b")
    assert bare.score is not None
    assert saved.score is not None
    assert bare.score.template is not None
    assert (saved.score.template, saved.score.from_chat) == (None, True)
