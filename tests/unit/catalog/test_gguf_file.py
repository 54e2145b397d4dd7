"""GGUF files as models: the card from their metadata, their tokenizer in the cache, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from sie.catalog import gguf_architectures
from sie.catalog.generation import finish_generator
from sie.catalog.gguf_file import find_gguf, read_gguf_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import parse_model_spec
from sie.values.errors import ModelLoadFailed
from tests.gguf_models import BOS, CONTEXT, EOS, write_tiny_llama, write_tiny_nemotron

TEMPLATE = "{% for m in messages %}{{ m.content }}<think>{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", chat_template=TEMPLATE)


def card_of(path: Path, cache: Path) -> Any:
    return finish_generator(read_gguf_card("m", str(path), str(cache)), "")


def test_the_card_is_in_the_metadata(path: Path, tmp_path: Path) -> None:
    card = card_of(path, tmp_path)
    rule = card.generate
    assert (card.kind, card.outputs, card.vocab_size, card.architecture) == ("generator", ("generate",), 260, "llama")
    assert card.gguf_file == str(path)
    assert (rule.context_length, rule.eos_token_ids) == (CONTEXT, (EOS,))
    assert (rule.chat_template, rule.reasoning_tags) == (TEMPLATE, ("<think>", "</think>"))
    assert rule.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert set(rule.special_texts) >= {"<|begin|>", "<|end|>"}
    assert card.num_weights == sum(weight.size for weight in _weights(path))


def _weights(path: Path) -> list[Any]:
    import gguf

    return [tensor.data for tensor in gguf.GGUFReader(path).tensors]


def test_its_tokenizer_is_the_librarys_own_and_is_kept(path: Path, tmp_path: Path) -> None:
    card = card_of(path, tmp_path)
    own = Tokenizer.from_file(card.tokenizer_file)
    library = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in ("there, another\n", "äöü €", "a<|end|>b"):
        assert own.encode(text).ids == library(text).input_ids
    before = Path(card.tokenizer_file).stat().st_mtime_ns
    assert card_of(path, tmp_path).tokenizer_file == card.tokenizer_file
    assert Path(card.tokenizer_file).stat().st_mtime_ns == before
    assert own.token_to_id("<|begin|>") == BOS


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_nemotron])
def test_a_second_read_needs_no_transformers_and_gives_the_same_card(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf")
    card = card_of(path, tmp_path)
    monkeypatch.setattr(transformers, "PreTrainedTokenizerFast", None)
    monkeypatch.setattr(transformers, "AutoConfig", None)
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    assert card_of(path, tmp_path) == card


def test_another_row_for_its_architecture_is_another_entry_of_the_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card_of(path, tmp_path)
    granite = gguf_architectures.ROWS["granite"]
    for model_type in ("llama", "mistral"):
        row = msgspec.structs.replace(granite, model_type=model_type)
        monkeypatch.setitem(gguf_architectures.ROWS, "llama", row)
        card_of(path, tmp_path)
    assert len(list(tmp_path.glob("tokenizers/*.json"))) == 3


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_nemotron])
def test_a_damaged_file_of_the_cache_is_made_again(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    card = card_of(path, tmp_path)
    (kept,) = tmp_path.glob("gguf/**/*.json")
    kept.write_text("{")
    assert card_of(path, tmp_path) == card
    assert kept.stat().st_size > 1


def test_a_file_or_the_only_one_of_a_directory_is_meant(path: Path, tmp_path: Path) -> None:
    assert find_gguf("m", str(path)) == find_gguf("m", str(path.parent)) == str(path)
    assert find_gguf("m", str(tmp_path)) == ""
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadFailed, match=r"a\.gguf"):
        find_gguf("m", str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_gguf("m", str(tmp_path)) == ""
    with pytest.raises(ModelLoadFailed, match=r"no file /.*/none\.gguf"):
        find_gguf("m", str(tmp_path / "none.gguf"))


def test_the_helper_prepares_it_from_a_spec(path: Path, tmp_path: Path) -> None:
    request = Request(spec=parse_model_spec(f"tiny={path}"), cache_dir=str(tmp_path))
    card = prepare(request, lambda *_: None)
    assert (card.id, card.kind) == ("tiny", "generator")


@pytest.mark.parametrize("size", [0, 3, 24, 400, 2000])
def test_a_cut_file_is_refused(path: Path, tmp_path: Path, size: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadFailed, match="damaged"):
        read_gguf_card("m", str(cut), str(tmp_path))


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "part.gguf", split__count=3)
    with pytest.raises(ModelLoadFailed, match="one part of several"):
        read_gguf_card("m", str(path), str(tmp_path))


def test_an_architecture_nobody_knows_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(path.read_bytes().replace(b"llama", b"lmaxx"))
    with pytest.raises(ModelLoadFailed, match="lmaxx"):
        read_gguf_card("m", str(strange), str(tmp_path))


def test_scaled_positions_that_the_library_would_ignore_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_nemotron(tmp_path / "tiny.gguf", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    with pytest.raises(ModelLoadFailed, match=r"set nemotron.rope.scaling.type to 'yarn', which is not computed"):
        read_gguf_card("m", str(path), str(tmp_path))
    plain = write_tiny_nemotron(tmp_path / "plain.gguf", **{"rope.scaling.type": "none"})
    assert read_gguf_card("m", str(plain), str(tmp_path)).generate is not None


def test_a_t5_is_refused_by_name(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "t5")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadFailed, match="'t5' is not served from a GGUF file"):
        read_gguf_card("m", str(tmp_path / "t5.gguf"), str(tmp_path))


def corrupted(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + value.to_bytes(8, "little") + data[place + 8 :]


@pytest.mark.parametrize(
    ("after", "value", "named"),
    [
        (b"", 1 << 40, r"damaged: the entry of a tensor at byte \d+: its name has \d+ bytes"),  # the number of tensors
        (b"general.name" + b"\x08\0\0\0", 1 << 62, r"general\.name: it is cut off"),
        (b"tokenizer.ggml.tokens" + b"\x09\0\0\0\x08\0\0\0", 1 << 62, r"tokenizer\.ggml\.tokens: it has \d+ values"),
        (b"tokenizer.ggml.token_type" + b"\x09\0\0\0\x05\0\0\0", 1000, r"token_type.*: "),
        (b"blk.0.attn_q.weight" + b"\x02\0\0\0", 1 << 60, r"blk\.0\.attn_q\.weight: its shape"),
        (b"blk.0.attn_q.weight" + b"\x02\0\0\0" + bytes([32, *[0] * 7]), 1 << 20, r"blk\.0\.attn_q\.weight: it is cut off"),
        (b"llama.block_count", (1 << 60) + 4, r"llama\.block_count"),  # its type
        (b"llama.attention.head_count" + b"\x04\0\0\0", 0, r"llama\.attention\.head_count to 0, which is out of range"),
        (b"llama.embedding_length" + b"\x04\0\0\0", 0xFFFFFFFF, r"llama\.embedding_length to 4294967295"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_for_good_by_the_name_of_the_field(
    path: Path, tmp_path: Path, after: bytes, value: int, named: str
) -> None:
    data = path.read_bytes()
    place = data.index(after) + len(after) if after else 8
    own = value | int.from_bytes(data[place + 4 : place + 8], "little") << 32 if value < 1 << 32 else value
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(corrupted(data, place, own))
    with pytest.raises(ModelLoadFailed, match=named) as caught:
        read_gguf_card("m", str(hostile), str(tmp_path))
    assert caught.value.extras["error_class"] == "CONFIG"


def test_no_damage_of_a_header_is_more_than_a_refusal(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    end = data.index(b"output_norm.weight")
    random = np.random.default_rng(11)
    damaged, refused = tmp_path / "damaged.gguf", 0
    for place in random.integers(8, end, 24):
        size = int(random.integers(1, 9))
        damaged.write_bytes(data[:place] + random.bytes(size) + data[place + size :])
        try:
            read_gguf_card("m", str(damaged), str(tmp_path))
        except ModelLoadFailed:
            refused += 1
    assert refused > 4
