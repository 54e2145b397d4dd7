"""Applies a renewed certificate by replacing frontends one after another. No request may fail because of it.

A stand-in listens on the same port from before the first replacement until after the last, so the number of listeners
never drops. A retiring frontend answers with `Connection: close` until its clients have seen it. Meanwhile the kernel gives
new connections to the newest listener, so that none waits at a listener that closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sie.ipc import messages
from sie.runtime.logs import get_logger
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.key_file import POLL_S

_log = get_logger(__name__)
_LINGER_S: Final = 2.0
"""How long a retiring frontend still takes requests. A keep-alive connection is told with its next answer."""
_READY_POLL_S: Final = 0.05


class Renewal:
    """Watches the TLS files and replaces the frontends when they change."""

    def __init__(
        self, files: CertificateFiles, children: Children, *, timeouts_s: Callable[[], tuple[float, float]],
        on_problem: Callable[[str], None],
    ) -> None:  # fmt: skip
        """timeouts_s returns the limits of a start and of a drain; on_problem gets the reason for refused files."""
        self._files = files
        self._children = children
        self._timeouts_s = timeouts_s
        self._on_problem = on_problem
        self._asked = asyncio.Event()
        self.problem = ""

    def request(self) -> None:
        """Check the files at once, as SIGHUP does."""
        self._asked.set()

    async def run(self) -> None:
        """Apply every change of the files, without end."""
        stuck = ""
        while True:
            is_asked = await self._wait()
            changed = await asyncio.to_thread(self._files.poll, at_once=is_asked)
            self._tell(self._files.problem or ("" if changed else stuck))
            if changed:
                stuck = "" if await self._roll() else "a frontend did not start with the new certificate"
                self._tell(stuck)

    async def _wait(self) -> bool:
        try:
            async with asyncio.timeout(POLL_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)

    async def _roll(self) -> bool:
        """Replace every HTTP frontend, also a gateway's. Return whether all serve with the new files; False if the server stops."""
        children, stand_in = self._children, self._children.stand_in
        children.send_all(children.frontends, self._files.message)  # the gRPC frontend applies it without a restart
        if stand_in is None or not await self._start(stand_in):
            return False
        is_done = True
        behind_granian = [child for child in children.frontends if child.protocol == stand_in.protocol]
        for frontend in [child for child in behind_granian if child is not stand_in]:
            if frontend.state == "gone":
                continue
            await self._retire(frontend)
            is_done = is_done and await self._start(frontend)
            if not is_done:
                break
        if is_done:
            await self._retire(stand_in)
            _log.info("certificate renewed: every frontend serves with it")
        return is_done

    async def _start(self, frontend: Child) -> bool:
        """Start a frontend that has no process, and wait for it to listen."""
        if self._children.is_draining:
            return False
        self._children.restart(frontend)
        deadline_s = asyncio.get_running_loop().time() + self._timeouts_s()[0]
        while frontend.state != "ready":
            if self._children.is_draining or frontend.state == "gone" or asyncio.get_running_loop().time() > deadline_s:
                _log.error("%s did not start with the new certificate; the others stay as they are", frontend.name)
                return False
            await asyncio.sleep(_READY_POLL_S)
        return True

    def _newest_beside(self, frontend: Child) -> int | None:
        """Return the position of the newest listener among those of the port, or None if it is this frontend's."""
        listening = [
            child
            for child in self._children.frontends
            if child.protocol == frontend.protocol and child.state == "ready"
        ]
        newest = max(listening, key=lambda child: child.started_s, default=frontend)
        return len(listening) - 1 if newest is not frontend else None

    async def _retire(self, frontend: Child) -> None:
        """Let a frontend finish its requests and exit."""
        if self._children.is_draining:
            return
        frontend.is_retired = True
        self._children.send(frontend, messages.Retire(self._newest_beside(frontend)))
        await asyncio.sleep(_LINGER_S)
        self._children.send(frontend, messages.Finish())
        frontend.finish()
        await self._children.until_gone([frontend], self._timeouts_s()[1])
        if frontend.process is not None:
            _log.warning("%s did not finish within drain_timeout_s; killing it", frontend.name)
            frontend.kill()
            await self._children.until_gone([frontend], self._timeouts_s()[1])
