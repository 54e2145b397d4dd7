"""Tokens around every text that a tokenizer's configuration requires and its tokenizer.json leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.catalog.text_ends import with_text_ends
from sie.frontend.inputs import tokenize
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed

UNK, BOS, EOS, A, B = range(5)
MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralModel"], "hidden_size": 8, "vocab_size": 5,
    "max_position_embeddings": 32,
}  # fmt: skip
SETTINGS = {
    "add_eos_token": True,
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "tokenizer_class": "LlamaTokenizer",
}
POOLED = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode": "lasttoken"},
}
BOS_ONLY = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", BOS)]
)  # as e5-mistral-7b-instruct has it
BOTH = processors.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", BOS), ("</s>", EOS)]
)
Prepare = Callable[..., ModelCard]


def tokenizer_json(processor: Any = BOS_ONLY) -> bytes:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": UNK, "<s>": BOS, "</s>": EOS, "a": A, "b": B}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer.to_str().encode()


@pytest.fixture
def prepare(write_files: Any, tmp_path: Path) -> Prepare:
    """Return a function that gives the card of a Mistral embedder, its tokenizer as it will be used."""

    def run(processor: Any = BOS_ONLY, files: dict[str, Any] | None = None, **settings: Any) -> ModelCard:
        wanted = {name: value for name, value in {**SETTINGS, **settings}.items() if value is not None}
        directory = write_files(
            {
                "config.json": MISTRAL, "tokenizer.json": tokenizer_json(processor), "tokenizer_config.json": wanted,
                **POOLED, **(files or {}),
            }
        )  # fmt: skip
        return with_text_ends(read_card(ModelSpec(id="m"), str(directory)), str(tmp_path / "cache"))

    return run


def ids(card: ModelCard, *texts: str) -> list[int]:
    return Tokenizer.from_file(card.tokenizer_file).encode(*texts).ids


def test_a_mistral_embedder_reads_every_text_up_to_its_end(prepare: Prepare, tmp_path: Path) -> None:
    card = prepare()
    assert ids(card, "a b") == [BOS, A, B, EOS]
    assert ids(card, "") == [BOS, EOS]
    assert ids(card, "a", "b") == [BOS, A, EOS, BOS, B, EOS]
    assert Path(card.tokenizer_file).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("length", [1, 6, 7, 40])
@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_text_that_is_cut_keeps_its_end_within_the_limit(
    prepare: Prepare, length: int, max_tokens: int | None
) -> None:
    tokenizer = tokenize.Tokenizer.load(prepare(model_max_length=8))
    limit = 8 if max_tokens is None else max_tokens
    found, bounds = tokenizer.encode_texts([" ".join("a" * length)], max_tokens=max_tokens)
    assert list(found) == [BOS, *[A] * min(length, limit - 2), EOS]
    assert list(bounds) == [0, min(length + 2, limit)]


@pytest.mark.parametrize(
    "processor",
    [
        None,
        processors.ByteLevel(trim_offsets=False),
        processors.Sequence([processors.ByteLevel(trim_offsets=False)]),
    ],
)
def test_a_tokenizer_that_puts_nothing_puts_the_end(prepare: Prepare, processor: Any) -> None:
    """As that of gte-Qwen2, whose class wrote the post-processor."""
    card = prepare(processor)
    assert (ids(card, "a"), ids(card, "a", "b")) == ([A, EOS], [A, EOS, B, EOS])


def test_a_template_within_a_sequence_is_changed(prepare: Prepare) -> None:
    card = prepare(processors.Sequence([processors.ByteLevel(trim_offsets=False), BOS_ONLY]))
    assert (ids(card, "a"), ids(card, "a", "b")) == ([BOS, A, EOS], [BOS, A, EOS, BOS, B, EOS])


@pytest.mark.parametrize("processor", [None, BOTH])
def test_a_requested_bos_token_is_added_too(prepare: Prepare, processor: Any) -> None:
    assert ids(prepare(processor, add_bos_token=True), "a") == [BOS, A, EOS]


def test_a_tokenizer_that_already_adds_the_tokens_is_unchanged(prepare: Prepare) -> None:
    card = prepare(BOTH, add_bos_token=True)
    assert card.tokenizer_file == f"{card.directory}/tokenizer.json"


@pytest.mark.parametrize("setting", [None, False])
def test_nothing_is_put_that_is_not_wanted(prepare: Prepare, setting: bool | None) -> None:
    card = prepare(add_eos_token=setting)
    assert card.tokenizer_file == f"{card.directory}/tokenizer.json"
    assert ids(card, "a") == [BOS, A]


def test_settings_for_sentence_transformers_count(prepare: Prepare) -> None:
    settings = {"sentence_bert_config.json": {"tokenizer_args": {"add_eos_token": True}}}
    assert ids(prepare(files=settings, add_eos_token=None), "a") == [BOS, A, EOS]


def test_a_prompt_to_generate_from_has_no_end(prepare: Prepare) -> None:
    bare = {"config.json": {**MISTRAL, "architectures": ["MistralForCausalLM"]}, **dict.fromkeys(POOLED)}
    card = prepare(files=bare)
    assert (card.kind, ids(card, "a")) == ("generator", [BOS, A])


def test_a_cross_encoder_reads_both_texts_up_to_their_ends(prepare: Prepare) -> None:
    config = {**MISTRAL, "architectures": ["MistralForSequenceClassification"], "id2label": {"0": "x"}}
    card = prepare(files={"config.json": config, **dict.fromkeys(POOLED)})
    assert card.kind == "cross-encoder"
    assert ids(card, "a", "b") == [BOS, A, EOS, BOS, B, EOS]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"eos_token": None}, "names no eos_token"), ({"eos_token": "</t>"}, "no token '</t>'")],
)
def test_an_end_that_is_not_there_is_refused(prepare: Prepare, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        prepare(**settings)


def test_all_else_of_the_file_stays_the_same(prepare: Prepare) -> None:
    card = prepare()
    before = json.loads(Path(card.directory, "tokenizer.json").read_bytes())
    after = json.loads(Path(card.tokenizer_file).read_bytes())
    assert {**before, "post_processor": None} == {**after, "post_processor": None}
    assert with_text_ends(card, "/nowhere") is card


def test_a_file_that_is_no_tokenizer_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    card = msgspec.structs.replace(prepare(), tokenizer_file=str(tmp_path / "none.json"))
    with pytest.raises(ModelLoadFailed, match="No such file"):
        with_text_ends(card, "")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        with_text_ends(card, "")
