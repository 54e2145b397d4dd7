"""Prepares and submits a typed request to generate: its limits, its prompts' tokens, and the worker's task."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec
import numpy as np

from sie.catalog.profiles import model_of
from sie.config.generation_settings import Generation
from sie.frontend.engine.interface import Engine
from sie.frontend.engine.token_stream import StreamTimes, TokenStream
from sie.frontend.generation.choose_parser import choose_parser
from sie.frontend.generation.constraints import constrain, schema_bytes
from sie.frontend.generation.fill_in import GapMarks, gap_ids, require_marks
from sie.frontend.generation.generation_run import Part, Run, TokenMeter
from sie.frontend.generation.logprob_limit import limit_logprobs
from sie.frontend.generation.prompt import chat_ids, check_ids, draft_chat, finish_chat, fit
from sie.frontend.generation.prompt_reader import PromptReader
from sie.frontend.generation.reader import Reader
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.generation.templates import Templates
from sie.frontend.generation.vocabulary import FileVocabulary, StubVocabulary, Vocabulary
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, Tokenizer, is_long
from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import ModelEntry
from sie.native.preempt import free
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, DeadlineExceeded
from sie.values.generate import GRAMMAR, GenerateRequest, GenerateRule, GenerateTask, Grammar, Sampling
from sie.values.work import WorkHeader

_encode_task: Final = msgspec.msgpack.Encoder().encode
_EXPECTED_TOKENS: Final = 256
"""Most tokens that a choice counts for, besides its prompt, when a worker is chosen: few use all they may."""
_GREEDY_BELOW: Final = 1e-7
_MANY_TOKENS: Final = 4096
"""Prompts with so many tokens are checked and decoded on a thread."""
_MAX_SEED: Final = (1 << 63) - 1
_PROMPT_END_CHARS: Final = 64
_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


class Generator:
    """Starts requests to generate."""

    def __init__(self, engine: Engine, models: ModelTable, settings: Generation, meter: TokenMeter) -> None:
        self._engine = engine
        self._models = models
        self._settings = settings
        self._meter = meter
        self._pool = ThreadPoolExecutor(2, "prompt")
        self._grammars = ThreadPoolExecutor(2, "grammar")
        """A schema may take seconds to check, so grammars do not share the prompts' threads."""
        self._times = StreamTimes(int(settings.stream_idle_timeout_s * 1e9), int(settings.generation_timeout_s * 1e9))
        self._templates = Templates(settings.template_timeout_s)
        self._vocabularies: dict[str, tuple[Tokenizer | None, Vocabulary]] = {}

    async def start(
        self, entry: ModelEntry, request: GenerateRequest, deadline_ns: int, *, salt: bytes = b"", echoes: bool = False
    ) -> Run:
        """Submit a request to the model of a served entry.

        deadline_ns: the deadline of the first token. Prompts share cache blocks only under an equal salt. echoes: the
        run keeps its prompts' texts. Raises BadRequest for anything that the model or the settings do not allow, and
        the engine's errors.
        """
        began_ns = time.monotonic_ns()
        rule = generate_rule(entry.card)
        check_request(request, self._settings)
        check_encoded(request, rule)
        vocabulary = await self.vocabulary(entry)
        marks = require_marks(vocabulary, entry.card.id) if request.suffix else None
        prompts, prompt_end = await self._prompts(model_of(entry.card.id), request, rule, vocabulary, marks)
        fitted = limit_logprobs(
            [self._fit(ids, request, rule) for ids in prompts], request, self._settings.max_answer_logprobs
        )
        grammar = await self._constrain(request, rule, deadline_ns)
        task = plan_task(request, rule, vocabulary.size, salt, grammar)
        if marks is not None and not request.ignore_eos:
            task = msgspec.structs.replace(task, stop_token_ids=(*task.stop_token_ids, *marks.ends))
        read = [ids for ids, _ in fitted]
        texts = await self._echoes(request, vocabulary, prompts, read) if echoes else ()
        new_readers = _readers(request, rule, vocabulary, read, prompt_end)
        news = asyncio.Event()
        tasks = [_task_of(task, number, max_tokens) for number, (_, max_tokens) in enumerate(fitted)]
        parts = await self._submit(entry.card.id, read, tasks, new_readers, news=news, deadline_ns=deadline_ns)
        return Run(
            self._engine, entry.card.id, parts, news, began_ns=began_ns, meter=self._meter, prompts=texts,
            grammar_field=grammar.field if grammar is not None else GRAMMAR,
        )  # fmt: skip

    async def _submit(
        self, model: str, prompts: Sequence[list[int]], tasks: Sequence[GenerateTask],
        new_readers: Sequence[Callable[[], Reader]], *, news: asyncio.Event, deadline_ns: int,
    ) -> list[Part]:  # fmt: skip
        """Submit a request to the engine for each prompt: all of them or none. Each sets news when tokens come."""
        parts: list[Part] = []
        try:
            for ids, task, new_reader in zip(prompts, tasks, new_readers, strict=True):
                stream = TokenStream(task.num_choices, self._times, news.set)
                pending = await self._engine.submit_stream(
                    WorkHeader(model, "generate", 1, (), task=_encode_task(task)),
                    [("cu_seqlens", np.array([0, len(ids)], np.int32)), ("token_ids", np.array(ids, np.int32))],
                    len(ids) + task.num_choices * min(task.max_tokens, _EXPECTED_TOKENS), deadline_ns, stream,
                )  # fmt: skip
                parts.append(Part(pending, stream, new_reader, len(ids)))
        except BaseException:
            for part in parts:
                self._engine.finish(part.pending)
            raise
        return parts

    def close(self) -> None:
        """End the processes that render templates."""
        self._templates.close()

    async def prompt_ids(self, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts, for a caller that only counts them. Raises the errors of `start`.

        An overlong prompt is returned whole, or cut if the request has it cut.
        """
        rule = generate_rule(entry.card)
        check_request(request, self._settings)
        check_encoded(request, rule)
        prompts, _ = await self._prompts(model_of(entry.card.id), request, rule, await self.vocabulary(entry))
        return [self._fit(ids, request, rule)[0] for ids in prompts] if request.truncate_prompt else prompts

    def _fit(self, ids: list[int], request: GenerateRequest, rule: GenerateRule) -> tuple[list[int], int]:
        context = min(rule.context_length, self._settings.max_context_tokens or rule.context_length)
        ids, room = fit(ids, request.max_tokens, context, truncate=request.truncate_prompt)
        own = rule.max_new_tokens if request.max_tokens is None else None
        return ids, room if own is None else min(room, max(own, request.min_tokens))

    async def vocabulary(self, entry: ModelEntry) -> Vocabulary:
        """Return the vocabulary of an entry's model. Raises Internal if its tokenizer cannot be read."""
        card = entry.card
        tokenizer = await self._models.tokenizer(entry) if card.tokenizer_file else None
        known = self._vocabularies.get(card.id)
        if known is not None and known[0] is tokenizer:
            return known[1]
        if tokenizer is None:
            vocabulary: Vocabulary = StubVocabulary(card)
        else:
            vocabulary = await self._on_thread(FileVocabulary, card, tokenizer.backend)
        gone = [name for name in self._vocabularies if name not in self._models or name == card.id]
        self._pool.submit(free, [self._vocabularies.pop(name) for name in gone])
        self._vocabularies[card.id] = (tokenizer, vocabulary)
        return vocabulary

    async def _prompts(
        self,
        model: str,
        request: GenerateRequest,
        rule: GenerateRule,
        vocabulary: Vocabulary,
        marks: GapMarks | None = None,
    ) -> tuple[list[list[int]], str]:
        """Return the tokens of each prompt, and the last characters of a chat's prompt."""
        if request.token_lists is not None:
            check = functools.partial(_check_lists, request.token_lists, vocabulary.size)
            is_large = sum(map(len, request.token_lists)) >= _MANY_TOKENS
            await self._on_thread(check) if is_large else check()
            return request.token_lists, ""
        if request.texts is not None:
            encode = functools.partial(_encode_texts, vocabulary, request.texts, request.suffix, marks)
            is_large = is_long([*request.texts, request.suffix], LONG_TEXT_BYTES)
            return (await self._read(vocabulary, encode, is_long=is_large)), ""
        draft = await self._on_thread(draft_chat, request, rule)
        rendered = finish_chat(draft, await self._templates.render(model, draft.packed), rule)
        tokenise = functools.partial(chat_ids, rendered, vocabulary, whole=rule.is_encoder_decoder)
        ids = await self._read(vocabulary, tokenise, is_long=rendered.is_long)
        return [ids], rendered.text[-_PROMPT_END_CHARS:]

    async def _constrain(self, request: GenerateRequest, rule: GenerateRule, deadline_ns: int) -> Grammar | None:
        """Return the grammar of an answer, or None. Raises BadRequest, and DeadlineExceeded."""
        if request.grammar is None and not request.tools:
            return None
        checked = asyncio.get_running_loop().run_in_executor(self._grammars, constrain, request, rule)
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                return await checked
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its grammar was checked") from None

    async def _echoes(
        self, request: GenerateRequest, vocabulary: Vocabulary, prompts: Sequence[list[int]], read: Sequence[list[int]]
    ) -> list[str]:
        is_long = sum(map(len, read)) >= _MANY_TOKENS
        return await self._read(
            vocabulary, functools.partial(_echo_texts, request, vocabulary, prompts, read), is_long=is_long
        )

    async def _read(self, vocabulary: Vocabulary, read: Callable[[], _T], *, is_long: bool) -> _T:
        """Read texts at once, or on the thread that they need."""
        if vocabulary.pool is not None:
            return await asyncio.get_running_loop().run_in_executor(vocabulary.pool, read)
        return await self._on_thread(read) if is_long else read()

    async def _on_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


def _check_lists(token_lists: Sequence[Sequence[int]], vocab_size: int) -> None:
    for ids in token_lists:
        check_ids(ids, vocab_size, "prompt")


def generate_rule(card: ModelCard) -> GenerateRule:
    """Return a model's rule for generation. Raises BadRequest if it does not generate."""
    if card.generate is None:
        raise BadRequest(f"Model '{card.id}' does not generate text", extras={"param": "model"})
    return card.generate


def check_request(request: GenerateRequest, settings: Generation) -> None:
    """Raise BadRequest for a field over a limit of the settings, or of the request. The error names the field and the limit."""
    grammar = request.grammar or Grammar(kind="json_schema", value="")
    for field, count, setting in (
        ("n", request.num_choices, "max_choices"),
        ("top_logprobs", request.logprobs or 0, "max_logprobs"),
        ("stop", len(request.stop), "max_stop_strings"),
        ("stop", max(map(len, request.stop), default=0), "max_stop_chars"),
        ("tools", len(request.tools), "max_tools"),
        ("messages", len(request.messages or ()), "max_messages"),
        (grammar.field, len(grammar.value), "max_grammar_bytes"),
        ("tools", schema_bytes(request) if request.tools else 0, "max_grammar_bytes"),
    ):
        limit: int = getattr(settings, setting)
        if count > limit:
            raise BadRequest(f"Field '{field}' is over {setting} ({limit})", extras={"param": field})
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise wrong(
            "min_tokens", f"is {request.min_tokens}, but an answer may have {request.max_tokens} tokens at most"
        )


def check_encoded(request: GenerateRequest, rule: GenerateRule) -> None:
    """Raise BadRequest for a field that is not served by a model whose encoder reads the prompt."""
    if not rule.is_encoder_decoder:
        return
    for field, is_given, problem in (
        ("tools", bool(request.tools), "it was not trained to call tools"),
        ("messages", request.continues, "its answer cannot continue an assistant's message"),
        ("suffix", bool(request.suffix), "it does not fill gaps"),
        ("logprobs", request.prompt_logprobs is not None, "a prompt that an encoder reads has no log probabilities"),
    ):
        if is_given:
            raise BadRequest(f"Field '{field}' is not served by '{request.model}': {problem}", extras={"param": field})


def plan_task(
    request: GenerateRequest, rule: GenerateRule, vocab_size: int, salt: bytes, grammar: Grammar | None = None
) -> GenerateTask:
    """Return the task for a worker. A value comes from the request, else from the model's defaults, else from the API's.

    max_tokens is set later, for each prompt. Raises BadRequest for a bias or a stop of a token that the model does not have.
    """
    check_ids(list(request.logit_bias), vocab_size, "logit_bias")
    check_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    temperature = _first(request.temperature, rule.temperature, 1.0)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    sampling = Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, _first(request.top_k, rule.top_k, 0)),
        top_p=_share(_first(request.top_p, rule.top_p, 1.0), 1.0),
        min_p=_share(_first(request.min_p, rule.min_p, 0.0), 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, rule.repetition_penalty, 1.0),
        logit_bias=tuple(request.logit_bias.items()),
        seed=seed & _MAX_SEED,
    )
    return GenerateTask(
        0, request.num_choices, sampling, request.logprobs, request.stop_token_ids, request.ignore_eos, salt,
        grammar.kind if grammar is not None else "", grammar.value if grammar is not None else "",
        request.prompt_logprobs, request.min_tokens,
    )  # fmt: skip


def _task_of(task: GenerateTask, prompt: int, max_tokens: int) -> GenerateTask:
    """Return the task of one of several prompts. Its seed is its own, so that equal prompts get different answers."""
    seed = (task.sampling.seed + prompt) & _MAX_SEED
    own = task.sampling if not prompt else msgspec.structs.replace(task.sampling, seed=seed)
    return msgspec.structs.replace(task, max_tokens=max_tokens, sampling=own)


def _readers(
    request: GenerateRequest, rule: GenerateRule, vocabulary: Vocabulary, prompts: Sequence[list[int]], prompt_end: str
) -> list[Callable[[], Reader]]:
    parsers, n = choose_parser(request, rule, prompt_end), request.num_choices
    is_scored = request.prompt_logprobs is not None
    return [
        functools.partial(
            Reader, n, vocabulary, request.stop, parsers, first_number=prompt * n, min_tokens=request.min_tokens,
            make_prompt=functools.partial(PromptReader, prompt, vocabulary, ids) if is_scored else None,
        )
        for prompt, ids in enumerate(prompts)
    ]  # fmt: skip


def _echo_texts(
    request: GenerateRequest, vocabulary: Vocabulary, prompts: Sequence[list[int]], read: Sequence[list[int]]
) -> list[str]:
    """Return the texts of prompts: as given, or decoded from the tokens if tokens were given or the prompt was cut."""
    if request.texts is None:
        return [vocabulary.decode(ids) for ids in prompts]
    return [
        text if len(ids) == len(own) else vocabulary.decode(own)
        for text, ids, own in zip(request.texts, prompts, read, strict=True)
    ]


def _encode_texts(vocabulary: Vocabulary, texts: Sequence[str], suffix: str, marks: GapMarks | None) -> list[list[int]]:
    if marks is not None:
        return [gap_ids(text, suffix, vocabulary, marks) for text in texts]
    return [vocabulary.encode(text, whole=True) for text in texts]


def _share(value: float, off: float) -> float:
    """Return a share of probability, or off for a value outside 0 to 1."""
    return value if 0 < value < 1 else off


def _first(asked: _N | None, own: _N | None, default: _N) -> _N:
    return asked if asked is not None else own if own is not None else default
