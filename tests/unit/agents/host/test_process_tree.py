"""What the processes of a sandbox hold, as /proc shows it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sie.agents.host.process_tree import socket_bytes
from tests.process.harness import eventually


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        yield client, stack.enter_context(listener.accept()[0])


def test_queues_of_other_programs_in_the_same_network_are_not_charged():
    code = "import sys; print(flush=True); sys.stdin.read()"
    with (
        connection() as (client, own),
        connection() as (sender, _unread),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[own.fileno()]
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        idle = socket_bytes([child.pid])
        sender.sendall(b"x" * 200_000)
        assert socket_bytes([child.pid]) == idle > 0
        client.sendall(b"x" * 100_000)
        eventually(lambda: socket_bytes([child.pid]) == idle + 100_000, "what was sent is charged")
        child.communicate()
