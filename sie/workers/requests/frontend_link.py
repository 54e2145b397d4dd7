"""Holds the worker's end of one attachment: the frontend's requests in, this worker's reply memory out."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable

from sie.config.settings import Settings
from sie.ipc.messages import Attach
from sie.runtime import failpoints
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.large import LargeBudget
from sie.shm.layout import TOKENS, ProtocolError
from sie.shm.pool import Lease
from sie.shm.space import OutboundSpace


class JoiningFrontend:
    """A frontend whose offer, or the memory for its replies, is awaited. The step loop continues meanwhile."""

    def __init__(self, message: Attach, fds: list[int], settings: Settings, budget: LargeBudget) -> None:
        """Take over fds: the socket to the frontend, and the frontend's pidfd.

        If the first is not a socket, close both and raise OSError.
        """
        self.slot = message.peer_slot
        self.sock_fd, self.pidfd = fds
        self.lacks_memory = False
        """Whether there was no memory for our offer."""
        self._generation = message.generation
        self._memory = settings.memory
        self._budget = budget
        self._offered: tuple[OutboundSpace, PendingAttachment] | None = None
        try:
            self._sock = socket.socket(fileno=self.sock_fd)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise

    def try_finish(self) -> FrontendLink | None:
        """Answer the frontend's offer, which has arrived, with ours. Return the link, or None if nothing has arrived.

        ORDER: the reply memory is created after the frontend's offer. Before its offer, the frontend unmaps the reply memory of
        this worker's predecessor, and there may be no room for both.

        Raises ReservationError without memory for our offer: a later call tries again. Raises OSError or ProtocolError if
        the attachment fails: then the caller stops watching this, and closes it.
        """
        space, pending = self._offered = self._offered or self._offer()
        attachment = pending.try_finish()
        return None if attachment is None else FrontendLink(self.slot, attachment, space)

    def close(self) -> None:
        """Cancel the attachment: the frontend is dead, or another one has its slot."""
        if self._offered is None:
            self._sock.close()
            os.close(self.pidfd)
            return
        space, pending = self._offered
        pending.close()
        space.close()

    def _offer(self) -> tuple[OutboundSpace, PendingAttachment]:
        memory = self._memory
        space = OutboundSpace.create(
            f"reply-{self.slot}",
            memory.reply_segment_bytes,
            self._budget,
            large_extent_bytes=memory.large_extent_bytes,
        )
        try:
            pending = PendingAttachment(self._sock, self.pidfd, self._generation, space, memory.ring_capacity)
        except BaseException:
            space.close()
            raise
        return space, pending


class FrontendLink:
    """One attached frontend, for the step loop."""

    def __init__(self, slot: int, attachment: Attachment, space: OutboundSpace) -> None:
        """Take ownership of both; `JoiningFrontend` creates them."""
        self.slot = slot
        self.attachment = attachment
        self._space = space
        self._unsent: list[tuple[int, int, int, int]] = []
        self._leases: list[Lease | None] = []
        """Those of the unsent replies."""
        self._to_retry: deque[Callable[[], bool]] = deque()
        self._fault: Exception | None = None
        self.view = attachment.view
        """Return the read-only extent that a descriptor names. Raises ProtocolError."""
        self._end_released = space.end_released
        self.lease = space.lease
        """Return a lease for a reply; None while the memory for replies is full."""
        self.can_hold = space.can_hold
        """Whether the memory for replies is large enough for one of this size."""

    @property
    def num_leased(self) -> int:
        """Reply extents that the frontend has not released."""
        return self._space.num_leased

    def reply(self, kind: int, request_id: int, lease: Lease | None, length: int) -> None:
        """Queue a terminal descriptor for the next `flush`, which the loop calls once for all replies of a step."""
        self._unsent.append((kind, request_id, 0 if lease is None else lease.address, length))
        self._leases.append(lease)

    def try_tokens(self, lease: Lease, length: int) -> bool:
        """Send tokens. Return False, with the lease ended, without credit or while earlier replies wait for it."""
        try:
            if self._unsent or not self.attachment.push(TOKENS, 0, 0, lease.address, length):
                lease.end()
                return False
        except (ConnectionError, ProtocolError) as error:
            self._fault = error
            return True
        lease.hand_over(0)
        return True

    def retry_later(self, try_send: Callable[[], bool]) -> None:
        """Keep a send without capacity; `retry` and `release` try it again, in order."""
        self._to_retry.append(try_send)

    def retry(self) -> None:
        """Try the kept sends again until one finds no capacity."""
        while self._to_retry and self._to_retry[0]():
            self._to_retry.popleft()

    def flush(self) -> bool:
        """Send the queued replies. Return False if some wait for credit until the next release.

        If the frontend is gone or broken, its replies are dropped, and `check` reports the fault.
        """
        unsent = self._unsent
        if not unsent:
            return True
        leases, num_staged = self._leases, 0
        try:
            num_staged = self.attachment.stage_many(unsent)
            for (_, request_id, _, _), lease in zip(unsent[:num_staged], leases, strict=False):
                if lease is not None:
                    lease.hand_over(request_id)
            del unsent[:num_staged], leases[:num_staged]
            self.attachment.publish()
        except (ConnectionError, ProtocolError) as error:
            self._fault = error
            unsent.clear()
            leases.clear()
        failpoints.reach("worker.after_reply", num_staged)
        return not unsent

    def check(self) -> None:
        """Raise ProtocolError if a reply could not be sent."""
        if self._fault is not None:
            raise ProtocolError(f"a reply could not be sent: {self._fault}") from self._fault

    def release(self, addresses: Iterable[int]) -> None:
        """End the leases on replies that the frontend has read. Raises ProtocolError for one that the frontend does not hold."""
        for address in addresses:
            self._end_released(address)
        if self._to_retry:
            self.retry()

    def close(self) -> None:
        """Unmap the frontend's memory and free ours. Call it only when its process is dead or has detached."""
        self.attachment.close()
        self._space.close()
