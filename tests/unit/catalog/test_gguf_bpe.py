"""Vocabularies of GGUF files that are joined by merges: transformers' own tokenizer of them is the oracle, where it has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from tokenizers import Tokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping as library

from sie.catalog.gguf_bpe import convert_bpe
from sie.catalog.gguf_contents import GgufContents
from sie.catalog.gguf_reader import VocabularyReader
from sie.values.errors import ModelLoadFailed
from tests.gguf_models import SPACE, byte_texts

NORMAL, CONTROL, DEFINED = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED
BYTES = dict.fromkeys(byte_texts(), NORMAL)
GPT2 = {**BYTES, "<s>": CONTROL, "</s>": CONTROL, "<|endoftext|>": CONTROL, "th": NORMAL, "er": NORMAL, "ĠĠ": NORMAL}
ENDS = {"bos_token_id": 256, "eos_token_id": 257}
PIECES = {
    "<unk>": TokenType.UNKNOWN, "<s>": CONTROL, "</s>": CONTROL,
    **{f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)},
    **dict.fromkeys([SPACE, *"acst", f"{SPACE}c", "at", f"{SPACE}cat", f"{SPACE}s", f"{SPACE}sat"], NORMAL),
    "  ": DEFINED,
}  # fmt: skip
PIECES_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 0}
GEMMA = {
    "<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": TokenType.UNKNOWN, "<mask>": DEFINED, "<unused0>": CONTROL,
    "\n\n": DEFINED, "  ": DEFINED,
    **dict.fromkeys(["\n", SPACE, *"acst", f"{SPACE}c", "at", f"{SPACE}cat", "cat"], NORMAL),
}  # fmt: skip
GEMMA_ENDS = {"padding_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
TEXTS = [
    "there, another 12345\n\n  x",
    "äöü € 日本語",
    " it's  GREAT We'LL\t\r\n go.",
    "<s>a</s>b",
    "cat<s> sat",
    "  cat  sat ",
]


def write(
    path: Path, kind: str, tokens: dict[str, TokenType], merges: tuple[str, ...] = (), **fields: Any
) -> GgufContents:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_token_list([*tokens])
    writer.add_token_types([*tokens.values()])
    if merges:
        writer.add_token_merges([*merges])
    else:
        writer.add_token_scores([-float(place) for place in range(len(tokens))])
    fields = {"model": kind, **fields}
    for name, value in fields.items():
        adds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        adds[type(value)](f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return GgufContents(model_id="m", path=str(path), fields=named, reader=VocabularyReader(path), fingerprint="")


def library_tokenizer(path: Path, model_type: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    if not hasattr(library, "GGUF_PRE_TOKENIZER_SPLITS"):
        pytest.skip("this transformers does not read the names of splits")
    _, parts, settings = library.get_gguf_tokenizer(str(path))
    backend, _ = library.convert_gguf_tokenizer(model_type, parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings).backend_tokenizer


def check(own: Tokenizer, expected: Tokenizer) -> None:
    for text in TEXTS:
        found = own.encode(text)
        assert found.ids == expected.encode(text).ids
        assert own.decode(found.ids) == expected.decode(found.ids)
    assert own.get_added_tokens_decoder() == expected.get_added_tokens_decoder()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
@pytest.mark.parametrize("adds", [{}, {"add_bos_token": True, "add_eos_token": True}])
def test_bytes_are_joined_as_the_library_joins_them(tmp_path: Path, pre: str, adds: dict[str, bool]) -> None:
    file = write(tmp_path / "m.gguf", "gpt2", GPT2, ("t h", "e r", "Ġ Ġ"), pre=pre, **ENDS, **adds)
    check(Tokenizer.from_str(convert_bpe(file)), library_tokenizer(tmp_path / "m.gguf", "qwen2"))


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize("adds", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_pieces_are_joined_as_the_library_joins_them(tmp_path: Path, model_type: str, adds: dict[str, bool]) -> None:
    file = write(tmp_path / "m.gguf", "llama", PIECES, **PIECES_ENDS, **adds)
    check(Tokenizer.from_str(convert_bpe(file, model_type)), library_tokenizer(tmp_path / "m.gguf", model_type))


@pytest.mark.parametrize("adds", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}, {}])
def test_gemma_s_vocabulary_is_the_one_that_the_library_makes(tmp_path: Path, adds: dict[str, bool]) -> None:
    file = write(tmp_path / "m.gguf", "llama", GEMMA, **GEMMA_ENDS, **adds)
    expected = library_tokenizer(tmp_path / "m.gguf", "gemma3").to_str()
    assert json.loads(convert_bpe(file, "gemma3_text")) == json.loads(expected)


@pytest.mark.parametrize("token", ["<\uff5cend\u2581of\u2581sentence\uff5c>", "    "])
def test_a_token_that_is_not_written_as_bytes_keeps_its_number(tmp_path: Path, token: str) -> None:
    tokens = {**GPT2, token: CONTROL if "<" in token else DEFINED}
    file = write(
        tmp_path / "m.gguf",
        "gpt2",
        tokens,
        ("t h",),
        pre="deepseek-r1-qwen",
        bos_token_id=len(GPT2),
        add_bos_token=True,
    )
    tokenizer = Tokenizer.from_str(convert_bpe(file))
    assert tokenizer.encode(f"a{token}b").ids == [len(GPT2), ord("a"), len(GPT2), ord("b")]
    assert tokenizer.get_vocab_size() == len(tokens)


def test_no_token_is_invented(tmp_path: Path) -> None:
    """GPT-2's class of the library has an <|endoftext|> in every vocabulary."""
    tokens = {token: kind for token, kind in GPT2.items() if token != "<|endoftext|>"}
    tokenizer = Tokenizer.from_str(convert_bpe(write(tmp_path / "m.gguf", "gpt2", tokens, ("t h",), pre="llama-bpe")))
    assert max(tokenizer.encode("<|endoftext|>").ids) < len(tokens)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("falcon", "a  12345!", ["a", "Ġ", "Ġ", "123", "45", "!"]),
        ("bloom", "it's 12345, a", ["it's", "Ġ12345", ",", "Ġa"]),
        ("starcoder", "in 12", ["in", "Ġ", "1", "2"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_str(convert_bpe(write(tmp_path / "m.gguf", "gpt2", GPT2, ("t h",), pre=pre)))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("kind", "tokens", "merges", "fields", "reason"),
    [
        ("llama", {"a": NORMAL, SPACE: NORMAL, "  ": NORMAL}, ("a b",), {}, r"'a b' in tokenizer\.ggml\.merges"),
        ("rwkv", GPT2, (), {}, r"set tokenizer\.ggml\.model to 'rwkv'"),
        ("gpt2", GPT2, ("t h",), {"pre": "runes"}, r"set tokenizer\.ggml\.pre to 'runes'"),
        ("llama", PIECES, (), {"bos_token_id": 999}, r"set tokenizer\.ggml\.bos_token_id to 999"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, kind: str, tokens: Any, merges: tuple[str, ...], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        convert_bpe(write(tmp_path / "m.gguf", kind, tokens, merges, **fields))


def test_a_vocabulary_with_a_token_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "llama", {**GEMMA, SPACE * 2: NORMAL}, **GEMMA_ENDS)
    with pytest.raises(ModelLoadFailed, match=r"'\u2581\u2581' twice in tokenizer\.ggml\.tokens"):
        convert_bpe(file, "gemma")
