"""Describes a version of a model for the tensor APIs: its state, the reason for it, and its statistics. Pure."""

from __future__ import annotations

import msgspec

from sie.ipc.messages import ModelEntry
from sie.values.card import ModelState
from sie.values.errors import NotFound
from sie.values.tensor import TensorRule


class VersionState(msgspec.Struct, frozen=True):
    """One version of a model in repository indexes. reason is empty if it has no error."""

    name: str
    version: str
    state: ModelState
    reason: str = ""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """How many steps or requests there were, and their time by phase, in nanoseconds."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class RequestStatistics(Spent, frozen=True, kw_only=True):
    """The requests of one size that workers answered; count and the phases are those of success."""

    success_ns: int = 0
    queue_ns: int = 0
    num_failed: int = 0
    failed_ns: int = 0


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one version since the server started; times in nanoseconds."""

    num_succeeded: int = 0
    num_failed: int = 0
    success_ns: int = 0
    failure_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    steps: dict[int, Spent] = {}
    """The steps by their batch size, ascending."""
    requests: dict[int, RequestStatistics] = {}
    """The requests by their own batch size, ascending."""
    num_rows: int = 0
    """Batch items that were computed."""
    num_steps: int = 0
    last_used_ms: int = 0
    """Unix time in milliseconds, 0 for never."""
    memory_bytes: int = 0
    device: str = ""


def rule_of(entry: ModelEntry) -> TensorRule:
    """Return a model's input and output tensors. Raises NotFound for a model without tensors."""
    rule = entry.card.tensor
    if rule is None:
        raise NotFound(f"Request for unknown model: '{entry.card.id}' is not found")
    return rule


def reason_of(entry: ModelEntry) -> str:
    """Return why a version takes no requests; empty if it takes them, or was never loaded."""
    if entry.error is not None:
        return entry.error.message
    return "unloaded" if entry.dismissed and entry.state == "available" else ""
