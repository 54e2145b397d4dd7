"""Finds text models, counts their requests and submits them, the same for every route. Knows no dialect."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Final

from sie.agents.loop.agent_run import AgentRun
from sie.agents.loop.plan import AgentPlan, plan_agent
from sie.agents.messages import ListMcp, McpTools
from sie.frontend.generation.interface import TextRun
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.exchange import Exchange
from sie.frontend.models.not_found import model_not_found
from sie.frontend.process import FrontendProcess
from sie.ipc.messages import ModelEntry
from sie.values.errors import ClientGone, NotFound
from sie.values.generate import GenerateRequest

_OUTPUT: Final = "generate"
_LEAST_ROUND_NS: Final = 1_000_000_000


class TextService:
    """The shared part of all text generation routes. One instance per process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self.generator = process.generator

    def find(self, exchange: Exchange, request: GenerateRequest) -> ModelEntry:
        """Return the model of a request, and replace a default in the request by its id. Raises NotFound with the text models."""
        request.model = self._process.models.resolve_default(request.model, _OUTPUT)
        return self.find_exactly(exchange, request.model)

    def find_exactly(self, exchange: Exchange, model: str) -> ModelEntry:
        """Return the model with this id. Raises NotFound with the list of text models."""
        models = self._process.models
        entry = models.find(model)
        if entry is None:
            able = ", ".join(models.models_for(_OUTPUT)) or "none"
            hint = model_not_found(model, models.entries).message
            end = "" if hint.endswith("?") else "."
            raise NotFound(f"{hint}{end} Models that generate: {able}", extras={"param": "model"})
        self.begin(exchange, entry)
        return entry

    def begin(self, exchange: Exchange, entry: ModelEntry) -> None:
        """Count a request as under way for a model, until its exchange is over."""
        exchange.known_model = entry.card.id
        exchange.decoded_ns = time.monotonic_ns()
        metrics, route = self._process.generation_metrics, exchange.route
        labels = exchange.scope.method, route.template if route is not None else "", entry.card.id
        metrics.begin(*labels)
        exchange.leave = partial(metrics.end, *labels)

    async def start(
        self, exchange: Exchange, entry: ModelEntry, request: GenerateRequest, *, echoes: bool = False
    ) -> TextRun | AgentRun:
        """Submit a request to a served model, with the rounds of its agent if it asks for one.

        It ends when its client leaves. A stream that will soon begin has begun, so that the caller can start it again on
        a model that was unloaded. Raises as `Generator.start`, `TextRun.wait_first` and `plan_agent` do.
        """
        plan = await self.plan(request)
        if plan is None:
            return await self._start_round(exchange, entry, request, echoes=echoes)
        run = exchange.run = await self.start_agent(entry, plan, exchange.deadline_ns, owner=exchange.owner)
        exchange.num_items = 1
        watch = asyncio.get_running_loop().create_task(_end_with_client(run, exchange.protocol))
        run.on_end(watch.cancel)
        return run

    async def prompt_ids(self, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts, with the server's tools. Raises as `start` does."""
        plan = await self.plan(request)
        return await self.generator.prompt_ids(entry, request if plan is None else plan.request)

    async def plan(self, request: GenerateRequest) -> AgentPlan | None:
        """Return the plan of a request that asks the server to act, or None. Raises as `plan_agent` does."""
        settings, servers = self._process.settings.agents, ()
        if self._process.remote is not None:
            if request.agent is None and not (settings.tool_dispatch_url and request.tools):
                return None
            field = request.agent.field if request.agent is not None else "tools"
            raise wrong(field, "asks for tools, which a gateway does not run; ask a host itself")
        if request.agent is not None and request.agent.mcp and settings.has_mcp:
            servers = (await self._process.agents.ask(ListMcp(), McpTools)).servers
        return plan_agent(request, settings, servers)

    async def start_agent(self, entry: ModelEntry, plan: AgentPlan, deadline_ns: int, *, owner: str) -> AgentRun:
        """Submit the first round of an agent's run. deadline_ns: of its first token; later rounds have as much time."""
        models, timeout_ns = self._process.models, deadline_ns - time.monotonic_ns()

        async def start(request: GenerateRequest) -> TextRun:
            next_ns = time.monotonic_ns() + max(timeout_ns, _LEAST_ROUND_NS)
            serving = await models.wait_serving(entry, next_ns)
            return await self.generator.start(serving, request, next_ns, salt=owner.encode())

        first = await self.generator.start(entry, plan.request, deadline_ns, salt=owner.encode())
        run = AgentRun(first, start, plan, self._process.agents, owner=owner)
        self._process.metrics.count_agents(1)
        run.on_end(partial(self._process.metrics.count_agents, -1))
        return run

    async def _start_round(
        self, exchange: Exchange, entry: ModelEntry, request: GenerateRequest, *, echoes: bool = False
    ) -> TextRun:
        process = self._process
        run = exchange.run = await self.generator.start(
            entry, request, exchange.deadline_ns, salt=exchange.owner.encode(), echoes=echoes
        )
        exchange.num_items = run.num_prompts
        for pending in run.pendings:
            process.watch_client(pending, exchange.protocol)
        if request.stream:  # what fails from now on is too late for another attempt
            try:
                await run.wait_first(process.settings.generation.keep_alive_interval_ms / 1e3)
            except BaseException:
                run.give_up(ClientGone("the request ended before its answer began"))
                raise
        return run


async def _end_with_client(run: AgentRun, protocol: Any) -> None:
    """Give up a run when its client leaves."""
    await protocol.client_disconnect()
    run.give_up(ClientGone("the client left before its answer was there"))
