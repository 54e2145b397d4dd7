"""The compiled form of an encoder gives what transformers gives; a model of any other shape has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie import native
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.packed.formulas import UnknownPartsError
from sie.workers.runners.compiled_encoder import compile_encoder
from sie.workers.runners.encode import Backbone
from sie.workers.runners.probe import choose_execution, difference
from tests.kernels import in_every_format, needs_bf16_kernels, needs_kernels
from tests.unit.workers.encoder_models import MODELS, MODERN, OTHERS, rounded

ALL = {**MODELS, **MODERN}
LENGTHS = [1, 12, 3, 230, 16, 12, 33]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("two_threads")


def _sequences() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(3, 200, length).astype(np.int32) for length in LENGTHS]


def _by_the_library(name: str, dtype: torch.dtype, batch: PackedBatch) -> torch.Tensor:
    """Return the hidden states of a model that nobody has touched."""
    with torch.inference_mode():
        return Backbone(ALL[name]().to(dtype), torch.device("cpu")).run_rectangles(batch)


@in_every_format
@pytest.mark.parametrize("name", ALL)
def test_the_compiled_form_is_chosen_and_gives_what_the_library_gives(name: str, dtype: torch.dtype) -> None:
    backbone = Backbone(ALL[name]().to(dtype), torch.device("cpu"))
    execution = choose_execution(name, backbone)
    assert backbone.compiled is not None
    assert backbone.compiled.memory_bytes > 0
    batch = pack_sequences(_sequences())
    got = backbone.run(batch, execution)
    assert got.dtype == dtype
    assert difference(got, _by_the_library(name, dtype, batch)) < TOLERANCE[dtype]


@in_every_format
def test_a_sequence_is_the_same_alone_and_in_every_place(dtype: torch.dtype) -> None:
    compiled = compile_encoder(MODELS["bert"]().to(dtype))
    sequences = _sequences()
    batch = pack_sequences(sequences)
    together = compiled.run(batch, 0)
    for place, item in enumerate(batch.order):
        alone = compiled.run(pack_sequences([sequences[item]]), 0)
        start, end = batch.cu_seqlens[place : place + 2]
        torch.testing.assert_close(together[start:end], alone, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("num_threads", [2, 3])
def test_any_number_of_threads_gives_the_same(num_threads: int) -> None:
    """Threads share out the columns of a small step, and the rows of a large one."""
    many = _sequences() * (1 + 800 // sum(map(len, _sequences())))
    compiled = compile_encoder(MODELS["bert"]())
    before = torch.get_num_threads()
    found: list[list[torch.Tensor]] = []
    try:
        for count in (1, num_threads, 2):
            torch.set_num_threads(count)
            found.append([compiled.run(pack_sequences(some), 0) for some in (many, _sequences(), _sequences()[1:2])])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for alone, shared in zip(found[0], other, strict=True):
            torch.testing.assert_close(shared, alone, rtol=0, atol=0)


@needs_kernels
def test_token_types_and_unseen_tokens_are_read() -> None:
    backbone = Backbone(MODELS["bert"](), torch.device("cpu"))
    execution = choose_execution("bert", backbone)
    sequences = _sequences()
    types = [(np.arange(len(ids)) > 3).astype(np.uint8) for ids in sequences]
    attended = np.array([max(1, len(ids) - 2) for ids in sequences], np.int32)
    for batch in (pack_sequences(sequences, types), pack_sequences(sequences, attended=attended)):
        expected = _by_the_library("bert", torch.float32, batch)
        assert difference(backbone.run(batch, execution), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_shape_has_no_compiled_form(name: str) -> None:
    with pytest.raises(UnknownPartsError):
        compile_encoder(OTHERS[name]())


@needs_kernels
def test_a_model_that_only_looks_alike_is_found_out_by_the_probe(caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["bert"]()
    embeddings = model.get_submodule("embeddings")
    embeddings.register_forward_hook(lambda _module, _arguments, output: output * 2)
    backbone = Backbone(model, torch.device("cpu"))
    assert choose_execution("alike", backbone).packed
    assert backbone.compiled is None
    assert "alike" in caplog.text


@needs_kernels
def test_a_model_whose_parts_cannot_be_looked_at_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["bert"]()
    model.get_submodule("encoder.layer.0").add_module("of_two", torch.nn.CosineSimilarity())
    backbone = Backbone(model, torch.device("cpu"))
    assert choose_execution("strange", backbone).packed
    assert backbone.compiled is None
    assert "strange" in caplog.text


@needs_kernels
def test_a_window_may_be_as_long_as_any_number() -> None:
    compiled = compile_encoder(MODERN["mistral, a window without end"]())
    batch = pack_sequences([np.random.default_rng(6).integers(3, 200, 700)])
    expected = _by_the_library("mistral, a window without end", torch.float32, batch)
    assert difference(compiled.run(batch, 0), expected) < TOLERANCE[torch.float32]


@needs_kernels
def test_values_that_are_not_numbers_stay_in_their_sequence() -> None:
    model = MODELS["bert"]()
    model.get_submodule("embeddings.word_embeddings").weight[7] = float("nan")
    compiled = compile_encoder(model)
    batch = pack_sequences([np.array([5, 7, 9]), np.array([5, 6, 9, 11])])
    hidden = compiled.run(batch, 0)
    assert hidden[:3].isnan().all()
    assert hidden[3:].isfinite().all()


def test_without_kernels_a_model_runs_as_before() -> None:
    native.allow(allowed=False)
    try:
        backbone = Backbone(MODELS["bert"](), torch.device("cpu"))
        execution = choose_execution("bert", backbone)
        assert execution.packed
        assert backbone.compiled is None
        batch = pack_sequences(_sequences())
        with torch.inference_mode():
            got = backbone.run(batch, execution)
        assert difference(got, _by_the_library("bert", torch.float32, batch)) < 1e-5
    finally:
        native.allow(allowed=True)


@needs_bf16_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(("bert", lengths) for lengths in ([1], [12], [16], [17], [40], [230, 12, 5], [112], [113])),
        ("modernbert", [230, 12, 5]),
        ("qwen3", [97, 33]),
    ],
)
def test_products_in_tiles_give_what_the_library_gives(name: str, lengths: list[int]) -> None:
    compiled = compile_encoder(ALL[name]().to(torch.bfloat16))
    random = np.random.default_rng(6)
    batch = pack_sequences([random.integers(3, 200, length) for length in lengths])
    expected = _by_the_library(name, torch.bfloat16, batch)
    assert difference(compiled.run(batch, 0), expected) < TOLERANCE[torch.bfloat16]


@needs_bf16_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["bert", "bert, no round widths"])
@pytest.mark.parametrize("lengths", [[1], [16], [17], [113], [230, 12, 5]])
def test_bytes_in_tiles_give_what_torch_gives(name: str, lengths: list[int]) -> None:
    model = rounded(MODELS[name]().to(torch.bfloat16))
    compiled = compile_encoder(model)
    random = np.random.default_rng(6)
    batch = pack_sequences([random.integers(3, 200, length) for length in lengths])
    with torch.inference_mode():
        expected = Backbone(model, torch.device("cpu")).run_rectangles(batch)
    assert difference(compiled.run(batch, 0), expected) < TOLERANCE[torch.bfloat16]
