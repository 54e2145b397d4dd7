"""Keeps a server busy with requests of every shape, and says whether any of its processes grows.

python -m tests.chaos.soak --seconds 3600           every process must stay flat
python -m tests.chaos.soak --seconds 60 --leak      a control: a leak on purpose, which must be caught

What is judged is private memory (RssAnon) by requests answered, a least-squares line. The warm-up is left out: the first
20,000 requests, or the first half of fewer than 40,000. In it a frontend of two grows by 7 MiB and a worker of MiniLM by
100 on two cores, while each width of a step and each size of a text comes for the first time. Shared segments have a fixed size, but count as resident only once a process has touched them, so they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np

from tests.process.harness import Role, Server, start_server
from tests.process.mutants import PACKED, mutate
from tests.process.watchers import watch
from tests.process.wire import Client, connect, raw_request

MAX_SLOPE = 1.0
"""MiB for 10,000 requests."""
_LEAK_KIB = 1
_WARM_REQUESTS = 20_000
_ROLES: tuple[Role, ...] = ("supervisor", "frontend", "worker")
_STUB = "stub/a=stub:dense=64,sparse=1000,multivector=16,score,extract"
_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_JSON = {"content-type": "application/json"}


class Sample(NamedTuple):
    """One look at one process."""

    num_requests: int
    anon_bytes: int


class Growth(NamedTuple):
    """What became of one process. slope is MiB for 10,000 requests."""

    process: str
    first_mib: float
    last_mib: float
    slope: float
    num_samples: int


class Soak:
    """A load of mixed shapes, and the memory of the server's processes beside it."""

    def __init__(self, server: Server, *, num_clients: int, seed: int, models: list[str], rate: float) -> None:
        """Rate is the requests a second of all clients together; 0: each asks as soon as it has its answer."""
        self.statuses: Counter[int] = Counter()
        self.samples: dict[str, list[Sample]] = {}
        self._server = server
        self._models = models
        self._seed = seed
        self._pause_s = num_clients / rate if rate else 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(num_clients)]

    def run(self, seconds: float, sample_s: float) -> None:
        """Ask and look for so long."""
        names = {pid: f"{role} {pid}" for role in _ROLES for pid in self._server.pids(role)}
        for thread in self._threads:
            thread.start()
        deadline_s = time.monotonic() + seconds
        with watch(self._server):
            while time.monotonic() < deadline_s:
                time.sleep(sample_s)
                num_requests = self.statuses.total()
                for pid, name in names.items():
                    self.samples.setdefault(name, []).append(Sample(num_requests, anon_bytes(pid)))
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)

    def growth(self) -> list[Growth]:
        """Return how each process grew after the warm-up."""
        return [judge(name, samples) for name, samples in self.samples.items()]

    def _ask(self, number: int) -> None:
        rng = np.random.default_rng([self._seed, number])
        due_s = time.monotonic() + rng.random() * self._pause_s
        with Client(self._server.port) as client:
            while not self._stop.wait(max(0.0, due_s - time.monotonic())):
                due_s += self._pause_s
                path, body, headers = self._request(rng)
                try:
                    status = self._send(client, rng, path, body, headers)
                except (OSError, http.client.HTTPException):
                    status = 0
                with self._lock:
                    self.statuses[status] += 1

    def _send(
        self, client: Client, rng: np.random.Generator, path: str, body: bytes | None, headers: dict[str, str]
    ) -> int:
        chance = rng.random()
        if body is None:
            return client.request("GET", path).status
        if chance < 0.01:  # a client that leaves
            with connect(self._server.port) as sock:
                sock.sendall(raw_request(path, body, headers))
            return 499
        if chance < 0.02:
            headers = {**headers, "x-sie-timeout-ms": "1"}
        elif chance < 0.05:
            body = mutate(body, rng)
        return client.request("POST", path, body, headers).status

    def _request(self, rng: np.random.Generator) -> tuple[str, bytes | None, dict[str, str]]:
        texts = [words(rng) for _ in range(int(rng.integers(1, 9)))]
        items = [{"text": text} for text in texts]
        model = self._models[int(rng.integers(0, len(self._models)))]
        match int(rng.integers(0, 8)):
            case 0 | 1 | 2:
                return f"/v1/encode/{model}", msgpack.packb({"items": items}), PACKED
            case 3:
                outputs = {"output_types": ["dense", "sparse", "multivector"], "output_dtype": "float16"}
                body = {"items": items, "params": outputs}
                return "/v1/encode/stub/a", msgpack.packb(body), PACKED
            case 4:
                return "/v1/embeddings", json.dumps({"model": model, "input": texts}).encode(), _JSON
            case 5:
                body = {"query": {"text": words(rng)}, "items": items}
                return "/v1/score/stub/a", json.dumps(body).encode(), _JSON
            case 6:
                body = {"items": items, "params": {"labels": ["a", "b"]}}
                return "/v1/extract/stub/a", json.dumps(body).encode(), _JSON
            case _:
                return ("/v1/models", "/readyz", "/nothing")[int(rng.integers(0, 3))], None, {}


def words(rng: np.random.Generator) -> str:
    """Return a text: mostly short, sometimes some kilobytes."""
    return f"{rng.integers(0, 1 << 40)} " * int(np.clip(rng.lognormal(1.0, 1.2), 1, 400))


def anon_bytes(pid: int) -> int:
    """Return the private resident memory of a process, which must live."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def judge(process: str, samples: list[Sample]) -> Growth:
    """Fit a line through what is left of the samples without the warm-up."""
    first = min(_WARM_REQUESTS, samples[-1].num_requests / 2)
    kept = [sample for sample in samples if sample.num_requests >= first]
    requests = np.array([sample.num_requests for sample in kept], float)
    mib = np.array([sample.anon_bytes for sample in kept], float) / 2**20
    slope = float(np.polyfit(requests / 10_000, mib, 1)[0]) if len(kept) > 2 else 0.0
    return Growth(process, float(mib[0]), float(mib[-1]), slope, len(kept))


def soak(seconds: float, *, leak_kib: int, seed: int, is_real: bool, rate: float = 0.0) -> Soak:
    """Start a server, keep it busy for so long, and return what was seen. Nothing may have died.

    rate is as for `Soak`; leak_kib is what frontends and workers keep of each request on purpose.
    """
    flags = ["--model", _STUB, "--devices", "cpu:1", "--frontends", "2", "--test"]
    models = ["stub/a"]
    if is_real:
        flags += ["--model", _MINILM]
        models.append(_MINILM)
    for point in ("frontend.before_release", "worker.before_reply") if leak_kib else ():
        flags += ["--failpoints", f"{point}=leak:{leak_kib}"]
    with start_server(*flags) as server:
        before = sorted(server.pids())
        seen = Soak(server, num_clients=4, seed=seed, models=models, rate=rate)
        seen.run(seconds, max(0.2, seconds / 500))
        assert sorted(server.pids()) == before, f"a process died:\n{server.output.text()}"
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: as many as are answered")
    parser.add_argument("--leak", action="store_true", help="leak on purpose, and succeed when that is caught")
    parser.add_argument("--real", action="store_true", help="serve the bundled all-MiniLM-L6-v2, too")
    args = parser.parse_args()
    seen = soak(args.seconds, leak_kib=_LEAK_KIB if args.leak else 0, seed=args.seed, is_real=args.real,
                rate=args.rate)  # fmt: skip
    growth = seen.growth()
    print(f"\n{seen.statuses.total():,} requests in {args.seconds:g} s, seed {args.seed}; by status: "
          f"{dict(sorted(seen.statuses.items()))} (0: no answer, 499: a client that left)\n")  # fmt: skip
    print("| process | MiB after the warm-up | MiB at the end | MiB for 10,000 requests |\n| --- | --- | --- | --- |")
    for each in growth:
        print(f"| {each.process} | {each.first_mib:.1f} | {each.last_mib:.1f} | {each.slope:+.3f} |")
    grows = [each.process for each in growth if each.slope > MAX_SLOPE]
    if args.leak:
        sys.exit(None if grows else "the leak on purpose was not caught")
    sys.exit(f"these grow by more than {MAX_SLOPE:g} MiB for 10,000 requests: {', '.join(grows)}" if grows else None)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
