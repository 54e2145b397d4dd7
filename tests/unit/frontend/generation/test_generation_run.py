"""One request to generate from its typed form to its events, with a worker played by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.config.generation_settings import Generation
from sie.frontend.generation.generation_run import Run
from sie.frontend.generation.start import Generator, check_encoded, check_request, plan_task
from sie.values.errors import BadRequest, ClientGone, DeadlineExceeded, Internal, WorkerLost
from sie.values.generate import (
    ChatMessage,
    Ended,
    Finished,
    GenerateRequest,
    GenerateRule,
    Grammar,
    PromptPiece,
    PromptScored,
    Started,
    TextDelta,
    TokenLogprob,
    TokenRecord,
    Tool,
)
from tests.unit.engine_rig import Rig
from tests.unit.frontend.engine.hand_worker import generator

RULE = GenerateRule(
    context_length=100,
    eos_token_ids=(256,),
    chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    special_texts=("<|end|>",),
)
CARD = generator(vocab_size=257, generate=RULE)
FAR_NS = 1 << 62
DEADLINE_S = 60.0


class Bench:
    """A generator on a hand-played worker; it is its own meter and table of models."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.worker = rig.start_hand_worker(CARD)
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.generator = Generator(rig.engine, rig.entries, Generation(), self)  # type: ignore[arg-type]

    def record_first_token(self, _model: str, elapsed_s: float) -> None:
        self.first.append(elapsed_s)

    def record_next_token(self, _model: str, gap_s: float) -> None:
        self.gaps.append(gap_s)

    async def start(self, **fields: Any) -> Run:
        options = {key: fields.pop(key) for key in ("salt", "echoes") if key in fields}
        if not {"messages", "token_lists"} & fields.keys():
            fields.setdefault("texts", ["abc"])
        run = await self.generator.start(self.rig.entries["m"], GenerateRequest(model="m", **fields), FAR_NS, **options)
        await self.rig.settle()
        return run

    async def tell(self, run: Run, text: str, index: int = 0, part: int = 0, **fields: Any) -> None:
        """Send bytes as tokens."""
        request_id = run.parts[part].pending.request_id
        record = TokenRecord(request_id, fields.pop("choice", 0), index, tuple(text.encode()))
        self.rig.hand_workers[-1].tell(msgspec.structs.replace(record, **fields))
        await self.rig.settle()

    async def end(self, run: Run, part: int = 0) -> None:
        self.rig.hand_workers[-1].reply(run.parts[part].pending.request_id)
        await self.rig.settle()


def on_bench(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        rig = Rig()
        bench = Bench(rig)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(bench)
                await rig.settle()
        finally:
            bench.generator.close()
            rig.close()

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@on_bench
async def test_rendering_and_tokenising_are_timed(bench: Bench) -> None:
    templates, called_ns = bench.generator._templates, []
    render = templates.render

    async def render_timed(*given: Any) -> str:
        called_ns.append(time.monotonic_ns())
        text = await render(*given)
        called_ns.append(time.monotonic_ns())
        return text

    templates.render = render_timed  # type: ignore[method-assign]
    began_ns = time.monotonic_ns()
    run = await bench.start(messages=[ChatMessage(role="user", content="abc")])
    timing = run.timing(began_ns)
    spent_ms = (called_ns[1] - called_ns[0]) / 1e6
    assert spent_ms <= timing.tokenization_ms <= (timing.submitted_ns - began_ns) / 1e6
    await bench.tell(run, "h", finish="length")
    await bench.end(run)
    await run.whole()
    assert run.timing(began_ns).tokenization_ms == timing.tokenization_ms


@on_bench
async def test_stream_of_one_choice(bench: Bench) -> None:
    run = await bench.start(max_tokens=5, seed=3)
    header, task, prompt = bench.worker.task()
    assert (header.operation, prompt) == ("generate", list(b"abc"))
    assert (task.max_tokens, task.num_choices, task.sampling.seed) == (5, 1, 3)

    assert await run.wait(0.01) == []
    await bench.tell(run, "h", num_cached=2)
    assert await run.wait(1) == [Started(3, 2), TextDelta(0, "h")]
    await bench.tell(run, "é", 1, finish="length")
    await bench.end(run)
    events = await run.wait(1)
    assert events[:-1] == [TextDelta(0, "é"), Finished(0, "length")]
    assert isinstance(events[-1], Ended)
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)
    assert usage.prompt_s > 0
    assert run.is_over
    assert (len(bench.first), len(bench.gaps)) == (1, 1)


@on_bench
async def test_character_in_two_frames_is_one_delta(bench: Bench) -> None:
    run = await bench.start()
    request_id = run.pendings[0].request_id
    bench.worker.tell(TokenRecord(request_id, 0, 0, (0xC3,)))
    await bench.rig.settle()
    assert await run.wait(0.01) == []
    bench.worker.tell(TokenRecord(request_id, 0, 1, (0xA9,)))
    await bench.rig.settle()
    assert await run.wait(1) == [Started(3, 0), TextDelta(0, "é")]
    run.give_up(ClientGone("left"))


@on_bench
async def test_choice_that_meets_a_stop_string_is_stopped_and_the_last_one_ends_the_work(bench: Bench) -> None:
    run = await bench.start(num_choices=2, stop=("STOP",))
    await bench.tell(run, "aST")
    await bench.tell(run, "bS", choice=1)
    assert await run.wait(1) == [Started(3, 0), TextDelta(0, "a"), TextDelta(1, "b")]
    await bench.tell(run, "OPx", 3)
    assert await run.wait(1) == [Finished(0, "stop", "STOP")]
    assert bench.worker.stopped() == [0]
    assert not bench.worker.is_cancelled()
    await bench.tell(run, "overshoot", 6)
    await bench.tell(run, "o", 2, choice=1)
    assert await run.wait(1) == [TextDelta(1, "So")]
    await bench.tell(run, "STOP", 3, choice=1)
    events = await run.wait(1)
    assert events[0] == Finished(1, "stop", "STOP")
    assert events[-1] == Ended(run.usage())
    assert run.usage().completion_tokens == 5 + 7
    assert bench.worker.is_cancelled()


@on_bench
async def test_whole_answer_of_several_prompts_in_order(bench: Bench) -> None:
    run = await bench.start(texts=["abc", "de"], num_choices=2, seed=7)
    tasks = [bench.worker.task(number)[1] for number in (0, 1)]
    assert [task.sampling.seed for task in tasks] == [7, 8]
    whole = asyncio.ensure_future(run.whole())
    for part, choice, text in ((1, 1, "four"), (0, 0, "one"), (1, 0, "three"), (0, 1, "two")):
        await bench.tell(run, text, part=part, choice=choice, finish="stop")
    reply = await whole
    assert [choice.text for choice in reply.choices] == ["one", "two", "three", "four"]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 15)


def piece(index: int, *own: float) -> PromptPiece:
    """Judge tokens, each with `x` as the likeliest."""
    count = len(own)
    return PromptPiece(
        index, np.array(own, "<f4").tobytes(), np.array([ord("x")] * count, "<i4").tobytes(),
        np.zeros(count, "<f4").tobytes(),
    )  # fmt: skip


@on_bench
async def test_what_is_known_of_a_prompt_comes_before_its_choices(bench: Bench) -> None:
    run = await bench.start(texts=["abc", "d"], logprobs=1, prompt_logprobs=1)
    assert bench.worker.task()[1].prompt_logprobs == 1
    await bench.tell(run, "", prompt=piece(0, -1.0))
    await bench.tell(run, "", prompt=piece(1, -2.0))
    assert await run.wait(0.01) == []
    assert not bench.first, "no token has come"
    await bench.tell(run, "y", logprobs=(TokenLogprob(-3.0),))
    started, scored, delta = await run.wait(1)
    assert (started, delta.text) == (Started(4, 0), "y")  # type: ignore[union-attr]
    assert isinstance(scored, PromptScored)
    assert (scored.prompt, [one.text for one in scored.tokens]) == (0, ["a", "b", "c"])
    assert [[other.text for other in one.top] for one in scored.tokens] == [[], ["x"], ["x"]]
    assert [one.logprob for one in scored.tokens] == [0, -1, -2]
    await bench.tell(run, "", part=1, finish="length")
    only, finished = await run.wait(1)
    assert isinstance(only, PromptScored)
    assert (only.prompt, [one.text for one in only.tokens], finished) == (1, ["d"], Finished(1, "length"))
    run.give_up(ClientGone("left"))


@on_bench
async def test_prompts_of_a_whole_answer_are_judged_anew_behind_a_dead_worker(bench: Bench) -> None:
    run = await bench.start(texts=["ab"], max_tokens=0, prompt_logprobs=0)
    whole = asyncio.ensure_future(run.whole())
    await bench.tell(run, "", prompt=piece(0, -1.0))
    bench.rig.die(bench.worker)
    bench.rig.start_hand_worker(CARD)
    await bench.rig.settle()
    await bench.tell(run, "", prompt=piece(0, -7.0))
    await bench.tell(run, "", finish="length")
    await bench.end(run)
    reply = await whole
    assert [[one.logprob for one in tokens] for tokens in reply.scored] == [[0, -7]]
    assert (reply.choices[0].text, reply.choices[0].reason) == ("", "length")


@pytest.mark.parametrize(
    "pieces", [[], [piece(1, -1.0)], [piece(0, -1.0), piece(0, -1.0)], [piece(0, -1.0, -1.0, -1.0)]]
)
def test_a_worker_that_leaves_something_of_a_prompt_out_fails_the_request(pieces: list[PromptPiece]) -> None:
    @on_bench
    async def check(bench: Bench) -> None:
        run = await bench.start(prompt_logprobs=0)
        for one in pieces:
            await bench.tell(run, "", prompt=one)
        await bench.tell(run, "x")
        with pytest.raises(Internal):
            await run.wait(1)

    check()


@on_bench
async def test_a_gap_is_filled_where_the_tokenizer_has_marks_for_it(bench: Bench) -> None:
    names = ("<|end|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    rule = msgspec.structs.replace(RULE, special_texts=names)
    card = generator(vocab_size=260, generate=rule)
    bench.rig.entries["m"] = msgspec.structs.replace(bench.rig.entries["m"], card=card)
    run = await bench.start(texts=["ab", "c"], suffix="yz")
    prompts = [bench.worker.task(number)[2] for number in (0, 1)]
    assert prompts == [[257, *b"ab", 258, *b"yz", 259], [257, *b"c", 258, *b"yz", 259]]
    assert bench.worker.task()[1].stop_token_ids == (257, 258, 259)
    run.give_up(ClientGone("left"))
    run = await bench.start(texts=["ab"], suffix="yz", ignore_eos=True)
    assert bench.worker.task(2)[1].stop_token_ids == ()
    run.give_up(ClientGone("left"))


@on_bench
async def test_whole_answer_knows_where_its_calls_stood(bench: Bench) -> None:
    messages = [ChatMessage(role="user", content="x")]
    run = await bench.start(messages=messages, tools=(Tool(name="f"),))
    whole = asyncio.ensure_future(run.whole())
    await bench.tell(run, '{"name": "f"}; {"name": "f"}\nThat is all.', finish="stop")
    await bench.end(run)
    (choice,) = (await whole).choices
    assert ([call.name for call in choice.calls], choice.call_places) == (["f", "f"], [0, 0])
    assert (choice.text, choice.reason) == ("That is all.", "tool_calls")


@on_bench
async def test_whole_answer_survives_a_worker_and_holds_nothing_of_its_tokens(bench: Bench) -> None:
    run = await bench.start(seed=1)
    whole = asyncio.ensure_future(run.whole())
    await bench.tell(run, "lost")
    bench.rig.die(bench.worker)
    bench.rig.start_hand_worker(CARD)
    await bench.rig.settle()
    await bench.tell(run, "found", finish="stop")
    await bench.end(run)
    reply = await whole
    assert reply.choices[0].text == "found"
    assert reply.usage.completion_tokens == 5


@on_bench
async def test_stream_that_was_sent_ends_with_its_worker(bench: Bench) -> None:
    run = await bench.start()
    await bench.tell(run, "a")
    assert len(await run.wait(1)) == 2
    bench.rig.die(bench.worker)
    with pytest.raises(WorkerLost):
        await run.wait(1)


@on_bench
async def test_events_before_an_error_come_first(bench: Bench) -> None:
    run = await bench.start()
    await bench.tell(run, "a")
    bench.worker.fail(run.pendings[0].request_id, Internal("broke"))
    await bench.rig.settle()
    assert await run.wait(1) == [Started(3, 0), TextDelta(0, "a")]
    with pytest.raises(Internal, match="broke"):
        await run.wait(1)


@on_bench
async def test_reply_without_an_end_of_a_choice_is_our_fault(bench: Bench) -> None:
    run = await bench.start()
    await bench.end(run)
    with pytest.raises(Internal, match="not finished"):
        await run.wait(1)


@on_bench
async def test_logprobs_come_with_the_text_of_their_tokens(bench: Bench) -> None:
    run = await bench.start(logprobs=1)
    assert bench.worker.task()[1].logprobs == 1
    logs = tuple(TokenLogprob(-float(n), ((97, -0.5),)) for n in range(3))
    await bench.tell(run, "aé", logprobs=logs, finish="stop")
    await bench.end(run)
    _, first, second, _, _ = await run.wait(1)
    assert isinstance(first, TextDelta)
    assert isinstance(second, TextDelta)
    assert [(log.raw, log.logprob) for log in (*first.logprobs, *second.logprobs)] == [
        (b"a", 0.0), (b"\xc3", -1.0), (b"\xa9", -2.0)
    ]  # fmt: skip
    assert first.logprobs[0].top[0].text == "a"


@on_bench
async def test_chat_and_token_ids_become_prompts(bench: Bench) -> None:
    messages = [ChatMessage(role="user", content="<|end|>x")]
    await bench.start(messages=messages, salt=b"tenant")
    _, task, prompt = bench.worker.task()
    assert (bytes(prompt), task.salt, task.max_tokens) == (b"<|end|>x", b"tenant", 92)
    run = await bench.start(token_lists=[[256, 97]], echoes=True)
    assert bench.worker.task()[2] == [256, 97]
    assert list(run.prompts) == ["<|end|>a"]
    with pytest.raises(BadRequest, match="vocabulary"):
        await bench.start(token_lists=[[257]])


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"num_choices": 17}, "max_choices"),
        ({"logprobs": 21}, "max_logprobs"),
        ({"stop": ("a",) * 17}, "max_stop_strings"),
        ({"stop": ("a" * 257,)}, "max_stop_chars"),
        ({"tools": (Tool(name="f"),) * 129}, "max_tools"),
        ({"messages": [ChatMessage(role="user")] * 2049}, "max_messages"),
        ({"grammar": Grammar(kind="regex", value="a" * 300_000)}, "max_grammar_bytes"),
    ],
)
def test_request_over_a_limit_names_its_setting(fields: dict[str, Any], setting: str) -> None:
    with pytest.raises(BadRequest, match=setting):
        check_request(GenerateRequest(model="m", **fields), Generation())


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": (Tool(name="f"),)}),
        ("messages", {"continues": True}),
        ("suffix", {"suffix": "x"}),
        ("logprobs", {"prompt_logprobs": 0}),
    ],
)
def test_a_field_that_an_encoder_cannot_serve_is_named(field: str, fields: dict[str, Any]) -> None:
    request = GenerateRequest(model="m", **fields)
    with pytest.raises(BadRequest, match=f"Field '{field}' is not served by 'm'"):
        check_encoded(request, GenerateRule(context_length=8, decoder_start_id=0))
    check_encoded(request, GenerateRule(context_length=8))


def test_task_takes_the_request_then_the_model_then_the_api() -> None:
    rule = GenerateRule(context_length=8, temperature=0.5, top_k=40, top_p=0.9, repetition_penalty=1.2)
    own = plan_task(GenerateRequest(model="m"), rule, 10, b"").sampling
    assert (own.temperature, own.top_k, own.top_p, own.min_p, own.repetition_penalty) == (0.5, 40, 0.9, 0.0, 1.2)
    asked = GenerateRequest(
        model="m", temperature=1e-9, top_k=-1, top_p=1.5, min_p=0.1, repetition_penalty=1.0, seed=-1
    )
    given = plan_task(asked, rule, 10, b"").sampling
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.0, 0, 1.0, 0.1)
    assert 0 <= given.seed < 1 << 63
    bare = plan_task(GenerateRequest(model="m"), GenerateRule(context_length=8), 10, b"")
    assert bare.sampling.temperature == 1.0
    assert bare.sampling.seed != plan_task(GenerateRequest(model="m"), rule, 10, b"").sampling.seed
    with pytest.raises(BadRequest, match="logit_bias"):
        plan_task(GenerateRequest(model="m", logit_bias={10: 1.0}), rule, 10, b"")


def _most_tokens(bench: Bench, **fields: Any) -> int:
    rule = msgspec.structs.replace(RULE, max_new_tokens=9)
    return bench.generator._fit([1, 2], GenerateRequest(model="m", **fields), rule)[1]


@on_bench
async def test_a_checkpoint_s_max_new_tokens_is_a_default(bench: Bench) -> None:
    assert _most_tokens(bench) == 9
    assert _most_tokens(bench, max_tokens=50) == 50
    assert _most_tokens(bench, min_tokens=20) == 20


@on_bench
async def test_a_worker_s_error_about_a_grammar_names_the_client_s_field(bench: Bench) -> None:
    run = await bench.start(grammar=Grammar(kind="json_schema", value='{"$ref":"#"}'))
    refused = BadRequest("grammar: no token can follow", extras={"param": "grammar"})
    bench.rig.hand_workers[-1].fail(run.parts[0].pending.request_id, refused)
    with pytest.raises(BadRequest, match=r"^Field 'response_format': no token can follow") as raised:
        await run.whole()
    assert raised.value.extras == {"param": "response_format"}


@on_bench
async def test_a_stream_that_has_not_begun_hears_of_its_grammar_by_the_client_s_field(bench: Bench) -> None:
    run = await bench.start(grammar=Grammar(kind="json_schema", value='{"$ref":"#"}'))
    refused = BadRequest("grammar: no token can follow", extras={"param": "grammar"})
    bench.rig.hand_workers[-1].fail(run.parts[0].pending.request_id, refused)
    with pytest.raises(BadRequest, match=r"^Field 'response_format': no token can follow"):
        await run.wait_first(DEADLINE_S)


@on_bench
async def test_a_grammar_that_waits_for_others_ends_at_the_requests_deadline(bench: Bench) -> None:
    are_over = threading.Event()
    others = [bench.generator._grammars.submit(are_over.wait, DEADLINE_S) for _ in range(2)]
    asked = GenerateRequest(model="m", texts=["abc"], grammar=Grammar(kind="regex", value="a"))
    try:
        with pytest.raises(DeadlineExceeded, match="before its grammar was checked"):
            await bench.generator.start(bench.rig.entries["m"], asked, time.monotonic_ns() + 1_000_000)
    finally:
        are_over.set()
    assert all([await asyncio.wrap_future(other) for other in others])
