"""Finds text models, counts their requests and submits them, the same for every route. Knows no dialect."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from sie.frontend.generation.interface import TextRun
from sie.frontend.http.exchange import Exchange
from sie.frontend.models.not_found import model_not_found
from sie.frontend.process import FrontendProcess
from sie.ipc.messages import ModelEntry
from sie.values.errors import NotFound
from sie.values.generate import GenerateRequest

_OUTPUT: Final = "generate"


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
            able = ", ".join(models.able(_OUTPUT)) or "none"
            hint = model_not_found(model, models.entries).message.rstrip(".")
            raise NotFound(f"{hint}. Models that generate: {able}", extras={"param": "model"})
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
    ) -> TextRun:
        """Submit a request to a served model. It ends when its client leaves. Raises the errors of `Generator.start`."""
        process = self._process
        run = await self.generator.start(
            entry, request, exchange.deadline_ns, salt=exchange.owner.encode(), echoes=echoes
        )
        exchange.num_items = run.num_prompts
        for pending in run.pendings:
            process.watch_client(pending, exchange.protocol)
        return run
