"""Writes the launch record of each child, from what all children share and what its slot adds. Starts no process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sie.config.generation_settings import MAX_TENSOR_PARALLEL
from sie.ipc.messages import Launch, Neighbour
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.child import Child
from sie.supervisor.core_lending import plan_lending
from sie.supervisor.core_shares import read_places
from sie.supervisor.host_resources import usable_cores

_STREAMS_TOGETHER: Final = 16
"""Streams of a model on one CPU worker before another gets one. More are bound by products, not by reading weights."""


class LaunchRecords:
    """The launch records of one server's children."""

    def __init__(
        self,
        shared: Launch,
        workers: Sequence[Child],
        num_frontends: int,
        *,
        is_lending: bool,
        grpc: tuple[str, int] | None = None,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """`shared` has the fields of all children. is_lending: CPU workers may use each other's cores.

        grpc is the (host, port) of the gRPC frontend.
        """
        self._shared = shared
        self._workers = workers
        self._grpc = grpc
        self._certificates = certificates
        places = [worker.place for worker in workers]
        self._lent_cores = plan_lending(places, read_places(usable_cores())) if is_lending else {}
        # Steps of up to so many rows take as long as one of one row where lent cores share their work. Frontends do not know
        # of each other's streams.
        self._streams_together = _STREAMS_TOGETHER // num_frontends if any(self._lent_cores.values()) else 0

    def set_log_level(self, level: str) -> None:
        """Change the log level of the children that start from now on."""
        self._shared = msgspec.structs.replace(self._shared, log_level=level)

    def next_of(self, child: Child) -> Launch:
        """Return the record of the next process in this slot."""
        launch = msgspec.structs.replace(
            self._shared,
            role=child.role,
            slot=child.slot,
            protocol=child.protocol,
            incarnation=child.incarnation + 1,
            device=child.place.device,
            cores=child.place.cores,
        )
        if child.role == "worker":
            return msgspec.structs.replace(
                launch,
                lent_cores=self._lent_cores.get(child.slot, ()),
                neighbours=self._neighbours(child),
                max_step_tokens=child.max_step_tokens,
                without_graphs=child.without_graphs,
            )
        if child.role == "frontend":
            return self._with_frontend_fields(launch)
        return launch

    def _with_frontend_fields(self, launch: Launch) -> Launch:
        paths = self._certificates.launch_paths if self._certificates is not None else {}
        launch = msgspec.structs.replace(launch, streams_together=self._streams_together, **paths)
        if launch.protocol == "grpc" and self._grpc is not None:
            host, port = self._grpc
            return msgspec.structs.replace(launch, host=host, port=port, listen_fd=-1)
        return launch

    def _neighbours(self, worker: Child) -> tuple[Neighbour, ...]:
        """Return the workers whose devices a worker's groups may use, as many as `tensor_parallel` allows."""
        after = self._workers[worker.slot + 1 : worker.slot + MAX_TENSOR_PARALLEL]
        return tuple(Neighbour(one.place.device, one.place.cores) for one in after)
