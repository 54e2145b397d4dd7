"""A model whose weights come from a file gives the same bits as one that computed them, and no fault of a file matters."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.values.card import ModelCard
from sie.values.extract import ExtractTask
from sie.values.generate import Sampling
from sie.workers.device.memory import MemoryReport
from sie.workers.loading import loader, shared_weights
from sie.workers.loading.shared_weights import load_shared
from sie.workers.model_api import Draw, SearchedImage, Slot
from sie.workers.packed.rounded_linear import RoundedLinear
from sie.workers.prepared import session, weights_file
from sie.workers.runners import compiled_encoder, probe
from tests import generation_models
from tests.gguf_models import write_tiny_llama
from tests.kernels import needs_kernels
from tests.unit.image_to_text_checkpoints import save_donut, save_florence

IDS = [np.random.default_rng(n).integers(9, 200, n).astype(np.int32) for n in (5, 1, 40, 5, 100)]


def _models(folder: Path, **changes: Any) -> Models:
    return msgspec.structs.replace(
        Models(cache_dir=str(folder), min_shared_weights_bytes=0, dtype="float32"), **changes
    )


def _load(card: ModelCard, models: Models, load: Callable[[], Any]) -> Any:
    return load_shared(card, models, "auto", load, lambda *_: None)


def _encoder(card: ModelCard, models: Models) -> Any:
    return _load(card, models, lambda: loader.load_encoder(card, "cpu", models.dtype, lambda *_: None))


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "weights").glob("*.weights"))


def _are_mapped(model: torch.nn.Module) -> list[bool]:
    """Return for each parameter whether it lies in a file of weights. The maps are read once: there are thousands."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in lines
        if line.endswith((".weights", ".weights (deleted)"))
    ]
    addresses = [weight.data_ptr() for weight in model.parameters() if weight.nbytes]
    return [any(first <= address < last for first, last in ends) for address in addresses]


def _align(model: torch.nn.Module) -> None:
    """Copy each parameter to a boundary of torch's allocator, as it has in the file: torch's products round by it.

    Not for a compiled form, which knows where the parameters lay.
    """
    for weight in model.parameters():
        weight.data = weight.data.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["bert", "roberta", "mpnet", "modernbert", "qwen3", "gemma3_text", "deberta-v2", "albert"]
)
def test_an_encoder_from_a_file_gives_the_same_bits(
    family: str, dtype: Any, make_checkpoint: Any, tmp_path: Path
) -> None:
    card = read_card(ModelSpec(id="test/model"), str(make_checkpoint(family)))
    models = _models(tmp_path, dtype=dtype)
    expected = loader.load_encoder(card, "cpu", dtype, lambda *_: None)
    if expected._backbone.compiled is None:
        _align(expected._backbone.model)
    for _ in range(2):
        runner = _encoder(card, models)
        np.testing.assert_array_equal(runner.run_tokens(IDS), expected.run_tokens(IDS))
        assert runner.execution == expected.execution
        assert runner.memory_bytes == expected.memory_bytes
        assert all(_are_mapped(runner._backbone.model))
        assert (runner._backbone.compiled is None) == (expected._backbone.compiled is None)
    assert len(_files(tmp_path)) == 1


def test_eight_bits_come_from_a_file_too(make_checkpoint: Any, tmp_path: Path) -> None:
    card = msgspec.structs.replace(
        read_card(ModelSpec(id="test/model"), str(make_checkpoint("bert"))), encoder_weights="int8"
    )
    expected = loader.load_encoder(card, "cpu", "float32", lambda *_: None)
    _encoder(card, _models(tmp_path))
    runner = _encoder(card, _models(tmp_path))
    np.testing.assert_array_equal(runner.run_tokens(IDS), expected.run_tokens(IDS))
    rounded: list[Any] = [module for module in runner._backbone.model.modules() if isinstance(module, RoundedLinear)]
    assert rounded
    assert [module.scales.tolist() for module in rounded] == [
        module.scales.tolist() for module in expected._backbone.model.modules() if isinstance(module, RoundedLinear)
    ]


def _logits(runner: Any) -> torch.Tensor:
    tokens = np.arange(3, 40, dtype=np.int32)
    draws = (Draw(Sampling(temperature=0.0), 0, 0),)
    return runner.run_logits([Slot(tokens[:30], 0, (0, 1, 4, 5), draws), Slot(tokens[30:], 0, (2,), draws)])


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "phi3-longrope"])
def test_a_generator_from_a_file_gives_the_same_bits(family: str, weights: Any, tmp_path: Path) -> None:
    directory = generation_models.save(tmp_path / "model", family)
    for dtype in ("bfloat16", "float32"):

        def load(dtype: str = dtype) -> Any:
            return generation_models.load(directory, dtype=dtype, weights=weights, kv_cache_bytes=1 << 20)

        alone = load()
        expected = _logits(alone)
        for _ in range(2):
            runner = load_shared(alone.card, _models(tmp_path, dtype=dtype), weights, load, lambda *_: None)
            assert torch.equal(_logits(runner), expected)
            assert all(_are_mapped(runner.model))
            assert (runner.decoder is None) == (alone.decoder is None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("save", [save_donut, partial(save_florence, by_authors=True)])
def test_a_model_that_writes_about_images_from_a_file_gives_the_same_answer(
    save: Any, dtype: Any, tmp_path: Path
) -> None:
    spec = ModelSpec(id="test/reads", directory=str(save(tmp_path / "model")))
    card = prepare(Request(spec=spec, cache_dir=str(tmp_path)), lambda *_: None)
    assert card.image is not None
    pixels = np.full((card.image.height, card.image.width, 3), 99, np.uint8)

    def load() -> Any:
        return loader.load_image_to_text(card, "cpu", dtype, lambda *_: None)

    def answer(runner: Any) -> list[int]:
        image, found = SearchedImage(pixels, (np.arange(5, 9, dtype=np.int32),), b""), None
        while found is None:
            [found] = runner.advance([image], [ExtractTask(max_new_tokens=20)])
        return found.tolist()

    expected = answer(load())
    for _ in range(2):
        runner = load_shared(card, _models(tmp_path, dtype=dtype), "auto", load, lambda *_: None)
        assert answer(runner) == expected
        assert all(_are_mapped(runner._model))


def test_a_head_that_its_checkpoint_unties_stays_untied(tmp_path: Path) -> None:
    directory = generation_models.save(tmp_path / "model", "gemma3")
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

    def load() -> Any:
        return generation_models.load(directory, kv_cache_bytes=1 << 20)

    alone = load()
    for _ in range(2):
        runner = load_shared(alone.card, _models(tmp_path), "auto", load, lambda *_: None)
        assert torch.equal(_logits(runner), _logits(alone))


def test_a_gguf_file_is_prepared_too(tmp_path: Path) -> None:
    from bench.checkpoint import read_card as read_any_card

    card = read_any_card(write_tiny_llama(tmp_path / "tiny.gguf"), str(tmp_path))
    settings = Generation(kv_cache_bytes=1 << 22)

    def load() -> Any:
        return loader.load_generator(card, "cpu", "bfloat16", settings, lambda *_: None)

    expected = _logits(load())
    for _ in range(2):
        assert torch.equal(_logits(_load(card, _models(tmp_path, dtype="bfloat16"), load)), expected)
    assert len(_files(tmp_path)) == 1


@pytest.fixture
def card(make_checkpoint: Any) -> ModelCard:
    return read_card(ModelSpec(id="test/model"), str(make_checkpoint("bert")))


@pytest.mark.parametrize("damage", ["cut", "foreign", "empty", "folder's rights"])
def test_a_damaged_file_is_made_again(card: ModelCard, damage: str, tmp_path: Path) -> None:
    expected = _encoder(card, _models(tmp_path)).run_tokens(IDS)
    (path,) = _files(tmp_path)
    inode = path.stat().st_ino
    path.chmod(0o600)
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "folder's rights":
        path.chmod(0o666)
    else:
        path.write_bytes(b"" if damage == "empty" else b"x" * 9000)
    np.testing.assert_array_equal(_encoder(card, _models(tmp_path)).run_tokens(IDS), expected)
    (path,) = _files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o400
    assert damage in ("empty", "foreign") or path.stat().st_ino != inode or path.stat().st_size > 9000


def test_another_version_of_the_checkpoint_is_another_file(card: ModelCard, tmp_path: Path) -> None:
    first = _encoder(card, _models(tmp_path)).run_tokens(IDS)
    (old,) = _files(tmp_path)
    path = Path(card.directory, "model.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(data)  # the same names, shapes and size
    assert not np.array_equal(_encoder(card, _models(tmp_path)).run_tokens(IDS), first)
    assert len(set(_files(tmp_path)) - {old}) == 1


@pytest.mark.parametrize(
    "changes", [{"share_weights": False}, {"min_shared_weights_bytes": 1 << 30}, {"max_weights_bytes": 1000}]
)
def test_a_model_is_loaded_as_ever_without_a_file(card: ModelCard, changes: dict[str, Any], tmp_path: Path) -> None:
    runner = _encoder(card, _models(tmp_path, **changes))
    assert not _files(tmp_path)
    assert not any(_are_mapped(runner._backbone.model))
    assert np.isfinite(runner.run_tokens(IDS)).all()


def test_a_short_disk_costs_the_file_and_not_the_load(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_file, "SPARE_BYTES", 1 << 60)
    assert np.isfinite(_encoder(card, _models(tmp_path)).run_tokens(IDS)).all()
    assert not _files(tmp_path)
    assert "its weights are not shared" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_file_and_not_the_load(card: ModelCard, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    assert np.isfinite(_encoder(card, _models(tmp_path)).run_tokens(IDS)).all()


def test_a_model_that_writes_into_its_weights_gets_its_own(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, loads = loader.choose_execution, []

    def writing(model_id: str, backbone: Any) -> Any:
        loads.append(backbone.model)
        found = original(model_id, backbone)
        with torch.inference_mode():
            next(backbone.model.parameters()).mul_(1.0)
        return found

    monkeypatch.setattr(loader, "choose_execution", writing)
    for count in (1, 2):  # the second load does not try
        runner = _encoder(card, _models(tmp_path))
        assert not any(_are_mapped(runner._backbone.model))
        assert len(loads) == count


def test_one_of_many_loads_writes_and_the_others_wait(card: ModelCard, tmp_path: Path) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(_encoder(card, _models(tmp_path)).run_tokens(IDS)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert len(_files(tmp_path)) == 1


def test_an_adapter_leaves_the_shared_weights_as_they_are(card: ModelCard, tmp_path: Path) -> None:
    from sie.workers.lora.lora_layers import LoraPair

    expected = _encoder(card, _models(tmp_path)).run_tokens(IDS)
    runner = _encoder(card, _models(tmp_path))
    name = "encoder.layer.0.attention.self.query"
    runner.adapters.install("a", {name: LoraPair(torch.ones(2, 32), torch.ones(32, 2))})
    assert not np.array_equal(runner.run_tokens(IDS, ["a"] * len(IDS)), expected)
    runner.adapters.remove("a")
    np.testing.assert_array_equal(runner.run_tokens(IDS), expected)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_fault_of_the_moment_leaves_a_good_file(
    number: int, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _encoder(card, _models(tmp_path))
    (path,) = _files(tmp_path)
    known = path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(weights_file, "_check_head", _raising(OSError(number, os.strerror(number))))
        runner = _encoder(card, _models(tmp_path))
    assert not any(_are_mapped(runner._backbone.model))
    assert path.stat().st_ino == known.st_ino
    assert any(_are_mapped(_encoder(card, _models(tmp_path))._backbone.model))


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("fault", ["of the moment", "of the model"])
def test_only_the_load_that_wrote_a_file_says_that_it_serves_nobody(
    fault: str, card: ModelCard, tmp_path: Path
) -> None:
    error = OSError(errno.EMFILE, "too many files") if fault == "of the moment" else RuntimeError("not mapped, please")
    for _ in range(2):
        readings: list[bool] = []

        def load(readings: list[bool] = readings) -> str:
            readings.append(session.is_skeleton())
            if session.is_skeleton():
                raise error
            return "loaded"

        assert _load(card, _models(tmp_path), load) == "loaded"
    assert readings == ([True, False] if fault == "of the moment" else [False])
    Path(*_files(tmp_path)).unlink()
    assert _load(card, _models(tmp_path), lambda: "written") == "written"
    assert _load(card, _models(tmp_path), load) == "loaded"
    assert _load(card, _models(tmp_path), session.is_skeleton) is True


def test_a_mark_that_cannot_be_written_costs_no_load(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> str:
        if session.is_skeleton():
            monkeypatch.setattr(shared_weights, "Writer", _raising(OSError(errno.EROFS, "read-only")))
            raise RuntimeError("not mapped, please")
        return "loaded"

    assert _load(card, _models(tmp_path), load) == "loaded"


@needs_kernels
def test_what_a_lack_of_memory_forced_is_not_kept(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle((0.0, 1.0))  # the compiled form's time is the first
    monkeypatch.setattr(probe, "_fastest_s", lambda _: next(times))
    for fault in (lambda _: MemoryReport(1 << 30, 1), _raising(MemoryError())):
        with monkeypatch.context() as patch:
            patch.setattr(compiled_encoder, "measure", fault)
            assert _encoder(card, _models(tmp_path))._backbone.compiled is None
    assert not _files(tmp_path)
    assert _encoder(card, _models(tmp_path))._backbone.compiled is not None
    monkeypatch.setattr(compiled_encoder, "measure", lambda _: MemoryReport(1 << 30, 1))
    assert _encoder(card, _models(tmp_path))._backbone.compiled is not None, "its packed weights lie in the file"


def _num_open_locks() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += str(fd.readlink()).endswith(".lock")
    return found


def _three_loads(card: ModelCard, models: Models, load: Callable[[], Any]) -> list[Any]:
    """Return what three loads return that begin together, each on a thread of its own."""
    with ThreadPoolExecutor(3) as pool:
        return [each.result(60) for each in [pool.submit(_load, card, models, load) for _ in range(3)]]


@pytest.mark.parametrize("cause", ["the disk", "max_weights_bytes"])
def test_loads_do_not_wait_for_each_other_where_no_file_fits(
    cause: str, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)
    if cause == "the disk":
        monkeypatch.setattr(weights_file, "SPARE_BYTES", 1 << 60)
    models = _models(tmp_path, max_weights_bytes=0 if cause == "max_weights_bytes" else 1 << 30)
    assert len(_three_loads(card, models, lambda: together.wait(30))) == 3


def test_the_others_load_as_soon_as_a_write_has_failed(card: ModelCard, tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def load() -> int:
        session.array("larger than the checkpoint", lambda: np.zeros(64 << 20, np.uint8), "zeros")
        return together.wait(30)

    assert sorted(_three_loads(card, _models(tmp_path, max_weights_bytes=17 << 20), load)) == [0, 1, 2]
    assert not _files(tmp_path)


def test_the_others_load_as_soon_as_a_load_has_failed(card: ModelCard, tmp_path: Path) -> None:
    together, failed = threading.Barrier(2), threading.Event()

    def load() -> int:
        if not failed.is_set():
            failed.set()
            deadline_s = time.monotonic() + 30
            while _num_open_locks() < 3 and time.monotonic() < deadline_s:  # the others wait for this load
                time.sleep(0.001)
            raise MemoryError
        return together.wait(30)

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(_load, card, _models(tmp_path), load) for _ in range(3)]
    assert sorted(type(each.exception()).__name__ for each in loads) == ["MemoryError", "NoneType", "NoneType"]
