"""Defines what gateways and hosts send each other, as msgpack. Pure; knows no connection.

Every payload is an `array_like` struct whose first field is its version: fields are only ever appended, and another
version is refused by name. Times that cross hosts are on the clock of the NATS server (`sie.cluster.server_clock`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec

from sie.ipc.messages import ModelEntry
from sie.values.card import ModelState
from sie.values.errors import ProtocolError, WireError
from sie.values.extract import Entity, ExtractTask
from sie.values.generate import GenerateRequest
from sie.values.muvera import Muvera

VERSION: Final = 1
"""The version of all payloads, and a part of every subject."""

ItemOperation = Literal["encode", "score", "extract"]
PayloadT = TypeVar("PayloadT")
_NOTHING: Final = memoryview(b"")
_to_msgpack: Final = msgspec.msgpack.Encoder().encode


class Work(msgspec.Struct, array_like=True, frozen=True):
    """One work item: one input of a request, several short ones, or a whole request to score.

    body is the msgpack of an `EncodeItem`, a `ScoreItem` or an `ExtractItem`; if it is large, it lies in the object store
    under stored. deadline_ns is on the server's clock.
    """

    version: int
    id: str
    reply_to: str
    deadline_ns: int
    operation: ItemOperation
    model: str
    body: memoryview = _NOTHING
    stored: str = ""


class Works(msgspec.Struct, array_like=True, frozen=True):
    """A message of a work stream: items of one gateway, lane and model, which one host takes and acknowledges together."""

    version: int
    items: list[Work]


class EncodeItem(msgspec.Struct, array_like=True, frozen=True):
    """Inputs to encode, already checked against the model's card: texts, lists of tokens, or one input of images."""

    texts: list[str] | None
    token_lists: list[list[int]] | None
    images: list[memoryview] | None
    output_types: tuple[str, ...] | None
    output_dtype: str | None
    instruction: str | None
    dimensions: int | None
    options: dict[str, Any]
    muvera: Muvera | None = None


class ScoreItem(msgspec.Struct, array_like=True, frozen=True):
    """One query with all its documents, already checked."""

    query: str
    documents: list[str]
    instruction: str | None
    options: dict[str, Any]
    compared: tuple[tuple[str, float], ...]


class ExtractItem(msgspec.Struct, array_like=True, frozen=True):
    """One input to extract from, already checked; images has one encoded image, or is None."""

    text: str
    images: list[memoryview] | None
    options: dict[str, Any]
    task: ExtractTask
    given: tuple[Entity, ...] = ()


class Result(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a work item: an error, or the bytes of a reply (`sie.values.work_bytes`), inline or in the store.

    Of the reply's `times` only the differences mean something to another host; queue_ns and tokenization_ns are durations.
    cuts has, by the number of each input that was cut, the most tokens that the model reads.
    """

    version: int
    id: str
    host: str
    error: WireError | None = None
    reply: memoryview = _NOTHING
    stored: str = ""
    num_tokens: int = 0
    image_tokens: int = 0
    tokenization_ns: int = 0
    queue_ns: int = 0
    cuts: dict[int, int] = {}
    is_returned: bool = False
    """Whether the host could not run the item, so that the gateway gives it to a host again."""


class Results(msgspec.Struct, array_like=True, frozen=True):
    """Host to gateway: the results that were ready at a time."""

    version: int
    items: list[Result]


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """Host to gateway: these work items have been running here for a while, so their loss would be this host's."""

    version: int
    host: str
    ids: list[str]


class ModelBeat(msgspec.Struct, array_like=True, frozen=True):
    """One model in a heartbeat: its state, whether it answers now, and whether requests wait because it is coming back."""

    state: ModelState
    is_served: bool
    is_coming_back: bool = False
    error: WireError | None = None


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """A host's heartbeat. cards_key changes with the cards, which a gateway then asks for (`Cards`).

    queued_tokens and tokens_per_s are the engine's; memory in bytes, 0 unknown. num_running are the items that came over
    NATS and are not answered; num_texts the answers that are being generated. lease is the leased pool that the host
    works for (`sie.cluster.pools`), or empty. config_hash is that of the shared configuration it runs
    (`sie.cluster.configs`), except for the models that are refused, each with its reason. credit is the number of items
    that it would have at a time now: those that run, and those it has room for.
    """

    version: int
    host: str
    name: str
    pool: str
    profile: str
    bundle: str
    cards_key: str
    models: dict[str, ModelBeat]
    is_draining: bool = False
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    num_running: int = 0
    num_texts: int = 0
    num_workers: int = 0
    num_gpus: int = 0
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    items_per_s: float = 0.0
    url: str = ""
    lease: str = ""
    config_hash: str = ""
    refused: dict[str, str] = {}
    credit: int = 256


class Cards(msgspec.Struct, array_like=True, frozen=True):
    """Host to gateway: its models' cards, as they are offered; without paths of the host's files."""

    version: int
    cards_key: str
    entries: list[ModelEntry] = []
    stored: str = ""


class GatewayBeat(msgspec.Struct, array_like=True, frozen=True):
    """A gateway's heartbeat. A host ends the generation of a gateway that no longer beats.

    backlog has, by subject of work, the weights of the API keys whose items wait in this gateway, at most in a second.
    """

    version: int
    gateway: str
    backlog: dict[str, int] = {}


class TextWork(msgspec.Struct, array_like=True, frozen=True):
    """A request to generate, sent to one host. Its answer is a series of `TextFrame` to reply_to.

    stored: the name in the object store of a payload with the request, if that is too large for a message.
    """

    version: int
    id: str
    gateway: str
    reply_to: str
    deadline_ns: int
    model: str
    request: GenerateRequest
    salt: bytes = b""
    echoes: bool = False
    stored: str = ""


class TextFrame(msgspec.Struct, array_like=True, frozen=True):
    """The next part of a generated answer; sequence counts the frames of an answer from 0.

    events are the events since the frame before, each (its number in `sie.cluster.text_events.KINDS`, its fields). The
    last frame has is_over, or an error. The first frame says that the answer has begun: it has no events, and it has the
    prompts if the request wants them. stored: the name in the object store of a payload with the events and prompts, if
    they are too large for a message.
    """

    version: int
    id: str
    sequence: int
    events: list[tuple[int, msgspec.Raw]] = []
    is_over: bool = False
    error: WireError | None = None
    num_prompts: int = 0
    prompts: list[str] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """The tokens of the answer up to this frame."""
    stored: str = ""


class CountWork(msgspec.Struct, array_like=True, frozen=True):
    """A request for the tokens of prompts, answered by a `CountResult`. stored as in `TextWork`."""

    version: int
    model: str
    request: GenerateRequest
    stored: str = ""


class CountResult(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of each prompt, or an error. stored is the name of the whole result in the store, if it is large."""

    version: int
    error: WireError | None = None
    prompts: list[list[int]] = []
    stored: str = ""


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """Gateway to host: nobody waits for this generated answer any more."""

    version: int
    id: str


class DeadLetter(msgspec.Struct, array_like=True, frozen=True):
    """A work item that is not tried again, and the reason. A large body is divided among num_parts letters."""

    version: int
    work: Work
    reason: str
    hosts: list[str] = []
    part: int = 0
    num_parts: int = 1


def encode(payload: msgspec.Struct) -> bytes:
    """Return a payload as bytes."""
    return _to_msgpack(payload)


def decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[PayloadT]) -> PayloadT:
    """Return the payload in data. Raises ProtocolError for another version, and for bytes of another form."""
    try:
        payload: Any = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a payload that cannot be decoded: {error}") from error
    if payload.version != VERSION:
        raise ProtocolError(f"a payload of version {payload.version}; this process reads version {VERSION}")
    return payload


works_decoder: Final = msgspec.msgpack.Decoder(Works)
results_decoder: Final = msgspec.msgpack.Decoder(Results)
taken_decoder: Final = msgspec.msgpack.Decoder(Taken)
beat_decoder: Final = msgspec.msgpack.Decoder(Beat)
cards_decoder: Final = msgspec.msgpack.Decoder(Cards)
gateway_beat_decoder: Final = msgspec.msgpack.Decoder(GatewayBeat)
text_work_decoder: Final = msgspec.msgpack.Decoder(TextWork)
text_frame_decoder: Final = msgspec.msgpack.Decoder(TextFrame)
count_work_decoder: Final = msgspec.msgpack.Decoder(CountWork)
count_result_decoder: Final = msgspec.msgpack.Decoder(CountResult)
cancel_decoder: Final = msgspec.msgpack.Decoder(Cancel)
