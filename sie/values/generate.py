"""The typed values of text generation: the rule on a card, a task, its tokens, requests and events.

Imports `sie.values.agent` only. A *choice* is one of the n texts that a request asks for. Types sent over the rings
(`GenerateTask`, `TokenFrame`, `GenerateTotals`) are `array_like`: fields are only ever appended.

    dialect: bytes -> GenerateRequest     frontend: -> prompt tokens + GenerateTask  -> worker
    dialect: bytes <- GenerateEvent ...   frontend: <- text, calls, reasoning        <- TokenFrame ..., GenerateTotals
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from sie.values.agent import AgentEvent, AgentOutcome, AgentTask

MAX_CHOICES = 64
"""Each choice of a request can be stopped separately, by its bit in the extent."""

MAX_PROMPT_LOGPROBS = 256
"""Most likely tokens to report for each prompt token; a worker keeps them until they are sent."""

JSON_SPACE = r"[ ]?|\r?\n([ ]{0,24}|\t{0,6})"
"""The white space allowed between the parts of schema-bound JSON, as a regular expression: a blank, or a line break and
an indent. Without this limit, small models may write only white space until their token limit."""

GRAMMAR = "grammar"
"""The field of a task whose errors a worker reports under this name."""
FinishReason = Literal["stop", "length", "tool_calls"]
GrammarKind = Literal["json_schema", "regex", "lark", "llguidance", "ebnf"]
"""llguidance's names, except the last. llama.cpp's EBNF is converted to Lark before it is sent to a worker."""
ToolFormat = Literal["hermes", "llama", "gemma", "json"]


# --- the card -------------------------------------------------------------------------------------------------------


class TokenBans(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a checkpoint forbids its model to choose."""

    always: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    """Those that no answer begins with."""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Two tokens or more each: the last one must not follow the others."""
    ngram_size: int = 0
    """So many tokens in a row do not occur twice in prompt and answer; of an encoder's prompt none count. 0: they may."""

    @property
    def depend_on_text(self) -> bool:
        """Whether the tokens before decide which ones are forbidden."""
        return bool(self.sequences or self.ngram_size)


class GenerateRule(msgspec.Struct, frozen=True, kw_only=True):
    """A model's generation rule: the facts that a frontend needs to write its prompt and to read its output."""

    context_length: int
    """Most tokens of a prompt and its answer together."""
    decoder_start_id: int | None = None
    """The token before every answer of a model whose encoder reads the prompt; None for a model with a decoder only."""
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str = ""
    """Jinja source; empty for a model without a template."""
    tool_chat_template: str = ""
    """The template for requests with tools, if the checkpoint has a separate one."""
    special_tokens: dict[str, str] = {}
    """Texts of the special tokens by their names in chat templates (`bos_token`, `eos_token`, ...)."""
    special_texts: tuple[str, ...] = ()
    """Texts that the tokenizer reads as special tokens; in a user's text they are plain text."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """The checkpoint's own defaults (generation_config.json), or None."""
    bans: TokenBans = TokenBans()
    unserved_settings: tuple[str, ...] = ()
    """Names of further settings in generation_config.json that would change answers, and that are not computed."""
    tool_format: ToolFormat = "json"
    """Its format of tool calls."""
    reasoning_tags: tuple[str, str] | None = None
    """The texts that begin and end its reasoning; None for a model without visible reasoning."""
    kv_token_bytes: int = 0
    """Estimated bytes of a token's keys and values in all layers, in 16 bits; 0 if unknown."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt, and a decoder writes the answer."""
        return self.decoder_start_id is not None


# --- across the rings -----------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The steps to choose a token, in this order: penalties, logit_bias, temperature, then top_k, top_p and min_p.

    temperature 0 chooses the most likely token, and the first of equals. top_k 0, top_p 1 and min_p 0 are off.
    seed: the same request and seed give the same tokens. A random number depends on seed, choice and position.
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
    """A generation request for a worker, without its prompt.

    max_tokens applies to each choice; 0 only prefills the prompt. logprobs is how many of the likeliest tokens are
    reported beside each chosen one, or None. stop_token_ids end a choice, and so does an end-of-text token unless
    ignore_eos; none of them is sent, nor chosen before a choice has min_tokens, except where a grammar allows nothing
    else. salt: prompts share cached blocks only if their salt is equal. grammar, of grammar_kind, restricts every token
    of a choice; empty means no grammar.
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
    """As logprobs, for the prompt's own tokens."""
    min_tokens: int = 0


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """The natural log probability of a token, before temperature and filters; top: the likeliest tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptPiece(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of n prompt tokens from number `index`; 0 is the second token, because the first has none.

    own is float32 (n,). top_ids int32 (n, k) and top float32 (n, k) are those of the k likeliest tokens at each place, best
    first. All are little-endian.
    """

    index: int
    own: bytes
    top_ids: bytes = b""
    top: bytes = b""


class TokenRecord(msgspec.Struct, array_like=True, frozen=True):
    """The next tokens of one choice of one request.

    index is the number of tokens sent before these, so a reader can detect missing tokens. finish is empty while the
    choice continues; the last record has one. num_cached: tokens of the prompt that were in the prefix cache. logprobs
    has one entry for each token, if the task asks for them. prompt: if the task asks for prompt logprobs, records of
    the first choice have them in pieces, before all other data.
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
    """The header of a `TOKENS` extent: the tokens of one or more steps for one frontend. It has no arrays."""

    records: tuple[TokenRecord, ...]


class GenerateTotals(msgspec.Struct, array_like=True, frozen=True):
    """The header of the terminal reply to a generation request, sent after its last record. It has no arrays.

    started_ns is on CLOCK_MONOTONIC. num_generated counts all choices.
    """

    num_cached: int
    num_generated: int
    started_ns: int


# --- what dialects decode to ----------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by a model; arguments is JSON text."""

    id: str
    name: str
    arguments: str


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that every chat may have. Others are for models whose templates name them."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, with the fields of chat templates."""

    role: str
    role_field: str = ""
    """The place of another role than ROLES in the request, for errors."""
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    given_call_id: str | None = None
    """The same id as the client wrote it, if that differs, for errors."""
    reasoning: str | None = None


def with_answer(messages: Sequence[ChatMessage], said: Sequence[ChatMessage], *, continues: bool) -> list[ChatMessage]:
    """Return a conversation with the messages of its answer. If it continues, the first one goes on with the last."""
    if not continues:
        return [*messages, *said]
    *before, begun = messages
    first = msgspec.structs.replace(said[0], content=f"{begun.content or ''}{said[0].content or ''}")
    return [*before, first, *said[1:]]


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a message of a request names. One of file_id, data and url is not empty."""

    field: str
    """Its place in the request, for errors."""
    file_id: str = ""
    name: str = ""
    data: str = ""
    """The bytes in base64, or a `data:` URL."""
    url: str = ""
    is_past: bool = False
    """Whether an earlier turn of the conversation named it: it may be gone."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; parameters is a JSON schema. strict: its arguments must follow it.

    is_lenient: what of a strict schema cannot be compiled is left out, because the client that asks did not write it.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    is_lenient: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that may be called, and whether one must be; names empty means any tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar that an answer must follow; value is its text, JSON for a schema."""

    kind: GrammarKind
    value: str
    field: str = "response_format"
    """The client's field name."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The request of every generation dialect. Exactly one of messages, texts and token_lists is set.

    None means that a field was not given: the model's default applies, then the API's.
    """

    model: str
    messages: list[ChatMessage] | None = None
    files: list[InputFile] = []
    """With messages: the files that they name."""
    session_id: str = ""
    """With messages: the stored conversation that they continue or begin; empty for none."""
    continues: bool = False
    """With messages: whether the answer continues the text of the last message, an assistant's."""
    texts: list[str] | None = None
    """Prompts without a template, each with its own n choices; choice i of prompt p is number p * n + i."""
    token_lists: list[list[int]] | None = None
    suffix: str = ""
    """With texts: the text after the gap that each choice fills."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    thinking: bool | None = None
    """Whether the template makes the model reason; None means the template's default."""
    reasoning_effort: str | None = None
    template_options: dict[str, bool | int | float] = {}
    """With messages: further variables of the template, by their names in it."""
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
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a choice, in addition to its model's own end."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Tokens that each choice has before anything but a limit may end it."""
    truncate_prompt: bool | None = None
    """Whether an overlong prompt loses its oldest tokens instead of being refused. None: the route has no field for it."""
    stream: bool = False
    agent: AgentTask | None = None
    """The acts besides generating that are asked of the server, if any."""


# --- what dialects encode -------------------------------------------------------------------------------------------


class LogprobText(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token as a client sees it, with its logprob; raw is its bytes, which may be only part of a character.

    Answers have up to a million, and none can be part of a reference cycle: so the garbage collector skips them.
    """

    text: str
    raw: bytes
    logprob: float
    top: tuple[LogprobText, ...] = ()


class Started(msgspec.Struct, frozen=True):
    """The first event: the prompt was read. Counts are in tokens, over all prompts."""

    prompt_tokens: int
    cached_tokens: int


class PromptScored(msgspec.Struct, frozen=True):
    """The tokens of a prompt with their logprobs, if requested; the first logprob has no meaning and is 0.

    It is sent before all other events of the prompt's choices.
    """

    prompt: int
    tokens: Sequence[LogprobText]


class TextDelta(msgspec.Struct, frozen=True):
    """More of a choice's text; the joined deltas are the whole text."""

    choice: int
    text: str
    logprobs: tuple[LogprobText, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of a choice's reasoning; the reasoning always comes before the text."""

    choice: int
    text: str
    logprobs: tuple[LogprobText, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A complete call; number counts the calls of its choice from 0."""

    choice: int
    number: int
    call: ToolCall


class Finished(msgspec.Struct, frozen=True):
    """The last event of a choice. stop_string is the stop string that ended it."""

    choice: int
    reason: FinishReason
    stop_string: str | None = None


class GenerateUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a request: tokens, seconds from its submission to the first token, and from there to the last."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_s: float = 0.0
    completion_s: float = 0.0


class Ended(msgspec.Struct, frozen=True):
    """The last event of a request. session: the name of the session of an agent's run."""

    usage: GenerateUsage
    session: str = ""


GenerateEvent = Started | PromptScored | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Ended | AgentEvent


class ChoiceReply(msgspec.Struct, kw_only=True):
    """One whole choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    call_places: list[int] = []
    """Number of characters of the text before each call."""
    logprobs: list[LogprobText] = []
    reason: FinishReason = "stop"
    stop_string: str | None = None

    def to_message(self) -> ChatMessage:
        """Return it as a message of the conversation."""
        content = self.text if self.text or not self.calls else None
        return ChatMessage(
            role="assistant", content=content, tool_calls=tuple(self.calls), reasoning=self.reasoning or None
        )


class GenerateReply(msgspec.Struct, kw_only=True):
    """A whole answer: its choices in order, and their cost. model is the id of the model that answered."""

    model: str
    choices: list[ChoiceReply]
    usage: GenerateUsage
    scored: list[Sequence[LogprobText]] = []
    """The tokens of each prompt, if their logprobs are requested (`PromptScored`)."""
    agent: AgentOutcome | None = None
    """The acts of the server besides generating, if it was asked to act."""
