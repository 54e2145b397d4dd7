"""A stuck reader loses log lines, and learns how many; no process waits for it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from sie.runtime.log_stream import LogStream, open_stderr


class Stderr:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_lines_that_nobody_reads_are_dropped_and_counted(kind, monkeypatch):
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (sock.detach() for sock in socket.socketpair())
    try:
        monkeypatch.setattr(sys, "stderr", Stderr(writer))
        stream = open_stderr()
        assert isinstance(stream, LogStream)
        lines = [f"line {n} {'x' * 1000}\n" for n in range(5000)]
        for line in lines:
            stream.write(line)
        os.set_blocking(reader, False)
        read = drain(reader)
        stream.write("after\n")
        read += drain(reader)
        stream.close()
    finally:
        os.close(reader)
        os.close(writer)
    *kept, told, last = read.decode().splitlines(keepends=True)
    assert kept == lines[: len(kept)]
    assert 0 < len(kept) < len(lines)
    assert told == f"{len(lines) - len(kept)} log lines were dropped: nobody read them\n"
    assert last == "after\n"


def drain(fd: int) -> bytes:
    parts: list[bytes] = []
    try:
        while part := os.read(fd, 1 << 20):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def test_a_line_that_went_out_in_part_is_ended_before_the_next():
    sent = bytearray()
    room = [4, 0, 3, 100]

    def send(data: bytes) -> int:
        taken = data[: room.pop(0)]
        sent.extend(taken)
        if not taken:
            raise BlockingIOError
        return len(taken)

    stream = LogStream(send, lambda: None)
    for line in ("abcdef\n", "dropped\n", "too\n", "last\n"):
        stream.write(line)
    assert sent.decode() == "abcdef\n2 log lines were dropped: nobody read them\nlast\n"


def test_a_stand_in_for_stderr_is_taken_as_it_is(capsys):
    assert open_stderr() is sys.stderr
