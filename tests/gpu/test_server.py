"""A server on the device with real models: loads beside traffic, too little memory, deaths, adapters, unloading, drain.

The tests share a server and run in this order; each leaves it serving. On a CPU, what concerns a GPU's memory is left out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.gpu.device import DEVICE, is_there, need
from tests.process.harness import WAIT_S, Server, devices, eventually, start_server
from tests.process.wire import Client, Response, dense_rows, encode, get, post_json, total
from tests.tiny_models import save_adapter
from tests.unit.tiny_tokenizers import byte_level
from tests.unit.workers.conftest import SPECIAL, WORDS, save_checkpoint, save_tokenizer

pytestmark = pytest.mark.gpu
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="looks at a GPU's memory")

LOAD_S = 120.0
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10"]
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 16}
NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 2}
NUM_LONG, LONG_TOKENS = 64, 256
"""Texts that fill a step of 16,384 tokens, the default on a GPU."""
LEFT_BYTES = 128 << 20
"""What another process leaves free: half of what such a step needs in the wide encoder's inner layers."""
SLACK_BYTES = 160 << 20
"""What a device may hold more than before: kernels that were loaded, workspaces of libraries."""
MIN_COSINE = 0.995
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
held = torch.empty(max(1, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda:0")
print("held", flush=True)
sys.stdin.read()
"""


class Served(NamedTuple):
    """The shared server, and what the device held before it started."""

    server: Server
    before_bytes: int


def used_bytes() -> int:
    """Return the memory that is in use on the first device, by whomever; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def write_wide(directory: Path) -> Path:
    """Write a BERT of 400 MB in 16 bits, or a small one for a CPU; return its directory."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = NARROW if DEVICE == "cpu" else WIDE
    config = transformers.BertConfig(vocab_size=len(SPECIAL + WORDS), max_position_embeddings=LONG_TOKENS, **sizes)
    transformers.BertModel(config).save_pretrained(directory)
    save_tokenizer(directory, LONG_TOKENS)
    return directory


def write_generator(directory: Path, seed: int) -> Path:
    """Write a small Llama of random weights with a tokenizer of bytes; return its directory."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not is_there():
        pytest.skip(f"needs a device: TEST_DEVICE is {DEVICE}")
    folder = tmp_path_factory.mktemp("models")
    texts = save_checkpoint(folder / "texts", "bert")
    wide = write_wide(folder / "wide")
    adapter = save_adapter(folder / "adapter")
    before_bytes = used_bytes()
    with start_server(
        "--model", f"texts={texts}", "--lora", f"texts=tone={adapter}",
        "--model", f"generator={write_generator(folder / 'generator', 1)}",
        "--lazy-model", f"late={write_generator(folder / 'late', 2)}", "--lazy-model", f"wide={wide}",
        "--model", "stub/breaks=stub:dense=16,fail=sticky,fail_on=BREAK",
        "--model", "stub/full=stub:dense=16,oom_tokens=8",
        "--test", "--frontends", "1", "--devices", devices(1), "--restart-budget", "100", "--request-timeout-s", "150", "--idle-unload-s", "4", "--memory-pressure-pct", "100",
        env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, is_stopped=True,
    ) as server:  # fmt: skip
        wait_loaded(server, "texts", "generator")
        yield Served(server, before_bytes)


def wait_loaded(server: Server, *models: str) -> None:
    """Wait until models serve; a lazy one begins to load."""
    for model in models:
        if state(server, model) == "available":
            ask(server, model)
        eventually(lambda model=model: state(server, model) == "loaded", f"{model} loaded", LOAD_S)


def state(server: Server, model: str) -> str:
    return get(server.port, f"/v1/models/{model}").json()["state"]


def ask(server: Server, model: str) -> Response:
    if model in ("generator", "late"):
        return post_json(server.port, "/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 4})
    return encode(server.port, model, TEXTS)


def lowest_cosine(rows: NDArray[Any], expected: NDArray[Any]) -> float:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((rows * expected).sum(1) / norms).min())


class Asking:
    """A client that asks an encoder without pause and compares each answer with the first one."""

    def __init__(self, server: Server, model: str = "texts") -> None:
        self.faults: list[str] = []
        self.num_answered = 0
        self._expected = dense_rows(encode(server.port, model, TEXTS))
        self._server, self._model = server, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        goal = self.num_answered + 3
        with contextlib.suppress(AssertionError):  # the faults say more
            eventually(lambda: self.faults or self.num_answered >= goal, "three more answers")
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self.faults, f"{len(self.faults)} of {self.num_answered}: {self.faults[:3]}"
        assert self.num_answered >= goal

    def _run(self) -> None:
        with Client(self._server.port, LOAD_S) as client:
            while not self._stop.is_set():
                try:
                    rows = dense_rows(client.encode(self._model, TEXTS))
                except (AssertionError, OSError, http.client.HTTPException) as error:
                    self.faults.append(repr(error))
                    continue
                self.num_answered += 1
                if (cosine := lowest_cosine(rows, self._expected)) < MIN_COSINE:
                    self.faults.append(f"cosine {cosine}")


class Stream:
    """A long answer that is read on a thread; `lines` is what has come so far."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        self.lines: list[str] = []
        self._port, self._num_tokens = server.port, num_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: len(self.lines) > 4, "the stream has begun")

    def end(self) -> list[str]:
        """Return the stream's data after its end."""
        self._thread.join(LOAD_S)
        assert not self._thread.is_alive(), "the stream goes on"
        return [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LOAD_S)
        body = {
            "model": "generator",
            "prompt": "hello",
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with contextlib.closing(connection), connection.getresponse() as response:
            for line in response:
                self.lines.append(line.decode().strip())


def test_the_status_shows_the_device(served: Served) -> None:
    need("websockets")
    from tests.process.watchers import first_frame

    def frame() -> dict[str, Any]:
        return first_frame(served.server)

    if DEVICE == "cpu":
        assert frame()["gpus"] == []
        return
    found: dict[str, Any] = eventually(
        lambda: next((gpu for gpu in frame()["gpus"] if gpu["utilization_pct"] is not None), None), "a sample of NVML"
    )
    assert (found["device"], found["healthy"], found["stale"]) == ("cuda:0", True, False)
    assert found["uuid"]
    assert found["temperature_c"] > 0
    assert 0 < found["memory_used_bytes"] < found["memory_total_bytes"]
    assert abs(found["memory_used_bytes"] - used_bytes()) < SLACK_BYTES


def test_loads_beside_traffic_disturb_no_answer(served: Served) -> None:
    with Asking(served.server):
        for model in ("late", "wide"):
            wait_loaded(served.server, model)
            assert ask(served.server, model).status == 200


def test_an_adapter_has_vectors_of_its_own(served: Served) -> None:
    server = served.server
    plain = dense_rows(encode(server.port, "texts", TEXTS))

    def adapted() -> Response:
        return encode(server.port, "texts", TEXTS, options={"lora_id": "tone"})

    response = eventually(lambda: found if (found := adapted()).status == 200 else None, "the adapter", LOAD_S)
    assert lowest_cosine(dense_rows(response), plain) < MIN_COSINE
    assert lowest_cosine(dense_rows(encode(server.port, "texts", TEXTS)), plain) > MIN_COSINE


def test_a_step_that_does_not_fit_is_split(served: Served) -> None:
    server = served.server
    texts = [f"text {number}" for number in range(20)]
    with Asking(server):
        assert dense_rows(encode(server.port, "stub/full", texts)).shape == (20, 16)
        eventually(lambda: total(server.port, "sie_oom_batch_splits_total", model="stub/full") >= 1, "a step was split")


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Have another process hold the device's memory, but for LEFT_BYTES."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(LEFT_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def test_clients_whose_items_fill_many_steps_get_their_own_rows(served: Served) -> None:
    """A full step begins before the one before has been read."""
    port = served.server.port
    random = np.random.default_rng(2)
    texts = [" ".join(f"w{word}" for word in random.integers(0, 200, random.integers(8, 24))) for _ in range(2048)]
    expected = np.concatenate([dense_rows(encode(port, "texts", texts[i : i + 64])) for i in range(0, len(texts), 64)])

    def ask_from(start: int) -> float:
        rows = dense_rows(encode(port, "texts", texts[start:] + texts[:start]))
        return lowest_cosine(np.roll(rows, start, axis=0), expected)

    with ThreadPoolExecutor(4) as pool:
        lowest = list(pool.map(ask_from, [0, 300, 900, 1500] * 2))
    assert min(lowest) > MIN_COSINE


def test_streams_of_all_kinds_have_all_their_tokens(served: Served) -> None:
    """A step begins before the tokens of the one before are read, but not beside penalties."""
    kinds = (
        {},
        {"temperature": 0},
        {"top_p": 0.5},
        {"logprobs": 2},
        {"n": 2},
        {"min_p": 0.1},
        {"frequency_penalty": 0.5},
    )

    def count_tokens(number: int) -> int:
        body = {
            "model": "generator",
            "prompt": "hello" * number,
            "max_tokens": 20 + number,
            "ignore_eos": True,
            "seed": 5,
        }
        answer = post_json(served.server.port, "/v1/completions", body | kinds[number % len(kinds)]).json()
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(count_tokens, range(1, 22)))
    assert counts == [(20 + number) * (1 + ("n" in kinds[number % len(kinds)])) for number in range(1, 22)]


@on_a_gpu
def test_a_step_that_finds_no_memory_on_the_device_is_split(served: Served) -> None:
    server = served.server
    random = np.random.default_rng(1)
    texts = [" ".join(f"w{word}" for word in random.integers(0, 200, LONG_TOKENS - 2)) for _ in range(NUM_LONG)]
    wait_loaded(server, "wide")
    with Asking(server, "wide"), little_memory():  # which is asked while that begins, so that it is not idle
        rows = dense_rows(encode(server.port, "wide", texts))
    assert total(server.port, "sie_oom_batch_splits_total", model="wide") >= 1
    wait_loaded(server, "wide")
    assert lowest_cosine(rows, dense_rows(encode(server.port, "wide", texts))) > MIN_COSINE


def test_an_idle_model_gives_its_memory_back(served: Served) -> None:
    server = served.server
    for model in ("late", "wide"):
        eventually(lambda model=model: state(server, model) == "available", f"{model} unloaded", LOAD_S)
    before = used_bytes()
    wait_loaded(server, "wide")
    grown = used_bytes() - before
    eventually(lambda: state(server, "wide") == "available", "unloaded again", LOAD_S)
    if DEVICE != "cpu":
        assert grown > SLACK_BYTES, "there is nothing to give back"
        eventually(lambda: used_bytes() < before + SLACK_BYTES, "the memory is given back")


def replaced(server: Server, end: Callable[[int], object]) -> None:
    """End the worker and wait until a successor serves the models that are not lazy."""
    dead = server.worker()
    end(dead)
    eventually(lambda: [pid for pid in server.pids("worker") if pid != dead], "a successor", LOAD_S)
    wait_loaded(server, "texts", "generator")


def test_a_worker_killed_in_a_step_is_replaced_and_its_memory_is_free(served: Served) -> None:
    server = served.server
    before = used_bytes()
    with Asking(server):
        stream = Stream(server, 6000)
        replaced(server, lambda pid: os.kill(pid, signal.SIGKILL))
    *_, error, done = stream.end()
    assert (json.loads(error)["error"]["code"], done) == ("worker_lost", "[DONE]")
    eventually(lambda: used_bytes() < before + SLACK_BYTES, "the dead worker's memory is free")
    assert ask(server, "generator").status == 200


def test_a_worker_that_loses_its_device_is_replaced(served: Served) -> None:
    server = served.server
    with Asking(server):
        replaced(server, lambda _pid: encode(server.port, "stub/breaks", ["BREAK"]))
        assert encode(server.port, "stub/breaks", ["fine"]).status == 200


def test_a_drain_ends_what_runs_and_leaves_the_device_as_it_was(served: Served) -> None:
    stream = Stream(served.server, 600)
    served.server.stop()
    *_, last, done = stream.end()
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    eventually(lambda: used_bytes() < served.before_bytes + SLACK_BYTES, "the device is as it was before the server")
