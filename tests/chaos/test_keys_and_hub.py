"""F44, F52, F53: the key file, the hub, or half of a download disappears while the server runs."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgpack
import numpy as np
import pytest
import transformers

from tests.chaos.cluster import MODEL, cluster
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.keys import INFER, METRICS, bearer, write_keys
from tests.process.mutants import PACKED
from tests.process.wire import dense_rows, encode, get, raw_request, read_response
from tests.tiny_models import save_poisoned
from tests.unit.fake_hub import FakeHub

WITHOUT_ROUTE = ("unshare", "--net")
REFUSALS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
    "no TOML": lambda path: path.write_text("[[key]\n"),
    "no key of ours": lambda path: path.write_text('[[key]]\nname = "x"\nhash = "md5:00"\nscopes = ["infer"]\n'),
    "writable for all": lambda path: path.chmod(0o666),
}


@pytest.mark.row("F44", "the file of API keys is removed, emptied, broken or opened, and comes back")
@pytest.mark.timeout(400)
def test_f44_a_file_of_keys_that_goes_never_opens_the_server(row: Row, tmp_path: Path):
    path = write_keys(tmp_path / "keys.toml")
    num_alarms = num_turns = 0
    with cluster("--api-keys", str(path), "--open-metrics", is_warm=False) as server, Doors(server) as doors:
        for _ in range(pick(1, 8)):
            for spoil in REFUSALS.values():
                num_turns += 1
                spoil(path)
                eventually(lambda: is_alarmed(server), "the alarm")
                num_alarms += 1
                path.unlink(missing_ok=True)
                write_keys(path)
                eventually(lambda: not is_alarmed(server), "the end of the alarm")
        doors.wait_for(pick(100, 1000))
    row.equals("times that the file was spoilt", num_turns, len(REFUSALS) * pick(1, 8))
    row.equals("of them with an alarm", num_alarms, num_turns)
    row.at_least("questions without a key, or with a wrong one", doors.statuses["closed"].total(), pick(200, 2000), "")
    row.equals("of them answered with 200", doors.statuses["closed"][200], 0)
    row.equals(
        "of them answered with anything but 401", doors.statuses["closed"].total() - doors.statuses["closed"][401], 0
    )
    row.at_least("questions with the right key", doors.statuses["open"].total(), pick(100, 1000), "")
    row.equals("of them refused", doors.statuses["open"].total() - doors.statuses["open"][200], 0)


def is_alarmed(server: Server) -> bool:
    return "\nsie_api_keys_refused 1.0\n" in get(server.port, "/metrics").body.decode()


class Doors:
    """Asks all the time, with the right key, with a wrong one and without any, and counts the answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.statuses: dict[str, Counter[int]] = {"open": Counter(), "closed": Counter()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def wait_for(self, num_answers: int) -> None:
        """Wait until so many questions with the right key were answered, at least twenty of them from now on."""
        wanted = max(num_answers, self.statuses["open"].total() + 20)
        eventually(lambda: self.statuses["open"].total() >= wanted, f"{num_answers} answers")

    def _ask(self) -> None:
        while not self._stop.wait(0.005):
            for kind, headers in (("open", bearer(INFER)), ("closed", {}), ("closed", bearer(METRICS + "x"))):
                status = encode(self._server.port, MODEL, ["x"], headers).status
                self.statuses[kind][status] += 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a tiny encoder, by name."""
    home = save_poisoned(tmp_path_factory.mktemp("model"), transformers.BertModel)
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def hub_env(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1", **more}


@contextlib.contextmanager
def asking(path: Path) -> Iterator[Callable[[], np.ndarray]]:
    """Yield what asks the server at a Unix socket for a vector: a socket with a path needs no network."""
    body = raw_request("/v1/encode/org/model", msgpack.packb({"items": [{"text": "w1 w2"}]}), PACKED)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(str(path))

        def ask() -> np.ndarray:
            sock.sendall(body)
            return dense_rows(read_response(sock))

        yield ask


@pytest.mark.row("F52", "the hub cannot be reached at the start, and the model is in the cache")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f52_a_cached_model_starts_without_a_network(row: Row, files: dict[str, bytes], tmp_path: Path):
    if shutil.which("unshare") is None or not can_unshare():
        pytest.skip("no network namespace can be made here (needs root, and unshare of util-linux)")
    home, sock = tmp_path / "hf", tmp_path / "s"
    flags = ("--model", "org/model", "--uds", str(sock), "--cache-dir", str(tmp_path / "cache"))
    with FakeHub(files) as hub:
        with start_server(*flags, env=hub_env(hub, home)), asking(sock) as ask:
            expected = ask()
        num_fetched = len(hub.downloads())
        hub.requests.clear()
        starts = [("no route", WITHOUT_ROUTE, {}), ("HF_HUB_OFFLINE=1", (), {"HF_HUB_OFFLINE": "1"})]
        for name, prefix, more in pick(starts[:1], starts):
            began_s = time.monotonic()
            with start_server(*flags, prefix=prefix, env=hub_env(hub, home, **more)), asking(sock) as ask:
                row.at_most(f"{name}: ready after", time.monotonic() - began_s, 20.0, "s")
                row.equals(
                    f"{name}: answers that differ",
                    sum(not np.allclose(ask(), expected, atol=0.01) for _ in range(5)),
                    0,
                )
        row.at_least("files of the model", num_fetched, 3, "")
        row.equals("questions to the hub, which was there", len(hub.requests), 0)


def can_unshare() -> bool:
    return subprocess.run([*WITHOUT_ROUTE, "true"], capture_output=True, check=False, timeout=WAIT_S).returncode == 0


@pytest.mark.row("F53", "a download is cut, and another one brings wrong bytes")
@pytest.mark.timeout(400)
def test_f53_half_a_model_is_never_served(row: Row, files: dict[str, bytes], tmp_path: Path):
    rng = np.random.default_rng(SEED)
    weights = "model.safetensors"
    right = files[weights]
    num_wrong = 0
    with FakeHub(files) as hub:
        flags = ("--lazy-model", "org/model", "--cache-dir", str(tmp_path / "cache"), "--load-retry-s", "1")
        with start_server(*flags, "--model", f"{MODEL}=stub:dense=16", env=hub_env(hub, tmp_path / "hf")) as server:
            for _ in range(pick(1, 5)):
                spoilt = bytearray(right)
                spoilt[int(rng.integers(len(right) // 2, len(right)))] ^= 1
                hub.served[weights] = bytes(spoilt)
                answer = eventually(lambda: settled(server), "an end of the load")
                assert answer == 502, answer
                num_wrong += any((tmp_path / "hf").rglob(weights))
            hub.served[weights] = right
            hub.cut_once = {weights}
            eventually(lambda: settled(server) == 200, "a good load")
            found = [path.read_bytes() == right for path in (tmp_path / "hf").rglob(weights)]
            assert get(server.port, "/readyz").status == 200
    row.equals("wrong downloads", pick(1, 5), pick(1, 5))
    row.equals("of them left in the cache", num_wrong, 0)
    row.equals("cut downloads", 1 - len(hub.cut_once), 1)
    row.equals("models served from wrong bytes", found.count(False), 0)


def settled(server: Server) -> int:
    """Ask for the model; return the status once it is not that of a load that goes on, else 0."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status = encode(server.port, "org/model", ["w1"]).status
        return 0 if status == 503 else status
    return 0
