"""Takes a renewed certificate over: frontends are replaced one after another, and no request fails.

A stand-in listens on the same port before the first one goes and until the last one is back, so that there are as many
listeners as ever. One that goes answers what it is asked, with `Connection: close`, until its clients have heard of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sie.ipc import messages
from sie.runtime.logs import get_logger
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.supervisor.key_file import POLL_S

_log = get_logger(__name__)
_LINGER_S: Final = 2.0
"""How long a frontend that goes still takes requests; a keep-alive connection hears with its next answer."""
_READY_POLL_S: Final = 0.05


class Renewal:
    """Watches the TLS files, and rolls the frontends over when they have changed."""

    def __init__(
        self, files: CertificateFiles, crew: Crew, *, timeouts_s: Callable[[], tuple[float, float]],
        on_problem: Callable[[str], None],
    ) -> None:  # fmt: skip
        """timeouts_s returns how long a start and a drain may take; on_problem is told why files were not taken over."""
        self._files = files
        self._crew = crew
        self._timeouts_s = timeouts_s
        self._on_problem = on_problem
        self._asked = asyncio.Event()
        self.problem = ""

    def request(self) -> None:
        """Look at the files at once: what SIGHUP does."""
        self._asked.set()

    async def run(self) -> None:
        """Take over what changes, for ever."""
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
        """Replace every HTTP frontend; return whether all serve with the new files. False at once when the server stops."""
        crew, stand_in = self._crew, self._crew.stand_in
        crew.send_all(crew.frontends, self._files.message)  # who takes it over without being replaced
        if stand_in is None or not await self._start(stand_in):
            return False
        is_done = True
        for frontend in [child for child in crew.frontends if child.protocol == "http" and child is not stand_in]:
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
        if self._crew.is_draining:
            return False
        self._crew.start_again(frontend)
        deadline_s = asyncio.get_running_loop().time() + self._timeouts_s()[0]
        while frontend.state != "ready":
            if self._crew.is_draining or frontend.state == "gone" or asyncio.get_running_loop().time() > deadline_s:
                _log.error("%s is not there with the new certificate; the others stay as they are", frontend.name)
                return False
            await asyncio.sleep(_READY_POLL_S)
        return True

    async def _retire(self, frontend: Child) -> None:
        """Let a frontend finish what it has, and go."""
        if self._crew.is_draining:
            return
        frontend.is_retired = True
        self._crew.send(frontend, messages.Retire())
        await asyncio.sleep(_LINGER_S)
        self._crew.send(frontend, messages.Finish())
        frontend.finish()
        await self._crew.until_gone([frontend], self._timeouts_s()[1])
        if frontend.process is not None:
            _log.warning("%s did not finish within drain_timeout_s; killing it", frontend.name)
            frontend.kill()
            await self._crew.until_gone([frontend], self._timeouts_s()[1])
