"""A model in two processes answers as in one; the death of either restarts both, and its requests are answered."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.generation_models import VOCABULARY, Stream, load, save, step
from tests.process.harness import DEVICE, WAIT_S, Server, eventually, start_server

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="it needs two devices, which two CPU workers are")
_PROMPT = [5, 9, 44, 17]
_NUM_TOKENS = 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(tmp_path_factory.mktemp("llama"), "llama")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(f'[models.m]\ndirectory = "{directory}"\npreload = true\ntensor_parallel = 2\n')
    flags = ("--catalog", str(catalog), "--devices", "cpu:2", "--frontends", "1", "--dtype", "float32")
    with start_server(*flags, "--kv-cache-bytes", str(1 << 20)) as running:
        yield running


def _followers(server: Server) -> list[int]:
    found: list[int] = []
    for worker in server.pids("worker"):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            found += [one.pid for one in psutil.Process(worker).children() if "follower" in " ".join(one.cmdline())]
    return found


def _ask(server: Server, answers: list[Any]) -> None:
    body = {"model": "m", "prompt": _PROMPT, "max_tokens": _NUM_TOKENS, "temperature": 0}
    answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).json())


def _ask_until_a_step(server: Server, follower: int, answers: list[Any]) -> threading.Thread:
    """Ask, and return in the middle of the answer; where the machine stood still for all of it, ask again."""
    for _ in range(20):
        answers.clear()
        before = psutil.Process(follower).cpu_times().user
        thread = threading.Thread(target=_ask, args=(server, answers))
        thread.start()
        eventually(lambda n=before: answers or psutil.Process(follower).cpu_times().user > n, "a step")
        if not answers:
            return thread
        thread.join(WAIT_S)
    raise AssertionError("each answer was over before it was looked at")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    """What one process answers."""
    stream, runner = Stream(_PROMPT, range(30)), load(directory)
    while len(stream.answer) < _NUM_TOKENS and 2 not in stream.answer:
        step(runner, [stream])
    assert len(stream.answer) > 100
    return stream.answer


def _tokens(answer: Any) -> list[int]:
    return [int(word.removeprefix("w")) for word in answer["choices"][0]["text"].split()]


@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_a_request_survives_the_death_of_each_member(victim: str, server: Server, expected: list[int]) -> None:
    (follower,) = eventually(lambda: _followers(server), "a follower")
    leader = psutil.Process(follower).ppid()
    answers: list[Any] = []
    thread = _ask_until_a_step(server, follower, answers)
    os.kill(follower if victim == "follower" else leader, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(follower) and not psutil.pid_exists(leader), "the end of both")
    thread.join(WAIT_S)
    assert _tokens(answers[0]) == expected
    eventually(lambda: _followers(server) not in ([], [follower]), "another follower")
