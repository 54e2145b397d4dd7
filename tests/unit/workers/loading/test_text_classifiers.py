"""Text classification, from a checkpoint's files to the scores, compared with transformers' own pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from sie.catalog.cards import make_card
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.text_classes import ClassReading
from sie.values.errors import BadRequest, InputTooLong, ModelLoadFailed
from sie.values.extract import Classification, ExtractTask, TextClassification, ZeroShot
from sie.workers.loading.loader import load_extractor
from sie.workers.model_api import Pair
from tests.unit.tiny_tokenizers import count_reads
from tests.unit.workers.loading.test_extractors import LONG, TOLERANCE, byte_level, split, wordpiece

LABELS = ["joy", "anger", "fear", "other"]
LIMIT = 24
TEXTS = ["Ada Lovelace met Charles Babbage in London", "x", "Crème brûlée 😀 e\u0301te\u0301!", "in this text", LONG]
ITEMS = [(TEXTS[0], None), ("x", "this text"), ("in", None), ("met", ""), (LONG, "ada"), ("ada", LONG), (LONG, LONG)]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES,
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "modernbert": SIZES,
    "qwen3": DECODER,
    "llama": DECODER,
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
}  # fmt: skip
_BERT = ("bert", "distilbert", "deberta-v2")


def save(directory: Path, family: str, labels: list[str] = LABELS, **config_values: Any) -> Path:
    """Write a tiny classifier with random weights that are large enough for every class to win somewhere."""
    torch.manual_seed(5)
    is_bert = family in _BERT
    tokenizer = wordpiece() if is_bert else byte_level()
    values: dict[str, Any] = {
        **FAMILIES[family], "pad_token_id": 0 if is_bert else 1, "bos_token_id": 0, "eos_token_id": 2,
        "id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)},
        **config_values,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        family, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=LIMIT + 8, **values
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(directory)
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if is_bert else {
        "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LIMIT, **special,
        model_input_names=["input_ids", *(["token_type_ids"] if family == "bert" else []), "attention_mask"],
    ).save_pretrained(directory)  # fmt: skip
    return directory


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


class Served:
    """A checkpoint as the server loads it, and the pipeline as its oracle."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        self.directory = directory
        self.card = make_card(ModelSpec(id="m", directory=str(directory), **spec), str(directory))
        self.tokenizer = Tokenizer.load(self.card)
        self.runner: Any = load_extractor(self.card, "cpu", "float32", lambda *_: None)
        self._oracle: Any = None

    def logits(self, reading: ClassReading, texts: list[str]) -> NDArray[np.float32]:
        arrays = reading.prepare(texts)
        types = split(arrays, "token_types") if "token_types" in dict(arrays) else [None] * len(texts)
        return self.runner.run_logits(list(map(Pair, split(arrays), types)))

    def classify(self, items: list[tuple[str, str | None]], **task: Any) -> list[list[Classification]]:
        """Go the way of a request, without processes."""
        rule = self.card.extract
        rule = rule.classes if isinstance(rule, ZeroShot) else rule
        assert isinstance(rule, TextClassification)
        pairs = {number: pair for number, (_, pair) in enumerate(items) if pair is not None}
        reading = ClassReading(rule, ExtractTask(**task), self.tokenizer, pairs)
        self.reading = reading
        found = reading.read(list(self.logits(reading, [text for text, _ in items])))
        return [extraction.classifications for extraction in found]

    def expect(self, text: str, pair: str | None = None, **options: Any) -> list[dict[str, Any]]:
        if self._oracle is None:
            self._oracle = transformers.pipeline("text-classification", model=str(self.directory), device="cpu")
        given = text if pair is None else {"text": text, "text_pair": pair}
        found = self._oracle(given, top_k=None, truncation=True, **options)
        return found[0] if isinstance(found[0], list) else found


def assert_same(found: list[Classification], expected: list[dict[str, Any]]) -> None:
    assert [one.label for one in found] == [one["label"] for one in expected]
    np.testing.assert_allclose([one.score for one in found], [one["score"] for one in expected], atol=TOLERANCE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    made: dict[str, Served] = {}

    def find(family: str) -> Served:
        if family not in made:
            made[family] = Served(save(tmp_path_factory.mktemp(family), family))
        return made[family]

    return find


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_texts_and_pairs_are_those_of_the_pipeline(served, family: str):
    model = served(family)
    together = model.classify(ITEMS)
    assert {4, 5, 6} <= set(model.reading.cuts) < set(range(len(ITEMS)))
    best: set[float] = set()
    for item, found in zip(ITEMS, together, strict=True):
        expected = model.expect(*item)
        assert_same(found, expected)
        assert_same(model.classify([item])[0], expected)
        best.add(round(found[0].score, 3))
    assert len(best) > 1, "the scores depend on the texts"


@pytest.mark.parametrize(
    ("problem", "function"),
    [("single_label_classification", "softmax"), ("multi_label_classification", "sigmoid"), ("regression", "none")],
)
def test_problem_type_decides_the_function(tmp_path: Path, problem: str, function: str):
    model = Served(save(tmp_path, "bert", problem_type=problem))
    assert model.card.extract.function == function
    for text, found in zip(TEXTS, model.classify([(text, None) for text in TEXTS]), strict=True):
        assert_same(found, model.expect(text))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "none"])
def test_a_request_may_choose_the_function(served, function: str):
    model = served("bert")
    assert_same(model.classify([("ada", None)], function_to_apply=function)[0],
                model.expect("ada", function_to_apply=function))  # fmt: skip


def test_logits_of_any_size_have_finite_scores(served):
    rule, tokenizer = served("bert").card.extract, served("bert").tokenizer
    logits = np.array([[1e4, -1e4, 0, 80]], np.float32)
    for function, expected in (("sigmoid", [1, 0, 0.5, 1]), ("softmax", [1, 0, 0, 0])):
        task = ExtractTask(function_to_apply=function, by_class=True)
        (found,) = ClassReading(rule, task, tokenizer, {}).read(list(logits))
        assert [one.score for one in found.classifications] == expected


def test_labels_threshold_and_top_k_choose_among_the_classes(served):
    model = served("bert")
    ((*everything,),) = model.classify([("ada", None)])
    assert model.classify([("ada", None)], top_k=2) == [everything[:2]]
    least = everything[1].score
    assert model.classify([("ada", None)], threshold=least) == [everything[:2]]
    wanted = tuple(one.label for one in everything[1:3])
    assert model.classify([("ada", None)], labels=wanted) == [everything[1:3]]
    (ordered,) = model.classify([("ada", None)], by_class=True)
    assert [one.label for one in ordered] == LABELS


def test_a_text_over_the_limit_is_refused_if_the_request_says_so(served):
    model = served("bert")
    with pytest.raises(InputTooLong, match="text 1 has more than the 24 tokens"):
        model.classify([("x", None), (LONG, None)], overflow_policy="error")
    assert_same(model.classify([(LONG, None)], max_tokens=9)[0], model.expect(LONG, max_length=9))
    with pytest.raises(BadRequest, match="no room"):
        model.classify([("x", None)], max_tokens=2)


@pytest.mark.parametrize("text", [TEXTS[0], f"{LONG} " * 10])
@pytest.mark.parametrize("pair", [None, "ada", f"{LONG} " * 11])
def test_of_a_long_text_only_the_beginning_is_read(served, text: str, pair: str | None, monkeypatch):
    model = served("bert")
    expected = model.expect(text, pair)  # which takes the square of the lengths
    reads = count_reads(monkeypatch, model.tokenizer)
    text, pair = (one if one is None or LONG not in one else one * 100 for one in (text, pair))
    assert_same(model.classify([(text, pair)])[0], expected)
    may_count = LONG in (pair or "")  # where both are cut, the longer one may have a token more
    assert reads.num_chars < 20_000 or may_count


def test_a_text_without_tokens_is_refused(tmp_path: Path):
    save(tmp_path, "qwen3")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    with pytest.raises(BadRequest, match="Text 1 has no token"):
        Served(tmp_path).classify([("x", None), ("", None)])


def test_a_decoder_without_a_padding_token_classifies_batches(tmp_path: Path):
    save(tmp_path, "llama")
    edit_config(tmp_path, pad_token_id=None)
    model = Served(tmp_path)
    items = [("ada", None), ("abc", None), ("in London", None)]
    for item, found in zip(items, model.classify(items), strict=True):
        assert_same(found, model.expect(*item))


def test_a_classifier_of_entailment_gives_its_own_classes_too(tmp_path: Path):
    labels = ["contradiction", "neutral", "entailment"]
    model = Served(save(tmp_path, "bert", labels))
    assert isinstance(model.card.extract, ZeroShot)
    assert_same(model.classify([("ada", "in")])[0], model.expect("ada", "in"))
    chosen = Served(tmp_path, task="text-classification")
    assert isinstance(chosen.card.extract, TextClassification)
    assert chosen.classify([("ada", "in")]) == model.classify([("ada", "in")])


def read(directory: Path, **spec: Any) -> Any:
    return make_card(ModelSpec(id="m", directory=str(directory), **spec), str(directory))


def test_one_label_is_a_reranker_unless_the_configuration_or_the_operator_says_otherwise(tmp_path: Path):
    save(tmp_path, "bert", ["LABEL_0"])
    assert read(tmp_path).outputs == ("score",)
    model = Served(tmp_path, task="text-classification")
    assert model.card.outputs == ("extract",)
    assert_same(model.classify([("ada", None)])[0], model.expect("ada"))

    edit_config(tmp_path, problem_type="regression")
    assert read(tmp_path, task="text-ranking").outputs == ("score",)
    number = Served(tmp_path)
    assert number.card.extract.function == "none"
    assert_same(number.classify([("ada", None)])[0], number.expect("ada"))

    edit_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    assert read(tmp_path).outputs == ("score",)


@pytest.mark.parametrize(
    ("labels", "task", "reason"),
    [
        (LABELS, "text-ranking", "its classifier has 4 labels"),
        (LABELS, "zero-shot-classification", "begins with 'entail'"),
    ],
)
def test_a_task_that_the_labels_do_not_fit_is_refused(tmp_path: Path, labels: list[str], task: str, reason: str):
    save(tmp_path, "bert", labels)
    with pytest.raises(ModelLoadFailed, match=reason):
        read(tmp_path, task=task)


def test_a_task_is_refused_for_a_model_that_is_no_sequence_classifier(tmp_path: Path):
    save(tmp_path, "bert")
    edit_config(tmp_path, architectures=["BertForTokenClassification"])
    with pytest.raises(ModelLoadFailed, match="sets task, which is for sequence classifiers"):
        read(tmp_path, task="text-classification")
