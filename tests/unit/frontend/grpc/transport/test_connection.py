"""One HTTP/2 connection: calls in any pieces, and every breach of the protocol ended by its name."""

from __future__ import annotations

import asyncio
import gc
import itertools
import struct
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sie.config.grpc_limits import Grpc
from sie.config.limits import Limits
from sie.frontend.grpc.transport import connection, floods, frames, turns
from sie.frontend.grpc.transport.frames import Code
from tests.unit.frontend.grpc.transport.breaches import CONNECTION_FAULTS, GREASE, STREAM_FAULTS, WHOLE, window
from tests.unit.frontend.grpc.transport.client_bytes import (
    OPENING,
    a_call,
    answered,
    block,
    data,
    ended_with,
    grpc_status,
    headers,
    prefixed,
    reset_with,
    split_frames,
)
from tests.unit.frontend.grpc.transport.peer import STREAM, UNARY, Peer

U32 = struct.Struct(">L")


@pytest.fixture(scope="module", autouse=True)  # of the module, because Hypothesis's examples share it
def _one_moment() -> Iterator[None]:
    """Count all floods at one moment: a busy machine takes longer for them than the time in which they are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floods, "time", SimpleNamespace(monotonic_ns=lambda: 1))
        yield


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_is_answered_with_its_message_and_a_status():
    peer = Peer().opened()
    assert answered(peer.send(a_call(1)), 1) == b"hello"
    assert answered(peer.send(a_call(3, b"")), 3) == b""


def test_the_greeting_tells_the_limits():
    first = split_frames(bytes(Peer().opened().transport.written))[0]
    told = dict(struct.iter_unpack(">HL", first[3]))
    assert (first[0], told[frames.MAX_CONCURRENT_STREAMS]) == (frames.SETTINGS, Grpc().max_grpc_streams)
    assert told[frames.INITIAL_WINDOW_SIZE] == Grpc().grpc_window_bytes


def session() -> bytes:
    """Return all that a well-behaved client may do."""
    whole = block(x_note="a" * 300)
    padded = frames.frame(frames.DATA, frames.PADDED, 7, b"\x03" + prefixed(b"padded")[:4] + b"\0\0\0")
    return b"".join((
        OPENING, GREASE, a_call(1),
        frames.frame(frames.HEADERS, 0, 3, whole[:100]), frames.frame(frames.CONTINUATION, 0, 3, whole[100:101]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 3, whole[101:]), data(3, prefixed(b"split")),
        window(0, 1000), headers(5), data(5, prefixed(b"two parts")[:7], 0), data(5, prefixed(b"two parts")[7:], 0),
        data(5, b""), frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED | frames.HAS_PRIORITY, 7,
                     b"\x02" + b"\0\0\0\0\x10" + block() + b"\0\0"),
        frames.frame(frames.PRIORITY, 0, 7, b"\0\0\0\0\x10"), padded, data(7, prefixed(b"padded")[4:]),
        headers(9), data(9, prefixed(b"trailers"), 0), frames.frame(frames.HEADERS, 5, 9, b"\0\x01a\x01b"),
        frames.goaway_frame(0, Code.NO_ERROR),
    ))  # fmt: skip


def test_what_a_client_may_do_is_served():
    received = Peer().send(session())
    assert [answered(received, stream) for stream in (1, 3, 5, 7, 9)] == [
        b"hello", b"split", b"two parts", b"padded", b"trailers"
    ]  # fmt: skip
    assert (frames.PING, frames.ACK, 0, b"12345678") in received
    assert ended_with(received) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60))
def test_any_pieces_mean_the_same(sizes: list[int]):
    whole = session()
    at, peer = 0, Peer()
    for size in sizes:
        peer.receive(whole[at : at + size])
        at += size
    peer.receive(whole[at:])
    assert split_frames(bytes(peer.transport.written)) == Peer().send(whole)


def test_one_byte_at_a_time_means_the_same():
    peer = Peer()
    for byte in session():
        peer.receive(bytes((byte,)))
    assert split_frames(bytes(peer.transport.written)) == Peer().send(session())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_garbage_ends_by_name_or_waits_for_more(garbage: bytes, is_greeted: bool):
    peer = Peer()
    if is_greeted:
        peer.opened()
    start = len(peer.transport.written)
    peer.receive(garbage)
    said = bytes(peer.transport.written[start:])
    if is_greeted:
        assert peer.transport.is_closed == (ended_with(split_frames(said)) is not None)
    else:
        assert not said or said.startswith(b"HTTP/1.1 400 ") or split_frames(said)
    assert answered(Peer(listener=peer.listener).opened().send(a_call(1)), 1) == b"hello"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_session_with_wrong_bytes_ends_by_name_or_is_served(draw: st.DataObject):
    broken = bytearray(session())
    for _ in range(draw.draw(st.integers(1, 4))):
        broken[draw.draw(st.integers(len(frames.PREFACE), len(broken) - 1))] = draw.draw(st.integers(0, 255))
    peer = Peer()
    received = peer.send(bytes(broken))
    assert peer.transport.is_closed == (ended_with(received) is not None)
    assert ended_with(received) != Code.INTERNAL_ERROR


# --- an independent client --------------------------------------------------------------------------------------------


class H2Client:
    """The `h2` library as a client."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()

    def flush(self) -> list[Any]:
        found: list[Any] = []
        while out := self.h2.data_to_send():
            start = len(self.peer.transport.written)
            self.peer.receive(out)
            found += self.h2.receive_data(bytes(self.peer.transport.written[start:]))
        return found

    def ask(self, message: bytes, path: str = UNARY.route.template, **extra: str) -> list[Any]:
        stream = self.h2.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
                  "content-type": "application/grpc", **extra}  # fmt: skip
        self.h2.send_headers(stream, list(fields.items()))
        self.h2.send_data(stream, prefixed(message), end_stream=True)
        return self.flush()


def of_kind(events: list[Any], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_h2_understands_the_answers_whatever_table_of_headers_it_wants():
    client = H2Client(Peer())
    for size in (None, 0, 100, 4096):
        if size is not None:
            client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: size})
        for _ in range(3):
            events = client.ask(b"hello", **{"x-request-id": "7"})
            assert dict(of_kind(events, h2.events.ResponseReceived)[0].headers)[":status"] == "200"
            assert of_kind(events, h2.events.DataReceived)[0].data == prefixed(b"hello")
            assert dict(of_kind(events, h2.events.TrailersReceived)[0].headers) == {"grpc-status": "0"}
            assert of_kind(events, h2.events.StreamEnded)


def test_a_large_answer_waits_for_room_and_then_goes_on():
    client = H2Client(Peer())
    client.flush()
    peer, message = client.peer, bytes(range(256)) * 2000
    client.h2.increment_flow_control_window(10)
    peer.service.is_slow = True
    client.ask(b"x")
    (call, _) = peer.service.begun[0]
    start = len(peer.transport.written)
    call.answer(message)
    assert peer.connection.held_bytes == len(message) + 5 - frames.DEFAULT_WINDOW
    events = client.h2.receive_data(bytes(peer.transport.written[start:]))
    taken = b""
    while not of_kind(events, h2.events.StreamEnded):
        for event in of_kind(events, h2.events.DataReceived):
            taken += event.data
            client.h2.acknowledge_received_data(len(event.data), event.stream_id)
        events = client.flush()
    taken += b"".join(event.data for event in of_kind(events, h2.events.DataReceived))
    assert taken == prefixed(message)
    assert peer.connection.held_bytes == 0


def test_a_client_that_takes_a_large_answer_in_small_parts_is_no_flood():
    peer = Peer().opened()
    peer.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.service.is_slow = True
    peer.send(a_call(1))
    peer.service.begun[0][0].answer(bytes(1_200_000))
    received: list[tuple[int, int, int, bytes]] = []
    for _ in range(12_001):
        received += peer.send(window(0, 100) + window(1, 100))
    assert sum(len(payload) for kind, _, _, payload in received if kind == frames.DATA) == 1_200_005
    assert grpc_status(received, 1) == 0


@pytest.mark.parametrize(
    ("change", "status"),
    [({":path": "/nobody/Here"}, 12), ({"grpc-encoding": "snappy"}, 12), ({"grpc-timeout": "soon"}, 3)],
)
def test_calls_that_are_not_taken_end_with_a_status(change: dict[str, str], status: int):
    client = H2Client(Peer())
    events = client.ask(b"x", **change)
    found = dict(of_kind(events, h2.events.ResponseReceived)[0].headers)
    assert found["grpc-status"] == str(status)
    assert of_kind(client.ask(b"good"), h2.events.DataReceived)


# --- what is not gRPC -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/1.1\r\n\r\n"])
def test_http_1_is_told_what_is_spoken_here(first: bytes):
    peer = Peer()
    peer.receive(first)
    assert peer.transport.written.startswith(b"HTTP/1.1 400 ")
    head, _, body = bytes(peer.transport.written).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert peer.transport.is_closed


def test_what_is_no_text_is_closed_without_a_word():
    peer = Peer()
    peer.receive(b"\x16\x03\x01\x02\x00\x01")
    assert (bytes(peer.transport.written), peer.transport.is_closed) == (b"", True)


@pytest.mark.parametrize(
    ("change", "http_status"), [({"method": "GET"}, b"405"), ({"content_type": "application/json"}, b"415"),
                                ({"content_type": "application/grpcx"}, b"415")],
)  # fmt: skip
def test_requests_that_are_no_grpc_are_refused_in_words_of_http(change: dict[str, str], http_status: bytes):
    peer = Peer().opened()
    received = peer.send(headers(1, block(**change)))
    assert http_status in received[0][3]
    assert reset_with(received, 1) == Code.NO_ERROR
    assert answered(peer.send(a_call(3)), 3) == b"hello"


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (b"", 12),
        (prefixed(b"one") + prefixed(b"two"), 12),
        (prefixed(b"cut")[:-1], 13),
        (b"\x00\x00", 13),
        (b"\x00\xff\xff\xff\xff", 8),
        (b"\x07\x00\x00\x00\x01x", 13),
        (prefixed(b"x" * 2000), 8),
    ],
)
def test_what_is_not_one_message_ends_the_call_and_nothing_else(payload: bytes, status: int):
    peer = Peer(limits=Limits(max_grpc_message_bytes=1024)).opened()
    received = peer.send(headers(1) + data(1, payload))
    assert grpc_status(received, 1) == status
    assert answered(peer.send(a_call(3)), 3) == b"hello"
    assert peer.connection.held_bytes == 0


def test_a_message_that_announces_too_much_is_refused_at_once_and_the_rest_skipped():
    peer = Peer(limits=Limits(max_grpc_message_bytes=1024)).opened()
    received = peer.send(headers(1) + data(1, b"\x00\x00\x10\x00\x00" + b"x" * 100, 0))
    assert (grpc_status(received, 1), reset_with(received, 1)) == (8, Code.NO_ERROR)
    assert peer.send(data(1, b"x" * 5000, 0) + data(1, b"x")) == []
    assert answered(peer.send(a_call(3)), 3) == b"hello"


def test_a_content_length_that_lies_is_malformed():
    for length in ("9", "11", "x"):
        received = Peer().opened().send(headers(1, block(content_length=length)) + data(1, prefixed(b"hello")))
        assert reset_with(received, 1) == Code.PROTOCOL_ERROR
    assert answered(Peer().opened().send(headers(1, block(content_length="10")) + data(1, prefixed(b"hello"))), 1)


def test_a_large_message_comes_in_pieces_and_makes_room_as_it_comes():
    peer = Peer(grpc=Grpc(grpc_window_bytes=65_535)).opened()
    message = bytes(range(256)) * 4000
    pieces = [prefixed(message)[at : at + 30_000] for at in range(0, len(message) + 5, 30_000)]
    received = peer.send(headers(1))
    room = {0: 4 * 65_535, 1: 65_535}
    for number, piece in enumerate(pieces):
        received = peer.send(data(1, piece, frames.END_STREAM if number == len(pieces) - 1 else 0))
        for kind, _, stream, payload in received:
            if kind == frames.WINDOW_UPDATE:
                room[stream] += U32.unpack(payload)[0]
        room[0] -= len(piece)
        room[1] -= len(piece)
        assert room[1] >= 30_000
        assert room[0] >= 30_000
    assert peer.service.begun[0][1].data == message


# --- breaches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
def test_a_breach_ends_its_connection_by_name_and_no_other(name: str):
    breach, code = CONNECTION_FAULTS[name]
    peer = Peer().opened()
    neighbour = Peer(listener=peer.listener).opened()
    received = peer.send(breach)
    assert ended_with(received) == code
    assert peer.transport.is_closed
    assert peer.send(a_call(101)) == []
    peer.connection.connection_lost(None)
    assert neighbour.send(a_call(1))
    assert peer.listener.connections == {neighbour.connection}


def test_calls_that_are_reset_as_fast_as_they_come_end_the_connection():
    peer = Peer().opened()
    peer.service.is_slow = True
    received = peer.send(b"".join(
        a_call(stream) + frames.reset_frame(stream, Code.CANCEL) for stream in range(1, 25_000, 2)
    ))  # fmt: skip
    assert ended_with(received) == Code.ENHANCE_YOUR_CALM
    assert all(call.is_over for call, _ in peer.service.begun)


def test_a_flood_that_is_read_slowly_ends_its_connection(monkeypatch: pytest.MonkeyPatch):
    """Each frame takes 2 ms here, so that no more than 500 are read in a second."""
    ticks = itertools.count(0, 2_000_000)
    clock = SimpleNamespace(monotonic_ns=lambda: next(ticks))
    for module in (floods, connection, turns):
        monkeypatch.setattr(module, "time", clock)
    peer = Peer().opened()
    assert ended_with(peer.send(frames.frame(frames.PING, 0, 0, b"12345678") * 12_000)) == Code.ENHANCE_YOUR_CALM


def test_pings_over_a_long_time_are_no_flood(monkeypatch: pytest.MonkeyPatch):
    ticks = itertools.count(0, 2_000_000)
    monkeypatch.setattr(floods, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    peer = Peer().opened()
    for _ in range(12_000):
        assert ended_with(peer.send(frames.frame(frames.PING, 0, 0, b"12345678"))) is None


def test_a_window_that_is_opened_by_single_bytes_is_a_flood():
    peer = Peer().opened()
    peer.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.service.is_slow = True
    peer.send(a_call(1))
    peer.service.begun[0][0].answer(bytes(20_000))
    assert ended_with(peer.send(window(1, 1) * 12_000)) == Code.ENHANCE_YOUR_CALM


def test_a_flood_is_read_in_turns_and_others_are_served_between():
    peer = Peer(grpc=Grpc(grpc_turn_ms=0.5, max_grpc_idle_frames_per_s=1 << 20)).opened()
    neighbour = Peer(listener=peer.listener).opened()
    start = len(peer.transport.written)
    flood = frames.frame(frames.PING, 0, 0, b"12345678") * 15_000 + a_call(1)
    peer.connection.data_received(flood)
    assert peer.transport.is_reading_paused, "or bytes would be kept without end"
    assert peer.connection.held_bytes > 65_536
    num_turns = 0
    neighbour.connection.data_received(a_call(1))
    while peer.connection.held_bytes:
        peer.listener.later.pop(0)()
        num_turns += 1
        if num_turns == 1:
            assert answered(split_frames(bytes(neighbour.transport.written))[2:], 1) == b"hello"
    assert num_turns > 2
    assert not peer.transport.is_reading_paused
    assert answered(split_frames(bytes(peer.transport.written[start:])), 1) == b"hello"


def test_connections_over_the_limit_are_closed_at_once():
    peer = Peer(grpc=Grpc(max_grpc_connections=1)).opened()
    assert Peer(listener=peer.listener).transport.is_cut
    assert answered(peer.send(a_call(1)), 1) == b"hello"


def test_no_settings_first_is_a_breach():
    received = Peer().send(frames.PREFACE + a_call(1))
    assert ended_with(received) == Code.PROTOCOL_ERROR


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_a_breach_of_one_stream_ends_that_alone(name: str):
    breach, code = STREAM_FAULTS[name]
    peer = Peer().opened()
    received = peer.send(breach)
    assert (reset_with(received, 1), ended_with(received)) == (code, None)
    assert answered(peer.send(a_call(3)), 3) == b"hello"


def test_more_data_after_the_end_of_a_stream_resets_it():
    peer = Peer().opened()
    peer.service.is_slow = True
    received = peer.send(a_call(1) + data(1, b"more"))
    assert reset_with(received, 1) == Code.STREAM_CLOSED
    assert peer.service.begun[0][0].is_over


def test_more_data_than_a_window_is_a_breach():
    peer = Peer(grpc=Grpc(grpc_window_bytes=65_535)).opened()
    peer.send(headers(1, block(path=STREAM.route.template)))
    sent = b"".join(data(1, prefixed(b"x" * 10_000), 0) for _ in range(7))
    assert reset_with(peer.send(sent), 1) == Code.FLOW_CONTROL_ERROR
    assert answered(peer.send(a_call(3)), 3) == b"hello"


def test_calls_over_the_limit_are_refused_and_may_come_again():
    peer = Peer(grpc=Grpc(max_grpc_streams=2)).opened()
    peer.service.is_slow = True
    received = peer.send(a_call(1) + a_call(3) + a_call(5))
    assert reset_with(received, 5) == Code.REFUSED_STREAM
    peer.service.begun[0][0].answer(b"done")
    peer.service.is_slow = False
    assert answered(peer.send(a_call(7)), 7) == b"hello"


def test_metadata_over_the_limit_are_refused_and_a_bomb_ends_the_connection():
    peer = Peer(grpc=Grpc(max_grpc_metadata_bytes=2048)).opened()
    assert grpc_status(peer.send(headers(1, block(x_note="a" * 2000))), 1) == 8
    assert answered(peer.send(a_call(3)), 3) == b"hello"
    bomb = (
        b"\x40\x01a\x7f\xe9\x06" + b"b" * 1000 + b"\xbe" * 1000
    )  # an entry of 1,000 bytes, and a thousand times its number
    received = peer.send(headers(5, block() + bomb))
    assert ended_with(received) == Code.ENHANCE_YOUR_CALM


def test_headers_are_what_they_were_after_the_table_has_changed():
    peer = Peer().opened()
    peer.service.is_slow = True
    indexed = b"\x40\x06x-note"
    first = headers(1, block() + indexed + b"\x03one")
    again = [headers(stream, block() + b"\xbe") for stream in (3, 5)]
    second = headers(7, block() + indexed + b"\x03two")
    last = headers(9, block() + b"\xbe")
    for number, frame_ in enumerate((first, *again, second, last)):
        peer.send(frame_ + data(1 + 2 * number, prefixed(b"x")))
    assert [call.headers["x-note"] for call, _ in peer.service.begun] == ["one", "one", "one", "two", "two"]
    shrunk = headers(11, b"\x20" + block() + indexed + b"\x03six")
    received = peer.send(shrunk + data(11, prefixed(b"x")) + headers(13, block() + b"\xbe"))
    assert ended_with(received) == Code.COMPRESSION_ERROR


# --- readers that do not read, and ends -------------------------------------------------------------------------------


def test_a_client_that_gives_no_room_costs_the_others_nothing_and_is_cut_in_time():
    peer = Peer(grpc=Grpc(grpc_unread_timeout_s=5)).opened()
    neighbour = Peer(listener=peer.listener).opened()
    peer.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    assert [frame[0] for frame in peer.send(a_call(1))] == [frames.HEADERS]
    assert answered(neighbour.send(a_call(1)), 1) == b"hello"
    now_ns = peer.connection.opened_ns
    peer.connection.check(now_ns + int(1e9))
    assert reset_with(split_frames(bytes(peer.transport.written)), 1) is None
    peer.connection.check(now_ns + int(60e9))
    assert reset_with(split_frames(bytes(peer.transport.written)), 1) == Code.CANCEL
    assert peer.connection.held_bytes == 0


def test_a_socket_that_takes_nothing_is_cut_in_time_and_answers_wait():
    peer = Peer(grpc=Grpc(grpc_unread_timeout_s=5)).opened()
    peer.transport.num_buffered = 5_000_000
    peer.connection.pause_writing()
    assert peer.transport.is_reading_paused, "or it could ask for ever without reading an answer"
    assert peer.connection.held_bytes == 5_000_000, "the socket's own buffer counts"
    start = len(peer.transport.written)
    peer.send(a_call(1))
    assert peer.connection.held_bytes == 5_000_010
    assert all(kind != frames.DATA for kind, *_ in split_frames(bytes(peer.transport.written[start:])))
    peer.connection.resume_writing()
    assert answered(split_frames(bytes(peer.transport.written[start:])), 1) == b"hello"
    peer.connection.pause_writing()
    peer.connection.check(peer.connection.paused_ns + int(6e9))
    assert peer.transport.is_cut


def test_the_connection_that_holds_most_is_cut_when_all_hold_too_much():
    async def hold() -> tuple[bool, bool]:
        peer = Peer(grpc=Grpc(max_grpc_held_bytes=1 << 20)).opened()
        neighbour = Peer(listener=peer.listener).opened()
        neighbour.send(headers(1) + data(1, prefixed(b"x" * 1000)[:-1], 0))
        peer.send(headers(1) + data(1, prefixed(b"x" * 900_000)[:-1], 0))
        peer.send(headers(3) + data(3, prefixed(b"x" * 900_000)[:-1], 0))
        await asyncio.sleep(0)
        return peer.transport.is_cut, neighbour.transport.is_cut

    assert asyncio.run(hold()) == (True, False)


@pytest.mark.parametrize("stalled", [b"", frames.PREFACE[:5], frames.PREFACE, OPENING + frames.frame(1, 0, 1, WHOLE)])
def test_an_opening_or_a_block_that_stalls_is_closed(stalled: bytes):
    peer = Peer(limits=Limits(body_idle_timeout_s=5))
    if stalled:
        peer.receive(stalled)
    peer.connection.check(peer.connection.opened_ns + int(1e9))
    assert not peer.transport.is_closed
    peer.connection.check(peer.connection.opened_ns + int(60e9))
    assert peer.transport.is_closed


def test_a_connection_that_is_lost_before_its_check_leaves_the_others_to_be_checked():
    lost = Peer(limits=Limits(body_idle_timeout_s=5)).opened()
    stalled = Peer(listener=lost.listener)
    lost.listener.turns.turn_ns = 1 << 60  # or the rest would wait for an event loop
    stalled.connection.opened_ns -= int(60e9)
    lost.connection.connection_lost(None)
    lost.listener._check_some([stalled.connection, lost.connection])
    assert stalled.transport.is_closed


def test_a_message_that_stalls_ends_its_call():
    peer = Peer(limits=Limits(body_idle_timeout_s=5)).opened()
    for stream, part in ((1, b""), (3, prefixed(b"hello")[:7]), (5, prefixed(b"hello"))):
        peer.send(headers(stream) + (data(stream, part, 0) if part else b""))
    start = len(peer.transport.written)
    peer.connection.check(peer.connection.opened_ns + int(60e9))
    received = split_frames(bytes(peer.transport.written[start:]))
    assert [grpc_status(received, stream) for stream in (1, 3, 5)] == [4, 4, 4]


@pytest.mark.parametrize(("num_bytes", "is_slow"), [(10, True), (900, False)])
def test_a_message_that_drips_ends_its_call_and_one_that_flows_does_not(num_bytes: int, is_slow: bool):
    peer = Peer(limits=Limits(body_idle_timeout_s=5, min_body_bytes_per_s=100)).opened()
    peer.send(headers(1) + data(1, prefixed(b"x" * 5000)[:num_bytes], 0))
    (call,) = peer.connection.calls
    now_ns = call.moved_ns + int(6e9)
    call.moved_ns = now_ns - int(1e9)
    peer.connection.check(now_ns)
    assert call.is_over == is_slow
    assert not is_slow or grpc_status(split_frames(bytes(peer.transport.written)), 1) == 4


def test_a_drain_takes_no_more_calls_and_ends_with_the_last():
    peer = Peer().opened()
    peer.service.is_slow = True
    peer.send(a_call(1))
    peer.connection.drain()
    last = int.from_bytes(split_frames(bytes(peer.transport.written))[-2][3][:4], "big")
    assert last == frames.MAX_WINDOW
    peer.send(a_call(3))
    received = peer.send(frames.frame(frames.PING, frames.ACK, 0, b"draining"))
    assert (ended_with(received), int.from_bytes(received[0][3][:4], "big")) == (Code.NO_ERROR, 3)
    assert reset_with(peer.send(a_call(5)), 5) == Code.REFUSED_STREAM
    for call, _ in peer.service.begun:
        assert not peer.transport.is_closed
        call.answer(b"done")
    assert peer.transport.is_closed


def test_a_lost_connection_ends_its_calls_and_nothing_is_written_any_more():
    peer = Peer().opened()
    peer.service.is_slow = True
    peer.send(a_call(1) + headers(3) + data(3, prefixed(b"hello")[:7], 0))
    peer.transport.is_closed = True
    peer.connection.connection_lost(None)
    ((call, _),) = peer.service.begun
    assert call.is_over
    call.answer(b"too late")
    assert peer.connection.held_bytes == 0
    assert not peer.listener.connections


def test_a_closed_connection_leaves_no_reference_cycle():
    peer = Peer().opened()
    peer.service.is_slow = True
    peer.send(a_call(1) + headers(3, block(path=STREAM.route.template)) + data(3, prefixed(b"x"), 0))
    peer.transport.is_closed = True
    peer.connection.connection_lost(None)
    is_left = weakref.ref(peer.connection)
    peer.service.begun.clear()
    peer.service.streams.clear()
    while peer.listener.later:  # a turn that had no time left cancels the rest in the next one
        peer.listener.later.pop(0)()
    gc.disable()
    try:
        del peer
        assert is_left() is None
    finally:
        gc.enable()
