from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sie.shm.layout import DESCRIPTOR_BYTES, REPLY, Descriptor, ProtocolError
from sie.shm.ring import RingConsumer, RingProducer

CAPACITY = 4


def _fields(request_id: int) -> tuple[int, ...]:
    return 1, 0, 7, request_id, 64, 100, 5, 6, 0, 1


def _extents(*request_ids: int) -> list[tuple[int, int, int, int]]:
    return [(REPLY, request_id, 64, 100) for request_id in request_ids]


@pytest.fixture
def ring() -> Iterator[tuple[RingProducer, RingConsumer]]:
    producer = RingProducer.create(CAPACITY)
    consumer = RingConsumer.open(*(os.dup(fd) for fd in producer.fds), CAPACITY)
    yield producer, consumer
    producer.close()
    consumer.close()


def test_empty_ring_drains_nothing(ring: tuple[RingProducer, RingConsumer]) -> None:
    assert ring[1].drain() == []


def test_descriptors_come_out_as_they_went_in(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    pushed = [(1, 2, 3, 2**64 - 1, 5, 6, 7, 8, 9, 10), _fields(2)]
    for fields in pushed:
        assert producer.push(*fields)

    assert consumer.drain() == [Descriptor(*fields) for fields in pushed]


def test_full_ring_returns_false_and_keeps_what_it_has(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    for request_id in range(CAPACITY):
        assert producer.push(*_fields(request_id))

    assert not producer.push(*_fields(99))
    assert producer.num_credits == 0
    assert [d.request_id for d in consumer.drain()] == list(range(CAPACITY))
    assert producer.num_credits == CAPACITY
    assert producer.push(*_fields(100))


def test_what_is_staged_is_seen_once_it_is_published_with_one_bell(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    for request_id in (1, 2, 3):
        assert producer.stage(*_fields(request_id))
    assert consumer.drain() == []
    producer.publish()
    producer.publish()  # nothing is left to be told

    assert os.eventfd_read(consumer.bell_fd) == 3


def test_pushing_publishes_what_was_staged_before_it(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    assert producer.stage(*_fields(1))
    assert producer.push(*_fields(2))
    assert producer.stage(*_fields(3))
    assert producer.stage_extents(7, _extents(4)) == 1
    producer.publish()
    assert not producer.stage(*_fields(5))

    assert [d.request_id for d in consumer.drain()] == [1, 2, 3, 4]


def test_order_holds_across_the_wrap(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    expected, got = [], []
    for request_id in range(0, 30, 3):
        for k in range(3):
            assert producer.push(*_fields(request_id + k))
            expected.append(request_id + k)
        got += [d.request_id for d in consumer.drain()]

    assert got == expected


def test_extents_are_staged_as_far_as_they_fit(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    producer.push(*_fields(0))

    assert producer.stage_extents(7, _extents(*range(1, 9))) == CAPACITY - 1
    assert producer.stage_extents(7, _extents(9)) == 0
    assert [d.request_id for d in consumer.drain()] == [0]
    producer.publish()
    assert consumer.drain() == [Descriptor(REPLY, 0, 7, number, 64, 100, 0, 0, 0, 1) for number in (1, 2, 3)]
    assert producer.stage_extents(7, []) == 0


def test_drained_descriptor_is_a_copy(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, consumer = ring
    producer.push(*_fields(1))
    (descriptor,) = consumer.drain()
    producer._segment.view[:DESCRIPTOR_BYTES] = b"\xff" * DESCRIPTOR_BYTES

    assert descriptor == Descriptor(*_fields(1))


@pytest.mark.parametrize("count", [CAPACITY + 1, 2**63])
def test_bell_above_capacity_is_a_protocol_error(ring: tuple[RingProducer, RingConsumer], count: int) -> None:
    os.eventfd_write(ring[0].fds[1], count)

    with pytest.raises(ProtocolError, match="doorbell counts"):
        ring[1].drain()


def test_credit_that_was_never_spent_is_a_protocol_error(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, _ = ring
    for request_id in range(CAPACITY):
        producer.push(*_fields(request_id))
    os.eventfd_write(producer.fds[2], CAPACITY + 1)

    with pytest.raises(ProtocolError, match="credits"):
        producer.push(*_fields(9))


def test_doorbell_that_a_peer_filled_up_is_a_protocol_error(ring: tuple[RingProducer, RingConsumer]) -> None:
    producer, _ = ring
    os.eventfd_write(producer.fds[1], 2**64 - 2)

    with pytest.raises(ProtocolError, match="filled up"):
        producer.push(*_fields(1))


@pytest.mark.parametrize("capacity", [0, 1, 3, 100, 1 << 17])
def test_capacity_that_is_no_power_of_two_in_range_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        RingProducer.create(capacity)


def test_consumer_refuses_a_ring_of_another_size_and_closes_its_fds(num_fds: Callable[[], int]) -> None:
    producer = RingProducer.create(CAPACITY)
    before = num_fds()
    with pytest.raises(ProtocolError):
        RingConsumer.open(*(os.dup(fd) for fd in producer.fds), 2 * CAPACITY)

    assert num_fds() == before
    producer.close()


def test_closed_ends_leave_no_descriptor_open(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    producer = RingProducer.create(CAPACITY)
    consumer = RingConsumer.open(*(os.dup(fd) for fd in producer.fds), CAPACITY)
    for end in (producer, consumer, producer, consumer):
        end.close()

    assert num_fds() == before
