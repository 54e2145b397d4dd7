"""Scores by vectors on a running server: a ColBERT and a model of the bge-m3 kind, through the SDK."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from sie_sdk import SIEClient
from sie_sdk.client import RequestError, ServerError
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.process.harness import Server, start_server
from tests.process.wire import Response, get, post_json, wait_no_extents

NUM_WORDS = 200
WIDTH = 12
QUERY = "w1 w2 w3"
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def _save_encoder(directory: Path, *, kind: str = "bert") -> Path:
    """Write a tiny encoder with random weights; its tokenizer skips no word and knows a full stop."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=NUM_WORDS + 6, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=80, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", ".", *(f"w{i}" for i in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "bert":  # a ColBERT without special tokens: a text may have no vector at all
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
        bos_token="<s>", eos_token="</s>",
    ).save_pretrained(directory)  # fmt: skip
    return directory


def _save_colbert(directory: Path) -> Path:
    _save_encoder(directory)
    prefix = "sentence_transformers"
    level = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": 16, "out_features": WIDTH, "bias": False,
             "activation_function": "torch.nn.modules.linear.Identity", **level}  # fmt: skip
    kinds = [
        (f"{prefix}.base.modules.transformer.Transformer", "", None),
        (f"{prefix}.base.modules.dense.Dense", "1_Dense", dense),
        (f"{prefix}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_Mask", {"skiplist_words": ["."]}),
        (f"{prefix}.base.modules.normalize.Normalize", "3_Normalize", level),
    ]  # fmt: skip
    for _, folder, config in kinds[1:]:
        (directory / folder).mkdir()
        (directory / folder / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.randn(WIDTH, 16)}, directory / "1_Dense/model.safetensors")
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path, _) in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    expansion = {"strategy": "fixed", "length": 8, "attend": False, "token": None}
    (directory / "sentence_bert_config.json").write_text(json.dumps({"query_expansion": expansion}))
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "MultiVectorEncoder"}))
    return directory


def save_m3(directory: Path) -> Path:
    """Write a tiny model of the bge-m3 kind with random weights; a worker reads its tokenizer, too."""
    _save_encoder(directory, kind="xlm-roberta")
    save_file({"weight": torch.randn(1, 16) / 10, "bias": torch.ones(1)}, directory / "sparse_linear.safetensors")
    save_file({"weight": torch.randn(WIDTH, 16), "bias": torch.randn(WIDTH)}, directory / "colbert_linear.safetensors")
    return directory


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_colbert(tmp_path_factory.mktemp("colbert"))


@pytest.fixture(scope="module")
def server(colbert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(
        "--model", f"tiny/colbert={colbert}",
        "--model", f"tiny/m3={save_m3(tmp_path_factory.mktemp('m3'))}",
        "--dtype", "float32",
        "--max-step-items", "7", "--max-step-tokens", "60",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[SIEClient]:
    with SIEClient(server.url) as client:
        yield client


def _documents(count: int) -> list[str]:
    random = np.random.default_rng(5)
    return [" ".join(f"w{i}" for i in random.integers(0, NUM_WORDS, n)) for n in random.integers(1, 30, count)]


def _post(server: Server, model: str, query: str, documents: list[str], **fields: Any) -> Response:
    body = {"query": {"text": query}, "items": [{"text": text} for text in documents], **fields}
    return post_json(server.port, f"/v1/score/{model}", body)


def _in_order(scores: list[Any]) -> list[float]:
    return [entry["score"] for entry in sorted(scores, key=lambda entry: int(entry["item_id"].removeprefix("item-")))]


def _vectors(client: SIEClient, model: str, texts: list[str], output: str, **options: Any) -> list[Any]:
    return [item[output] for item in
            client.encode(model, [{"text": text} for text in texts], output_types=[output], options=options)]  # fmt: skip


def test_sdk_scores_equal_multi_vector_encoder(client: SIEClient, colbert: Path) -> None:
    documents = _documents(300)  # over more than 40 steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import MultiVectorEncoder

        oracle = MultiVectorEncoder(str(colbert), device="cpu", local_files_only=True)
        expected = oracle.similarity(oracle.encode_query([QUERY]), oracle.encode_document(documents))[0].numpy()
    result = client.score("tiny/colbert", {"text": QUERY}, [{"text": text} for text in documents])
    assert [entry["rank"] for entry in result["scores"]] == list(range(300))
    scores = _in_order(result["scores"])
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, expected, **TOLERANCE)
    assert scores[int(result["scores"][0]["item_id"].removeprefix("item-"))] == max(scores)


@pytest.mark.parametrize(
    "options", [{}, {"max_seq_length": 4}, {"query_max_length": 3}, {"max_seq_length": 6, "query_max_length": 2}]
)
def test_score_equals_maxsim_of_the_encoded_vectors(client: SIEClient, options: dict[str, int]) -> None:
    documents = _documents(20)
    (query,) = _vectors(client, "tiny/colbert", [QUERY], "multivector", is_query=True, **options)
    rows = _vectors(client, "tiny/colbert", documents, "multivector", **options)
    expected = [(query @ own.T).max(1).sum() for own in rows]
    longest = min(options.values(), default=8)
    assert len(query) == longest, "a query is filled up to its limit and no further"
    result = client.score("tiny/colbert", {"text": QUERY}, [{"text": text} for text in documents], options=options)
    np.testing.assert_allclose(_in_order(result["scores"]), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (1, 0, 0)),
        ({"score_mode": "sparse"}, (0, 1, 0)),
        ({"score_mode": "colbert"}, (0, 0, 1)),
        ({"score_mode": "hybrid"}, (0.4, 0.2, 0.4)),
        ({"score_mode": "hybrid", "score_weights": [1, 0, 3]}, (1, 0, 3)),
    ],
)
def test_m3_modes_are_their_formulas_of_the_encoded_vectors(client: SIEClient, options: Any, weights: Any) -> None:
    documents = [*_documents(20), QUERY]
    texts = [QUERY, *documents]
    dense = np.stack(_vectors(client, "tiny/m3", texts, "dense", normalize=True))
    sparse = np.zeros((len(texts), NUM_WORDS + 6))
    for row, entries in zip(sparse, _vectors(client, "tiny/m3", texts, "sparse"), strict=True):
        row[entries["indices"]] = entries["values"]
    query, *vectors = _vectors(client, "tiny/m3", texts, "multivector")
    late = [(query @ rows.T).max(1).sum() / len(query) for rows in vectors]
    expected = np.stack([dense[1:] @ dense[0], sparse[1:] @ sparse[0], late], axis=1) @ np.array(weights)
    result = client.score("tiny/m3", {"text": QUERY}, [{"text": text} for text in documents], options=options)
    np.testing.assert_allclose(_in_order(result["scores"]), expected, **TOLERANCE)


def test_usage_counts_the_query_once_and_times_are_told(server: Server) -> None:
    response = _post(server, "tiny/m3", QUERY, ["w5", "w6 w7"])
    assert response.json()["usage"] == {"input_tokens": 5 + 3 + 4}
    for name in ("x-queue-time", "x-tokenization-time", "x-inference-time", "x-total-time"):
        assert float(response.headers[name]) >= 0
    assert float(response.headers["x-inference-time"]) > 0


def test_instruction_is_the_querys(server: Server) -> None:
    plain = _in_order(_post(server, "tiny/colbert", "w9 w1", ["w2 w3", "w4"]).json()["scores"])
    for fields in ({"instruction": "w9"}, {"options": {"instruction": "w9"}}):
        told = _in_order(_post(server, "tiny/colbert", "w1", ["w2 w3", "w4"], **fields).json()["scores"])
        np.testing.assert_allclose(told, plain, rtol=1e-5, atol=1e-5)


def test_rerank_is_the_same_code(server: Server) -> None:
    documents = _documents(9)
    expected = _in_order(_post(server, "tiny/m3", QUERY, documents, options={"score_mode": "colbert"}).json()["scores"])
    body = {"model": "tiny/m3", "query": QUERY, "documents": documents, "options": {"score_mode": "colbert"}}
    results = post_json(server.port, "/v1/rerank", {**body, "top_n": 4}).json()["results"]
    best = sorted(range(len(documents)), key=lambda index: -expected[index])[:4]
    assert [entry["index"] for entry in results] == best
    np.testing.assert_allclose(
        [entry["relevance_score"] for entry in results], np.array(expected)[best], rtol=1e-5, atol=1e-5
    )
    refused = post_json(server.port, "/v1/rerank", {**body, "options": {"score_mode": "best"}})
    assert (refused.status, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "Invalid score_mode 'best'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("text", ["", ".", ". ."])
def test_document_without_vectors_fails_its_request(client: SIEClient, text: str) -> None:
    with pytest.raises(ServerError, match="Model 'tiny/colbert' produced non-finite scores") as caught:
        client.score("tiny/colbert", {"text": QUERY}, [{"text": "w1"}, {"text": text}])
    assert caught.value.code == "INFERENCE_ERROR"


@pytest.mark.parametrize(
    ("model", "options", "part"),
    [
        ("tiny/m3", {"score_mode": "best"}, "Valid: ['colbert', 'dense', 'hybrid', 'sparse']"),
        ("tiny/m3", {"score_mode": 1}, "Invalid score_mode 1"),
        ("tiny/m3", {"score_mode": "hybrid", "score_weights": [1, 2]}, "score_weights"),
        ("tiny/m3", {"score_weights": [1, 1, 1]}, "score_weights"),
        ("tiny/m3", {"query_template": "{nothing}"}, "placeholder"),
        ("tiny/colbert", {"score_mode": "dense"}, "does not support option 'score_mode'"),
        ("tiny/colbert", {"normalize": 1}, "$.options.normalize"),
    ],
)
def test_bad_option_is_named(client: SIEClient, model: str, options: Any, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        client.score(model, {"text": QUERY}, [{"text": "w1"}], options=options)
    assert caught.value.status_code == 400
    assert part in str(caught.value)


def test_model_list_shows_the_output(server: Server) -> None:
    shown = {info["name"]: info for info in get(server.port, "/v1/models").json()["models"]}
    assert shown["tiny/colbert"]["outputs"] == ["multivector", "score"]
    assert shown["tiny/colbert"]["dims"] == {"multivector": WIDTH}
    assert shown["tiny/m3"]["outputs"] == ["dense", "sparse", "multivector", "score"]
