"""A checkpoint with a hostile chat template or tokenizer affects only its own requests, and those only for a short time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from tokenizers import Regex, pre_tokenizers

from tests import generation_models
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import Client, Response, get, post_json
from tests.unit import tiny_tokenizers

CHAT = "/v1/chat/completions"
TIMEOUT_S = 0.5
STALL_S = 0.02
HOSTILE = {
    "memory": "{{ ('x' * (n * 2000000000))|length }}",
    "copies": "{{ ('x' * (n * 100000000))|replace('x', 'yy')|length }}",
    "time": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "output": "{{ 'x' * (n * 5000000) }}",
}
"""What a template does, by what a message says."""
FROM_ENCODE = b'{"items":[{"text":"x"}]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory: Path = generation_models.save(tmp_path_factory.mktemp("models") / "bad", "llama")
    tiny_tokenizers.byte_level().save(str(directory / "tokenizer.json"))
    branches = [f"{{% if messages[0].content == '{name}' %}}{text}{{% endif %}}" for name, text in HOSTILE.items()]
    (directory / "chat_template.jinja").write_text(
        "{% set n = messages|length %}" + "".join(branches) + "{{ messages[0].content }}"
    )
    backtracks: Path = generation_models.save(directory.parent / "backtracks", "llama")
    tokenizer = tiny_tokenizers.byte_level()
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.save(str(backtracks / "tokenizer.json"))
    (backtracks / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with start_server(
        "--model", f"backtracks={backtracks}",
        "--model", f"bad={directory}", "--model", "stub/a=stub:dense=16", "--model", "good=stub:generate",
        "--frontends", "1", "--devices", "cpu:1", "--template-timeout-s", str(TIMEOUT_S), "--dtype", "float32",
    ) as running:  # fmt: skip
        eventually(lambda: get(running.port, "/readyz").status == 200, "both models")
        yield running


def chat(server: Server, model: str, text: str) -> Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return post_json(server.port, CHAT, body)


def peak_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_template_is_the_requests_own_failure(server: Server, name: str):
    answer = chat(server, "bad", name)
    assert answer.status == 400, answer.body
    assert "template" in json.loads(answer.body)["error"]["message"]
    # On a busy machine any template may take longer than a template has.
    eventually(lambda: chat(server, "bad", "a").status == 200, "the next request")
    eventually(lambda: chat(server, "good", "a").status == 200, "a request to another model")
    assert max(map(peak_bytes, server.frontends())) < 600 << 20


class Stranger:
    """Somebody who uses other models, without pause."""

    def __init__(self, server: Server) -> None:
        self.worst_s = {"encode": 0.0, "chat": 0.0}
        self.failures: list[Response] = []
        self._stop = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        hello = {"model": "good", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        asked = {"encode": ("/v1/encode/stub/a", FROM_ENCODE), "chat": (CHAT, json.dumps(hello).encode())}
        with Client(self._server.port) as client:
            while not self._stop.is_set():
                for name, (path, body) in asked.items():
                    began_s = time.monotonic()
                    answer = client.request("POST", path, body, {"content-type": "application/json"})
                    self.worst_s[name] = max(self.worst_s[name], time.monotonic() - began_s)
                    self.failures += [answer] if answer.status != 200 else []
                time.sleep(0.002)


@pytest.mark.parametrize("text", ["x" * 40, ("x" * 20 + "z") * 380, ("x" * 20 + "z") * 3000])
def test_texts_that_a_tokenizer_backtracks_over_are_refused_one_by_one(server: Server, text: str):
    def is_refused() -> bool:
        answer = chat(server, "backtracks", text)
        assert answer.status in (400, 500), answer.body
        return "okenizer" in json.loads(answer.body)["error"]["message"]

    eventually(is_refused, "a refusal by the tokenizer; on a busy machine the template may be the first to be late")
    eventually(lambda: chat(server, "backtracks", "a").status == 200, "the next request")
    completion = {"model": "backtracks", "prompt": text, "max_tokens": 1}
    assert post_json(server.port, "/v1/completions", completion).status in (400, 500)
    eventually(
        lambda: post_json(server.port, "/v1/completions", {**completion, "prompt": "a"}).status == 200, "the next text"
    )


@pytest.mark.timing(alone=True)
@pytest.mark.parametrize(
    ("model", "name"), [*(("bad", name) for name in HOSTILE), ("backtracks", ("x" * 20 + "z") * 380)],
    ids=[*HOSTILE, "backtracks"],
)  # fmt: skip
def test_a_hostile_template_or_tokenizer_stalls_no_stranger(server: Server, model: str, name: str):
    assert chat(server, "good", "a").status == 200

    def worst_s() -> float:
        with Stranger(server) as stranger:
            assert chat(server, model, name).status == 400
        assert not stranger.failures
        return max(stranger.worst_s.values())

    worst = [worst_s()]
    while worst[-1] > STALL_S and len(worst) < 5:  # what other programs do to the times differs from try to try
        worst.append(worst_s())
    assert min(worst) < STALL_S, worst
