"""Settings of tokenizer_config.json that override a tokenizer.json: texts are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs import tokenize
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from tests.tiny_models import save_classifier, save_cross_encoder

TEXTS = ["W1 w2 About", "\u00e9 w3", "\u4e2d\u6587 w4"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "about", "About", "w1", "w2", "w3", "w4", "W1", "e", "\u00e9", "\u4e2d", "\u4e2d\u6587"]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A bare BERT whose tokenizer.json lowercases."""
    directory = save_classifier(tmp_path / "model", transformers.AutoModel, ["a"])
    make: Any = transformers.models.bert.BertTokenizer
    make(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(directory)
    return directory


def save_large(directory: Path) -> None:
    """Replace the model with one that has vectors for more tokens than the vocabulary has."""
    models: Any = transformers
    config = models.BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    models.BertModel(config).save_pretrained(directory)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def card_of(directory: Path) -> ModelCard:
    request = Request(spec=ModelSpec(id="m", directory=str(directory)), cache_dir=str(directory.parent / "cache"))
    return prepare(request, lambda _fraction, _text: None)


def read(card: ModelCard, texts: list[str] = TEXTS) -> list[list[int]]:
    tokenizer = tokenize.Tokenizer.load(card)
    return [tokenizer.encode_texts([text])[0].tolist() for text in texts]


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


TOKEN = {
    "content": "<t>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": False,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"14": TOKEN, "12": TOKEN | {"content": "w9", "normalized": True}}},
        {"added_tokens_decoder": {"4": TOKEN | {"content": "[MASK]", "special": True, "lstrip": True}}},
        {"added_tokens_decoder": {"10": TOKEN | {"content": "w4"}}},
        {"extra_special_tokens": ["<t>"]},
        {"extra_special_tokens": {"image_token": "<t>"}},
        {"additional_special_tokens": ["<t>", "w3"]},
        {"pad_token": TOKEN | {"__type": "AddedToken", "rstrip": True}},
        {"sound_token": "<t>"},
        {"split_special_tokens": True},
        {"split_special_tokens": True, "added_tokens_decoder": {"14": TOKEN}},
    ],
    ids=str,
)
def test_tokens_that_the_configuration_adds_are_read_whole(directory: Path, settings: dict[str, Any]):
    save_large(directory)
    change(directory / "tokenizer_config.json", **settings)
    texts = ["w1 <t>w2", "W3 [MASK] w9[SEP]w9", "w4w4 [CLS]<T>"]
    load: Any = transformers.AutoTokenizer.from_pretrained
    assert read(card_of(directory), texts) == load(directory)(texts)["input_ids"]


def test_tokens_of_older_files_are_read_whole(directory: Path):
    save_large(directory)
    (directory / "added_tokens.json").write_text(json.dumps({"<t>": 17, "<u>": 16}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<t>", "eos_token": "<v>"}))
    texts = ["w1 <t>w2 <T> <U>", "W3 <u> w9<v>w9"]
    load: Any = transformers.AutoTokenizer.from_pretrained
    assert read(card_of(directory), texts) == load(directory)(texts)["input_ids"]


def test_a_token_without_a_vector_stays_text(directory: Path):
    before = read(card_of(directory), ["w1 <t>"])
    change(directory / "tokenizer_config.json", added_tokens_decoder={"99": TOKEN})
    number = json.loads((directory / "config.json").read_text())["vocab_size"]
    change(directory / "config.json", vocab_size=len(WORDS))
    assert read(card_of(directory), ["w1 <t>"]) == before
    change(directory / "config.json", vocab_size=number)
    assert read(card_of(directory), ["w1 <t>"]) != before


def test_added_tokens_of_another_form_are_refused(directory: Path):
    change(directory / "tokenizer_config.json", added_tokens_decoder={"x": {"content": 3}})
    with pytest.raises(ModelLoadFailed, match=r"added tokens in its tokenizer_config.json cannot be read"):
        card_of(directory)


def sentence_reader(directory: Path) -> Any:
    tokenizer = SentenceTransformer(str(directory), device="cpu")
    return lambda texts: [tokenizer.preprocess([text])["input_ids"][0].tolist() for text in texts]


@pytest.mark.parametrize("kind", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_a_lowered_text_keeps_its_special_tokens(directory: Path, kind: str):
    """The checkpoint's own normalizer keeps letters; sentence-transformers puts a step before it."""
    change(directory / "tokenizer_config.json", tokenizer_class=kind, do_lower_case=False)
    normalizer = json.loads((directory / "tokenizer.json").read_text())["normalizer"]
    change(directory / "tokenizer.json", normalizer=normalizer | {"lowercase": False})
    (directory / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True, "max_seq_length": 20}))
    modules = {"": "sentence_transformers.models.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    entries = [{"name": name.rsplit(".")[-1], "path": path, "type": name} for path, name in modules.items()]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16}))
    texts = ["W1 [MASK] About", "W2 [SEP] ABOUT [mask]", "\u03a3\u03a3"]
    card = card_of(directory)
    assert read(card, texts) == sentence_reader(directory)(texts)
    assert WORDS.index("[MASK]") in read(card, texts)[0]


LONG = ["w1 w2 w3 w4 about " * 9, "w1 w2", "w4 " * 19 + "w1", "w1 w2 w3 w4 about " * 9000, "w1 " * 40_000 + "12" * 9]


def test_a_text_loses_its_beginning_where_the_tokenizer_says_so(directory: Path):
    change(directory / "tokenizer_config.json", truncation_side="left")
    tokenizer = tokenize.Tokenizer.load(card_of(directory))
    expected = sentence_reader(directory)(LONG)
    cuts: dict[int, int] = {}
    ids, bounds = tokenizer.encode_texts(LONG, cuts=cuts)
    assert [row.tolist() for row in np.split(ids, bounds[1:-1])] == expected
    assert cuts == dict.fromkeys((0, 2, 3, 4), 20)
    assert [tokenizer.encode_texts([text])[0].tolist() for text in LONG] == expected
    shorter = [[row[0], *row[1:-1][-5:], row[-1]] for row in expected]
    assert [tokenizer.encode_texts([text], max_tokens=7)[0].tolist() for text in LONG] == shorter
    ids, _ = tokenizer.check_token_ids([list(range(5, 15)) * 3])
    assert ids.tolist() == [*range(5, 15), *range(5, 15)]


def test_a_tokenizer_json_may_cut_the_beginning_of_texts(directory: Path):
    truncation = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    change(directory / "tokenizer.json", truncation=truncation)
    assert read(card_of(directory), LONG) == sentence_reader(directory)(LONG)
    change(directory / "tokenizer_config.json", truncation_side="right")
    assert read(card_of(directory), LONG) == sentence_reader(directory)(LONG)


def test_pairs_lose_their_beginnings(tmp_path: Path):
    directory = save_cross_encoder(tmp_path / "model")
    change(directory / "tokenizer_config.json", truncation_side="left")
    load: Any = transformers.AutoTokenizer.from_pretrained
    library, tokenizer = load(directory), tokenize.Tokenizer.load(card_of(directory))
    text = " ".join(f"w{i}" for i in range(200))
    for query, document in ((text, "w1 w2"), ("w1 w2", text), (text, text + " w3"), ("w1", "w2"), (text * 40, text)):
        pair = library(query, document, truncation="longest_first", max_length=64)
        assert tokenizer.encode_pairs(query, [document])[0].tolist() == pair["input_ids"]
        pair = library(query, document, truncation="longest_first", max_length=21)
        assert tokenizer.encode_pairs(query, [document], max_tokens=21)[0].tolist() == pair["input_ids"]


def test_a_reader_of_templates_that_cuts_the_beginning_is_refused(directory: Path):
    change(directory / "tokenizer_config.json", truncation_side="left")
    (directory / "modules.json").write_text(json.dumps([
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1", "type": "sentence_transformers.models.MultiVectorMask"},
    ]))  # fmt: skip
    (directory / "1").mkdir()
    (directory / "1" / "config.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match=r"truncation_side in tokenizer_config.json is 'left'"):
        card_of(directory)


def test_a_table_of_token_vectors_reads_its_tokenizer_json_alone(directory: Path):
    save_file({"embedding.weight": torch.zeros(len(WORDS), 4)}, directory / "model.safetensors")
    modules = [{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    change(directory / "tokenizer_config.json", do_lower_case=False, truncation_side="left")
    assert card_of(directory).tokenizer_file == str(directory / "tokenizer.json")
