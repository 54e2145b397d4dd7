"""Speaks to a running server: raw sockets, a small msgpack client, metrics, and load with checked answers."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import msgpack
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.process.harness import WAIT_S, Server, eventually, extents_in_use, paused

MSGPACK = "application/msgpack"
TIMEOUT_S = WAIT_S


class Response(NamedTuple):
    """One HTTP response; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    def unpack(self) -> Any:
        """Return the body as msgpack; arrays stay maps with bytes keys."""
        return msgpack.unpackb(self.body, strict_map_key=False)

    def code(self) -> str:
        """Return the error code of the native envelope."""
        return self.json()["detail"]["code"]


def connect(port: int, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Open a connection."""
    return socket.create_connection(("127.0.0.1", port), timeout_s)


def read_response(sock: socket.socket, method: str = "POST") -> Response:
    """Read one response from a socket."""
    parsed = http.client.HTTPResponse(sock, method=method)
    parsed.begin()
    body = parsed.read()
    return Response(parsed.status, {name.lower(): value for name, value in parsed.getheaders()}, body)


def send_raw(port: int, data: bytes, timeout_s: float = TIMEOUT_S) -> Response:
    """Send bytes on a fresh connection and return the response."""
    with connect(port, timeout_s) as sock:
        sock.sendall(data)
        return read_response(sock)


def send_until(sock: socket.socket, request: bytes, condition: Callable[[], Any], what: str) -> None:
    """Send a request and wait until a state is there that lasts no longer than it does.

    Where it was answered before that was looked at, since the machine stood still, it is sent once more.
    """
    sock.sendall(request)

    def is_so() -> bool:
        if condition():
            return True
        if select.select([sock], [], [], 0)[0]:
            read_response(sock)
            sock.sendall(request)
        return False

    eventually(is_so, what)


def raw_request(
    path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, method: str = "POST", length: bool = True
) -> bytes:
    """Return the bytes of one HTTP/1.1 request."""
    fields = {"host": "127.0.0.1", **({"content-length": str(len(body))} if length else {}), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class _AtOnce(http.client.HTTPConnection):
    """Sends head and body in one call: between two, a busy machine may let the time pass that the server has for both."""

    def _send_output(self, message_body: Any = None, encode_chunked: bool = False) -> None:
        head = b"\r\n".join([*self._buffer, b"", b""])  # type: ignore[attr-defined]
        self._buffer.clear()  # type: ignore[attr-defined]
        self.send(head + (message_body or b""))


class Client:
    """One keep-alive connection that speaks msgpack. Use it from one thread."""

    def __init__(self, port: int, timeout_s: float = TIMEOUT_S) -> None:
        self._connection = _AtOnce("127.0.0.1", port, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the response to any request; a broken connection is opened anew by the next one."""
        try:
            self._connection.request(method, path, body, dict(headers or {}))
            response = self._connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, found, response.read())
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise

    def encode(
        self, model: str, texts: Iterable[str], headers: Mapping[str, str] | None = None, **params: Any
    ) -> Response:
        """Post texts to `/v1/encode`; params are `output_dtype`, `options` and so on."""
        body = {"items": [{"text": text} for text in texts], **({"params": params} if params else {})}
        return self.request(
            "POST", f"/v1/encode/{model}", msgpack.packb(body), {"content-type": MSGPACK, **(headers or {})}
        )


def get(port: int, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a GET on a fresh connection."""
    with Client(port) as client:
        return client.request("GET", path, None, headers)


def encode(
    port: int, model: str, texts: Iterable[str], headers: Mapping[str, str] | None = None, **params: Any
) -> Response:
    """Post texts to `/v1/encode` on a fresh connection."""
    with Client(port) as client:
        return client.encode(model, texts, headers, **params)


def post_json(port: int, path: str, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Post a JSON value, asking for JSON."""
    with Client(port) as client:
        fields = {"content-type": "application/json", "accept": "application/json", **(headers or {})}
        return client.request("POST", path, json.dumps(value).encode(), fields)


def to_array(packed: Mapping[bytes, Any]) -> NDArray[Any]:
    """Return the array in a decoded msgpack array map. Source: SIE API reference, section 4."""
    assert packed[b"nd"] is True
    assert packed[b"kind"] == b""
    return np.frombuffer(packed[b"data"], packed[b"type"]).reshape(packed[b"shape"])


def dense_rows(response: Response) -> NDArray[Any]:
    """Return the (n, width) rows of a good msgpack encode reply."""
    assert response.status == 200, (response.status, response.body[:500])
    return np.stack([to_array(item["dense"]["values"]) for item in response.unpack()["items"]])


def stub_rows(texts: Iterable[str], dense: int) -> NDArray[np.float32]:
    """Return what a stub must answer: int8(SHAKE-256(UTF-8 text)[i]) / 127 as float32."""
    digests = [np.frombuffer(hashlib.shake_256(text.encode()).digest(dense), np.int8) for text in texts]
    return np.stack(digests).astype(np.float32) / np.float32(127)


def families(port: int) -> dict[str, Metric]:
    """Return what `/metrics` holds, by family name as prometheus_client spells it (counters without `_total`)."""
    response = get(port, "/metrics")
    assert response.status == 200
    return {family.name: family for family in text_string_to_metric_families(response.body.decode())}


def samples(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of `/metrics` by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(port).values()
        for sample in family.samples
    }


def total(port: int, name: str, **labels: str) -> float:
    """Return the sum of one sample name over all its labels but those given.

    Only its lines are parsed: tests ask again and again, and the whole page takes 6 ms.
    """
    response = get(port, "/metrics")
    assert response.status == 200
    lines = (line for line in response.body.decode().splitlines(keepends=True) if line.startswith(name))
    return sum(
        sample.value
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def wait_no_extents(port: int, timeout_s: float = WAIT_S) -> None:
    """Wait until every extent has been given back."""
    eventually(lambda: extents_in_use(port) == 0, "no extent in use", timeout_s)


@contextlib.contextmanager
def without_worker(server: Server, is_missed: Callable[[], bool]) -> Iterator[None]:
    """Kill the only worker, and have its successor stand still before it has loaded, which is_missed sees.

    Where the machine stood still in between, the successor has loaded: then it is killed, too.
    """
    for _ in range(20):
        num_restarts = total(server.port, "sie_worker_restarts_total")
        server.kill_worker()
        with paused(server.worker()):
            eventually(lambda n=num_restarts: total(server.port, "sie_worker_restarts_total") > n, "the death is known")
            deadline_s = time.monotonic() + 1.0
            while not (is_so := is_missed()) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            if is_so:
                yield
                return
    raise AssertionError("each successor had loaded before it was stopped")


def keep_asking(ask: Callable[[], Response], for_s: float, pause_s: float) -> None:
    """Ask without a pause for so long, and assert that every answer is good.

    What may go when nobody asks for pause_s may have gone where the machine stood still for that: then it begins anew.
    """
    deadline_s = time.monotonic() + 2 * WAIT_S
    began_s = asked_s = 0.0  # long ago
    while asked_s - began_s < for_s:
        before_s, asked_s = asked_s, time.monotonic()
        is_good = ask().status == 200
        if time.monotonic() - before_s < pause_s:
            assert is_good
            continue
        assert asked_s < deadline_s, f"no {for_s:g} s without a pause of {pause_s:g} s"
        if not is_good:
            time.sleep(0.01)
            asked_s = 0.0
        began_s = asked_s


class Load:
    """Clients that ask without pause, each on its own connection, and check every answer.

    failures holds whatever was not the right answer, and num_answered counts the right ones.
    """

    def __init__(self, server: Server, model: str, dense: int, num_clients: int, seed: int) -> None:
        self.failures: list[str] = []
        self.num_answered = 0
        self.slowest_s = 0.0
        self._server = server
        self._model = model
        self._dense = dense
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed, i), daemon=True) for i in range(num_clients)]

    def start(self) -> None:
        """Begin; return when the first answer is there."""
        for thread in self._threads:
            thread.start()
        self.wait_answers(1)

    def wait_answers(self, num_more: int, timeout_s: float = WAIT_S) -> None:
        """Wait for further right answers, or for the first failure."""
        goal = self.num_answered + num_more
        eventually(lambda: self.failures or self.num_answered >= goal, f"{num_more} more answers", timeout_s)

    def end(self, timeout_s: float = WAIT_S) -> None:
        """Let every client finish what it asked, and assert that all of it was answered rightly."""
        self._stop.set()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            assert not thread.is_alive(), f"a request was not answered within {timeout_s:g} s"
        assert not self.failures, f"{len(self.failures)} failed, {self.num_answered} answered: {self.failures[:3]}"

    def _run(self, seed: int, index: int) -> None:
        rng = np.random.default_rng([seed, index])
        with Client(self._server.port) as client:
            while not self._stop.is_set():
                texts = [f"{seed} {index} {n}" * int(n % 7 + 1) for n in rng.integers(0, 1 << 30, rng.integers(1, 5))]
                began_s = time.monotonic()
                fault = self._ask(client, texts)
                with self._lock:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                    if fault:
                        self.failures.append(fault)
                    else:
                        self.num_answered += 1

    def _ask(self, client: Client, texts: list[str]) -> str:
        try:
            response = client.encode(self._model, texts)
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        if response.status != 200:
            return f"{response.status} {response.body[:300]!r}"
        return "" if np.array_equal(dense_rows(response), stub_rows(texts, self._dense)) else f"wrong rows: {texts}"


@contextlib.contextmanager
def under_load(server: Server, model: str, dense: int, *, seed: int, num_clients: int = 4) -> Iterator[Load]:
    """Yield a running load; at the end assert that every request was answered, and rightly."""
    print(f"load seed {seed}")
    load = Load(server, model, dense, num_clients, seed)
    load.start()
    try:
        yield load
    finally:
        load._stop.set()
    load.end()
