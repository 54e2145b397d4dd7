"""Vectors of tokens against sentence-transformers' MultiVectorEncoder, in every layout of a checkpoint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sie.values.errors import ModelLoadFailed
from sie.workers.model_api import RowStep
from sie.workers.requests.quantise import finish_rows

MAX_DIFFERENCE = 2e-4
"""Of a component of a vector of unit length."""
WIDTH = 24
IDENTITY = "torch.nn.modules.linear.Identity"
PREFIX = "sentence_transformers"
Layout = Callable[..., None]


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _write_modules(directory: Path, *kinds: tuple[str, dict[str, Any]]) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}.base.modules.transformer.Transformer"}]
    for number, (kind, config) in enumerate(kinds, start=1):
        folder = f"{number}_{kind.rpartition('.')[2]}"
        modules.append({"idx": number, "name": str(number), "path": folder, "type": kind})
        _write(directory / folder / "config.json", config)
        if "out_features" in config:
            weight = torch.randn(config["out_features"], config["in_features"])
            save_file({"linear.weight": weight}, directory / folder / "model.safetensors")
    (directory / "modules.json").write_text(json.dumps(modules))


def _dense(**names: str) -> dict[str, Any]:
    return {"in_features": 32, "out_features": WIDTH, "bias": False, "activation_function": IDENTITY, **names}


def write_own(directory: Path, *, normalize: bool = True, mask: dict[str, Any] | None = None, **rules: Any) -> None:
    """Write the form of sentence-transformers 6."""
    level = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    modules = [
        (f"{PREFIX}.base.modules.dense.Dense", _dense(**level)),
        (f"{PREFIX}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", mask or {}),
    ]
    if normalize:
        modules.append((f"{PREFIX}.base.modules.normalize.Normalize", level))
    _write_modules(directory, *modules)
    _write(directory / "sentence_bert_config.json", rules)
    prompts = {"query": "w7 ", "document": "w8 w9 "}
    _write(
        directory / "config_sentence_transformers.json",
        {"model_type": "MultiVectorEncoder", "prompts": prompts, "default_prompt_name": None},
    )


def write_pylate(directory: Path, **rules: Any) -> None:
    _write_modules(directory, ("pylate.models.Dense.Dense", _dense()))
    _write(directory / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    _write(directory / "config_sentence_transformers.json", {"model_type": "ColBERT", "prompts": {}, **rules})


def write_original(directory: Path, **metadata: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": weight for name, weight in load_file(directory / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(WIDTH, 32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    if metadata:
        (directory / "artifact.metadata").write_text(json.dumps(metadata))


FIXED = {"query_expansion": {"strategy": "fixed", "length": 16, "attend": False, "token": None}}
MIN = {"query_expansion": {"strategy": "min", "length": 16, "attend": False, "token": "w3"}}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "own": (write_own, {"query_length": 9, "document_length": 12}),
    "own expanded": (write_own, FIXED),
    "own expanded at least": (write_own, {**MIN, "query_length": 30}),
    "own attended": (write_own, {"query_expansion": {**FIXED["query_expansion"], "attend": True}}),
    "own skipping": (write_own, {"mask": {"skiplist_words": [".", "w1", "no word"]}}),
    "own skipping both": (
        write_own,
        {**FIXED, "mask": {"skiplist_words": ["."], "skiplist_tasks": ["query", "document"]}},
    ),
    "own not normalised": (write_own, {"normalize": False}),
    "pylate": (
        write_pylate,
        {"query_prefix": "[unused0] ", "document_prefix": "[unused1] ", "query_length": 20, "document_length": 30},
    ),
    "pylate plain": (write_pylate, {"query_length": 20, "do_query_expansion": False, "skiplist_words": []}),
    "pylate attended": (write_pylate, {"attend_to_expansion_tokens": True, "query_prefix": "[Q] "}),
    "original": (write_original, {"query_maxlen": 20, "doc_maxlen": 30, "mask_punctuation": True}),
    "original, no metadata": (write_original, {}),
}


def _reference(sentence_transformers: Any, directory: Path, texts: list[str], task: str) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sentence_transformers.MultiVectorEncoder(str(directory), device="cpu", local_files_only=True)
        encode = model.encode_query if task == "query" else model.encode_document
        return encode(texts, convert_to_numpy=True, batch_size=3)


def _assert_close(rows: list[np.ndarray], expected: list[np.ndarray], *, normalize: bool = True) -> None:
    assert [row.shape for row in rows] == [row.shape for row in expected]
    for own, other in zip(rows, expected, strict=True):
        finished = finish_rows(own, normalize=normalize)
        np.testing.assert_allclose(finished, other, rtol=0 if normalize else 2e-3, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize("task", ["query", "document"])
@pytest.mark.parametrize("case", CASES)
def test_layout_equals_multi_vector_encoder(
    case: str, task: str, make_checkpoint: Any, serve: Any, texts: Any, sentence_transformers: Any
) -> None:
    layout, rules = CASES[case]
    directory = make_checkpoint("bert")
    layout(directory, **rules)
    model = serve(directory)
    assert (model.card.outputs, model.card.dims) == (("multivector", "score"), {"multivector": WIDTH})
    rows = model.run(texts, "multivector", task == "query")
    expected = _reference(sentence_transformers, directory, texts, task)
    _assert_close(rows, expected, normalize=model.card.late.normalize)


@pytest.mark.parametrize("family", ["roberta", "modernbert", "mpnet"])
@pytest.mark.parametrize("task", ["query", "document"])
def test_family_equals_multi_vector_encoder(
    family: str, task: str, make_checkpoint: Any, serve: Any, texts: Any, sentence_transformers: Any
) -> None:
    directory = make_checkpoint(family)
    write_own(directory, **FIXED)
    model = serve(directory)
    assert model.runner.execution.packed is (family != "mpnet")
    rows = model.run(texts, "multivector", task == "query")
    _assert_close(rows, _reference(sentence_transformers, directory, texts, task))


@pytest.mark.parametrize(
    ("layout", "rules", "shorter"),
    [
        (write_own, FIXED, {"query_expansion": {**FIXED["query_expansion"], "length": 6}}),
        (write_own, {"query_length": 12}, {"query_length": 6}),
    ],
)
def test_a_lower_limit_of_a_request_equals_a_checkpoint_with_that_limit(
    layout: Layout, rules: Any, shorter: Any, make_checkpoint: Any, serve: Any, texts: Any, sentence_transformers: Any
) -> None:
    directory = make_checkpoint("bert")
    layout(directory, **rules)
    model = serve(directory)
    wants = [model.want("multivector", is_query=True, expand_to=6)] * len(texts)
    rows = model.runner.run_wants(model.inputs(texts, True, 6), wants).ragged["multivector"]
    _write(directory / "sentence_bert_config.json", shorter)
    _assert_close(rows, _reference(sentence_transformers, directory, texts, "query"))


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_rows_are_the_same_alone_and_among_queries_and_documents(
    family: str, make_checkpoint: Any, serve: Any, texts: Any
) -> None:
    directory = make_checkpoint(family)
    write_own(directory, **FIXED, mask={"skiplist_words": ["."]})
    model = serve(directory)
    asked = [(text, number % 2 == 0) for number, text in enumerate(texts + texts)]
    inputs = [model.inputs([text], is_query)[0] for text, is_query in asked]
    wants = [model.want("multivector", is_query=is_query) for _, is_query in asked]
    for shift in range(0, len(asked), 3):
        turned, turned_wants = inputs[shift:] + inputs[:shift], wants[shift:] + wants[:shift]
        together = model.runner.run_wants(turned, turned_wants).ragged["multivector"]
        together = together[len(asked) - shift :] + together[: len(asked) - shift]
        for (text, is_query), rows in zip(asked, together, strict=True):
            alone = model.run([text], "multivector", is_query)[0]
            np.testing.assert_allclose(rows, alone, rtol=1e-3, atol=1e-4)


def test_m3_gives_three_outputs_from_one_pass(make_checkpoint: Any, serve: Any, texts: Any) -> None:
    directory = make_checkpoint("xlm-roberta")
    sparse = {"weight": torch.randn(1, 32), "bias": torch.randn(1)}
    vectors = {"weight": torch.randn(WIDTH, 32), "bias": torch.randn(WIDTH)}
    save_file(sparse, directory / "sparse_linear.safetensors")
    save_file(vectors, directory / "colbert_linear.safetensors")
    model = serve(directory)
    assert model.card.outputs == ("dense", "sparse", "multivector", "score")
    wanted = [("dense",), ("sparse",), ("multivector",), ("dense", "sparse", "multivector"), ("multivector", "sparse")]
    inputs = model.inputs(texts[: len(wanted)])
    outputs = model.runner.run_wants(inputs, [model.want(*names) for names in wanted])
    encoder = transformers.AutoModel.from_pretrained(directory)
    for item, (names, ids) in enumerate(zip(wanted, inputs, strict=True)):
        with torch.inference_mode():
            hidden = encoder(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        expected = (hidden[1:] @ vectors["weight"].T + vectors["bias"]).numpy()
        assert (outputs.ragged["sparse"][item] is not None) is ("sparse" in names)
        assert (outputs.ragged["multivector"][item] is not None) is ("multivector" in names)
        if "multivector" in names:
            np.testing.assert_allclose(outputs.ragged["multivector"][item], expected, rtol=2e-3, atol=2e-3)
        if "dense" in names:
            np.testing.assert_allclose(outputs.dense[item], hidden.mean(0).numpy(), rtol=2e-3, atol=2e-4)
    check_begun_together(model, inputs)


def check_begun_together(model: Any, inputs: list[np.ndarray]) -> None:
    """Two steps begin before either is read; each gives its own outputs."""
    wants = [model.want("dense", "sparse", "multivector")]
    begun = [model.runner.launch(RowStep("encode", [ids], wants)) for ids in inputs[:2]]
    for ids, wait in reversed([*zip(inputs, begun, strict=False)]):
        outputs, expected = wait(), model.runner.run_wants([ids], wants)
        np.testing.assert_array_equal(outputs.dense, expected.dense)
        np.testing.assert_array_equal(outputs.ragged["multivector"][0], expected.ragged["multivector"][0])
        for found, own in zip(outputs.ragged["sparse"][0], expected.ragged["sparse"][0], strict=True):
            np.testing.assert_array_equal(found, own)


def test_bf16_is_close(make_checkpoint: Any, serve: Any, texts: Any) -> None:
    directory = make_checkpoint("bert")
    write_own(directory, **FIXED)
    wide, narrow = (serve(directory, dtype).run(texts, "multivector", True) for dtype in ("float32", "bfloat16"))
    for one, other in zip(wide, narrow, strict=True):
        cosines = (finish_rows(one, normalize=True) * finish_rows(other, normalize=True)).sum(1)
        assert cosines.min() > 0.98  # a model of 32 dimensions; see test_loader


@pytest.mark.parametrize(
    ("layout", "rules", "reason"),
    [
        (write_own, {"mask": {"keep_only_token_ids": [3]}}, "keeps only some tokens"),
        (write_own, {"query_expansion": {"strategy": "double", "length": 4}}, "query_expansion"),
        (write_own, {"query_expansion": {"strategy": "min", "length": 4, "token": "nobody"}}, "expansion token"),
    ],
)
def test_rules_that_cannot_be_run_are_refused(
    layout: Layout, rules: dict[str, Any], reason: str, make_checkpoint: Any, serve: Any
) -> None:
    directory = make_checkpoint("bert")
    layout(directory, **rules)
    with pytest.raises(ModelLoadFailed, match=reason):
        serve(directory)


def test_projection_that_does_not_fit_is_refused(make_checkpoint: Any, serve: Any) -> None:
    directory = make_checkpoint("bert")
    write_original(directory)
    weights = load_file(directory / "model.safetensors")
    weights["linear.weight"] = torch.randn(WIDTH, 31)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"linear\.weight"):
        serve(directory)


def test_text_without_a_token_has_nothing_and_its_neighbours_all(make_checkpoint: Any, serve: Any) -> None:
    directory = make_checkpoint("xlm-roberta")
    for name, width in (("sparse", 1), ("colbert", WIDTH)):
        save_file({"weight": torch.randn(width, 32)}, directory / f"{name}_linear.safetensors")
    model = serve(directory)
    inputs = [np.empty(0, np.int32), *model.inputs(["w1 w2"]), np.empty(0, np.int32)]
    outputs = model.runner.run_wants(inputs, [model.want("dense", "sparse", "multivector")] * 3)
    alone = model.runner.run_wants(inputs[1:2], [model.want("dense", "sparse", "multivector")])
    assert not outputs.dense[[0, 2]].any()
    np.testing.assert_allclose(outputs.dense[1], alone.dense[0])
    np.testing.assert_allclose(outputs.ragged["multivector"][1], alone.ragged["multivector"][0])
    assert [len(indices) for indices, _ in outputs.ragged["sparse"]] == [0, len(alone.ragged["sparse"][0][0]), 0]
    assert outputs.ragged["multivector"][2].shape == (0, WIDTH)
