"""Answers over a Unix socket count until their clients have read them, although nobody knows whose each one is."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.frontend.http.held_bytes import HeldBytes
from sie.frontend.http.unread import UnreadAnswers

BIG = 1 << 20
ASKED: Any = SimpleNamespace(scope=SimpleNamespace(client="unix:server"), holder=None)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[list[Pair]]:
    """Yield connections: the server's end and the client's."""
    before = Path.cwd()
    os.chdir(tmp_path)  # the path of a Unix socket is short
    made: list[Pair] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen()
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.connect("socket")
            made.append((listener.accept()[0], client))
        yield made
    os.chdir(before)
    for sock in [sock for pair in made for sock in pair]:
        sock.close()


def fill(ours: socket.socket) -> int:
    ours.setblocking(False)
    num_bytes = 0
    try:
        while True:
            num_bytes += ours.send(bytes(65536))
    except BlockingIOError:
        return num_bytes


def drain(client: socket.socket, num_bytes: int) -> None:
    client.settimeout(60)
    while num_bytes:
        num_bytes -= len(client.recv(num_bytes))


@pytest.fixture
def held() -> HeldBytes:
    return HeldBytes(2 * BIG)


@pytest.fixture
def answers(held: HeldBytes) -> Iterator[UnreadAnswers]:
    loop = asyncio.new_event_loop()
    yield UnreadAnswers(held, loop)
    loop.close()


def look(answers: UnreadAnswers, held: HeldBytes) -> None:
    answers.tick(1 << 62)
    answers._check_ns = 0
    held.tick()


def test_an_answer_counts_until_it_is_read(pairs: list[Pair], held: HeldBytes, answers: UnreadAnswers) -> None:
    sent = [fill(ours) for ours, _ in pairs[:2]]
    for number in (1, 2):
        answers.add(ASKED, BIG)
        look(answers, held)
        assert held.num_bytes == number * BIG
    time.sleep(0.06)  # an answer that was sent is at its connection after this time
    look(answers, held)
    assert held.num_bytes == 2 * BIG
    drain(pairs[0][1], sent[0])
    look(answers, held)
    assert held.num_bytes == BIG
    pairs[1][0].close()
    look(answers, held)
    assert held.num_bytes == 0


def test_answers_that_were_read_at_once_count_no_longer(
    pairs: list[Pair], held: HeldBytes, answers: UnreadAnswers
) -> None:
    fill(pairs[0][0])
    for _ in range(5):
        answers.add(ASKED, BIG // 4)
    time.sleep(0.06)
    look(answers, held)
    assert held.num_bytes == BIG // 4, "one connection has one answer"


def test_over_the_limit_a_connection_that_is_not_read_is_cut(
    pairs: list[Pair], held: HeldBytes, answers: UnreadAnswers
) -> None:
    for ours, _ in pairs[:2]:
        fill(ours)
    for _ in range(2):
        answers.add(ASKED, BIG + 1)
    look(answers, held)
    assert held.num_bytes == BIG + 1
    cut = [ours.fileno() for ours, _ in pairs if is_shut(ours)]
    assert len(cut) == 1
    assert pairs[2][0].fileno() not in cut


def is_shut(ours: socket.socket) -> bool:
    ours.setblocking(False)
    try:
        return ours.recv(1) == b""
    except BlockingIOError:
        return False


def test_over_the_limit_a_new_answer_is_looked_at_without_a_pause(
    pairs: list[Pair], held: HeldBytes, answers: UnreadAnswers
) -> None:
    now_ns = time.monotonic_ns()
    for ours, _ in pairs:
        fill(ours)
        answers.add(ASKED, BIG + 1)
        now_ns += 1_000_000  # far less than the usual pause between two looks
        answers.tick(now_ns)
        held.tick()
        assert held.num_bytes <= 2 * BIG
    assert sum(is_shut(ours) for ours, _ in pairs) == 2


def test_answers_that_may_have_been_read_cut_nobody(pairs: list[Pair], held: HeldBytes, answers: UnreadAnswers) -> None:
    fill(pairs[0][0])  # a client in the middle of its answer
    for _ in range(20):  # and those of fast clients, which nobody knows to be read until a moment later
        answers.add(ASKED, BIG)
    look(answers, held)
    assert not is_shut(pairs[0][0])
    time.sleep(0.06)
    look(answers, held)
    assert held.num_bytes == BIG
