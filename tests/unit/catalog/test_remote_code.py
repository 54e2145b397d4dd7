"""Checkpoints with code of their own: the replacements that are served, and the refusals."""

from __future__ import annotations

from typing import Any

import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "vocab_size": 64}
LLAMA = {
    "model_type": "llama_bidirec",
    "architectures": ["LlamaBidirectionalModel"],
    "hidden_size": 8,
    "vocab_size": 64,
}
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "vocab_size": 64}
GTE_QWEN2 = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
}
NVIDIA = {
    "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
    "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
}
POOLED = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode": "lasttoken"},
}
SETTINGS = {"eos_token": "<|endoftext|>"}


@pytest.fixture
def read(write_files: Any) -> Any:
    """Return a function that reads the card of a checkpoint with a config and other files."""

    def run(config: dict[str, Any], files: dict[str, Any] | None = None, *, ignored: bool = False) -> ModelCard:
        directory = write_files({"config.json": config, **(files or {})})
        return read_card(ModelSpec(id="org/model", ignore_remote_code=ignored), str(directory))

    return run


@pytest.mark.parametrize("prefix", ["", "Alibaba-NLP/gte-Qwen2-7B-instruct--"])
@pytest.mark.parametrize("own", [{}, {"is_causal": False}])
def test_gte_qwen2_sees_both_ways_and_reads_up_to_the_end(read: Any, prefix: str, own: dict[str, Any]) -> None:
    code = {name: prefix + value for name, value in GTE_QWEN2.items()}
    card = read({**QWEN, **own, "auto_map": code}, {**POOLED, "tokenizer_config.json": SETTINGS})
    assert (card.kind, card.config_changes, card.last_token) == ("encoder", {"is_causal": False}, "<|endoftext|>")


def test_the_settings_of_its_tokenizer_come_first(read: Any) -> None:
    files = {**POOLED, "tokenizer_config.json": {**SETTINGS, "add_eos_token": False}}
    assert read({**QWEN, "auto_map": GTE_QWEN2}, files).last_token == ""
    with pytest.raises(ModelLoadFailed, match="names none"):
        read({**QWEN, "auto_map": GTE_QWEN2}, POOLED)


def test_a_config_that_contradicts_its_code_is_refused(read: Any) -> None:
    files = {**POOLED, "tokenizer_config.json": SETTINGS}
    config = {**QWEN, "auto_map": GTE_QWEN2, "is_causal": True}
    with pytest.raises(ModelLoadFailed, match=r"sets is_causal, but modeling_qwen\.Qwen2Model sees both ways"):
        read(config, files)
    assert read(config, files, ignored=True).config_changes == {}


def test_a_bidirectional_llama_is_one_of_the_library(read: Any) -> None:
    card = read({**LLAMA, "auto_map": NVIDIA, "pooling": "avg"})
    assert card.config_changes == {"model_type": "llama", "is_causal": False}
    assert card.pipeline[0].config == {"modes": ["mean"]}
    assert card.last_token == ""


@pytest.mark.parametrize("pooling", ["last", "colbert"])
def test_a_pooling_that_only_its_code_does_is_refused(read: Any, pooling: str) -> None:
    with pytest.raises(ModelLoadFailed, match=f"pools by '{pooling}'"):
        read({**LLAMA, "auto_map": NVIDIA, "pooling": pooling})


@pytest.mark.parametrize(
    ("model_type", "code"),
    [
        ("nomic_bert", "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"),
        ("eurobert", "modeling_eurobert.EuroBertModel"),
        ("gte", "modeling_hf_alibaba_nlp_gte.GteModel"),
    ],
)
def test_code_that_the_library_has_too_is_served_as_it_is(read: Any, model_type: str, code: str) -> None:
    card = read({**BERT, "model_type": model_type, "auto_map": {"AutoConfig": "x.Y", "AutoModel": code}})
    assert (card.config_changes, card.last_token) == ({}, "")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (BERT, {"AutoModel": "modeling_mine.MyModel"}),
        (BERT, {"AutoConfig": "modeling_mine.MyModel"}),
        (BERT, {"AutoConfig": "a.B", "AutoModel": "org/other--modeling_mine.MyModel"}),
        ({**BERT, "architectures": ["BertForMaskedLM"]}, {"AutoModelForMaskedLM": "modeling_mine.MyModel"}),
        (
            {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "a"}},
            {"AutoModel": "b.C", "AutoModelForSequenceClassification": "modeling_mine.MyModel"},
        ),
        (
            {**BERT, "architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B-X"}},
            {"AutoModelForTokenClassification": "modeling_mine.MyModel"},
        ),
    ],
)
def test_code_that_is_not_known_is_refused_by_name(read: Any, config: dict[str, Any], code: dict[str, str]) -> None:
    with pytest.raises(
        ModelLoadFailed, match=r"modeling_mine\.MyModel \(auto_map\).*ignore_remote_code = true"
    ) as caught:
        read({**config, "auto_map": code})
    assert caught.value.extras["error_class"] == "CONFIG"
    assert read({**config, "auto_map": code}, ignored=True).config_changes == {}


def test_code_of_another_family_is_not_known(read: Any) -> None:
    with pytest.raises(ModelLoadFailed, match=r"modeling_qwen\.Qwen2Model"):
        read({**BERT, "auto_map": GTE_QWEN2})


def test_code_that_this_model_does_not_use_does_not_matter(read: Any) -> None:
    """An auto class that `auto_map` leaves out is the library's own with its authors, too."""
    assert read({**BERT, "auto_map": {"AutoModelForCausalLM": "a.B"}}).kind == "encoder"


def test_a_mean_without_the_instruction_skips_the_prompt(read: Any) -> None:
    config = {**QWEN, "model_type": "mistral", "auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel"}}
    with pytest.raises(ModelLoadFailed, match="prompt out of the mean, but its modules do not"):
        read(config, POOLED)
    means = {**POOLED, "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}
    assert read(config, means).skips_prompt


def test_a_generator_stays_as_it_is(read: Any) -> None:
    card = read({**QWEN, "auto_map": {**GTE_QWEN2, "AutoModelForCausalLM": "modeling_mine.MyModel"}})
    assert (card.kind, card.config_changes) == ("generator", {})


@pytest.mark.parametrize("form", ["named", "pair"])
def test_a_tokenizer_of_its_own_is_refused_unless_it_is_known(read: Any, form: str) -> None:
    def settings(*classes: str | None) -> dict[str, Any]:
        named = {"AutoTokenizer": list(classes)} if form == "named" else list(classes)
        return {"tokenizer_config.json": {"auto_map": named}}

    assert read(BERT, settings("a/b--tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"))
    with pytest.raises(ModelLoadFailed, match=r"tokenizer_config.json names code of its own, tokenization_mine\.T "):
        read(BERT, settings("tokenization_mine.T", None))
    assert read(BERT, settings("tokenization_mine.T", None), ignored=True).kind == "encoder"
