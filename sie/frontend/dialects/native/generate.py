"""Decodes the bodies of `/v1/generate/{model}`, and encodes whole answers, streams and their errors.

Source: SIE API reference, section 10, the types of sie-sdk 0.10.1, and the reference server's own checks. It refuses
unknown fields, and logprobs without a stream.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.chat import logprob_json
from sie.frontend.dialects.openai.text_fields import DONE, KEEP_ALIVE, data_line, read_bias
from sie.frontend.generation.sampling_fields import (
    Bias,
    Count,
    Number,
    Penalty,
    Seed,
    StopTexts,
    Temperature,
    read_stop,
    wrong,
)
from sie.frontend.inputs.bounded_json import check_json, decode_typed
from sie.values.errors import SieError
from sie.values.generate import (
    Ended,
    Finished,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    Grammar,
    TextDelta,
)

NAMES: Final = {"messages": "prompt", "max_tokens": "max_new_tokens"}
"""This route's names for fields in the errors of the generation core."""
_to_json: Final = msgspec.json.Encoder().encode


class NativeGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """The grammar of an answer: exactly one of the first three fields. It constrains every token, strict or not."""

    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    label: str | None = None
    strict: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request."""

    prompt: Annotated[str, Meta(min_length=1)]
    max_new_tokens: Count
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: StopTexts | None = None
    stream: bool | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    images: Any = None
    grammar: NativeGrammar | None = None
    options: dict[str, Any] | None = None
    routing_key: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


_DECODER: Final = msgspec.json.Decoder(GenerateBody)


def named_model(path: str, known: Container[str]) -> str:
    """Return the model id of a path, which has `__` for a slash and `_dot_` for a dot. Raises BadRequest for a slash."""
    if "/" in path:
        raise wrong("model", f"needs '__' for each slash in this path: {path.replace('/', '__')!r}")
    with_slashes = path.replace("__", "/")
    with_points = with_slashes.replace("_dot_", ".")
    return next((model for model in (path, with_slashes) if model in known), with_points)


def decode_generate(body: bytes, model: str, limits: Limits) -> GenerateRequest:
    """Return the request in a body. Raises BadRequest naming the field."""
    check_json(body, limits.max_depth)
    call = decode_typed(_DECODER, body)
    if call.images is not None:
        raise wrong("images", "are not served for generation: models read texts")
    if call.options:
        raise wrong("options", f"are not served for generation; {next(iter(call.options))!r} is one")
    return GenerateRequest(
        model=model,
        texts=[call.prompt],
        max_tokens=call.max_new_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        logit_bias=read_bias(call.logit_bias or {}),
        seed=call.seed,
        logprobs=_read_logprobs(call),
        stop=read_stop(call.stop),
        grammar=_read_grammar(call.grammar),
        stream=bool(call.stream),
    )


def _read_logprobs(call: GenerateBody) -> int | None:
    for field in ("logprobs", "top_logprobs"):
        if getattr(call, field) and not call.stream:
            raise wrong(field, "is supported only with 'stream': a whole answer has no field for it")
    if call.top_logprobs and not call.logprobs:
        raise wrong("top_logprobs", "needs 'logprobs': true beside it")
    return (call.top_logprobs or 0) if call.logprobs else None


def _read_grammar(field: NativeGrammar | None) -> Grammar | None:
    if field is None:
        return None
    given = [name for name in ("json_schema", "regex", "ebnf") if getattr(field, name) is not None]
    if len(given) != 1:
        raise wrong("grammar", "must hold exactly one of 'json_schema', 'regex' and 'ebnf'")
    if field.ebnf is not None:
        return Grammar(kind="ebnf", value=field.ebnf, field="grammar")
    if field.regex is not None:
        return Grammar(kind="regex", value=field.regex, field="grammar")
    return Grammar(kind="json_schema", value=_to_json(field.json_schema).decode(), field="grammar")


# --- writing --------------------------------------------------------------------------------------------------------


def encode_generate(reply: GenerateReply) -> bytes:
    """Return the body of a whole answer; times are in milliseconds."""
    choice, usage = reply.choices[0], reply.usage
    body = {"model": reply.model, "text": choice.text, "finish_reason": choice.reason, "usage": _usage(usage)}
    return _to_json({**body, "ttft_ms": _first_ms(usage), "tpot_ms": _next_ms(usage)})


def _usage(usage: GenerateUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _first_ms(usage: GenerateUsage) -> float:
    return round(usage.prompt_s * 1e3, 3)


def _next_ms(usage: GenerateUsage) -> float | None:
    """Return the mean time per token after the first one."""
    later = usage.completion_tokens - 1
    return round(usage.completion_s * 1e3 / later, 3) if later > 0 else None


class GenerateWriter:
    """Writes a stream of numbered chunks and `[DONE]`. The last chunk has the reason and the usage."""

    keep_alive = KEEP_ALIVE

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._num_chunks = 0
        self._reason = "stop"

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return b"".join(map(self._write, events))

    def write_error(self, error: SieError) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        fault = {"code": error.code, "message": error.message, "param": error.extras.get("param")}
        if error.retry_after_s is not None:
            fault["retry_after_s"] = error.retry_after_s
        return self._chunk(done=True, finish_reason="error", error=fault) + DONE

    def _write(self, event: GenerateEvent) -> bytes:
        match event:
            case TextDelta(_, text, logprobs) if text or logprobs:
                shown: dict[str, Any] = {"logprobs": [logprob_json(one) for one in logprobs]} if logprobs else {}
                return self._chunk(text, done=False, **shown)
            case Finished(_, reason):
                self._reason = reason
                return b""
            case Ended(usage):
                last = self._chunk(done=True, finish_reason=self._reason, usage=_usage(usage), ttft_ms=_first_ms(usage))
                return last + DONE
            case _:
                return b""

    def _chunk(self, delta: str = "", /, *, done: bool = False, **more: Any) -> bytes:
        number, self._num_chunks = self._num_chunks, self._num_chunks + 1
        return data_line({"request_id": self._id, "seq": number, "text_delta": delta, "done": done, **more})
