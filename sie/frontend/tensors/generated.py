"""Serves tensor requests to models that generate: `text_input` and parameters in, the whole text in `text_output`.

They run the same way as on `/v2/models/{model}/generate`, with the same parameters. This module imports a template
engine, so only the first such request imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sie.frontend.generation.interface import TextRun, TextStarter
from sie.frontend.generation.sampling_fields import (
    Count,
    SamplingNumbers,
    StopText,
    StopTexts,
    read_stop,
    write_sampling,
)
from sie.frontend.tensors.held_reply import HeldReply
from sie.frontend.tensors.parameters import EMPTY_FINAL_RESPONSE, checked_parameters
from sie.ipc.messages import ModelEntry
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest, ClientGone
from sie.values.generate import GenerateRequest
from sie.values.tensor import Tensor, TensorReply, TensorRequest


async def start_generation(
    generator: TextStarter, entry: ModelEntry, request: TensorRequest, text: str, *, owner: str, deadline_ns: int
) -> TextRun:
    """Start to generate after `text`. Raises BadRequest for a wrong parameter, and the errors of `Generator.start`."""
    given = read_parameters(request.parameters or {})
    return await generator.start(
        entry, text_request([text], given, is_stream=False), deadline_ns, salt=owner.encode(),
        echoes=given.exclude_input_in_output is False,
    )  # fmt: skip


async def whole_tensor(run: TextRun, began_ns: int) -> HeldReply:
    """Return the whole text of a run, as a reply that owns its output. Raises the errors of `Run.whole`."""
    try:
        reply = await run.whole()
    finally:
        run.give_up(ClientGone("the client no longer waits for the answer"))
    written = "".join(run.prompts) + reply.choices[0].text
    output = Tensor("text_output", "BYTES", (1,), memoryview(frame_elements([written.encode()])))
    return HeldReply(TensorReply(model=run.model, outputs=[output], timing=run.timing(began_ns)))


_DEFAULT_MAX_TOKENS: Final = 16
"""As on `/v1/completions`."""


class GenerateParameters(SamplingNumbers, kw_only=True):
    """The parameters of text generation. None means not given."""

    stream: bool | None = None
    max_tokens: Count | None = None
    stop: StopText | StopTexts | None = None
    exclude_input_in_output: bool | None = None


def read_parameters(parameters: Mapping[str, Any]) -> GenerateParameters:
    """Return the generation parameters of a request. Raises BadRequest for a wrong type or name."""
    checked_parameters(
        {name: value for name, value in parameters.items() if name != "stop"}, own=(EMPTY_FINAL_RESPONSE,)
    )
    try:
        # Not strict: gRPC parameters may be texts or whole numbers, so a client sends a temperature as a text.
        return msgspec.convert(parameters, GenerateParameters, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace("`$.", "`$.parameters.")) from None


def text_request(texts: list[str], given: GenerateParameters, *, is_stream: bool) -> GenerateRequest:
    """Return the request to generate text after these texts. The caller sets its model.

    Raises BadRequest if it asks for several answers on a route that gives one.
    """
    if given.stream and not is_stream:
        raise BadRequest("parameter 'stream' is true, but this route gives one answer; use /generate_stream")
    request = GenerateRequest(
        model="",
        texts=texts,
        max_tokens=given.max_tokens or _DEFAULT_MAX_TOKENS,
        stop=read_stop(given.stop),
        stream=is_stream,
    )
    write_sampling(given, request)
    return request
