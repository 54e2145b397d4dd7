"""A request in the worker, from its extent to its reply, with the frontend's reader as the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import msgpack

from sie.frontend.engine.worker_link import ShmPending, ShmReply
from sie.frontend.operations.reply_reader import read_reply
from sie.ipc.messages import ModelEntry
from sie.shm.extent import write_extent
from sie.shm.layout import ERROR, REPLY, SUBMIT, Descriptor, ProtocolError
from sie.shm.pool import ExtentPool, Lease
from sie.values.card import ModelCard
from sie.values.errors import WireError
from sie.values.inference import EncodeReply, EncodeRequest
from sie.values.work import WorkHeader
from sie.values.work_bytes import extent_bytes, plan_arrays, read_extent
from sie.workers.requests.ragged import KeptBytes
from sie.workers.requests.worker_request import Request, read_request

MIB = 1 << 20
CARD = ModelCard(id="a", kind="encoder", outputs=("dense", "sparse", "multivector"),
                 dims={"dense": 3, "sparse": 100, "multivector": 2})  # fmt: skip
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
SPARSE = [(np.array([1, 7, 99], np.int32), np.array([0.5, 1, 2], np.float32)),
          (np.empty(0, np.int32), np.empty(0, np.float32))]  # fmt: skip
VECTORS = [np.array([[1, 2]], np.float16), np.array([[3, 4], [5, 6]], np.float16)]


class Link:
    """A frontend with so much reply memory, and what it was sent."""

    slot = 0

    def __init__(self, room: int = MIB) -> None:
        self.pool = ExtentPool(memoryview(bytearray(room)))
        self.submitted = memoryview(b"")
        self.sent: list[tuple[int, Lease | None, int]] = []

    def view(self, _descriptor: Descriptor) -> memoryview:
        return self.submitted

    def lease(self, nbytes: int) -> Lease | None:
        return self.pool.lease(nbytes)

    def reply(self, kind: int, request_id: int, lease: Lease | None, length: int) -> None:
        self.sent.append((kind, lease, length))

    def error(self) -> WireError:
        kind, lease, length = self.sent[-1]
        assert (kind, lease is not None) == (ERROR, True)
        return read_extent(lease.view[:length], msgpack.Decoder(WireError))[0]  # type: ignore[union-attr]


def submit(link: Link, *outputs: str) -> Request:
    arrays = [np.array([0, 1, 3], np.int32), np.array([5, 6, 7], np.int32)]
    plan = plan_arrays([("cu_seqlens", "<i4", (3,)), ("token_ids", "<i4", (3,))])
    header = msgpack.encode(WorkHeader("a", "encode", 2, plan.refs, output_types=outputs))
    view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
    write_extent(view, header, plan.refs, arrays)
    link.submitted = view.toreadonly()
    return read_request(link, Descriptor(SUBMIT, 0, 1, 1, 0, len(view), 0, 3, 0, 1))


def kept_request(link: Link, kept: KeptBytes, *outputs: str, max_reply_bytes: int = MIB) -> Request:
    request = submit(link, *outputs)
    request.start_ragged(kept, max_reply_bytes, 10)
    for index in range(2):
        for output, arrays in (
            ("dense", (ROWS[index],)),
            ("sparse", SPARSE[index]),
            ("multivector", (VECTORS[index],)),
        ):
            if output in outputs and not request.ended:
                request.keep(output, index, arrays)
    return request


def read(link: Link, *outputs: str) -> EncodeReply:
    kind, lease, length = link.sent[-1]
    assert (kind, lease is not None) == (REPLY, True)
    pending: Any = ShmPending(1, "a", lease=lease, length=1, num_tokens=3, deadline_ns=0, submitted_ns=0, future=None)  # type: ignore[arg-type]
    raw = ShmReply(None, pending, 0, lease.view[:length].toreadonly())  # type: ignore[arg-type, union-attr]
    asked = EncodeRequest(model="a", texts=["", ""], output_types=outputs)
    return read_reply(raw, ModelEntry(card=CARD, state="loaded"), asked, 0, 0)


@pytest.mark.parametrize(
    "outputs", [("sparse",), ("multivector",), ("dense", "sparse", "multivector"), ("multivector", "dense")]
)
def test_reply_holds_what_was_kept(outputs: tuple[str, ...]) -> None:
    link, kept = Link(), KeptBytes(MIB)
    request = kept_request(link, kept, *outputs)
    assert request.num_left == 0
    assert kept.used_bytes > 0
    assert request.try_reply()
    assert (request.ended, kept.used_bytes) == (True, 0)
    reply = read(link, *outputs)
    if "dense" in outputs:
        np.testing.assert_array_equal(np.frombuffer(reply.values, reply.dtype).reshape(2, 3), ROWS)
    else:
        assert reply.width == 0
    assert reply.ragged.keys() == {*outputs} - {"dense"}
    if sparse := reply.ragged.get("sparse"):
        indices, values = sparse.arrays
        assert (sparse.dims, indices.dtype, values.dtype, sparse.offsets) == (100, "<i4", "<f4", [0, 3, 3])
        assert np.frombuffer(indices.values, "<i4").tolist() == [1, 7, 99]
        assert np.frombuffer(values.values, "<f4").tolist() == [0.5, 1, 2]
    if vectors := reply.ragged.get("multivector"):
        (rows,) = vectors.arrays
        assert (vectors.dims, rows.dtype, rows.width, vectors.offsets) == (2, "<f2", 2, [0, 1, 3])
        assert np.frombuffer(rows.values, "<f2").tolist() == [1, 2, 3, 4, 5, 6]


def test_reply_without_room_waits_and_is_sent_when_there_is_some() -> None:
    link, kept = Link(4096), KeptBytes(MIB)
    blocker = link.lease(4000)
    request = kept_request(link, kept, "multivector")
    assert blocker is not None
    assert not request.try_reply()
    assert (request.ended, link.sent) == (False, [])
    blocker.end()
    assert request.try_reply()
    assert read(link, "multivector").ragged["multivector"].arrays


def test_worker_that_keeps_too_much_refuses_that_request_alone() -> None:
    link, kept = Link(), KeptBytes(30)
    first = kept_request(link, kept, "multivector")  # 12 bytes
    second = kept_request(link, kept, "dense", "sparse")  # more than is left
    assert (first.ended, second.ended) == (False, True)
    error = link.error()
    assert (error.code, error.http_status, error.retry_after_s) == ("RESOURCE_EXHAUSTED", 503, 5)
    assert kept.used_bytes == 12
    assert first.try_reply()
    assert kept.used_bytes == 0


def test_reply_over_its_limit_is_the_clients_fault() -> None:
    link, kept = Link(), KeptBytes(MIB)
    request = kept_request(link, kept, "multivector", max_reply_bytes=11)
    assert request.ended
    assert (link.error().http_status, link.error().code) == (400, "INVALID_INPUT")
    assert kept.used_bytes == 0


@pytest.mark.parametrize("end", [Request.cancel, Request.drop])
def test_request_that_ends_early_releases_its_outputs(end: Any) -> None:
    link, kept = Link(), KeptBytes(MIB)
    end(kept_request(link, kept, "sparse"))
    assert kept.used_bytes == 0


@pytest.mark.parametrize("outputs", [(), ("dense", "thoughts")])
def test_outputs_that_nobody_knows_break_the_protocol(outputs: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError, match="outputs"):
        submit(Link(), *outputs)
