"""A hostile checkpoint affects only its own model: its load is refused, or its requests are answered."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import transformers
from safetensors.torch import save_file

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import parse_model_spec
from sie.config.settings import Settings
from sie.frontend.inputs.tokenize import Tokenizer
from sie.runtime.progress import Progress
from sie.supervisor import card_helper
from sie.values.card import ModelCard
from sie.values.errors import Internal, ModelLoadFailed, WireError
from tests.gguf_models import write_tiny_llama
from tests.process.harness import Server, eventually, start_server
from tests.process.wire import Response, encode, extents_in_use, get, post_json
from tests.tiny_models import save_poisoned

Change = Callable[[Path], object]
PANICS_AT_LOAD = {"type": "Precompiled", "precompiled_charsmap": "//////////8="}
ENLARGES = {"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 1000}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
MAX_GROWTH_MIB = 300
PANICS_AT_USE = {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_poisoned(tmp_path_factory.mktemp("checkpoint") / "model", transformers.BertModel)


def changed(checkpoint: Path, directory: Path, change: Change) -> Path:
    """Return a copy of a checkpoint with one file that harms."""
    shutil.copytree(checkpoint, directory)
    change(directory)
    return directory


def rewrite(name: str, **values: Any) -> Change:
    """Return a change of some values in a JSON file."""

    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))

    return change


def replace(name: str, make: Change) -> Change:
    """Return a change of a file into something else."""

    def change(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return change


def claim(**values: Any) -> Change:
    """Return a change of what a safetensors file says of its first tensor."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header[next(name for name in header if name != "__metadata__")].update(values)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])

    return change


def card_of(directory: Path) -> ModelCard:
    return prepare(
        Request(spec=parse_model_spec(f"m={directory}"), cache_dir=str(directory / "cache")), lambda *_: None
    )


# --- what is refused before a worker hears of it -----------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipe_in_place_of_a_file_is_refused_and_never_waited_for(checkpoint: Path, tmp_path: Path, file: str):
    directory = changed(checkpoint, tmp_path / "m", replace(file, os.mkfifo))
    with pytest.raises(ModelLoadFailed, match=rf"{file} is not a file"):
        card_of(directory)


@pytest.mark.parametrize(
    "change",
    [
        rewrite("config.json", architectures=5),
        rewrite("config.json", architectures=["A", {}], matryoshka_dimensions=5),
        rewrite("config.json", num_hidden_layers=10**9),
        rewrite("config_sentence_transformers.json", prompts={"a": 5}),
        claim(shape=[1 << 40, 1 << 40, 1 << 40]),
        claim(shape=[1 << 40]),
    ],
)
def test_contradictory_files_are_a_permanent_refusal_or_a_storage_error(
    checkpoint: Path, tmp_path: Path, change: Change
):
    with pytest.raises(ModelLoadFailed) as caught:
        card_of(changed(checkpoint, tmp_path / "m", change))
    assert caught.value.extras["error_class"] in ("CONFIG", "STORAGE")


@pytest.mark.parametrize("layers", [2**31, 10**6])
def test_gguf_of_countless_layers_is_refused(tmp_path: Path, layers: int):
    path = write_tiny_llama(tmp_path / "m.gguf")
    data = path.read_bytes()
    place = data.index(b"llama.block_count") + len("llama.block_count") + 4
    path.write_bytes(data[:place] + struct.pack("<I", layers) + data[place + 4 :])
    with pytest.raises(ModelLoadFailed, match="layers"):
        card_of(path)


@pytest.mark.parametrize("place", ["", "text_config"])
@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation"])
def test_checkpoint_names_no_kernel_to_fetch(checkpoint: Path, tmp_path: Path, name: str, place: str):
    from sie.catalog.architecture import read_model_config

    values = {name: "someone/kernel"}
    values = {place: values} if place else values
    config = read_model_config("m", str(changed(checkpoint, tmp_path / "m", rewrite("config.json", **values))), {})
    assert "someone/kernel" not in str(config.to_dict()) + str(config._attn_implementation)


def test_tokenizer_of_endless_pieces_is_refused(checkpoint: Path, tmp_path: Path):
    """A text of 8,000 characters took 36 s with pieces of up to 4,000."""
    pieces = [("<unk>", 0.0), *(("x" * length, -float(length)) for length in range(1, 100))]
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    with pytest.raises(ModelLoadFailed, match="a piece of 99 characters"):
        card_of(changed(checkpoint, tmp_path / "m", rewrite("tokenizer.json", model=model)))


@pytest.mark.parametrize("normalizer", [PANICS_AT_LOAD])
def test_tokenizer_on_which_its_library_panics_is_no_readable_one(
    checkpoint: Path, tmp_path: Path, normalizer: dict[str, str]
):
    directory = changed(checkpoint, tmp_path / "m", rewrite("tokenizer.json", normalizer=normalizer))
    with pytest.raises(Internal, match="has no readable tokenizer"):
        Tokenizer.load(card_of(directory))


@pytest.mark.parametrize("line", ["x" * (17 << 20), '{"type":"rea', '{"type":"ready","card":5}'])
def test_answer_of_the_helper_that_cannot_be_read_is_a_failed_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    (tmp_path / "line").write_text(line + "\n")
    helper = tmp_path / "helper"
    helper.write_text(f"#!/bin/sh\nexec cat {tmp_path}/line\n")
    helper.chmod(0o700)
    monkeypatch.setattr(card_helper.sys, "executable", str(helper))
    preparer = card_helper.Preparer(Settings(), Progress(io.StringIO(), "json"))
    found = asyncio.run(preparer.prepare(parse_model_spec("m=stub:dense=8")))
    assert isinstance(found, WireError)
    assert "cannot be read" in found.message


# --- adapters ---------------------------------------------------------------------------------------------------------

WIDTH = 16
QUERY = "encoder.layer.0.attention.self.query"


def adapter(scale: float = 0.01, name: str = QUERY, rank: int = 2, **config: Any) -> Change:
    """Return the writing of an adapter of one layer."""

    def write(directory: Path) -> None:
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": "all-linear", **config}
        (directory / "adapter_config.json").write_text(json.dumps(values))
        shapes = {"A": (rank, WIDTH), "B": (WIDTH, rank)}
        tensors = {f"{name}.lora_{letter}.weight": torch.full(shape, scale) for letter, shape in shapes.items()}
        save_file(tensors, directory / "adapter_model.safetensors")

    return write


def weights(content: bytes) -> Change:
    return lambda directory: (directory / "adapter_model.safetensors").write_bytes(content)


ADAPTERS: dict[str, Path] = {}
"""The directories of the running server's adapters."""
HOSTILE_ADAPTERS: dict[str, tuple[Change, str]] = {
    "rank": (adapter(r=10**9), "Expected `int` <= 65536"),
    "immense": (adapter(rank=65536), "over 2 times those of the model"),
    "text": (adapter(lora_alpha="16"), "Expected `float`, got `str`"),
    "beyond": (adapter(scale=1e30, lora_alpha=1e30), "not finite, or too large"),
    "not-finite": (adapter(scale=float("nan")), "not finite"),
    "elsewhere": (replace("adapter_model.safetensors", lambda path: path.symlink_to("/etc/passwd")), "leads out"),
    "pipe": (replace("adapter_model.safetensors", os.mkfifo), "is not a file"),
    "paths": (adapter(name="../../etc/passwd"), "none of the adapter's layers"),
    "long-name": (adapter(name="x" * 1_000_000), "none of the adapter's layers"),
    "long-field": (adapter(surprise="x" * 1_000_000), "surprise 'xxx"),
    "repeated": (adapter(target_modules="a{99999999999999}"), "repetition number is too large"),
    "nested": (adapter(target_modules="(" * 100_000), "recursion depth"),
    "huge-header": (weights(struct.pack("<Q", 1 << 40) + b"{}"), "damaged"),
    "cut": (weights(b"\x10"), "damaged"),
}


# --- a running server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("hostile")
    flags = ["--model", "stub/a=stub:dense=8"]
    for name in HOSTILE_ADAPTERS:
        ADAPTERS[name] = root / f"adapter-{name}"
        ADAPTERS[name].mkdir()
        adapter()(ADAPTERS[name])
        flags += ["--lora", f"plain={name}={ADAPTERS[name]}"]
    for name, change in {
        "at-load": rewrite("tokenizer.json", normalizer=PANICS_AT_LOAD),
        "at-use": rewrite("tokenizer.json", normalizer=PANICS_AT_USE),
        "enlarges": rewrite("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [ENLARGES, ENLARGES]}),
        "backtracks": rewrite("tokenizer.json", pre_tokenizer=BACKTRACKS),
        "many-rules": rewrite("tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS] * 1000}),
        "plain": lambda _directory: None,
        "shapes": rewrite("config.json", intermediate_size=2**45),
        "padding": rewrite("config.json", pad_token_id=10**9),
    }.items():
        flags += ["--lazy-model", f"{name}={changed(checkpoint, root / name, change)}"]
    with start_server(*flags, "--dtype", "float32", "--frontends", "1") as running:
        yield running


@pytest.mark.parametrize("name", HOSTILE_ADAPTERS)
def test_hostile_adapter_is_a_short_error_and_its_model_serves_on(server: Server, tmp_path: Path, name: str):
    """Its files are replaced after the start, which looks at what it finds then."""
    change, reason = HOSTILE_ADAPTERS[name]
    eventually(lambda: encode(server.port, "plain", ["w1"]).status == 200, "the model is loaded")
    plain = {"items": [{"text": "w1"}]}
    [before], worker = post_json(server.port, "/v1/encode/plain", plain).json()["items"], server.worker()
    [declared] = [lora for lora in get(server.port, "/v1/models/plain").json()["loras"] if lora["id"] == name]
    assert declared["state"] == "available"
    change(ADAPTERS[name])
    body = {"items": [{"text": "w1"}], "params": {"options": {"lora_id": name}}}
    reply = eventually(
        lambda: (found := post_json(server.port, "/v1/encode/plain", body)).status != 503 and found,
        "the load has ended",
    )
    assert reply.status in (400, 500), reply
    assert reason in reply.json()["detail"]["message"]
    assert len(reply.body) < 3000
    [after] = post_json(server.port, "/v1/encode/plain", plain).json()["items"]
    assert after["dense"] == before["dense"]
    assert server.worker() == worker


@pytest.mark.timing
def test_expression_of_a_tokenizer_that_backtracks_stalls_nobody(server: Server):
    """It held the event loop for 6 s with each text of 8 KB, and would have held a thread for ever."""
    quick, harms = {"items": [{"text": "w1"}]}, {"items": [{"text": ("x" * 20 + "z") * 380}]}
    eventually(lambda: post_json(server.port, "/v1/encode/backtracks", quick).status == 200, "the model is loaded")
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(post_json, server.port, "/v1/encode/backtracks", harms) for _ in range(3)]
        took_s = time_others(server, asked)
    replies = [one.result() for one in asked]
    assert {reply.status for reply in replies} == {400}, replies
    assert "takes too long for a text" in replies[0].json()["detail"]["message"]
    assert max(took_s) < 2.0
    assert post_json(server.port, "/v1/encode/backtracks", quick).status == 200


@pytest.mark.timing
def test_long_words_of_an_ordinary_tokenizer_stall_nobody(server: Server):
    """WordPiece takes the square of a word's length: 8 KB of words of 100 letters held the event loop for 0.1 s."""
    eventually(lambda: encode(server.port, "plain", ["w1"]).status == 200, "the model is loaded")
    text = ("w" * 99 + " ") * 80
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(encode, server.port, "plain", [text]) for _ in range(40)]
        took_s = time_others(server, asked)
    assert {one.result().status for one in asked} == {200}
    assert statistics.median(took_s) < 0.1  # the machine itself may stall one of them
    assert max(took_s) < 2.0


def time_others(server: Server, asked: list[Future[Response]]) -> list[float]:
    """Return how long small requests to another model take, one after the other, until these are answered."""
    took_s: list[float] = []
    while not all(one.done() for one in asked):
        began_s = time.monotonic()
        assert encode(server.port, "stub/a", ["x"]).status == 200
        took_s.append(time.monotonic() - began_s)
    return took_s


@pytest.mark.parametrize("model", ["at-load", "at-use", "enlarges", "many-rules"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/encode/{}", {"items": [{"text": "w1"}]}),
        ("/v1/encode/{}", {"items": [{"text": "w1 " * 20_000}]}),
        ("/v1/embeddings", {"model": "{}", "input": "w1"}),
    ],
)
def test_panic_of_a_tokenizer_is_an_answer_in_the_dialects_shape(
    server: Server, model: str, path: str, body: dict[str, Any]
):
    body = msgspec.json.decode(msgspec.json.encode(body).replace(b'"{}"', json.dumps(model).encode()))

    def ask() -> Any:
        reply = post_json(server.port, path.format(model), body)
        return reply if reply.status != 503 else None

    reply = eventually(ask, "the model is loaded")
    error = reply.json()
    assert reply.status == 500, reply
    assert "error" in error or "detail" in error
    assert encode(server.port, "stub/a", ["x"]).status == 200
    eventually(lambda: extents_in_use(server.port) == 0, "no extent is left behind")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/encode/plain", {"items": [{"text": "w1 " * 8_000_000}]}),
        ("/v1/encode/plain", {"items": [{"text": "w1 " * 8000}] * 1000}),
        ("/v1/encode/plain", {"items": [{"text": " " * 24_000_000}]}),
    ],
)
def test_text_of_any_length_takes_bounded_memory_and_time(server: Server, path: str, body: dict[str, Any]):
    """It took 100 bytes of memory for each byte of a text, and 0.5 us, however little of it the model reads."""
    eventually(lambda: encode(server.port, "plain", ["w1"]).status == 200, "the model is loaded")
    [frontend] = server.frontends()
    highest_memory_mib(frontend)
    before, spent_s = highest_memory_mib(frontend), sum(psutil.Process(frontend).cpu_times()[:2])
    reply = post_json(server.port, path, body)
    assert reply.status in (200, 400), reply
    assert highest_memory_mib(frontend) - before < MAX_GROWTH_MIB
    assert sum(psutil.Process(frontend).cpu_times()[:2]) - spent_s < 5
    assert encode(server.port, "stub/a", ["x"]).status == 200


def highest_memory_mib(pid: int) -> int:
    """Return the most resident memory that a process has had since `clear_refs`, and begin anew."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(line.split()[1]) >> 10


@pytest.mark.parametrize(("model", "reason"), [("shapes", "wrong shape"), ("padding", "Padding_idx")])
def test_weights_and_numbers_that_do_not_fit_are_a_refusal_for_good(server: Server, model: str, reason: str):
    worker = server.worker()
    reply = eventually(
        lambda: (found := encode(server.port, model, ["w1"])).status != 503 and found, "the load has ended"
    )
    assert reply.status == 502, reply
    error = reply.json()["detail"]
    assert error["error_class"] == "CONFIG", error
    assert reason in error["message"]
    assert server.worker() == worker
