"""Settings of tokenizer_config.json that override a tokenizer.json: texts are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs import tokenize
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from tests.tiny_models import save_classifier

TEXTS = ["W1 w2 About", "\u00e9 w3", "\u4e2d\u6587 w4"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "about", "About", "w1", "w2", "w3", "w4", "W1", "e", "\u00e9", "\u4e2d", "\u4e2d\u6587"]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A bare BERT whose tokenizer.json lowercases."""
    directory = save_classifier(tmp_path / "model", transformers.AutoModel, ["a"])
    make: Any = transformers.models.bert.BertTokenizer
    make(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(directory)
    return directory


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def card_of(directory: Path) -> ModelCard:
    request = Request(spec=ModelSpec(id="m", directory=str(directory)), cache_dir=str(directory.parent / "cache"))
    return prepare(request, lambda _fraction, _text: None)


def read(card: ModelCard) -> list[list[int]]:
    tokenizer = tokenize.Tokenizer.load(card)
    return [tokenizer.encode_texts([text])[0].tolist() for text in TEXTS]


@pytest.mark.parametrize(
    "name", ["BertTokenizer", "DistilBertTokenizerFast", "MPNetTokenizer", "PreTrainedTokenizerFast", None]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}],
    ids=str,
)  # fmt: skip
def test_a_tokenizer_of_bert_reads_letters_as_its_configuration_says(
    directory: Path, name: str | None, settings: dict[str, Any]
):
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "bos_token": None, "eos_token": None}
    change(directory / "tokenizer_config.json", **special, tokenizer_class=name, **settings)
    load: Any = transformers.AutoTokenizer.from_pretrained
    assert read(card_of(directory)) == load(directory)(TEXTS)["input_ids"]


def test_a_setting_of_the_wrong_kind_is_refused_by_name(directory: Path):
    change(directory / "tokenizer_config.json", do_lower_case=None)
    with pytest.raises(ModelLoadFailed, match=r"tokenizer_config.json sets do_lower_case to None"):
        card_of(directory)


def test_an_encoder_that_cuts_the_beginning_of_texts_is_refused(directory: Path):
    change(directory / "tokenizer_config.json", truncation_side="left")
    with pytest.raises(ModelLoadFailed, match=r"truncation_side in tokenizer_config.json is 'left'"):
        card_of(directory)


def test_a_tokenizer_json_that_cuts_the_beginning_of_texts_is_refused(directory: Path):
    truncation = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    change(directory / "tokenizer.json", truncation=truncation)
    with pytest.raises(ModelLoadFailed, match=r"truncation in tokenizer.json is 'Left'"):
        card_of(directory)
    change(directory / "tokenizer_config.json", truncation_side="right")
    assert read(card_of(directory))


def test_a_table_of_token_vectors_reads_its_tokenizer_json_alone(directory: Path):
    save_file({"embedding.weight": torch.zeros(len(WORDS), 4)}, directory / "model.safetensors")
    modules = [{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    change(directory / "tokenizer_config.json", do_lower_case=False, truncation_side="left")
    assert card_of(directory).tokenizer_file == str(directory / "tokenizer.json")
