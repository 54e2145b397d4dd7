"""Tells gateways each second how this host is, and sends its models' cards to those that ask."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import msgspec

from sie.cluster.connection import Connection
from sie.cluster.large_payloads import pack
from sie.cluster.payloads import VERSION, Beat, Cards, ModelBeat, encode
from sie.cluster.subjects import Lane, host_subject
from sie.frontend.process import FrontendProcess
from sie.ipc.messages import ModelEntry, TookConfigs
from sie.values.card import ModelCard

BEAT_S: Final = 1.0
_to_msgpack: Final = msgspec.msgpack.Encoder(order="deterministic").encode
_FILE_FIELD: Final = re.compile(r"(_file|directory)$")


class Beats:
    """The heartbeats of one host."""

    def __init__(self, process: FrontendProcess, connection: Connection, lane: Lane, host: str) -> None:
        self._process = process
        self._connection = connection
        self.lane = lane
        self._host = host
        self.configs = TookConfigs("", {})
        """The shared configuration that this host runs."""
        self._known: dict[str, ModelEntry] | None = None
        self._cards = Cards(VERSION, "")

    async def send(
        self, *, is_draining: bool, num_running: int, num_texts: int, items_per_s: float, credit: int
    ) -> None:
        """Publish one heartbeat."""
        process, lane = self._process, self.lane
        models = process.models
        workers = [worker for worker in models.workers if worker.state == "ready"]
        beat = Beat(
            VERSION, self._host, process.settings.server.name or self._host, lane.pool, lane.profile, lane.bundle,
            self.cards().cards_key,
            {entry.card.id: _model_beat(entry) for entry in models.hosted_entries if _is_offered(entry)},
            is_draining=is_draining, queued_tokens=process.engine.queued_tokens,
            tokens_per_s=process.engine.tokens_per_s, num_running=num_running, num_texts=num_texts,
            num_workers=len(workers), num_gpus=sum(worker.device.startswith("cuda") for worker in workers),
            gpu=lane.profile, memory_used_bytes=sum(entry.memory_bytes for entry in models.hosted_entries),
            items_per_s=items_per_s, lease=lane.lease,
            config_hash=self.configs.hash, refused=self.configs.refused, credit=credit,
        )  # fmt: skip
        await self._connection.publish(host_subject(lane.pool, self._host, "beat"), encode(beat))

    def cards(self) -> Cards:
        """Return the present cards, with a key that changes when they do."""
        models = self._process.models
        if models.entries is not self._known:
            self._known = models.entries
            shown = [_shown(entry) for entry in models.hosted_entries if _is_offered(entry)]
            key = hashlib.blake2b(_to_msgpack(shown), digest_size=12).hexdigest()
            self._cards = Cards(VERSION, key, shown)
        return self._cards

    async def packed_cards(self) -> bytes:
        """Return the cards for a gateway, by reference if they are many. Raises SieErrors."""
        cards = self.cards()
        return await pack(self._connection, self.lane.pool, f"cards.{cards.cards_key}", cards, entries=[])


def _is_offered(entry: ModelEntry) -> bool:
    return entry.card.kind != "tensor"


def _model_beat(entry: ModelEntry) -> ModelBeat:
    is_served = entry.state == "loaded" and bool(entry.workers)
    return ModelBeat(entry.state, is_served, entry.recovering or entry.reloading, entry.error)


def _shown(entry: ModelEntry) -> ModelEntry:
    """Return an entry with only the facts that loads and unloads do not change, and without this host's paths."""
    adapters = {
        name: msgspec.structs.replace(adapter, state="available", workers=(), error=None, recovering=False)
        for name, adapter in entry.adapters.items()
    }
    return ModelEntry(card=card_without_paths(entry.card), state="available", is_read=entry.is_read, adapters=adapters)


def card_without_paths(card: ModelCard) -> ModelCard:
    """Return a card with only the last part of each file and directory, at every level."""
    return msgspec.convert(_without_folders(msgspec.to_builtins(card)), ModelCard)


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: held.rpartition("/")[2] if _is_path(name, held) else _without_folders(held)
            for name, held in value.items()
        }
    return [_without_folders(held) for held in value] if isinstance(value, list | tuple) else value


def _is_path(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, str) and bool(_FILE_FIELD.search(name))
