"""Encoders in eight bits: the compiled form and torch agree, stay near the original weights, and do so in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sie import native
from sie.catalog.cards import make_card
from sie.catalog.spec import ModelSpec
from sie.values.errors import BadRequest, ModelLoadFailed
from sie.workers.device.fallbacks import collecting
from sie.workers.loading.loader import load_encoder, load_scorer
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.packed.rounded_linear import RoundedLinear
from sie.workers.runners.compiled_encoder import compile_encoder
from sie.workers.runners.encode import Backbone
from sie.workers.runners.encoder_formats import choose_encoder_format
from sie.workers.runners.probe import choose_execution, difference
from tests.kernels import needs_bf16_kernels
from tests.unit.workers.encoder_models import MODELS, MODERN, OTHERS, rounded

ALL = {**MODELS, **MODERN}
CPU = torch.device("cpu")
ROUNDED = (*MODELS, "nomic-bert", "gte", "jina-v3")
"""Models whose norms are behind additions."""
LENGTHS = [1, 12, 3, 230, 16, 12, 33]
SAME = {torch.float32: 1e-2, torch.bfloat16: 2e-2}
"""Mean distance from torch, which computes the same: where two of its steps are as near, the last bit of a value decides."""
NEAR = 3e-2
"""Mean distance of such small models from what they give in float32: 1.3e-2, and in bfloat16 1.6e-2."""
MIN_COSINE = 0.99
"""Of real weights; the least is that of a single short word."""


@pytest.fixture
def no_kernels():
    """Leave everything to torch."""
    native.allow(allowed=False)
    yield
    native.allow(allowed=True)


def _batch() -> PackedBatch:
    random = np.random.default_rng(5)
    return pack_sequences([random.integers(3, 200, length).astype(np.int32) for length in LENGTHS])


def _by_torch(model: Any, batch: PackedBatch) -> torch.Tensor:
    with torch.inference_mode():
        return Backbone(model, CPU).run_rectangles(batch)


@needs_bf16_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDED)
def test_the_compiled_form_is_chosen_gives_what_torch_gives_and_is_near(name: str, dtype: torch.dtype) -> None:
    backbone = Backbone(rounded(ALL[name]().to(dtype)), CPU)
    execution = choose_execution(name, backbone)
    assert backbone.compiled is not None
    batch = _batch()
    found = backbone.run(batch, execution)
    assert found.dtype == dtype
    assert difference(found, _by_torch(rounded(ALL[name]().to(dtype)), batch)) < SAME[dtype]
    assert 1e-4 < difference(found.float(), _by_torch(ALL[name](), batch)) < NEAR


@needs_bf16_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "bert, no round widths"])
def test_a_sequence_is_the_same_to_the_bit_alone_and_in_every_place(name: str, dtype: torch.dtype) -> None:
    compiled = compile_encoder(rounded(MODELS[name]().to(dtype)))
    batch = _batch()
    together = compiled.run(batch, 0)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        alone = compiled.run(pack_sequences([batch.input_ids[start:end]]), 0)
        torch.testing.assert_close(together[start:end], alone, rtol=0, atol=0)


@needs_bf16_kernels
def test_threads_give_the_same_to_the_bit() -> None:
    compiled = compile_encoder(rounded(MODELS["bert"]().to(torch.bfloat16)))
    alone = compiled.run(_batch(), 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.testing.assert_close(compiled.run(_batch(), 0), alone, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@needs_bf16_kernels
def test_sums_of_the_largest_products_do_not_saturate() -> None:
    model = MODELS["bert, relu"]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("intermediate.dense.weight", "output.dense.weight")):
                weight.fill_(0.5)
            if name.endswith("intermediate.dense.bias"):
                weight.fill_(2.0)
    compiled = compile_encoder(rounded(model))
    batch = _batch()
    assert difference(compiled.run(batch, 0), _by_torch(model, batch)) < SAME[torch.float32]


@needs_bf16_kernels
def test_values_that_are_not_numbers_stay_in_their_sequence() -> None:
    model = rounded(MODELS["bert"]())
    model.get_submodule("embeddings.word_embeddings").weight[7] = float("nan")
    compiled = compile_encoder(model)
    batch = pack_sequences([np.array([5, 7, 9]), np.array([5, 6, 9, 11])])
    hidden = compiled.run(batch, 0)
    assert hidden[:3].isnan().all()
    assert hidden[3:].isfinite().all()


def test_a_layer_rounds_each_row_by_itself_whatever_its_size() -> None:
    torch.manual_seed(2)
    linear = torch.nn.Linear(70, 9)
    layer = RoundedLinear(linear)
    rows = torch.randn(6, 70)
    rows[1] *= 1e6
    rows[2] *= 1e-6
    rows[3] = 4.25
    rows[4] += 1000
    rows[5] = 0
    with torch.inference_mode():
        expected, found = linear(rows), layer(rows)
        alone = torch.cat([layer(row[None]) for row in rows])
    extent = rows.amax(1) - rows.amin(1) + rows.abs().amax(1)
    assert ((found - expected).abs().amax(1) < 0.01 * extent + 1e-6).all()
    torch.testing.assert_close(alone, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_none_that_is(value: float) -> None:
    rows = torch.zeros(2, 16)
    rows[0, 3] = value
    found = RoundedLinear(torch.nn.Linear(16, 4))(rows)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_torch_gives_the_same_and_the_load_says_so(make_checkpoint: Any, tokenize: Any) -> None:
    directory = make_checkpoint("bert")
    with collecting("m") as fallbacks:
        slow = _load(directory)
    assert slow.dtype == "int8"
    assert [fallback.name for fallback in fallbacks.found] == ["uncompiled_int8"]
    ids = tokenize(slow.card, ["w1 w2 w3", "w4 " * 40, "w5"])
    native.allow(allowed=True)
    np.testing.assert_allclose(_cosines(slow.run_tokens(ids), _load(directory).run_tokens(ids)), 1, atol=1e-3)


@needs_bf16_kernels
def test_real_weights_stay_near_and_take_less_memory(
    minilm_directory: Path, tokenize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [
        "A man is eating food.",
        "The weather in Oslo was cold, and it rained all day. " * 8,
        "def add(a, b):",
        "ok",
    ]
    runners = {weights: _load(minilm_directory, weights, "bfloat16") for weights in ("auto", "int8")}
    exact = _load(minilm_directory, "auto", "float32")
    ids = tokenize(exact.card, texts)
    expected = exact.run_tokens(ids)
    found = runners["int8"].run_tokens(ids)
    assert "no compiled kernels" not in caplog.text
    assert _cosines(found, expected).min() > MIN_COSINE
    assert runners["int8"].memory_bytes < 0.8 * runners["auto"].memory_bytes
    for row, item in zip(found, ids, strict=True):  # to the bit, in every batch
        np.testing.assert_array_equal(runners["int8"].run_tokens([item])[0], row)


@needs_bf16_kernels
def test_real_weights_give_the_same_without_kernels(minilm_directory: Path, tokenize: Any) -> None:
    compiled = _load(minilm_directory)
    ids = tokenize(compiled.card, ["A man is eating food.", "Water boils at 100 degrees Celsius at sea level."])
    expected = compiled.run_tokens(ids)
    native.allow(allowed=False)
    try:
        found = _load(minilm_directory).run_tokens(ids)
    finally:
        native.allow(allowed=True)
    assert _cosines(found, expected).min() > MIN_COSINE


@pytest.mark.parametrize(
    "name", [*sorted(OTHERS.keys() - {"an activation of its own", "a head of odd width"}), "modernbert", "qwen3"]
)
def test_a_model_of_another_kind_is_refused_with_the_setting(name: str) -> None:
    with pytest.raises(ModelLoadFailed, match="encoder_weights: int8 is for encoders of the BERT kind"):
        rounded({**OTHERS, **MODERN}[name]())


@pytest.mark.parametrize("name", ["an activation of its own", "a head of odd width"])
def test_a_model_that_only_the_kernels_do_not_know_is_torchs(name: str) -> None:
    backbone = Backbone(rounded(OTHERS[name]()), CPU)
    execution = choose_execution(name, backbone)
    assert backbone.compiled is None
    batch = _batch()
    with torch.inference_mode():
        found = backbone.run(batch, execution)
    assert 1e-4 < difference(found, _by_torch(OTHERS[name](), batch)) < NEAR


def test_a_gpu_is_refused_with_the_setting() -> None:
    with pytest.raises(BadRequest, match="encoder_weights: int8 is served on a CPU only"):
        choose_encoder_format("int8", "auto", torch.device("cuda"))


def _load(directory: Path, weights: str = "int8", dtype: str = "float32") -> Any:
    card = make_card(ModelSpec(id="test/model", encoder_weights=weights), str(directory))  # type: ignore[arg-type]
    load = load_scorer if card.score is not None else load_encoder
    return load(card, "cpu", dtype, lambda _fraction, _text: None)  # type: ignore[arg-type]


def _cosines(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    return (rows * expected).sum(axis=1) / norms
