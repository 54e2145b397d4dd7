"""Two processes, odd sizes, checksums: every request is answered once and rightly, and all memory comes back."""

from __future__ import annotations

import os
import random
import time

from sie.shm.extent import set_cancelled
from sie.shm.layout import ERROR, SUBMIT

_NUM_REQUESTS = 8000
_CAPACITY = 16
_DEADLINE_S = 200.0


def test_two_processes_exchange_checksummed_payloads(peers, peer, new_fds) -> None:
    seed = int(os.environ.get("SIE_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"SIE_TEST_SEED={seed}")
    rng = random.Random(seed)
    noise = rng.randbytes(100_000)
    space = peer.create_space("stress")
    attachment = peers.start("worker", space, 2**32 - 1, _CAPACITY)
    deadline = time.monotonic() + _DEADLINE_S
    pending: dict[int, tuple[object, bytes, bool]] = {}
    num_sent = num_answered = num_cancelled = num_full = num_large = 0

    while num_answered < _NUM_REQUESTS:
        assert time.monotonic() < deadline, f"{num_answered} answers, {len(pending)} missing"
        while num_sent < _NUM_REQUESTS:
            size = rng.randrange(20_000, 40_000) if rng.random() < 0.01 else rng.randrange(1, 3000)
            start = rng.randrange(len(noise) - size)
            payload = noise[start : start + size]
            lease = space.lease(peer.PAYLOAD_AT + size)
            if lease is None:
                num_full += 1
                break
            with lease:
                if not attachment.push(SUBMIT, 0, num_sent, lease.address, peer.write(lease, payload)):
                    num_full += 1
                    break
                lease.hand_over(num_sent)
            cancelled = rng.random() < 0.02
            if cancelled:
                set_cancelled(lease.view)
            num_large += size > 16_384
            pending[num_sent] = (lease, payload, cancelled)
            num_sent += 1
        peers.wait_readable(attachment.bell_fd, attachment.pidfd)
        released = []
        for reply in attachment.drain():
            lease, payload, cancelled = pending.pop(reply.request_id)
            if reply.kind == ERROR:
                assert cancelled
                num_cancelled += 1
            else:
                assert peer.read(attachment.view(reply)) == payload[::-1]
                released.append(reply.offset)
            lease.end()
            num_answered += 1
        attachment.push_release(released)
        assert attachment.read_socket()

    assert min(num_full, num_cancelled, num_large) > 10
    assert space.num_leased == 0
    assert space.free_bytes == space.nbytes
    attachment.close()
    assert peers.wait() == 0
    space.close()
    assert not new_fds()
