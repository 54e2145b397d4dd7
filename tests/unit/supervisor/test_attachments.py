"""Which attachments are made again."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sie.ipc.messages import Attach, Message, WorkerDown
from sie.supervisor.attachments import Attachments


class Server:
    """A frontend and a worker, connected and paired; `sent` has the messages to both."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.frontend, self.worker = (
            SimpleNamespace(
                name=role, role=role, slot=0, channel=object(), peer_pidfd=os.pidfd_open(os.getpid()),
                place=SimpleNamespace(cores=(0,)),
            )
            for role in ("frontend", "worker")
        )  # fmt: skip
        frontends: list[Any] = [self.frontend]
        workers: list[Any] = [self.worker]
        self.attachments = Attachments(self._send, frontends, workers, 4)
        self.attachments.pair(workers[0])

    def _send(self, child: Any, message: Message, fds: list[int] | None = None) -> None:
        self.sent.append((child.name, message))

    def repair(self, generation: int) -> list[tuple[str, Message]]:
        """Return what is sent when the frontend's report of an attachment is looked at."""
        self.sent.clear()
        self.attachments.repair(self.frontend, 0, generation)  # type: ignore[arg-type]  # a stand-in
        return self.sent

    def close(self) -> None:
        for child in (self.frontend, self.worker):
            os.close(child.peer_pidfd)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def test_attachment_that_ended_while_both_live_is_made_again(server: Server) -> None:
    assert server.repair(1) == [
        ("frontend", WorkerDown(0, 1, ())),
        ("frontend", Attach(0, 2)),
        ("worker", Attach(0, 2)),
    ]


def test_attachment_that_has_a_successor_stays_as_it_is(server: Server) -> None:
    server.attachments.pair(server.frontend)  # type: ignore[arg-type]  # a stand-in
    assert server.repair(1) == []


def test_attachment_to_a_dead_worker_is_left_to_its_successor(server: Server) -> None:
    server.attachments.end(server.worker, ())  # type: ignore[arg-type]  # a stand-in
    assert server.repair(1) == []


@pytest.mark.parametrize("role", ["frontend", "worker"])
def test_attachment_of_a_process_that_is_ending_is_not_made_again(server: Server, role: str) -> None:
    getattr(server, role).channel = None
    assert server.repair(1) == []
