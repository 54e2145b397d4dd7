"""The typed values of text generation: the rule on a card, a task, its tokens, requests and events.

Imports nothing of ours; holds no behaviour beyond construction. A *choice* is one of the n texts that a request asks
for. What crosses the rings (`GenerateTask`, `TokenFrame`, `GenerateTotals`) is `array_like`: fields are only ever appended.

    dialect: bytes -> GenerateRequest     frontend: -> prompt tokens + GenerateTask  -> worker
    dialect: bytes <- GenerateEvent ...   frontend: <- text, calls, reasoning        <- TokenFrame ..., GenerateTotals
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_CHOICES = 64
"""A request's choices can be stopped one by one, each by its bit in the extent."""

MAX_PROMPT_LOGPROBS = 256
"""Of a prompt's tokens, as many of the likeliest: what a worker keeps of each until it is sent."""

JSON_SPACE = r"[ ]?|\r?\n([ ]{0,24}|\t{0,6})"
"""What may stand between the parts of JSON that follows a schema, as a regular expression: a blank, or a line's end and an
indent. Where there is no end to it, small models write nothing else until they have had all their tokens."""

FinishReason = Literal["stop", "length", "tool_calls"]
GrammarKind = Literal["json_schema", "regex", "lark", "llguidance", "ebnf"]
"""All but the last as llguidance names them. EBNF, as llama.cpp writes it, becomes Lark before a worker has it."""
ToolFormat = Literal["hermes", "llama", "gemma", "json"]


# --- the card -------------------------------------------------------------------------------------------------------


class GenerateRule(msgspec.Struct, frozen=True, kw_only=True):
    """How a model generates: what a frontend needs to write its prompt and to read what it wrote."""

    context_length: int
    """Most tokens of a prompt and its answer together."""
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str = ""
    """Jinja source; empty for a model without one."""
    tool_chat_template: str = ""
    """The template for requests with tools, where the checkpoint has one of its own for them."""
    special_tokens: dict[str, str] = {}
    """Texts of the special tokens by name (`bos_token`, `eos_token`, ...), as chat templates know them."""
    special_texts: tuple[str, ...] = ()
    """Texts that the tokenizer reads as special tokens: in a user's own text they are plain text."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    """The checkpoint's own defaults (generation_config.json); None where it says nothing."""
    tool_format: ToolFormat = "json"
    """How it writes calls of tools."""
    reasoning_tags: tuple[str, str] | None = None
    """What begins and ends its reasoning; None for a model that does not show any."""
    gguf_file: str = ""
    """Absolute path of a GGUF file with its weights; empty for safetensors in the card's directory."""


# --- across the rings -----------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are chosen, in this order: penalties, logit_bias, temperature, then top_k, top_p and min_p.

    temperature 0 takes the most likely token, and of equals the first. top_k 0, top_p 1 and min_p 0 are off.
    seed: the same request and seed give the same tokens; the number for a choice's position comes from all three.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


class GenerateTask(msgspec.Struct, array_like=True, frozen=True):
    """What a request to generate asks of a worker, beside its prompt.

    max_tokens is that of each choice; 0 only has the prompt read. logprobs: None for none, else how many of the likeliest tokens come beside each
    chosen one. stop_token_ids end a choice, and so does an end-of-text token unless ignore_eos; none of them is sent.
    salt: prompts share cached blocks only under an equal one. grammar, as grammar_kind says, binds every token
    of a choice; empty for none.
    """

    max_tokens: int
    num_choices: int = 1
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    salt: bytes = b""
    grammar_kind: str = ""
    grammar: str = ""
    prompt_logprobs: int | None = None
    """The same as logprobs of the prompt's own tokens."""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """The natural logarithm of a token's probability, before temperature and filters; top: the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptPiece(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of tokens of a prompt, from number `index` on, where 0 is the second token: the first has none.

    Little-endian: own float32 (n,); of the likeliest at each place, best first, top_ids int32 (n, k) and top float32 (n, k).
    """

    index: int
    own: bytes
    top_ids: bytes = b""
    top: bytes = b""


class TokenRecord(msgspec.Struct, array_like=True, frozen=True):
    """The next tokens of one choice of one request.

    index is the number of tokens sent before these, so a reader can tell that nothing is missing. finish is empty
    while the choice goes on; a record with one is its last. num_cached: tokens of the prompt that were in the
    prefix cache. logprobs has one entry for each token, where the task asks for them. prompt: where it asks for those
    of the prompt, records of the first choice have them in pieces, before anything else is told.
    """

    request_id: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    finish: str = ""
    num_cached: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: PromptPiece | None = None


class TokenFrame(msgspec.Struct, array_like=True, frozen=True):
    """The header of a `TOKENS` extent: what one or more steps gave to one frontend. It has no arrays."""

    records: tuple[TokenRecord, ...]


class GenerateTotals(msgspec.Struct, array_like=True, frozen=True):
    """The header of the terminal reply to a request to generate, sent behind its last record. It has no arrays.

    Times in nanoseconds, started_ns of CLOCK_MONOTONIC. num_generated counts all choices.
    """

    num_cached: int
    num_generated: int
    started_ns: int
    prompt_ns: int
    completion_ns: int


# --- what dialects decode to ----------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model made; arguments is JSON text."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, as chat templates know them."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; parameters is a JSON schema. strict: its arguments must follow it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may be called, and whether one must be; names empty: any."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must follow; value is text, of a schema its JSON."""

    kind: GrammarKind
    value: str
    field: str = "response_format"
    """What the client calls it."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What every generation dialect decodes to. Exactly one of messages, texts and token_lists is set.

    Fields that are None were not given: the model's own default holds, then the API's.
    """

    model: str
    messages: list[ChatMessage] | None = None
    continues: bool = False
    """Of messages: whether the answer goes on where the text of the last one, an assistant's, ends."""
    texts: list[str] | None = None
    """Prompts without a template, each with its own n choices; choice i of prompt p is number p * n + i."""
    token_lists: list[list[int]] | None = None
    suffix: str = ""
    """Of texts: what stands behind the gap that each choice fills."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    thinking: bool | None = None
    """Whether the template is to let the model reason; None: as it does by itself."""
    reasoning_effort: str | None = None
    num_choices: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Both as in `GenerateTask`."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    truncate_prompt: bool = False
    """Whether an overlong prompt loses its oldest tokens instead of being refused."""
    stream: bool = False


# --- what dialects encode -------------------------------------------------------------------------------------------


class LogprobText(msgspec.Struct, frozen=True, kw_only=True):
    """A token as a client sees it, with its logprob; raw is its bytes, which alone may be no whole character."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[LogprobText, ...] = ()


class Started(msgspec.Struct, frozen=True):
    """The first event: the prompt was read. Counts are in tokens, over all prompts."""

    prompt_tokens: int
    cached_tokens: int


class PromptScored(msgspec.Struct, frozen=True):
    """The tokens of a prompt with their logprobs, where these are wanted; the first one's means nothing: it is 0.

    Comes before all else of the prompt's choices.
    """

    prompt: int
    tokens: tuple[LogprobText, ...]


class TextDelta(msgspec.Struct, frozen=True):
    """More of a choice's text; the deltas joined are the whole of it."""

    choice: int
    text: str
    logprobs: tuple[LogprobText, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of a choice's reasoning; all of it comes before its text."""

    choice: int
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A call, whole; number counts the calls of its choice from 0."""

    choice: int
    number: int
    call: ToolCall


class Finished(msgspec.Struct, frozen=True):
    """The last event of a choice. stop_string is the one of the request's that ended it."""

    choice: int
    reason: FinishReason
    stop_string: str | None = None


class GenerateUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost: tokens, and seconds from its submission to the first token and from there to the last."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_s: float = 0.0
    completion_s: float = 0.0


class Ended(msgspec.Struct, frozen=True):
    """The last event of a request."""

    usage: GenerateUsage


GenerateEvent = Started | PromptScored | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Ended


class ChoiceReply(msgspec.Struct, kw_only=True):
    """One whole choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    call_places: list[int] = []
    """How many characters of the text stand before each call."""
    logprobs: list[LogprobText] = []
    reason: FinishReason = "stop"
    stop_string: str | None = None


class GenerateReply(msgspec.Struct, kw_only=True):
    """A whole answer: its choices in order, and what they cost. model is the id of the model that answered."""

    model: str
    choices: list[ChoiceReply]
    usage: GenerateUsage
    scored: list[tuple[LogprobText, ...]] = []
    """Of each prompt its tokens, where their logprobs are wanted (`PromptScored`)."""
