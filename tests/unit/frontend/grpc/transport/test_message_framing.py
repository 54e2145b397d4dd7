"""Messages of a stream, however their bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.grpc.transport.message_framing import PREFIX, BadPrefix, Message, MessageReader, TooLarge

MESSAGES = st.lists(st.builds(Message, st.booleans(), st.binary(max_size=40)), max_size=8)


def sent(messages: list[Message]) -> bytes:
    return b"".join(PREFIX.pack(message.is_compressed, len(message.data)) + message.data for message in messages)


@given(MESSAGES, st.lists(st.integers(0, 30), max_size=30))
def test_any_pieces_make_the_same_messages(messages: list[Message], sizes: list[int]):
    reader, data, at = MessageReader(40), sent(messages), 0
    found: list[Message] = []
    for size in [*sizes, len(data)]:
        found += reader.feed(memoryview(data)[at : at + size])
        at += size
    assert found == messages
    assert reader.is_between
    assert reader.num_held == 0


@given(MESSAGES, st.binary(min_size=1, max_size=40), st.data())
def test_what_is_not_there_whole_is_held(messages: list[Message], last: bytes, draw: st.DataObject):
    reader = MessageReader(40)
    cut = draw.draw(st.integers(0, len(last) - 1))
    assert reader.feed(sent(messages) + PREFIX.pack(0, len(last)) + last[:cut]) == messages
    assert (reader.is_between, reader.num_held) == (False, cut)
    assert reader.feed(last[cut:]) == [Message(False, last)]


@pytest.mark.parametrize(
    ("data", "error"), [(b"\0\0\0\0\x29", TooLarge), (b"\0\xff\xff\xff\xff", TooLarge), (b"\2\0\0\0\0", BadPrefix)]
)
def test_a_prefix_that_lies_is_refused_before_anything_is_kept(data: bytes, error: type[Exception]):
    for cut in range(len(data)):
        reader = MessageReader(40)
        reader.feed(data[:cut])
        with pytest.raises(error):
            reader.feed(data[cut:])
        assert reader.num_held == 0


def test_large_pieces_are_kept_without_a_copy_and_small_ones_together():
    reader, large = MessageReader(1 << 20), bytes(range(256)) * 1024
    reader.feed(PREFIX.pack(0, 2 * len(large) + 6))
    for piece in (b"abc", large, b"d", b"e", large):
        assert reader.feed(piece) == []
    assert reader.feed(b"f") == [Message(False, b"abc" + large + b"de" + large + b"f")]
