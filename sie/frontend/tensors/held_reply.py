"""Holds a tensor reply while its outputs are read. They are views of an extent, which the worker then gets back."""

from __future__ import annotations

from sie.frontend.engine.worker_link import Reply
from sie.values.tensor import TensorReply


class HeldReply:
    """A reply whose outputs are valid inside a `with` block. Without raw, the outputs do not use a worker's extent."""

    __slots__ = ("_raw", "_reply")

    def __init__(self, reply: TensorReply, raw: Reply | None = None) -> None:
        """Take ownership of raw."""
        self._reply = reply
        self._raw = raw

    @property
    def nbytes(self) -> int:
        """The size of its outputs in bytes."""
        return sum([len(output.data) for output in self._reply.outputs])

    def __enter__(self) -> TensorReply:
        return self._reply

    def __exit__(self, *_exc: object) -> None:
        if self._raw is not None:
            self._raw.release()
