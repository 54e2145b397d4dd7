"""Serves tensor requests to models that generate: `text_input` and parameters in, the whole text in `text_output`.

What they run is what `/v2/models/{model}/generate` runs, and the parameters are the same. It imports a template engine, so
it is imported by the first such request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from sie.frontend.engine.worker_link import Pending
from sie.frontend.generation.sampling_fields import (
    Count,
    SamplingNumbers,
    StopText,
    StopTexts,
    read_stop,
    write_sampling,
)
from sie.frontend.generation.start import Generator
from sie.frontend.tensors.held_reply import HeldReply
from sie.frontend.tensors.parameters import EMPTY_FINAL_RESPONSE, checked_parameters
from sie.ipc.messages import ModelEntry
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest, ClientGone
from sie.values.generate import GenerateRequest
from sie.values.tensor import Tensor, TensorReply, TensorRequest


async def generate_tensor(
    generator: Generator,
    entry: ModelEntry,
    request: TensorRequest,
    text: str,
    *,
    owner: str,
    began_ns: int,
    deadline_ns: int,
    watch: Callable[[Pending], None] | None,
) -> HeldReply:
    """Return the text that follows `text`, as a reply whose output nobody else holds.

    Raises BadRequest for a parameter at fault, and as `Generator.start` and `Run.whole` do.
    """
    given = read_parameters(request.parameters)
    run = await generator.start(
        entry, text_request([text], given, is_stream=False), deadline_ns, salt=owner.encode(),
        echoes=given.exclude_input_in_output is False,
    )  # fmt: skip
    try:
        if watch is not None:
            for pending in run.pendings:
                watch(pending)
        reply = await run.whole()
    finally:
        run.give_up(ClientGone("nobody waits for the answer any more"))
    written = "".join(run.prompts) + reply.choices[0].text
    output = Tensor("text_output", "BYTES", (1,), memoryview(frame_elements([written.encode()])))
    return HeldReply(TensorReply(model=entry.card.id, outputs=[output], timing=run.timing(began_ns)))


_DEFAULT_MAX_TOKENS: Final = 16
"""As on `/v1/completions`."""


class GenerateParameters(SamplingNumbers, kw_only=True):
    """How a text is generated. None: not given."""

    stream: bool | None = None
    max_tokens: Count | None = None
    stop: StopText | StopTexts | None = None
    exclude_input_in_output: bool | None = None


def read_parameters(parameters: Mapping[str, Any] | None) -> GenerateParameters:
    """Return what a request's parameters say. Raises BadRequest for a wrong type or name."""
    given = parameters or {}
    checked_parameters({name: value for name, value in given.items() if name != "stop"}, own=(EMPTY_FINAL_RESPONSE,))
    try:
        # Not strictly: gRPC has parameters for texts and whole numbers, so that a client sends a temperature as a text.
        return msgspec.convert(given, GenerateParameters, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace("`$.", "`$.parameters.")) from None


def text_request(texts: list[str], given: GenerateParameters, *, is_stream: bool) -> GenerateRequest:
    """Return the request for what follows texts; its model is the caller's to name.

    Raises BadRequest for one that asks for many answers where there is one.
    """
    if given.stream and not is_stream:
        raise BadRequest("parameter 'stream' is true, and there is one answer; /generate_stream has many")
    request = GenerateRequest(
        model="",
        texts=texts,
        max_tokens=given.max_tokens or _DEFAULT_MAX_TOKENS,
        stop=read_stop(given.stop),
        stream=is_stream,
    )
    write_sampling(given, request)
    return request
