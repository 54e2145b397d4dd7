"""Holds a frontend's end of the control channel. Must end the process when the supervisor has gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Final

from sie.ipc.channel import Channel, ChannelClosedError
from sie.ipc.messages import LoadModel, Message
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_ASK_AGAIN_S: Final = 1.0
"""A load of the same model is asked for at most once in this time."""


class SupervisorLink:
    """The supervisor, as one frontend process sees it. on_message gets each message and its descriptors."""

    def __init__(self, channel: Channel, on_message: Callable[[Message, list[int]], None]) -> None:
        self._channel = channel
        self._on_message = on_message
        self._asked_load_s: dict[str, float] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read every message as soon as it arrives. Called before the event loop runs."""
        loop.add_reader(self._channel.fileno(), self.read)

    def read(self) -> None:
        """Handle all messages that have arrived. Ends this process if the supervisor has closed the channel."""
        try:
            while (received := self._channel.try_receive()) is not None:
                self._on_message(*received)
        except ChannelClosedError:
            _log.warning("the supervisor is gone: stopping")
            os._exit(1)  # an orphan must not answer, and Granian would wait for requests under way

    def send(self, message: Message) -> None:
        """Send a message. Does nothing if the supervisor has gone, because `read` then ends this process."""
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(message)

    def ask_load(self, model: str) -> None:
        """Ask the supervisor to load a model."""
        self.send(LoadModel(model))

    def ask_once(self, model: str, ask: Callable[[str], None]) -> None:
        """Call ask with a model, unless a load of it was asked for within the last second."""
        now_s = time.monotonic()
        if now_s - self._asked_load_s.get(model, 0.0) >= _ASK_AGAIN_S:
            self._asked_load_s[model] = now_s
            ask(model)

    def close(self) -> None:
        """Close the channel. Called when no request is under way."""
        self._channel.close()
