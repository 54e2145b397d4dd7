"""Where an answer ends, however its bytes arrive."""

from __future__ import annotations

import struct

import pytest

from sie.loadgen.channels import Http1Channel, MalformedError, Response, header_value
from sie.loadgen.grpc_channel import GrpcChannel, grpc_request
from sie.loadgen.target import parse_target

OK = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 5\r\n\r\nhello"


def feed_in_pieces(channel: Http1Channel | GrpcChannel, data: bytes, size: int) -> list[Response]:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return [response for piece in pieces if (response := channel.feed(piece)) is not None]


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_http_answers_are_found_however_they_arrive(size: int):
    channel = Http1Channel()
    for _ in range(3):
        (response,) = feed_in_pieces(channel, OK, size)
        assert (response.error, response.body, header_value(response.head, "Content-Type")) == ("", b"hello", "a/b")


def test_http_header_names_may_be_in_capitals():
    response = Http1Channel().feed(OK.replace(b"content-length", b"Content-Length"))
    assert response is not None
    assert response.body == b"hello"


def test_http_status_is_the_error():
    response = Http1Channel().feed(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
    assert response is not None
    assert response.error == "status 503"


@pytest.mark.parametrize("header", [b"", b"content-length: x\r\n", b"transfer-encoding: chunked\r\n"])
def test_an_http_answer_of_unknown_length_is_malformed(header: bytes):
    with pytest.raises(MalformedError):
        Http1Channel().feed(b"HTTP/1.1 200 OK\r\n" + header + b"\r\nhello")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def long_literal(name: bytes, value: bytes) -> bytes:
    """Return a field whose value may have 127 bytes and more. Source: RFC 7541, section 5.1."""
    if len(value) < 127:
        return literal(name, value)
    rest, length = len(value) - 127, b"\x7f"
    while rest >= 128:
        rest, length = rest >> 7, length + bytes((rest & 127 | 128,))
    return b"\0" + bytes((len(name),)) + name + length + bytes((rest,)) + value


def grpc_answer(stream: int, message: bytes, status: bytes = b"0") -> bytes:
    body = b"\0" + struct.pack(">I", len(message)) + message
    middle = len(body) // 2
    data = frame(0, 0, stream, body[:middle]) + frame(0, 0, stream, body[middle:]) if message else b""
    return (
        frame(1, 4, stream, literal(b":status", b"200")) + data + frame(1, 5, stream, literal(b"grpc-status", status))
    )


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_grpc_answers_are_found_however_they_arrive(size: int):
    channel = GrpcChannel()
    data = grpc_request(parse_target("grpc://127.0.0.1:1"), "/a/b", b"x" * 40_000)
    for stream in (1, 3, 5):
        framed = channel.frame(data)
        assert int.from_bytes(framed[5:9], "big") == stream
        assert framed.endswith(b"x" * 7000)
        (response,) = feed_in_pieces(channel, grpc_answer(stream, b"hello"), size)
        assert (response.error, response.body) == ("", b"hello")


def test_a_grpc_status_is_the_error():
    channel = GrpcChannel()
    channel.frame(b"")
    assert channel.feed(grpc_answer(1, b"", b"8")).error == "grpc-status 8"  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [5, 126, 127, 128, 20_000])
def test_the_reason_of_a_grpc_status_is_read_from_between_other_fields(length: int):
    reason = b"r" * length
    channel = GrpcChannel()
    channel.frame(b"")
    block = literal(b"content-type", b"application/grpc") + literal(b"grpc-status", b"5")
    answer = channel.feed(frame(1, 5, 1, block + long_literal(b"grpc-message", reason) + literal(b"a", b"b")))
    assert answer == Response("grpc-status 5", reason, b"")


def test_an_answer_without_a_message_is_no_good():
    channel = GrpcChannel()
    channel.frame(b"")
    assert channel.feed(grpc_answer(1, b"")).error == "no message"  # type: ignore[union-attr]


def test_pings_and_settings_are_acknowledged_and_a_goaway_ends_it():
    channel = GrpcChannel()
    channel.frame(b"")
    assert channel.feed(frame(4, 0, 0, b"") + frame(6, 0, 0, b"12345678") + frame(4, 1, 0, b"")) is None
    assert channel.replies() == frame(4, 1, 0, b"") + frame(6, 1, 0, b"12345678")
    assert channel.replies() == b""
    with pytest.raises(MalformedError):
        channel.feed(frame(7, 0, 0, b"12345678"))
