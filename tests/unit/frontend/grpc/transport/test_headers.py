"""Header blocks of calls, with what is kept of them, and the blocks of answers."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sie.frontend.grpc.methods import BY_PATH, Method
from sie.frontend.grpc.transport.frames import Code, ConnectionFault, StreamFault
from sie.frontend.grpc.transport.headers import (
    GREETING,
    NO_TABLE,
    OK,
    OPENING,
    HeaderReader,
    refusal_block,
    status_block,
)

PATH = "/inference.GRPCInferenceService/ModelInfer"
BASE = [(":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "application/grpc")]


def find(path: str) -> Method:
    return BY_PATH.get(path)


def a_reader(max_bytes: int = 65_536) -> HeaderReader:
    return HeaderReader(max_bytes, 256, find, lambda *_: None)


def encoded(*extra: tuple[str, str], encoder: Encoder | None = None) -> bytes:
    return (encoder or Encoder()).encode([*BASE, *extra])


VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
CALLS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(["x-a", "x-b", "x-c", "traceparent"]), VALUES, max_size=4),
              st.sampled_from([None, None, None, 0, 60, 200, 4096])),
    min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_headers_are_what_the_client_said_whatever_is_kept(calls: list[tuple[dict[str, str], int | None]]):
    encoder, reader, seen = Encoder(), a_reader(), set[bytes]()
    for extra, table_size in calls:
        if table_size is not None:
            encoder.header_table_size = table_size
        block = encoded(*extra.items(), encoder=encoder)
        event("a block came again" if block in seen else "a new block")
        seen.add(block)
        assert reader.read(block).headers == {"content-type": "application/grpc", **extra}


def test_repeated_headers_are_decoded_once():
    encoder, reader = Encoder(), a_reader()
    heads = [reader.read(encoded(("x-a", "1"), encoder=encoder)) for _ in range(4)]
    assert heads[1] is heads[2] is heads[3]
    reader.read(encoded(("x-a", "2"), encoder=encoder))
    assert reader.read(encoded(("x-a", "1"), encoder=encoder)).headers["x-a"] == "1"


def test_what_a_call_says_is_read():
    head = a_reader().read(encoded(
        ("grpc-timeout", "250m"), ("grpc-encoding", "gzip"), ("x-note", "first"), ("x-note", "second"),
        ("trace-bin", "AAAA"), ("te", "trailers"), ("content-length", "12"),
    ))  # fmt: skip
    assert (head.path, head.method, head.coding) == (PATH, BY_PATH[PATH], "gzip")
    assert (head.timeout_ns, head.content_length, head.headers["x-note"]) == (250_000_000, 12, "first")
    assert "trace-bin" not in head.headers
    assert head.is_plain


@pytest.mark.parametrize(
    ("text", "timeout_ns"),
    [("1H", 3600 * 10**9), ("2M", 120 * 10**9), ("3S", 3 * 10**9), ("4m", 4_000_000), ("5u", 5000), ("6n", 6), ("0n", 1),
     ("99999999H", 99_999_999 * 3600 * 10**9)],
)  # fmt: skip
def test_timeouts_of_every_unit(text: str, timeout_ns: int):
    assert a_reader().read(encoded(("grpc-timeout", text))).timeout_ns == min(timeout_ns, 1 << 60)


@pytest.mark.parametrize(
    "text", ["", "1", "S", "1s", "-1S", "1.5S", "123456789S", "1S1S", "\N{ARABIC-INDIC DIGIT ONE}S"]
)
def test_a_malformed_timeout_is_refused_as_malformed(text: str):
    head = a_reader().read(encoded(("grpc-timeout", text)))
    assert head.problem
    assert not head.is_plain


def test_too_many_entries_are_a_problem_and_too_many_bytes_are_too_large():
    many = a_reader().read(encoded(*((f"x-{number}", "") for number in range(300))))
    assert "256" in many.problem
    assert a_reader(1024).read(encoded(("x-note", "a" * 900))).is_too_large
    with pytest.raises(ConnectionFault) as caught:
        a_reader(1024).read(encoded(("x-note", "a" * 3000)))
    assert caught.value.code == Code.ENHANCE_YOUR_CALM


def test_a_head_that_is_malformed_is_so_each_time():
    encoder, reader = Encoder(), a_reader()
    for _ in range(3):
        with pytest.raises(StreamFault):
            reader.read(encoded(("connection", "close"), encoder=encoder))
    assert reader.read(encoded(("x-a", "1"), encoder=encoder)).headers["x-a"] == "1"


# --- answers ----------------------------------------------------------------------------------------------------------


def decoded(block: bytes) -> dict[str, str]:
    decoder = Decoder()
    found = {str(name): str(value) for name, value in decoder.decode(block)}
    assert not decoder.header_table.dynamic_entries, "our blocks are constants, and so may use no table"
    return found


def test_answers_begin_and_end_as_gRPC_has_it():
    assert decoded(OPENING) == {":status": "200", "content-type": "application/grpc"}
    assert decoded(NO_TABLE + GREETING)["grpc-accept-encoding"] == "identity, deflate, gzip"
    assert decoded(OK) == decoded(status_block(0, "")) == {"grpc-status": "0"}
    assert decoded(refusal_block(415))[":status"] == "415"


@pytest.mark.parametrize(
    ("message", "sent"),
    [("plain", "plain"), ("100 % of it", "100 %25 of it"), ("a\r\nb", "a%0D%0Ab"), ("\N{SNOWMAN}", "%E2%98%83"), ("~ ", "~ "),
     ("x" * 5000, "x" * 5000), ("\ud800", "?")],
)  # fmt: skip
def test_messages_of_a_status_are_percent_encoded(message: str, sent: str):
    found = decoded(status_block(13, message, [("x-request-id", "7")]))
    assert found == {"grpc-status": "13", "grpc-message": sent, "x-request-id": "7"}
