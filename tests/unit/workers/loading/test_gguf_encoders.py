"""GGUF files of embedding models give the vectors of the models that they were made of."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models
from torch.nn.functional import normalize

from sie.catalog.gguf_file import read_gguf_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.tokenize import Tokenizer as ServedTokenizer
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_encoder
from tests.gguf_models import (
    EOS,
    HIDDEN,
    SPACE,
    VOCABULARY,
    add_byte_vocabulary,
    add_sentence_pieces,
    add_word_pieces,
    write_bert,
    write_converted,
    write_tiny_llama,
)  # fmt: skip

TEXTS = ["A cat sat on the mat.", "Café naïve, 東京: 12.5% ÄÖÜ", "unaffable [MASK] ##ing", "", "one two three " * 30]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 2}
METADATA = {
    "context_length": 64, "embedding_length": 32, "block_count": 7, "feed_forward_length": 48, "attention.head_count": 2,
}  # fmt: skip
CAUSAL = {
    **METADATA, "attention.head_count_kv": 1, "attention.key_length": 12, "attention.value_length": 12,
    "attention.layer_norm_rms_epsilon": 2e-3, "rope.freq_base": 700.0,
}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "cat", "sat", "##s", "##ing", "[", "]", "a", "##t"]
PIECES: list[tuple[str, float]] = [
    ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (SPACE, -3.0), ("a", -4.0), ("c", -4.5), ("s", -4.6),
    ("t", -4.7), ("at", -3.5), (f"{SPACE}c", -3.6), (f"{SPACE}cat", -2.0), (f"{SPACE}s", -3.7), (f"{SPACE}sat", -2.5),
    ("<mask>", 0.0),
]  # fmt: skip
IDS = [[2, 6, 8, 7, 3], [2, 12, 13, 9, 3], [2, 3], [2, *[6, 7] * 20, 3]]


def card_of(path: Path, pooling: str | None = None) -> Any:
    return read_gguf_card("m", str(path), str(path.parent / "cache"), pooling)


def vectors_of(card: Any, ids: list[list[int]]) -> Any:
    runner: Any = load_encoder(card, "cpu", "float32", lambda *_: None)
    return runner.run_tokens([np.array(one, np.int32) for one in ids])


def expected_of(model: Any, ids: list[list[int]], pool: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack([pool(model(torch.tensor([one])).last_hidden_state[0]) for one in ids]).numpy()


def make(cls: Any, **values: Any) -> Any:
    torch.manual_seed(7)
    model = cls._from_config(cls.config_class(**SIZES, max_position_embeddings=64, **values)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


@pytest.mark.parametrize(
    ("pooling", "kind", "cosine"), [(1, "F32", 0.99999), (1, "F16", 0.9999), (1, "Q8_0", 0.999), (2, "F32", 0.99999)]
)
def test_minilm_gives_the_vectors_of_sentence_transformers(
    tmp_path: Path, minilm_directory: Path, pooling: int, kind: str, cosine: float
) -> None:
    path = write_bert(tmp_path / "m.gguf", minilm_directory, pooling=pooling, kind=gguf.GGMLQuantizationType[kind])
    card = prepare(Request(spec=ModelSpec(id="m", directory=str(path)), cache_dir=str(tmp_path)), lambda *_: None)
    assert (card.kind, card.outputs, card.dims, card.normalize) == ("encoder", ("dense",), {"dense": 384}, True)
    token_ids, bounds = ServedTokenizer.load(card).encode_texts(TEXTS, False, 256)
    found = vectors_of(card, [list(map(int, ids)) for ids in np.split(token_ids, bounds[1:-1])])
    library = SentenceTransformer(str(minilm_directory), device="cpu")
    library[1].pooling_mode = ("mean", "cls")[pooling - 1]
    expected = library.encode(TEXTS, normalize_embeddings=True)
    assert (normalize(torch.tensor(found)) * torch.tensor(expected)).sum(1).min() > cosine


def test_word_pieces_are_read_as_bert_reads_them(tmp_path: Path, minilm_directory: Path) -> None:
    card = card_of(write_bert(tmp_path / "m.gguf", minilm_directory, pooling=1))
    own, library = (
        Tokenizer.from_file(file) for file in (card.tokenizer_file, str(minilm_directory / "tokenizer.json"))
    )
    library.no_padding()
    library.no_truncation()
    for text in TEXTS:
        assert own.encode(text).ids == library.encode(text).ids
        assert own.encode(text, "b a").ids == library.encode(text, "b a").ids
    assert own.get_vocab() == library.get_vocab()


def small_word_pieces(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(words[:5])
    return tokenizer


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "Cat"]])
def test_texts_keep_their_capitals_where_the_vocabulary_has_some(tmp_path: Path, words: list[str]) -> None:
    path = write_nomic(tmp_path / "m.gguf", make(transformers.NomicBertModel, vocab_size=len(words)), words)
    own = Tokenizer.from_file(card_of(path).tokenizer_file)
    expected = ["[CLS]", "Cat" if "Cat" in words else "cat", "##s", "[UNK]", "[", "a", "##t", "]", "[SEP]"]
    assert own.encode("Cats zebra [at]").tokens == expected


def write_nomic(path: Path, model: Any, words: list[str] = WORDS, **metadata: Any) -> Path:
    """Write the weights under the names of the checkpoint's own code, which the converter reads."""
    names = {
        "embeddings.LayerNorm": "emb_ln", "layers": "encoder.layers", "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
    }  # fmt: skip
    del names["embeddings.LayerNorm"]  # gguf has this name too
    weights: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for name, weight in state.items():
        if ".k_proj" in name or ".v_proj" in name or name.startswith("pooler."):
            continue
        own = name
        for library, theirs in names.items():
            own = own.replace(library, theirs)
        if ".q_proj" in name:
            own = own.replace("self_attn.q_proj", "attn.Wqkv")
            weight = torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])  # noqa: PLW2901
        weights[own] = weight
    own_metadata = {
        **METADATA, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 900.0, "pooling_type": 1,
        "attention.causal": False, **metadata,
    }  # fmt: skip
    return write_converted(
        path, "nomic-bert", model, own_metadata, weights=weights,
        add_vocabulary=lambda writer: add_word_pieces(writer, small_word_pieces(words)),
    )  # fmt: skip


def test_nomic_bert(tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 900.0}
    model = make(transformers.NomicBertModel, vocab_size=len(WORDS), layer_norm_eps=1e-5, rope_parameters=rotary)
    found = vectors_of(card_of(write_nomic(tmp_path / "m.gguf", model)), IDS)
    np.testing.assert_allclose(found, expected_of(model, IDS, lambda rows: rows.mean(0)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("has_layers", [False, True])
def test_embedding_gemma(tmp_path: Path, has_layers: bool) -> None:
    rotary = {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("full_attention", 700.0), ("sliding_attention", 10_000.0))
    }
    own = {
        "vocab_size": 270,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "rms_norm_eps": 2e-3,
    }
    model = make(
        transformers.Gemma3TextModel, **own, rope_parameters=rotary, sliding_window=8, use_bidirectional_attention=True
    )
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    dense = [torch.randn(50, 32), torch.randn(24, 50)]
    if has_layers:
        weights |= {"dense_2_out.weight": dense[0], "dense_3_out.weight": dense[1]}
    metadata = {**CAUSAL, "attention.sliding_window": 8, "pooling_type": 1}
    path = write_converted(
        tmp_path / "m.gguf", "gemma-embedding", model, metadata, add_vocabulary=add_sentence_pieces, weights=weights
    )
    card = card_of(path)
    assert card.dims == {"dense": 24 if has_layers else 32}
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    assert tokenizer.encode("cat sat").tokens == ["<bos>", "c", "at", f"{SPACE}sat", "<eos>"]

    def pool(rows: torch.Tensor) -> torch.Tensor:
        pooled = rows.mean(0)
        return dense[1] @ (dense[0] @ pooled) if has_layers else pooled

    np.testing.assert_allclose(vectors_of(card, IDS), expected_of(model, IDS, pool), atol=5e-5, rtol=5e-5)
    if has_layers:  # another file with the same metadata has other layers
        other = {**weights, "dense_2_out.weight": torch.randn(50, 32)}
        (tmp_path / "other").mkdir()
        path = write_converted(
            tmp_path / "other/m.gguf", "gemma-embedding", model, metadata,
            add_vocabulary=add_sentence_pieces, weights=other,
        )  # fmt: skip
        assert read_gguf_card("m", str(path), str(tmp_path / "cache")).pipeline[1] != card.pipeline[1]
        np.testing.assert_allclose(vectors_of(card, IDS), expected_of(model, IDS, pool), atol=5e-5, rtol=5e-5)


def charsmap_of(letter: str, replacement: str) -> bytes:
    """Return SentencePiece's normaliser of one ASCII letter: a double-array trie, then the texts that it points to."""
    units, code = [0] * 512, ord(letter)
    units[0] = 256 << 10
    units[256 ^ code] = (1 << 10) | (1 << 8) | code
    units[256 ^ code ^ 1] = 0  # the place of the replacement
    return struct.pack("<I512I", 4 * len(units), *units) + replacement.encode() + b"\0"


def add_xlm_pieces(writer: gguf.GGUFWriter, *, num_scores: int | None = None) -> None:
    """Write a vocabulary of XLM-RoBERTa. Source: conversion/bert.py, `_xlmroberta_set_vocab`."""
    kinds = gguf.TokenType
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in PIECES])
    writer.add_token_scores([score for _, score in PIECES][:num_scores])
    types = [kinds.CONTROL] * 3 + [kinds.UNKNOWN] + [kinds.NORMAL] * (len(PIECES) - 5) + [kinds.CONTROL]
    writer.add_token_types(types)
    writer.add_add_space_prefix(True)
    writer.add_token_type_count(1)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap_of("K", "c"))
    for name, number in (("bos", 0), ("padding", 1), ("eos", 2), ("unknown", 3), ("seperator", 2), ("cls", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)


def write_xlm(path: Path, **vocabulary: Any) -> tuple[Path, Any]:
    torch.manual_seed(7)
    config = transformers.XLMRobertaConfig(
        **SIZES, vocab_size=len(PIECES), max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5
    )
    model = transformers.XLMRobertaModel(config, add_pooling_layer=False).eval()
    weights = model.state_dict()
    weights["embeddings.position_embeddings.weight"] = weights["embeddings.position_embeddings.weight"][2:]
    metadata = {**METADATA, "attention.layer_norm_epsilon": 1e-5, "pooling_type": 2, "attention.causal": False}
    return write_converted(
        path, "bert", model, metadata, weights=weights,
        add_vocabulary=lambda writer: add_xlm_pieces(writer, **vocabulary),
    ), model  # fmt: skip


def test_xlm_roberta(tmp_path: Path) -> None:
    path, model = write_xlm(tmp_path / "m.gguf")
    card = card_of(path)
    assert card.max_sequence_length == 64
    ids = [*IDS, [2, *[6, 7] * 31, 3]]
    np.testing.assert_allclose(
        vectors_of(card, ids), expected_of(model, ids, lambda rows: rows[0]), atol=2e-5, rtol=2e-5
    )
    own = Tokenizer.from_file(card.tokenizer_file)
    library = transformers.XLMRobertaTokenizer(vocab=PIECES, _spm_precompiled_charsmap=charsmap_of("K", "c"))
    for text in ("cat sat", "  Kat  sats ", "", "a <mask> cat", "zebra"):
        assert own.encode(text).ids == library(text).input_ids
        assert own.encode(text, "cat").ids == library(text, "cat").input_ids
    assert own.encode("Kat").tokens == ["<s>", f"{SPACE}cat", "</s>"]


def test_pieces_without_scores_are_refused(tmp_path: Path) -> None:
    path, _ = write_xlm(tmp_path / "m.gguf", num_scores=3)
    with pytest.raises(ModelLoadFailed, match=r"3 tokenizer\.ggml\.scores for 15 tokens"):
        card_of(path)


def write_qwen(path: Path, **metadata: Any) -> tuple[Path, Any]:
    own = {
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "rms_norm_eps": 2e-3,
        "rope_theta": 700.0,
    }
    model = make(transformers.Qwen3Model, **own)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        add_byte_vocabulary(writer, "qwen2")
        writer.add_add_eos_token(True)

    return write_converted(
        path, "qwen3", model, {**CAUSAL, **metadata}, add_vocabulary=add_vocabulary, weights=weights
    ), model


def test_qwen3_pools_its_last_token(tmp_path: Path) -> None:
    path, model = write_qwen(tmp_path / "m.gguf", pooling_type=3)
    card = card_of(path)
    assert card.kind == "encoder"
    assert Tokenizer.from_file(card.tokenizer_file).encode("there").ids[-1] == EOS
    expected = expected_of(model, IDS, lambda rows: rows[-1])
    np.testing.assert_allclose(vectors_of(card, IDS), expected, atol=2e-5, rtol=2e-5)


def test_a_generator_s_architecture_with_a_pooling_is_an_encoder(tmp_path: Path) -> None:
    card = card_of(write_tiny_llama(tmp_path / "m.gguf", llama__pooling_type=3))
    assert (card.kind, card.dims, card.pipeline[0].config) == ("encoder", {"dense": HIDDEN}, {"modes": ["lasttoken"]})
    whole, alone = vectors_of(card, [IDS[0], IDS[1]]), vectors_of(card, [IDS[1]])
    np.testing.assert_allclose(whole[1], alone[0], atol=1e-5)


def test_an_encoder_that_does_not_say_how_it_pools_needs_the_operator_s_setting(tmp_path: Path) -> None:
    model = make(transformers.NomicBertModel, vocab_size=len(WORDS))
    path = write_nomic(tmp_path / "m.gguf", model, pooling_type=0)
    with pytest.raises(ModelLoadFailed, match=r"nomic-bert\.pooling_type\); set pooling"):
        card_of(path)
    assert card_of(path, "cls").pipeline[0].config == {"modes": ["cls"]}
    path, _ = write_qwen(tmp_path / "q.gguf")
    assert card_of(path).kind == "generator"


@pytest.mark.parametrize("kind", [4, 9])
def test_a_reranker_is_refused_by_the_field(tmp_path: Path, kind: int) -> None:
    path, _ = write_qwen(tmp_path / "m.gguf", pooling_type=kind)
    with pytest.raises(ModelLoadFailed, match=rf"qwen3\.pooling_type to {kind}"):
        card_of(path)
