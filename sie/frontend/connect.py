"""Joins the supervisor from a new frontend process, of any protocol, before its first connection is accepted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from sie.frontend.process import FrontendProcess, MakeRemote
from sie.ipc import channel as control
from sie.ipc import messages
from sie.ipc.channel import ChannelClosedError
from sie.ipc.messages import Launch
from sie.runtime import child_setup, failpoints
from sie.shm.core_board import CoreBoard
from sie.shm.pages import CounterPage

_CONFIGURE_TIMEOUT_S: Final = 10.0


def connect(
    launch: Launch, make_remote: MakeRemote | None = None
) -> Callable[[asyncio.AbstractEventLoop], FrontendProcess]:
    """Return a function that joins the supervisor from Granian's child process, given its event loop."""

    def join(loop: asyncio.AbstractEventLoop) -> FrontendProcess:
        child_setup.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        channel = control.connect(launch)
        message, fds = channel.receive(_CONFIGURE_TIMEOUT_S)
        if not isinstance(message, messages.Configure):
            raise ChannelClosedError(f"expected Configure, got {type(message).__name__}")
        failpoints.arm(message.settings.testing.failpoints)
        own_fd, board_fd, *page_fds = fds
        pages = [CounterPage.open(own_fd, writable=True), *(CounterPage.open(fd, writable=False) for fd in page_fds)]
        needs_cores = CoreBoard.open(board_fd, writable=False).is_needed
        frontend = FrontendProcess(
            launch, message.settings, channel, pages, loop, make_remote=make_remote, needs_cores=needs_cores
        )
        if frontend.access is not None:
            first, _ = channel.receive(_CONFIGURE_TIMEOUT_S)
            if not isinstance(first, messages.Keys):
                raise ChannelClosedError(f"expected Keys, got {type(first).__name__}")
            frontend.access.replace(first)  # valid keys work from the first connection on
        frontend.start()
        return frontend

    return join
