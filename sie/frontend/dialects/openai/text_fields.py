"""The parts that OpenAI's chat and completions share: sampling fields, their checks, usage and errors.

Source: generation API reference, sections 2, 3.1 and 3.3. A field of the wrong type is 422, a wrong value 400; unknown
fields are ignored.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Generator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai import embeddings
from sie.frontend.dialects.openai.agent_fields import AgentFields
from sie.frontend.generation.sampling_fields import (
    Bias,
    Count,
    Number,
    Share,
    read_stop,
    refuse_set,
    write_sampling,
    wrong,
)
from sie.frontend.inputs.bounded_json import check_json
from sie.frontend.inputs.json_parts import decode_json
from sie.values.choices import with_choices
from sie.values.errors import BadRequest, NotFound, SieError
from sie.values.generate import GenerateRequest, GenerateUsage, Grammar

_FINGERPRINT: Final = "local"
DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment, which clients do not read as an event."""
_LINE_ENDS: Final = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
"""Characters that some clients (httpx's `iter_lines`, so huggingface_hub and LiteLLM) read as the end of a line, and
their escapes. JSON escapes the others itself."""
_MAX_LIST: Final = 65_536
_MAX_ID_DIGITS: Final = 10
_MAX_STOP_IDS: Final = 64
_JSON_GRAMMARS: Final = ("json_schema", "llguidance")
_JSON_ENDS: Final = ("/json", "+json")
_FORM_ELSEWHERE: Final = "is another server's; use 'response_format' or 'grammar'"
_STOPS_LEFT_OUT: Final = "is not served: a stop string is no part of the answer"
_WITHOUT_IDS: Final = "is not served: answers have no token ids; use 'logprobs' for the bytes of each token"
_UNSERVED: Final = {
    "allowed_token_ids": "is not served; use 'grammar' or 'logit_bias'",
    "bad_words": "is not served; use 'logit_bias'",
    "include_stop_str_in_output": _STOPS_LEFT_OUT,
    "no_stop_trim": _STOPS_LEFT_OUT,
    "prompt_logprobs": "is not served; use 'echo' and 'logprobs' on /v1/completions",
    "return_token_ids": _WITHOUT_IDS,
    "return_tokens_as_token_ids": _WITHOUT_IDS,
    "stop_regex": "is not served; use 'stop'",
    "truncate_prompt_tokens": "is not served; use 'truncate_sequence'",
    "use_beam_search": "is not served",
}
"""Why fields of vLLM, SGLang and llama.cpp are not served that do not describe the form of an answer."""
_PATH: Final = re.compile(r" - at `(?:key in `)?\$\.?([^`]*)`$")
_OUT_OF_BOUNDS: Final = re.compile(r"Expected `[^`]*` (?:[<>]|of length)")
_MISSING: Final = re.compile(r"Object missing required field `([^`]+)`")
_NAMING: Final = ("Field", "with")
"""Words before the quoted name of a field in error messages."""
_StructT = TypeVar("_StructT", bound=msgspec.Struct)

_to_json: Final = msgspec.json.Encoder().encode


class GrammarField(msgspec.Struct):
    """The grammar of an answer, in this server's own form."""

    type: Literal["json_schema", "regex", "lark", "llguidance"]
    value: Any


class StreamEnding(msgspec.Struct):
    """How a stream ends."""

    include_usage: bool | None = None


class ForeignFields(AgentFields, kw_only=True):
    """Fields of other servers. They are refused, because an answer that ignores them looks like one that follows them.

    A field that is null, false or empty is ignored, except `skip_special_tokens`, which may not be false.
    """

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    include_stop_str_in_output: Any = None
    no_stop_trim: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    stop_regex: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


_FOREIGN: Final = {
    field: _UNSERVED.get(field, _FORM_ELSEWHERE)
    for field in ForeignFields.__struct_fields__
    if field not in AgentFields.__struct_fields__ and field != "skip_special_tokens"
}


class SamplingFields(ForeignFields, kw_only=True):
    """The fields of OpenAI's and Anthropic's routes. None means not given."""

    model: str | None = None
    max_tokens: Count | None = None
    dry_multiplier: Share | None = None
    logit_bias: dict[str, Bias] | None = None
    truncate_sequence: bool | None = None
    grammar: GrammarField | None = None
    adapter: Any = None
    lora_adapter: Any = None
    stream: bool | None = None


class TextFields(SamplingFields, kw_only=True):
    """The fields of OpenAI's routes."""

    n: Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=_MAX_LIST)] | None = None
    stop_token_ids: Annotated[list[Number], Meta(max_length=_MAX_STOP_IDS)] | None = None
    stream_options: StreamEnding | None = None


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """How to write an answer: the facts that all of its parts share."""

    id: str
    created: int
    num_choices: int
    """The number of choices of all prompts."""
    wants_usage: bool = False
    """Whether a stream ends with a separate chunk for the usage."""
    echo: bool = False
    num_hidden: int = 0
    """The number of choices of each prompt that are generated but not shown."""
    has_logprobs: bool = False
    session_id: str = ""
    """The session of a chat, which the end of an answer names."""
    names: dict[str, str] = {}
    """The request's names for fields in errors of the generation core, if they differ."""

    @classmethod
    def begin(cls, prefix: str, **facts: Any) -> Shown:
        """Return the facts of a new answer, with an id and the present time."""
        return cls(id=f"{prefix}-{secrets.token_hex(16)}", created=int(time.time()), **facts)

    def head(self, kind: str, model: str) -> dict[str, Any]:
        """Return the first keys of an answer or of each of its chunks; kind is its `object`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": model}
        return {**head, "system_fingerprint": _FINGERPRINT}


# --- reading --------------------------------------------------------------------------------------------------------


def decode_body(
    decoder: msgspec.json.Decoder[_StructT], body: bytes, content_type: str | None, limits: Limits
) -> _StructT:
    """Return a typed body.

    Raises BadRequest: 415 for another content type, 400 for invalid JSON or a value out of bounds, 422 for a wrong type.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind and not kind.endswith(_JSON_ENDS):
        raise BadRequest(f"Content-Type must be application/json, not {kind!r}", http_status=415)
    check_json(body, limits.max_depth)
    try:
        return decode_json(decoder, body)
    except msgspec.ValidationError as error:
        raise _syntax_error(body) or _type_error(with_choices(error, decoder.type)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="INVALID_JSON") from None
    except RecursionError:
        raise BadRequest("The body is nested too deep") from None


def _syntax_error(body: bytes) -> BadRequest | None:
    """Return the syntax error of a body, or None. It has priority over errors of its fields."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return BadRequest(f"The body is not valid JSON: {error}", code="INVALID_JSON")
    return None


def _type_error(message: str) -> BadRequest:
    at = _PATH.search(message)
    missing = _MISSING.search(message)
    path = at[1] if at else ""
    param = ".".join(part for part in (path, missing[1] if missing else "") if part) or None
    text = message[: at.start()] if at else message
    if missing:
        text = f"Field '{param}' is required"
    elif path:
        text = f"Field '{path}': {text[0].lower()}{text[1:]}"
    status = 400 if _OUT_OF_BOUNDS.match(message) else 422
    return BadRequest(text, http_status=status, extras={"param": param})


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Rename fields in errors raised in the block. names maps the generation core's names to the route's."""
    try:
        yield
    except BadRequest as error:
        field = str(error.extras.get("param"))
        if field in names:
            error.extras = {**error.extras, "param": names[field]}
        for own, name in names.items():
            for words in _NAMING:
                error.message = error.message.replace(f"{words} '{own}'", f"{words} '{name}'")
        raise


def read_text_fields(body: TextFields) -> GenerateRequest:
    """Return a request with the common fields of OpenAI's routes. Raises BadRequest for a wrong value."""
    request = read_sampling_fields(body)
    request.num_choices = body.n or 1
    request.stop = read_stop(body.stop)
    request.stop_token_ids = tuple(body.stop_token_ids or ())
    return request


def read_sampling_fields(body: SamplingFields) -> GenerateRequest:
    """Return a request with the common fields of all routes. Raises BadRequest for a wrong value."""
    refuse_set(body, _FOREIGN)
    if body.skip_special_tokens is False:
        raise wrong("skip_special_tokens", "must be true: special tokens are no part of the answer")
    if body.dry_multiplier:
        raise wrong("dry_multiplier", "is not served; leave it out, or give 0")
    for name, value in (("adapter", body.adapter), ("lora_adapter", body.lora_adapter)):
        if value is not None:
            raise wrong(name, "is not served for generation")
    request = GenerateRequest(
        model=body.model or embeddings.DEFAULT_MODEL,
        max_tokens=body.max_tokens,
        logit_bias=read_bias(body.logit_bias or {}),
        truncate_prompt=bool(body.truncate_sequence),
        grammar=read_grammar(body.grammar),
        stream=bool(body.stream),
    )
    write_sampling(body, request)
    return request


def wants_usage(body: TextFields) -> bool:
    """Tell whether a stream should end with a separate chunk for its usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def read_grammar(field: GrammarField | None) -> Grammar | None:
    """Return a grammar. A schema may be a JSON object or its text. Raises BadRequest."""
    if field is None:
        return None
    value: Any = field.value
    if isinstance(value, str):
        return Grammar(kind=field.type, value=value, field="grammar")
    if field.type in _JSON_GRAMMARS and isinstance(value, dict):
        return Grammar(kind=field.type, value=_to_json(value).decode(), field="grammar")
    raise wrong("grammar.value", f"must be a text{' or an object' if field.type in _JSON_GRAMMARS else ''}")


def read_bias(bias: dict[str, float]) -> dict[int, float]:
    """Return biases by token id. Raises BadRequest for a key that is not a token id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < _MAX_ID_DIGITS):
            raise wrong("logit_bias", f"has the key {key[:20]!r}, which is not a token id")
    return {int(key): value for key, value in bias.items()}


# --- writing --------------------------------------------------------------------------------------------------------


def usage_object(usage: GenerateUsage) -> dict[str, Any]:
    """Return the usage of an answer, with the rates that this API adds to OpenAI's counts."""
    total_s = usage.prompt_s + usage.completion_s
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "avg_tok_per_sec": _rate(total, total_s),
        "avg_prompt_tok_per_sec": _rate(usage.prompt_tokens, usage.prompt_s),
        "avg_compl_tok_per_sec": _rate(usage.completion_tokens, usage.completion_s),
        "total_time_sec": round(total_s, 6),
        "total_prompt_time_sec": round(usage.prompt_s, 6),
        "total_completion_time_sec": round(usage.completion_s, 6),
    }


def _rate(count: int, elapsed_s: float) -> float:
    return round(count / elapsed_s, 3) if elapsed_s > 0 else 0.0


def data_line(value: Any) -> bytes:
    """Return one unnamed event."""
    return event_of_json(_to_json(value))


def event_of_json(data: bytes) -> bytes:
    """Return one unnamed event with encoded JSON, in a single line for every client."""
    for end, escaped in _LINE_ENDS:
        data = data.replace(end, escaped)
    return b"data: %b\n\n" % data


def named_event(name: str, value: dict[str, Any]) -> bytes:
    """Return one event whose data also has its name."""
    return b"event: %b\n%b" % (name.encode(), data_line({"type": name, **value}))


def error_object(error: SieError) -> dict[str, Any]:
    """Return OpenAI's error object, with lower-case codes; code is null for a generic client error."""
    made = embeddings.error_object(error)
    if isinstance(error, NotFound) or error.code == "MODEL_NOT_FOUND":
        made["param"] = made["param"] or "model"
    made["code"] = code_word(error.code) if error.code != BadRequest.code else None
    if error.http_status >= 500:
        made["type"] = "server_error"
    return made


def code_word(code: str) -> str:
    """Return these routes' name for one of our codes."""
    return embeddings.wire_code(code).lower()


def error_body(error: SieError) -> bytes:
    """Return `{"error": {message, type, param, code}, "message"}`."""
    return _to_json({"error": error_object(error), "message": error.message})


def error_events(error: SieError) -> bytes:
    """Return the last events of a stream that fails."""
    return data_line({"error": error_object(error)}) + DONE
