"""Large answers are encoded on a thread, because the event loop serves all other clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sie.frontend.http.stream import Streamed, send_stream
from sie.frontend.routes.generate import encoded
from sie.values.generate import ChoiceReply, GenerateEvent, GenerateReply, GenerateUsage, LogprobText, PromptScored

USAGE = GenerateUsage(prompt_tokens=1, completion_tokens=1)
TOKENS = (LogprobText(text="x", raw=b"x", logprob=-1.0),) * 1200


def reply(*choices: ChoiceReply, **fields: Any) -> GenerateReply:
    return GenerateReply(model="m", choices=list(choices), usage=USAGE, **fields)


@pytest.mark.parametrize(
    ("whole", "prompts", "is_large"),
    [
        (reply(ChoiceReply(text="x" * 1000)), [], False),
        (reply(ChoiceReply(text="x" * 70_000)), [], True),
        (reply(ChoiceReply(logprobs=[*TOKENS[:100]])), [], False),
        (reply(ChoiceReply(logprobs=[*TOKENS])), [], True),
        (reply(*[ChoiceReply()] * 2), ["x" * 40_000], True),
        (reply(ChoiceReply(), scored=[TOKENS]), ["x"], True),
    ],
)
def test_a_large_answer_is_encoded_on_a_thread(whole: GenerateReply, prompts: list[str], is_large: bool) -> None:
    def encode(_reply: GenerateReply, _prompts: Sequence[str]) -> bytes:
        return threading.current_thread().name.encode()

    with ThreadPoolExecutor(1, "encode") as pool:
        made = asyncio.run(encoded(asyncio.Semaphore(1), pool, encode, whole, prompts))
    assert made.startswith(b"encode") == is_large


class Told:
    """A stream of one prompt's log probabilities; it is its own writer, transport and count of unread bytes."""

    keep_alive = b""
    is_over = False

    async def wait(self, _timeout_s: float) -> list[GenerateEvent]:
        self.is_over = True
        return [PromptScored(0, TOKENS)]

    def write(self, _events: Sequence[GenerateEvent]) -> bytes:
        return threading.current_thread().name.encode()

    async def send_bytes(self, data: bytes) -> None:
        self.sent = data

    def add(self, _count: int) -> bool:
        return False


def test_a_stream_writes_a_prompts_log_probabilities_on_a_thread() -> None:
    told: Any = Told()
    with ThreadPoolExecutor(1, "encode") as pool:
        asyncio.run(send_stream(Streamed(told, told, pool=pool), lambda: told, told, 1.0))
    assert told.sent.startswith(b"encode")
