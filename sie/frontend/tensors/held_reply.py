"""Holds a tensor reply while its outputs are read: they are views of memory that the worker gets back."""

from __future__ import annotations

from sie.frontend.engine.worker_link import Reply
from sie.values.tensor import TensorReply


class HeldReply:
    """A reply, handed out by `with` for as long as the block lasts. Without raw, its outputs are views of nobody's memory."""

    __slots__ = ("_raw", "_reply")

    def __init__(self, reply: TensorReply, raw: Reply | None = None) -> None:
        """Take over raw."""
        self._reply = reply
        self._raw = raw

    @property
    def nbytes(self) -> int:
        """The bytes of its outputs."""
        return sum([len(output.data) for output in self._reply.outputs])

    def __enter__(self) -> TensorReply:
        return self._reply

    def __exit__(self, *_exc: object) -> None:
        if self._raw is not None:
            self._raw.release()
