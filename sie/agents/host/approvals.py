"""Keeps the approvals that clients have yet to give. One process holds them, so any frontend can take the decision."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final

from sie.agents.messages import Approval, AwaitApproval, Decide, Decided, Decision, OpenApproval

_TIMED_OUT: Final = "Nobody approved this call in time, so it was denied"
_DENIED: Final = "The user denied this call"
_MAX_OPEN: Final = 10_000
_MAX_KINDS: Final = 1024
"""Most kinds of one session that are remembered; clients of `tool_dispatch_url` name functions as they like."""
_MAX_REMEMBERED: Final = 10_000
"""Most sessions whose approvals are remembered. A session without a working directory is never removed, so it is forgotten here."""


class _Open:
    def __init__(self, question: OpenApproval, ends_s: float) -> None:
        self.question = question
        self.ends_s = ends_s
        self.is_awaited = False
        self.decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()


class Approvals:
    """The open approvals, and the kinds of tools that a session has approved for good."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[str, _Open] = {}
        self._remembered: dict[tuple[str, str], set[str]] = {}
        """The approved kinds of each session, the most recently used session last."""

    def open(self, question: OpenApproval) -> Approval:
        """Make an approval, unless this kind is approved for the session."""
        if question.kind in self._remembered.get((question.owner, question.session), ()):
            self._remember(question)
            return Approval("")
        now_s = time.monotonic()
        for approval_id in [one for one, approval in self._open.items() if approval.ends_s < now_s]:
            del self._open[approval_id]  # its run never came to wait for it
        while len(self._open) >= _MAX_OPEN:
            del self._open[next(iter(self._open))]
        approval_id = f"appr_{secrets.token_hex(16)}"
        self._open[approval_id] = _Open(question, now_s + 2 * self._timeout_s)
        return Approval(approval_id)

    async def wait(self, question: AwaitApproval) -> Decision:
        """Return the decision, or a denial when its time is over. A caller that stops waiting removes the approval."""
        approval = self._open.get(question.id)
        if approval is None:
            return Decision(False, _TIMED_OUT)
        approval.is_awaited = True
        try:
            async with asyncio.timeout(self._timeout_s):
                return await approval.decision
        except TimeoutError:
            return Decision(False, _TIMED_OUT)
        finally:
            self._open.pop(question.id, None)

    def decide(self, question: Decide) -> Decided:
        """Decide once. An approval of another owner does not exist."""
        approval = self._open.get(question.id)
        if approval is None or approval.question.owner != question.owner or approval.decision.done():
            return Decided("not_found")
        if question.is_approved and question.remembers:
            self._remember(approval.question)
        message = question.message or ("" if question.is_approved else _DENIED)
        approval.decision.set_result(Decision(question.is_approved, message))
        return Decided("resolved" if approval.is_awaited else "queued")

    def forget(self, owner: str, session: str) -> None:
        """Forget what a session approved for good."""
        self._remembered.pop((owner, session), None)

    def _remember(self, asked: OpenApproval) -> None:
        """Remember an approved kind of action for its session. Over the limit, forget the session used longest ago."""
        kinds = self._remembered.pop((asked.owner, asked.session), set())
        self._remembered[asked.owner, asked.session] = kinds | {asked.kind} if len(kinds) < _MAX_KINDS else kinds
        if len(self._remembered) > _MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
