"""Approvals: each is decided once, by its owner, in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sie.agents.host import approvals as module
from sie.agents.host.approvals import Approvals
from sie.agents.messages import AwaitApproval, Decide, Decision, OpenApproval

QUESTION = OpenApproval(owner="me", session="s", kind="shell")


def run(work: Callable[[Approvals], Awaitable[None]], timeout_s: float = 30.0) -> None:
    async def main() -> None:
        await work(Approvals(timeout_s))

    asyncio.run(asyncio.wait_for(main(), 30))


def approve(approval_id: str, **fields: object) -> Decide:
    return Decide(**{"owner": "me", "id": approval_id, "is_approved": True, **fields})  # type: ignore[arg-type]


def test_a_decision_resolves_a_call_that_waits_once() -> None:
    async def work(approvals: Approvals) -> None:
        approval_id = approvals.open(QUESTION).id
        waiting = asyncio.ensure_future(approvals.wait(AwaitApproval(approval_id)))
        await asyncio.sleep(0)
        assert approvals.decide(approve(approval_id, owner="other")).status == "not_found"
        assert approvals.decide(approve(approval_id)).status == "resolved"
        assert approvals.decide(approve(approval_id)).status == "not_found"
        assert await waiting == Decision(True)
        assert approvals.decide(approve("appr_unknown")).status == "not_found"

    run(work)


def test_a_decision_before_the_wait_is_kept() -> None:
    async def work(approvals: Approvals) -> None:
        approval_id = approvals.open(QUESTION).id
        assert approvals.decide(approve(approval_id, is_approved=False, message="no")).status == "queued"
        assert await approvals.wait(AwaitApproval(approval_id)) == Decision(False, "no")

    run(work)


def test_without_a_decision_a_call_is_denied() -> None:
    async def work(approvals: Approvals) -> None:
        approval_id = approvals.open(QUESTION).id
        decision = await approvals.wait(AwaitApproval(approval_id))
        assert not decision.is_approved
        assert "in time" in decision.message
        assert approvals.decide(approve(approval_id)).status == "not_found"

    run(work, timeout_s=0.01)


def test_an_approval_may_hold_for_its_kind_and_session() -> None:
    async def work(approvals: Approvals) -> None:
        denied = approvals.open(QUESTION).id
        approvals.decide(approve(denied, is_approved=False, remembers=True))
        assert approvals.open(QUESTION).id
        approvals.decide(approve(approvals.open(QUESTION).id, remembers=True))
        assert approvals.open(QUESTION).id == ""
        for other in ({"owner": "other"}, {"session": "t"}, {"kind": "file"}):
            question = OpenApproval(**{"owner": "me", "session": "s", "kind": "shell", **other})
            assert approvals.open(question).id, other
        approvals.forget("me", "s")
        assert approvals.open(QUESTION).id

    run(work)


def test_only_the_latest_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that used no sandbox never ends, so only the number of sessions bounds what is remembered."""
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 2)

    def question(session: str, kind: str = "shell") -> OpenApproval:
        return OpenApproval(owner="me", session=session, kind=kind)

    async def work(approvals: Approvals) -> None:
        for session, kind in (("a", "shell"), ("b", "shell"), ("a", "mcp"), ("c", "shell")):
            approvals.decide(approve(approvals.open(question(session, kind)).id, remembers=True))
        assert approvals.open(question("b")).id, "the session that was approved longest ago is still remembered"
        assert approvals.open(question("a")).id == ""
        approvals.decide(approve(approvals.open(question("d")).id, remembers=True))
        assert approvals.open(question("c")).id, "a session that was used is forgotten before an unused one"
        assert approvals.open(question("a", "mcp")).id == approvals.open(question("d")).id == ""

    run(work)


def test_who_stops_waiting_leaves_nothing_to_approve() -> None:
    async def work(approvals: Approvals) -> None:
        approval_id = approvals.open(QUESTION).id
        waiting = asyncio.ensure_future(approvals.wait(AwaitApproval(approval_id)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert approvals.decide(approve(approval_id)).status == "not_found"

    run(work)
