"""Holds the handlers of one process. Those with large libraries are made by the first request that needs them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from sie.frontend.http.routing import RouteTable
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.cluster import ClusterRoutes
from sie.frontend.routes.inference import Inference
from sie.frontend.routes.kserve import KServe
from sie.frontend.routes.models import Cards
from sie.frontend.routes.server_pages import Pages

if TYPE_CHECKING:
    from sie.frontend.routes.agents import Agents
    from sie.frontend.routes.files import Files
    from sie.frontend.routes.generate import TextRoutes
    from sie.frontend.routes.sessions import Sessions
    from sie.frontend.routes.skills import Skills
    from sie.frontend.routes.store_requests import Uploads
    from sie.frontend.routes.trtis import Trtis


class Handlers:
    """One group of handlers for each API. identity is the headers by which SIE's clients know the server."""

    def __init__(
        self, process: FrontendProcess, identity: tuple[tuple[str, str], ...], table: RouteTable
    ) -> None:  # fmt: skip
        self._process = process
        self._identity = identity
        self.inference = Inference(process, identity)
        self.kserve = KServe(process)
        self.cards = Cards(process)
        self.pages = Pages(process, table)
        self.cluster = ClusterRoutes(process)

    @cached_property
    def texts(self) -> TextRoutes:
        """The text generation routes. Their module brings a template engine: import it on a thread first."""
        from sie.frontend.routes.generate import TextRoutes

        return TextRoutes(self._process, self.kserve, self.inference.pool, self._identity)

    @cached_property
    def agents(self) -> Agents:
        """The decisions on calls of tools."""
        from sie.frontend.routes.agents import Agents

        return Agents(self._process)

    @cached_property
    def trtis(self) -> Trtis:
        """The routes of the TensorRT Inference Server v1 API. Their module brings protobuf: import it on a thread first."""
        from sie.frontend.routes.trtis import Trtis

        return Trtis(self._process)

    @cached_property
    def uploads(self) -> Uploads:
        """The uploads of files and skills. Their module brings a reader of forms: import it on a thread first."""
        from sie.frontend.routes.store_requests import Uploads

        return Uploads(self._process)

    @cached_property
    def files(self) -> Files:
        """The routes of files."""
        from sie.frontend.routes.files import Files

        return Files(self._process, self.uploads)

    @cached_property
    def skills(self) -> Skills:
        """The routes of skills."""
        from sie.frontend.routes.skills import Skills

        return Skills(self._process, self.uploads)

    @cached_property
    def sessions(self) -> Sessions:
        """The routes of sessions."""
        from sie.frontend.routes.sessions import Sessions

        return Sessions(self._process)
