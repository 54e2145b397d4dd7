"""Vectors on the wire are the model's own: compared with sentence-transformers, alone and at every place of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import MINILM
from tests.process.harness import Server, eventually, paused, start_server
from tests.process.wire import Client, dense_rows, encode, total

SEED = 7_001
MIN_COSINE = {"float32": 0.9999, "bfloat16": 0.999, "int8": 0.99}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "boil",
    "süße",
    "Äpfel",
    "in",
    "Zürich",
    "東京",
    "and",
    "нигде",
    "else",
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return texts of 0 to about 400 tokens, in no order of length; some are over the model's 256."""
    print(f"texts seed {SEED}")
    rng = np.random.default_rng(SEED)
    lengths = [0, 1, 2, 300, 5, 60, 35, 3, 20, 128, 1, 40, 9, 250, 15, 7]
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


@pytest.fixture(scope="module")
def reference(texts: list[str], minilm_directory: Path) -> np.ndarray:
    """Return what sentence-transformers computes in float32, one text at a time: (n, 384)."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_directory), device="cpu", model_kwargs={"dtype": "float32"})
    return np.stack([model.encode(text, convert_to_numpy=True, show_progress_bar=False) for text in texts])


@pytest.fixture(scope="module")
def int8_server(minilm_directory: Path) -> Iterator[Server]:
    flags = ("--encoder-weights", "int8", "--request-timeout-s", "120", "--max-step-ms", "0")
    with start_server("--model", f"{MINILM}={minilm_directory}", *flags) as server:
        server.log_line("loaded: cpu int8")
        yield server


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def served(request: pytest.FixtureRequest) -> tuple[Server, float]:
    """Return a server and the least cosine that its number format allows."""
    name = {"float32": "minilm_server", "bfloat16": "bfloat16_server", "int8": "int8_server"}[request.param]
    return request.getfixturevalue(name), MIN_COSINE[request.param]


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return (found * expected).sum(axis=1) / norms


def test_each_text_alone(served, texts, reference):
    server, least = served
    with Client(server.port) as client:
        found = np.concatenate([dense_rows(client.encode(MINILM, [text])) for text in texts])
    assert cosines(found, reference).min() >= least
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)


def test_each_text_in_each_place_of_a_batch(served, texts, reference):
    server, least = served
    with Client(server.port) as client:
        for shift in range(len(texts)):
            found = dense_rows(client.encode(MINILM, np.roll(texts, shift).tolist()))
            assert cosines(found, np.roll(reference, shift, axis=0)).min() >= least, f"shifted by {shift}"


def test_each_text_in_a_mixed_load_of_many_clients(served, texts, reference):
    server, least = served
    rng = np.random.default_rng(SEED)
    picks = [rng.integers(0, len(texts), rng.integers(1, 5)) for _ in range(32)]

    def ask(some: np.ndarray) -> float:
        found = dense_rows(encode(server.port, MINILM, [texts[pick] for pick in some]))
        return float(cosines(found, reference[some]).min())

    def large_steps() -> float:
        """Return how many steps had more texts than a request has."""
        up_to_four = total(server.port, "sie_batch_size_bucket", model=MINILM, le="4.0")
        return total(server.port, "sie_batch_size_count", model=MINILM) - up_to_four

    before = large_steps()
    with ThreadPoolExecutor(8) as pool:
        with paused(server.worker()):  # so that some wait for a step together, however slow the clients are
            answers = [pool.submit(ask, pick) for pick in picks]
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") >= 8, "each in the queue")
        assert min(answer.result() for answer in answers) >= least
    eventually(lambda: large_steps() > before, "a step that requests of several clients shared")
