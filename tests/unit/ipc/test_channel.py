from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import time

import msgspec
import pytest

from sie.config.settings import Settings
from sie.ipc import channel, messages
from sie.ipc.channel import MAX_FDS, Channel, ChannelClosedError, peer_credentials
from sie.ipc.messages import (
    Attach,
    Configure,
    Drain,
    Hello,
    Launch,
    Load,
    ModelEntry,
    ModelReport,
    Models,
    Ping,
    WorkerDown,
    WorkerEntry,
)
from sie.values.card import ModelCard, PipelineStep, StubOptions
from sie.values.errors import Internal, to_wire

CARD = ModelCard(
    id="a/b", kind="encoder", dims={"dense": 4}, matryoshka=(2, 4), pipeline=(PipelineStep(kind="pooling"),),
    stub=StubOptions(dense=3),
)  # fmt: skip
MESSAGES = [
    Hello("worker", 3, 7),
    Configure(Settings()),
    Attach(1, 9),
    Load(CARD),
    ModelReport("a/b", "failed", error=to_wire(Internal("broke", extras={"error_class": "OOM"}))),
    Models(
        (ModelEntry(card=CARD, state="loaded", workers=(0, 1)),),
        ready=True,
        workers=(WorkerEntry(slot=0, device="cpu", pid=4, state="ready", restarts=1),),
    ),
    WorkerDown(0, 9, (1, 2, 3)),
    Drain(),
]


@pytest.fixture
def pair():
    ends = [Channel(end, send_timeout_s=0.05) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        end.close()


def open_fds() -> int:
    gc.collect()  # what other tests of the process left behind must not close in between
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # iterdir holds a descriptor of its own meanwhile


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(pair, message):
    pair[0].send(message)
    assert pair[1].try_receive() == (message, [])


def test_messages_keep_their_order_and_their_bounds(pair):
    for number in range(20):
        pair[0].send(Ping(number))
    assert [pair[1].try_receive()[0].number for _ in range(20)] == list(range(20))
    assert pair[1].try_receive() is None


def test_descriptors_come_as_copies_that_close_on_exec(pair):
    reading, writing = os.pipe()
    pair[0].send(Attach(1, 2), [writing])
    os.close(writing)
    _, (received,) = pair[1].try_receive()

    assert not os.get_inheritable(received)
    os.write(received, b"through")
    assert os.read(reading, 16) == b"through"
    os.close(received)
    os.close(reading)


def test_as_many_descriptors_as_a_frontend_may_get_fit_in_one_message(pair):
    pair[0].send(Configure(Settings()), [0] * MAX_FDS)
    _, fds = pair[1].try_receive()
    assert len(fds) == MAX_FDS
    for fd in fds:
        os.close(fd)


def test_end_of_file_is_reported_after_all_sent_messages(pair):
    pair[0].send(Ping(1))
    pair[0].close()
    assert pair[1].receive(1.0)[0] == Ping(1)
    with pytest.raises(ChannelClosedError, match="end of file"):
        pair[1].try_receive()
    with pytest.raises(ChannelClosedError):
        pair[1].send(Ping(2))


def test_peer_that_does_not_read_is_given_up_in_time(pair):
    began_s = time.monotonic()
    large = Models((ModelEntry(card=CARD, state="loaded"),) * 20, ready=True)

    def send_for_ever() -> None:
        while time.monotonic() - began_s < 60:
            pair[0].send(large)

    with pytest.raises(ChannelClosedError, match="read nothing"):
        send_for_ever()


def test_receive_waits_no_longer_than_it_is_told(pair):
    with pytest.raises(TimeoutError):
        pair[1].receive(0.01)


def _raw(pair) -> socket.socket:
    return pair[0]._sock


@pytest.mark.parametrize(
    "junk",
    [
        b"\xc1",
        b"\x80",
        b"junk",
        msgspec.msgpack.encode({"type": "Unheard"}),
        msgspec.msgpack.encode({"type": "Ping"}),
        msgspec.msgpack.encode({"type": "Ping", "number": "one"}),
        msgspec.msgpack.encode({"type": "Ping", "number": 1}) + b"\x00",
        b"\x82\xa4type\xa9LoadModel\xa5model\xa2\xff\xfe",
        b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 50_000 + b"\xc0",
    ],
)
def test_what_is_no_message_ends_the_channel_and_closes_its_descriptors(pair, junk):
    before = open_fds()
    socket.send_fds(_raw(pair), [junk], [0, 1, 2])
    with pytest.raises(ChannelClosedError):
        pair[1].try_receive()
    assert open_fds() == before


def test_random_bytes_never_do_more_than_end_the_channel(pair):
    seed = 20240611
    print("seed", seed)
    rng = random.Random(seed)
    good = [msgspec.msgpack.encode(message) for message in MESSAGES]
    for _ in range(3000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        _raw(pair).send(data)
        with contextlib.suppress(ChannelClosedError):
            assert pair[1].try_receive() is not None


def test_message_that_was_cut_ends_the_channel_and_closes_its_descriptors(pair, monkeypatch):
    monkeypatch.setattr(channel, "MAX_INLINE_BYTES", 16)
    before = open_fds()
    data = msgspec.msgpack.encode(Models((ModelEntry(card=CARD, state="loaded"),), ready=True))
    pair[0]._send(data, [0])
    with pytest.raises(ChannelClosedError, match="cut"):
        pair[1].try_receive()
    assert open_fds() == before


def test_more_descriptors_than_expected_end_the_channel_and_are_closed(pair, monkeypatch):
    monkeypatch.setattr(channel, "MAX_FDS", 4)
    before = open_fds()
    pair[0].send(Ping(1), [0] * 40)
    with pytest.raises(ChannelClosedError, match="cut"):
        pair[1].try_receive()
    assert open_fds() == before


def test_child_connects_with_its_identity_and_the_kernel_vouches_for_it(tmp_path):
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        launch = Launch(control_path=str(path), supervisor_pid=1, role="frontend", slot=2, incarnation=5)
        child = channel.connect(launch)
        accepted, _ = listener.accept()
        supervisor = Channel(accepted)

        assert peer_credentials(accepted) == (os.getpid(), os.getuid())
        assert supervisor.receive(5.0)[0] == Hello("frontend", 2, 5)
        assert msgspec.json.decode(msgspec.json.encode(launch), type=Launch) == launch
        child.close()
        supervisor.close()


def test_message_longer_than_a_socket_takes_arrives_whole_with_its_descriptors(pair):
    """The models of a large catalogue; a socket's buffer is capped by the host."""
    message = Models(tuple(ModelEntry(card=CARD, state="available") for _ in range(20_000)), ready=False)
    reading, writing = os.pipe()
    before = open_fds()
    pair[0].send(message, [writing])
    received, fds = pair[1].try_receive()
    assert received == message
    assert len(fds) == 1
    os.write(fds[0], b"x")
    assert os.read(reading, 1) == b"x"
    for fd in fds:
        os.close(fd)
    assert open_fds() == before, "the spilled memory is closed on both sides"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("nbytes", [-1, 1 << 40])
def test_spilled_message_of_an_absurd_size_ends_the_channel(pair, nbytes):
    fd = os.memfd_create("spill")
    pair[0].send(messages.Spilled(nbytes), [fd])
    os.close(fd)
    before = open_fds()
    with pytest.raises(ChannelClosedError):
        pair[1].try_receive()
    assert open_fds() == before
