"""Decodes and encodes `/v2/models/{model}/generate` and `/generate_stream`: a text in, a text or its pieces out.

Source: Triton's generate extension and KServe v2 sheet, section 11. Fields other than `text_input` may be in `parameters`
or at the top level, which has priority. Unknown fields have no effect, as on the other KServe routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.text_fields import KEEP_ALIVE, data_line
from sie.frontend.inputs.bounded_json import check_json, check_utf8, decode_free_form, decode_typed
from sie.frontend.tensors.generated import GenerateParameters, read_parameters, text_request
from sie.values.errors import SieError
from sie.values.generate import Ended, GenerateEvent, GenerateReply, GenerateRequest, Started, TextDelta
from sie.values.tensor import TensorRule

_ABSENT: Final = msgspec.Raw(b"")
_to_json: Final = msgspec.json.Encoder().encode


OneText = Annotated[list[str], Meta(min_length=1, max_length=1)]
"""A list with exactly one text: a tensor of one element, as a text alone is."""


class TextInputBody(GenerateParameters, kw_only=True):
    """The body of a request."""

    text_input: str | OneText
    id: str | None = None
    parameters: msgspec.Raw = _ABSENT


_DECODER: Final = msgspec.json.Decoder(TextInputBody)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """How to write an answer."""

    rule: TensorRule
    id: str = ""
    in_pieces: bool = False
    echo: bool = False

    def answer(self, text: str) -> dict[str, Any]:
        """Return a whole answer or one of its pieces."""
        head = {"id": self.id} if self.id else {}
        return {**head, "model_name": self.rule.name, "model_version": self.rule.version, "text_output": text}


def decode_text_input(
    body: bytes, rule: TensorRule, limits: Limits, *, is_stream: bool
) -> tuple[GenerateRequest, Shown]:
    """Return the request in a body, and how to write its answer. The caller sets the request's model.

    is_stream: the request came to `/generate_stream`. Raises BadRequest naming the field.
    """
    check_json(body, limits.max_depth)
    check_utf8(body)
    call = decode_typed(_DECODER, body)
    free = decode_free_form(call.parameters, msgpack=False, path="$.parameters", max_depth=limits.max_depth)
    given = read_parameters(free)
    for field in GenerateParameters.__struct_fields__:
        if (value := getattr(call, field)) is not None:
            setattr(given, field, value)
    texts = [call.text_input] if isinstance(call.text_input, str) else call.text_input
    request = text_request(texts, given, is_stream=is_stream)
    in_pieces, echo = is_stream and given.stream is not False, given.exclude_input_in_output is False
    return request, Shown(rule=rule, id=call.id or "", in_pieces=in_pieces, echo=echo)


# --- writing --------------------------------------------------------------------------------------------------------


def encode_text_output(reply: GenerateReply, shown: Shown, prompts: Sequence[str]) -> bytes:
    """Return the body of a whole answer; prompts holds its prompt if the request asks to echo it."""
    return _to_json(shown.answer("".join(prompts) + reply.choices[0].text))


class TextOutputWriter:
    """Writes a stream: an answer for each piece, or one for all of them. The stream has no closing event."""

    keep_alive = KEEP_ALIVE

    def __init__(self, shown: Shown, prompts: Sequence[str]) -> None:
        self._shown = shown
        self._prompt = "".join(prompts)
        self._held: list[str] = []
        self._is_begun = False

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return b"".join(map(self._write, events))

    def write_error(self, error: SieError) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return data_line({"error": error.message})

    def _write(self, event: GenerateEvent) -> bytes:
        match event:
            case Started():
                return self._add(self._prompt)
            case TextDelta(_, text):
                return self._add(text)
            case Ended() if self._held or not self._is_begun:
                return self._send("".join(self._held))
            case _:
                return b""

    def _add(self, text: str) -> bytes:
        if not text:
            return b""
        if self._shown.in_pieces:
            return self._send(text)
        self._held.append(text)
        return b""

    def _send(self, text: str) -> bytes:
        self._is_begun = True
        return data_line(self._shown.answer(text))
