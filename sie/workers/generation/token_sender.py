"""Sends the tokens of one model's jobs to their frontends, and the reply that ends each job. Never waits.

Without room or credit, output stays with its sequences. The next frame carries everything since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from sie.shm.extent import begin_extent
from sie.values.generate import GenerateTotals, TokenFrame
from sie.values.work_bytes import extent_bytes
from sie.workers.generation.sequences import Job
from sie.workers.generation.token_frames import note_sent, take_records
from sie.workers.requests.worker_request import Link

_to_msgpack = msgspec.msgpack.Encoder().encode


class TokenSender:
    """The jobs of one model that have output to send, by their link."""

    def __init__(self, on_ended: Callable[[Job], None]) -> None:
        """on_ended is called with each job whose last reply was sent."""
        self._on_ended = on_ended
        self._unsent: dict[Link, dict[Job, None]] = {}

    @property
    def is_unsent(self) -> bool:
        """Whether output waits for room or credit."""
        return bool(self._unsent)

    def mark(self, job: Job) -> None:
        """Note that a job has output, or has ended."""
        self._unsent.setdefault(job.request.link, {})[job] = None

    def forget(self, job: Job) -> None:
        """Drop a job's unsent output."""
        unsent = self._unsent.get(job.request.link)
        if unsent is not None:
            unsent.pop(job, None)

    def drop(self, link: Link) -> None:
        """Drop all output for a frontend that is gone."""
        self._unsent.pop(link, None)

    def send(self) -> None:
        """Send all waiting output, a frame for each frontend; without room or credit it keeps waiting."""
        for link in list(self._unsent):
            self._send(link)

    def _send(self, link: Link) -> None:
        jobs = self._unsent[link]
        if not _try_frames(link, jobs):
            return
        for job in list(jobs):
            if job.sequences or self._try_end(job):
                del jobs[job]
        if not jobs:
            del self._unsent[link]

    def _try_end(self, job: Job) -> bool:
        """Send the terminal reply of a job whose choices have all ended; return False without room."""
        totals = GenerateTotals(job.num_cached, job.num_generated, job.started_ns)
        # ORDER: after the last record of each choice; the frontend forgets the request when it reads this.
        if not job.request.try_end(_to_msgpack(totals)):
            return False
        self._on_ended(job)
        return True


def _try_frames(link: Link, jobs: Collection[Job]) -> bool:
    """Send all unsent tokens of these jobs to a frontend; return False if room or credit runs out."""
    while True:
        records, is_all = take_records(jobs)
        if records:
            header = _to_msgpack(TokenFrame(tuple([record for _, record in records])))
            nbytes = extent_bytes(len(header), 0)
            lease = link.lease(nbytes)
            if lease is None:
                return False
            begin_extent(lease.view, header)
            if not link.try_tokens(lease, nbytes):
                return False
            for sequence, record in records:
                note_sent(sequence, record)
        if is_all:
            return True
