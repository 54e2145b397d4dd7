"""Decodes and encodes `/v1/completions`: prompts without a template. Source: generation API reference, section 4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.agent_fields import drop_agent_fields
from sie.frontend.dialects.openai.prompt_offsets import find_offsets
from sie.frontend.dialects.openai.sse_chunks import ChunkWriter
from sie.frontend.dialects.openai.text_fields import (
    Shown,
    TextFields,
    decode_body,
    read_text_fields,
    usage_object,
    wants_usage,
)
from sie.frontend.generation.sampling_fields import Number, wrong
from sie.values.generate import (
    ChoiceReply,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    LogprobText,
    PromptScored,
    Started,
    TextDelta,
)

_DEFAULT_MAX_TOKENS: Final = 16
"""Source: OpenAI API reference, completions."""
_MOST_IDS: Final = 1 << 24
_TokenIds = Annotated[list[Number], Meta(max_length=_MOST_IDS)]
_Prompts = Annotated[list[str | Number | _TokenIds], Meta(max_length=_MOST_IDS)]
_NAMES: Final = {"messages": "prompt", "top_logprobs": "logprobs"}
_to_json: Final = msgspec.json.Encoder().encode


class CompletionsBody(TextFields, kw_only=True):
    """The body of a request."""

    prompt: str | _Prompts
    max_tokens: Number | None = None
    best_of: Number | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Number | bool | None = None
    tools: Any = None
    tool_choice: Any = None
    add_special_tokens: Any = None
    user: Any = None


_DECODER: Final = msgspec.json.Decoder(CompletionsBody)


def decode_completions(body: bytes, content_type: str | None, limits: Limits) -> tuple[GenerateRequest, Shown]:
    """Return the request in a body, and how to write its answer. Raises BadRequest naming the field."""
    call = decode_body(_DECODER, body, content_type, limits)
    drop_agent_fields(call)
    request = read_text_fields(call)
    if call.max_tokens is None:
        request.max_tokens = _DEFAULT_MAX_TOKENS
    if not request.max_tokens and not call.echo:
        raise wrong("max_tokens", "must be at least 1 without 'echo'")
    if call.add_special_tokens is False:
        raise wrong("add_special_tokens", "must be true; give token ids as the prompt to choose each of them")
    if call.tools:
        raise wrong("tools", "are served on /v1/chat/completions")
    request.logprobs = None if call.logprobs is None or call.logprobs is False else int(call.logprobs)
    request.prompt_logprobs = request.logprobs if call.echo else None
    num_prompts = _read_prompt(call.prompt, request)
    request.suffix = _read_suffix(call, request)
    if num_prompts > limits.max_items:
        raise wrong("prompt", f"must hold at most max_items ({limits.max_items}) prompts, not {num_prompts}")
    num_choices, has_logprobs = num_prompts * request.num_choices, request.logprobs is not None
    return request, Shown.begin(
        "cmpl", num_choices=num_choices, wants_usage=wants_usage(call), echo=bool(call.echo),
        num_hidden=_read_best_of(call.best_of, request), has_logprobs=has_logprobs,
        names=_NAMES if call.best_of is None else {**_NAMES, "n": "best_of"},
    )  # fmt: skip


def _read_best_of(best_of: int | None, request: GenerateRequest) -> int:
    """Add the hidden choices that best_of asks for to a request, with their logprobs; return their number per prompt."""
    num_hidden = best_of - request.num_choices if best_of is not None else 0
    if num_hidden < 0:
        raise wrong("best_of", f"must be at least 'n' ({request.num_choices})")
    if num_hidden:
        if request.stream:
            raise wrong("best_of", "over 'n' cannot be streamed, because the best choices are only known at the end")
        request.num_choices += num_hidden
        request.logprobs = request.logprobs or 0
    return num_hidden


def _read_suffix(call: CompletionsBody, request: GenerateRequest) -> str:
    """Return the text after the gap to fill. Raises BadRequest if other fields do not allow a suffix."""
    if call.suffix:
        if request.texts is None:
            raise wrong("suffix", "needs a prompt that is text: token ids may hold their own special tokens")
        if request.prompt_logprobs is not None:
            raise wrong("suffix", "does not allow 'logprobs' with 'echo': the prompt is written around the gap")
        if request.truncate_prompt:
            raise wrong("suffix", "and 'truncate_sequence' cannot both be given")
    return call.suffix or ""


def _read_prompt(prompt: str | list[Any], request: GenerateRequest) -> int:
    """Set the request's prompts and return how many there are."""
    if isinstance(prompt, str):
        request.texts = [prompt]
        return 1
    kinds = set(map(type, prompt))
    if not kinds:
        raise wrong("prompt", "must not be empty")
    if kinds == {str}:
        request.texts = prompt
    elif kinds == {int}:
        request.token_lists = [prompt]
    elif kinds == {list}:
        request.token_lists = prompt
    else:
        raise wrong("prompt", "must be all texts, all token ids or all lists of token ids")
    return len(request.texts if request.texts is not None else request.token_lists or ())


# --- writing --------------------------------------------------------------------------------------------------------


def encode_completions(reply: GenerateReply, shown: Shown, prompts: Sequence[str]) -> bytes:
    """Return the body of a whole answer; prompts are those to echo, if any."""
    choices: list[dict[str, Any]] = []
    starts = [_prompt_logprobs(*pair) for pair in zip(prompts, reply.scored, strict=False)]
    for index, choice in enumerate(_best(reply.choices, shown)):
        echo, logprobs = _echoed(prompts, index, shown), None
        if shown.has_logprobs:
            start = starts[_prompt_of(index, shown, len(starts))] if starts else None
            logprobs = _whole_logprobs(echo, start, choice.logprobs)
        choices.append(_choice(index, echo + choice.text, choice.reason, logprobs))
    head = shown.head("text_completion", reply.model)
    return _to_json({**head, "choices": choices, "usage": usage_object(reply.usage)})


def _best(choices: Sequence[ChoiceReply], shown: Shown) -> Sequence[ChoiceReply]:
    """Return the choices to show: for each prompt, those with the highest mean logprob per token.

    Source: OpenAI API reference, completions, `best_of`.
    """
    if not shown.num_hidden:
        return choices
    num_prompts = (len(choices) - shown.num_choices) // shown.num_hidden
    size = len(choices) // num_prompts
    best: list[ChoiceReply] = []
    for start in range(0, len(choices), size):
        ranked = sorted(choices[start : start + size], key=_mean_logprob, reverse=True)
        best += ranked[: size - shown.num_hidden]
    return best


def _mean_logprob(choice: ChoiceReply) -> float:
    return sum(one.logprob for one in choice.logprobs) / max(1, len(choice.logprobs))


def _prompt_logprobs(prompt: str, scored: Sequence[LogprobText]) -> dict[str, Any]:
    """Return the tokens of a prompt; the first has no logprob. Source: OpenAI API reference, completions."""
    raws: list[bytes] = []
    shown = Logprobs().take(_noting(raws, scored))
    shown["token_logprobs"][0] = shown["top_logprobs"][0] = None
    shown["text_offset"] = find_offsets(prompt, raws)
    return shown


def _noting(raws: list[bytes], tokens: Iterable[LogprobText]) -> Iterator[LogprobText]:
    """Yield tokens, and add their bytes to raws: a second pass over a prompt's tokens would make all of them again."""
    for one in tokens:
        raws.append(one.raw)
        yield one


def _whole_logprobs(
    prompt: str, start: Mapping[str, Any] | None, logprobs: Sequence[LogprobText]
) -> dict[str, Any] | None:
    """Return all tokens of a choice, after those of its prompt if they were scored; None without tokens."""
    if start is None:
        return Logprobs().take(logprobs) if logprobs else None
    rest = Logprobs(len(prompt)).take(logprobs)
    return {key: start[key] + rest[key] for key in start}


class Logprobs:
    """Writes logprobs in the form of this route. Offsets count characters from the first shown character.

    A token that begins within a character gets its offset, as in `find_offsets`.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def take(self, logprobs: Iterable[LogprobText]) -> dict[str, Any]:
        """Return the next tokens."""
        shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokens, own, top, offsets = shown.values()
        for one in logprobs:
            tokens.append(one.text)
            own.append(one.logprob)
            top.append(_top_json(one))
            begins = [byte & 0xC0 != 0x80 for byte in one.raw]
            offsets.append(max(0, self._offset - (begins[:1] == [False])))
            self._offset += sum(begins)
        return shown


def _top_json(one: LogprobText) -> msgspec.Raw:
    """Return the likeliest tokens and the chosen one, encoded: other threads run between two tokens of a long answer."""
    return msgspec.Raw(_to_json({other.text: other.logprob for other in (*reversed(one.top), one)}))


class CompletionsWriter(ChunkWriter):
    """Writes a stream: texts, then finishing chunks."""

    def __init__(self, shown: Shown, model: str, prompts: Sequence[str]) -> None:
        super().__init__(shown, "text_completion", model)
        self._prompts = prompts
        self._logprobs = [Logprobs() for _ in range(shown.num_choices)]

    def _chunks(self, event: GenerateEvent) -> list[list[dict[str, Any]]]:
        match event:
            case Started() if self._shown.echo and not self._shown.has_logprobs:
                indices = range(self._shown.num_choices)
                return [[_choice(index, _echoed(self._prompts, index, self._shown))] for index in indices]
            case PromptScored(prompt, tokens):
                text, size = self._prompts[prompt], self._shown.num_choices // len(self._prompts)
                indices, start = range(prompt * size, (prompt + 1) * size), _prompt_logprobs(text, tokens)
                for index in indices:
                    self._logprobs[index] = Logprobs(len(text))
                return [[_choice(index, text, logprobs=start)] for index in indices]
            case TextDelta(choice, text, logprobs):
                shown = self._logprobs[choice].take(logprobs) if logprobs else None
                return [[_choice(choice, text, logprobs=shown)]]
            case Finished(choice, reason):
                return [[_choice(choice, "", reason)]]
            case _:
                return []


def _choice(
    index: int, text: str, reason: FinishReason | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}


def _echoed(prompts: Sequence[str], index: int, shown: Shown) -> str:
    """Return the prompt to write before a choice's text, if the request asks to echo it."""
    return prompts[_prompt_of(index, shown, len(prompts))] if shown.echo and prompts else ""


def _prompt_of(index: int, shown: Shown, num_prompts: int) -> int:
    return index // (shown.num_choices // num_prompts)
