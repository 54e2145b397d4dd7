"""Defines what a frontend process knows of operations that run on other hosts (`sie.cluster` implements it).

Such a process has no workers. Routes, dialects, access and telemetry are the same; its operations go elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sie.frontend.engine.interface import Pending
from sie.frontend.generation.interface import TextStarter
from sie.frontend.http.routing import Route
from sie.frontend.operations.interface import EncodeOperation, ExtractOperation, ScoreOperation
from sie.values.errors import SieError

if TYPE_CHECKING:
    from sie.frontend.access.key_use import KeyHolder
    from sie.frontend.http.exchange import Exchange


YAML: Final = "application/yaml"


class ClusterAnswer(NamedTuple):
    """The answer to a request about the cluster itself."""

    status: int
    body: Any
    """The body as plain values of JSON, or as the text of another media type."""
    media: str = "application/json"


class PoolApi(Protocol):
    """The leased pools of a cluster: `/v1/pools`. Every method raises SieErrors."""

    def list(self) -> ClusterAnswer:
        """Describe all pools."""
        ...

    def show(self, name: str) -> ClusterAnswer:
        """Describe one pool."""
        ...

    async def put(self, body: bytes) -> ClusterAnswer:
        """Create a pool, or update one and renew its lease."""
        ...

    async def renew(self, name: str) -> ClusterAnswer:
        """Renew a pool's lease."""
        ...

    async def delete(self, name: str) -> ClusterAnswer:
        """Delete a pool."""
        ...


class ConfigApi(Protocol):
    """The models and profiles that all hosts of a cluster share: `/v1/configs`. Every method raises SieErrors."""

    async def put(self, body: bytes, key: str, epoch: str) -> ClusterAnswer:
        """Add a model or profiles; key is the `Idempotency-Key` and epoch the `If-Match` of the request."""
        ...

    def list(self) -> ClusterAnswer:
        """Describe every model."""
        ...

    def show(self, model: str) -> ClusterAnswer:
        """Return a model's configuration."""
        ...

    def status(self, model: str) -> ClusterAnswer:
        """Return which hosts run a model's configuration."""
        ...

    def list_bundles(self) -> ClusterAnswer:
        """Describe the bundles."""
        ...

    def show_bundle(self, name: str) -> ClusterAnswer:
        """Describe one bundle."""
        ...

    def resolve(self, body: bytes) -> ClusterAnswer:
        """Return the model, profile and bundles behind a name."""
        ...

    def export(self) -> ClusterAnswer:
        """Return every configuration."""
        ...

    def show_epoch(self) -> ClusterAnswer:
        """Return the epoch."""
        ...


class Remote(Protocol):
    """The operations of a process without workers, and what dispatch asks of them."""

    @property
    def encoder(self) -> EncodeOperation:
        """The encode operation."""
        ...

    @property
    def scorer(self) -> ScoreOperation:
        """The score operation."""
        ...

    @property
    def extractor(self) -> ExtractOperation:
        """The extract operation."""
        ...

    @property
    def generator(self) -> TextStarter:
        """The starter of generated answers."""
        ...

    @property
    def pools(self) -> PoolApi:
        """The leased pools."""
        ...

    @property
    def configs(self) -> ConfigApi:
        """The shared models and profiles."""
        ...

    @property
    def num_pending(self) -> int:
        """Number of requests that are not answered."""
        ...

    async def run(self) -> None:
        """Keep the connection to the hosts for as long as the process runs. Sets its models."""
        ...

    async def lease(self, holder: KeyHolder | None) -> None:
        """Lease what the next request of an API key needs of its limits, which all gateways share."""
        ...

    async def wait_settled(self) -> None:
        """Wait until the hosts are known; for some seconds at most, since they may all be away."""
        ...

    def check_open(self) -> None:
        """Refuse a request before its body is read if no more can be taken. Raises Overloaded or Unavailable."""
        ...

    def check_route(self, route: Route) -> None:
        """Refuse a route that only a host itself can serve. Raises SieError, which names the route."""
        ...

    def check_placement(self, exchange: Exchange) -> None:
        """Read where the request wants to run from its headers, for the task that serves it. Raises SieErrors."""
        ...

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End the client's wait with an error."""
        ...

    def expire(self, now_ns: int) -> None:
        """End overdue requests; called on each tick of the process's clock."""
        ...

    def record(
        self, exchange: Exchange, status: int, headers: list[tuple[str, str]], error: SieError | None
    ) -> list[tuple[str, str]]:
        """Count a request that ends. Returns the headers of the response."""
        ...

    def status_frame(self) -> str:
        """Return a frame of `/ws/cluster-status`, JSON."""
        ...

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`."""
        ...

    def readiness(self) -> dict[str, Any]:
        """Return the body of `/readyz`. Requests are served while its `status` is `ready`."""
        ...

    def close(self) -> None:
        """Let go of the connection. Called when no request is under way."""
        ...
