"""Handles `/v1/agent/approvals/{approval_id}`: a client's decision on a call of a tool, at any frontend."""

from __future__ import annotations

from sie.agents.messages import Decide, Decided
from sie.frontend.dialects.openai.approvals import decode_decision, encode_status
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Response
from sie.frontend.process import FrontendProcess
from sie.frontend.telemetry.access_log import id_headers, request_id_of


class Agents:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process

    async def decide(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/agent/approvals/{approval_id}`. An approval belongs to the key of its request."""
        process = self._process
        exchange.request_id = request_id_of(exchange.headers)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        body = await exchange.read_body(process.bodies)
        decision = decode_decision(body, exchange.headers.get("content-type"), process.settings.limits)
        status = "not_found"
        if process.settings.agents.is_on:
            question = Decide(
                owner=exchange.owner, id=exchange.model, is_approved=decision.decision == "approve",
                remembers=decision.remember_for_session, message=decision.message or "",
            )  # fmt: skip
            status = (await process.agents.ask(question, Decided)).status
        return Response(404 if status == "not_found" else 200, [JSON, *id_headers(exchange)], encode_status(status))
