"""An engine with a stub that generates, and a frontend that reads what it sends: no process, no ring, its own clock.

`RingFrontend` is the same frontend at the end of a real ring, for a step loop or a worker process. Reading checks what
every frontend relies on: records without a gap, none behind a choice's last one, the terminal descriptor behind all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.shm.attach import Attachment
from sie.shm.extent import set_cancelled, set_stopped, write_extent
from sie.shm.layout import ERROR, FLAG_ALONE, REPLY, SUBMIT, TOKENS, Descriptor
from sie.shm.pool import ExtentPool, Lease
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.errors import SieError, WireError, from_wire
from sie.values.generate import GenerateTask, GenerateTotals, PromptPiece, Sampling, TokenFrame, TokenLogprob
from sie.values.work import WorkHeader
from sie.values.work_bytes import extent_bytes, plan_arrays, read_extent
from sie.workers.generation.engines import read_task
from sie.workers.generation.model_engine import Engine, EngineLimits
from sie.workers.generation.sequences import Job
from sie.workers.generation.step import Begin, StepSize
from sie.workers.generation.stub import StubGenerator
from sie.workers.model_api import Chosen, GenerateRunner, Slot, SlotResult
from sie.workers.requests.worker_request import Request, read_request

FAR_NS = 1 << 62
MODEL = "stub/g"
_frames = msgspec.msgpack.Decoder(TokenFrame)
_totals = msgspec.msgpack.Decoder(GenerateTotals)
_errors = msgspec.msgpack.Decoder(WireError)
_encode = msgspec.msgpack.Encoder().encode


def make_card(options: str = "") -> ModelCard:
    return stub_card(parse_model_spec(f"{MODEL}=stub:generate{',' if options else ''}{options}"))


def echo(prompt: Sequence[int], choice: int = 0, count: int | None = None) -> list[int]:
    """Return what a stub generates behind a prompt: count tokens, or as many as the prompt has."""
    return [prompt[(choice + i) % len(prompt)] for i in range(len(prompt) if count is None else count)]


def request_extent(
    prompt: Sequence[int], task: GenerateTask, lora: str = ""
) -> tuple[WorkHeader, list[np.ndarray[Any, Any]], int]:
    """Return header, arrays and size of the extent of a request to generate."""
    arrays = [np.array([0, len(prompt)], np.int32), np.array(prompt, np.int32)]
    plan = plan_arrays([("cu_seqlens", "<i4", arrays[0].shape), ("token_ids", "<i4", arrays[1].shape)])
    header = WorkHeader(MODEL, "generate", 1, plan.refs, output_types=("generate",), task=_encode(task), lora=lora)
    return header, arrays, extent_bytes(len(_encode(header)), plan.nbytes)


class Answer:
    """What a frontend has of one request."""

    def __init__(self, task: GenerateTask) -> None:
        self.task = task
        self.tokens: list[list[int]] = [[] for _ in range(task.num_choices)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(task.num_choices)]
        self.finish = [""] * task.num_choices
        self.scores: Judged | None = None
        """Of the prompt's own tokens."""
        self.num_cached = 0
        self.totals: GenerateTotals | None = None
        self.error: SieError | None = None
        self.is_cancelled = False

    @property
    def is_over(self) -> bool:
        return self.totals is not None or self.error is not None or self.is_cancelled


class Judged(NamedTuple):
    """Log probabilities of a prompt's tokens but its first: own (t,), and of the k likeliest ids and values (t, k)."""

    own: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    @classmethod
    def of(cls, piece: PromptPiece) -> Judged:
        own = np.frombuffer(piece.own, "<f4")
        top_ids, top = np.frombuffer(piece.top_ids, "<i4"), np.frombuffer(piece.top, "<f4")
        num_top = len(top) // len(own)
        return cls(own, top_ids.reshape(len(own), num_top), top.reshape(len(own), num_top))

    def __add__(self, other: Judged) -> Judged:  # type: ignore[override]
        return Judged(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Answers(dict[int, Answer]):
    """What a frontend has of all its requests, by their ids; reading checks what every frontend relies on."""

    num_frames = 0

    def read_tokens(self, view: memoryview) -> None:
        """Read a frame."""
        self.num_frames += 1
        frame, _ = read_extent(view, _frames)
        for record in frame.records:
            answer = self[record.request_id]
            assert not answer.is_over, "a record behind the terminal descriptor"
            assert not answer.finish[record.choice], "a record behind a choice's last one"
            assert record.index == len(answer.tokens[record.choice]), "a gap"
            if record.prompt is not None:
                assert not any(map(len, answer.tokens)), "a piece of the prompt behind tokens"
                assert record.prompt.index == (0 if answer.scores is None else len(answer.scores.own)), "a gap"
                own = Judged.of(record.prompt)
                answer.scores = own if answer.scores is None else answer.scores + own
            assert len(record.logprobs) == (0 if answer.task.logprobs is None else len(record.token_ids))
            answer.tokens[record.choice] += record.token_ids
            answer.logprobs[record.choice] += record.logprobs
            answer.finish[record.choice] = record.finish
            answer.num_cached = record.num_cached

    def read_end(self, kind: int, request_id: int, view: memoryview | None) -> None:
        """Read a terminal descriptor's extent, or note that it has none."""
        answer = self[request_id]
        assert not answer.is_over, "a second terminal descriptor"
        if view is None:
            answer.is_cancelled = True
        elif kind == REPLY:
            answer.totals, _ = read_extent(view, _totals)
        else:
            assert kind == ERROR
            answer.error = from_wire(read_extent(view, _errors)[0])


class Frontend:
    """A link whose other end reads at once; without credit, or with memory that is full, it takes nothing."""

    def __init__(self, slot: int = 0, memory_bytes: int = 1 << 20) -> None:
        self.slot = slot
        self.credit: float = float("inf")
        self.answers = Answers()
        self._extents: dict[int, memoryview] = {}
        self._space = ExtentPool(memoryview(bytearray(memory_bytes)))
        self._put_off: list[Callable[[], bool]] = []
        self._hoard: list[Lease] = []

    # --- what a client does

    def submit(self, prompt: Sequence[int], task: GenerateTask, *, deadline_ns: int, flags: int = 0) -> Request:
        request_id = len(self.answers) + 1
        header, arrays, nbytes = request_extent(prompt, task)
        view = memoryview(bytearray(nbytes + 64))
        length = write_extent(view, _encode(header), header.arrays, arrays)
        self._extents[request_id] = view[:length]
        self.answers[request_id] = Answer(task)
        return read_request(self, Descriptor(1, flags, 1, request_id, 0, length, deadline_ns, 0, 0, 1))

    def cancel(self, request_id: int) -> None:
        set_cancelled(self._extents[request_id])

    def stop(self, request_id: int, choice: int) -> None:
        set_stopped(self._extents[request_id], choice)

    def fill(self) -> None:
        """Leave no room for a reply."""
        for nbytes in (1 << 16, 64):
            while (lease := self._space.lease(nbytes)) is not None:
                self._hoard.append(lease)

    def empty(self) -> None:
        """Give the room back."""
        while self._hoard:
            self._hoard.pop().end()
        self._put_off = [try_send for try_send in self._put_off if not try_send()]

    @property
    def num_leased(self) -> int:
        return self._space.num_leased

    # --- what a worker sees

    def view(self, descriptor: Descriptor) -> memoryview:
        return self._extents[descriptor.request_id]

    def lease(self, nbytes: int) -> Lease | None:
        return self._space.lease(nbytes)

    def retry_later(self, try_send: Callable[[], bool]) -> None:
        self._put_off.append(try_send)

    def try_tokens(self, lease: Lease, length: int) -> bool:
        with lease:
            if self.credit < 1:
                return False
            self.credit -= 1
            self.answers.read_tokens(lease.view[:length])
        return True

    def reply(self, kind: int, request_id: int, lease: Lease | None, length: int) -> None:
        if lease is None:
            self.answers.read_end(kind, request_id, None)
            return
        with lease:
            self.answers.read_end(kind, request_id, lease.view[:length])


class RingFrontend:
    """A frontend at the other end of a real attachment; `drain` reads what came and gives it back."""

    def __init__(self, attachment: Attachment, space: OutboundSpace) -> None:
        self.attachment = attachment
        self.answers = Answers()
        self.encoded: list[int] = []
        """Requests to encode that were answered, in order."""
        self._space = space
        self._leases: dict[int, Lease] = {}

    def generate(self, prompt: bytes, *, max_tokens: int = 1000, lora: str = "", **task: Any) -> int:
        """Submit a prompt to the stub that generates; return the request's id."""
        asked = GenerateTask(max_tokens, **task)
        request_id = len(self._leases) + 1
        self.answers[request_id] = Answer(asked)
        self._submit(request_id, *request_extent(list(prompt), asked, lora))
        return request_id

    def encode(self, model: str, text: bytes) -> int:
        """Submit a text to a stub that encodes; return the request's id."""
        ends = [np.array([0, end], np.int32) for end in (1, len(text))]
        arrays = [ends[0], np.frombuffer(text, np.uint8), ends[1]]
        names = ("cu_seqlens", "text", "text_offsets")
        plan = plan_arrays([(name, array.dtype.str, array.shape) for name, array in zip(names, arrays, strict=True)])
        header = WorkHeader(model, "encode", 1, plan.refs)
        request_id = len(self._leases) + 1
        self._submit(request_id, header, arrays, extent_bytes(len(_encode(header)), plan.nbytes))
        return request_id

    def _submit(self, request_id: int, header: WorkHeader, arrays: list[Any], nbytes: int) -> None:
        lease = self._space.lease(nbytes)
        assert lease is not None
        length = write_extent(lease.view, _encode(header), header.arrays, arrays)
        assert self.attachment.push(SUBMIT, 0, request_id, lease.address, length, FAR_NS)
        lease.hand_over(request_id)
        self._leases[request_id] = lease

    @property
    def num_encoding(self) -> int:
        """Requests to encode that were not answered."""
        return len(self._leases) - len(self.answers) - len(self.encoded)

    def cancel(self, request_id: int) -> None:
        set_cancelled(self._leases[request_id].view)

    def stop(self, request_id: int, choice: int) -> None:
        set_stopped(self._leases[request_id].view, choice)

    def drain(self) -> None:
        """Read what came, and give its extents back."""
        for descriptor in self.attachment.drain():
            view = self.attachment.view(descriptor) if descriptor.length else None
            if descriptor.kind == TOKENS:
                assert view is not None
                self.answers.read_tokens(view)
            elif descriptor.request_id in self.answers:
                self.answers.read_end(descriptor.kind, descriptor.request_id, view)
                self._leases[descriptor.request_id].end()
            else:
                assert descriptor.kind == REPLY
                self.encoded.append(descriptor.request_id)
                self._leases[descriptor.request_id].end()
            if view is not None:
                self.attachment.push_release([descriptor.offset])


class FaultyStub(StubGenerator):
    """A stub whose next steps fail as a test wants: each of `faults` is raised by one, before or behind its writing."""

    def __init__(self, card: ModelCard, block_tokens: int) -> None:
        super().__init__(card, block_tokens)
        self.faults: list[tuple[Exception, bool]] = []
        self.lengths: list[list[int]] = []
        """Tokens of each slot of each step."""

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[tuple[Chosen, ...]]:
        fault, is_late = self.faults.pop(0) if self.faults else (None, True)
        if fault is not None and not is_late:
            raise fault
        self.lengths.append([len(slot.token_ids) for slot in slots])
        chosen = super().run_step(slots, copies)
        if fault is not None:
            raise fault
        return chosen


class AheadStub(FaultyStub):
    """A stub that computes a launched step only when it is read, or when a later step is, as a device in its time does.

    What the engine gave it may have changed by then: it keeps copies, as a device has its own.
    """

    generates_ahead = True

    def __init__(self, card: ModelCard, block_tokens: int) -> None:
        super().__init__(card, block_tokens)
        self.launch_faults: list[Exception] = []
        """Each is raised by one launch."""
        self.num_launched = self.num_behind = 0
        """Steps that were launched, and those of them behind one that was not read."""
        self.is_on_host: Callable[[Slot], bool] = lambda _slot: False
        """Whether only the host can finish a slot's draw."""
        self._under_way: list[_Launched] = []

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[tuple[Chosen, ...]]:
        if self._under_way:
            pytest.fail("a step runs whole beside another")
        return super().run_step(slots, copies)

    def launch_step(
        self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()
    ) -> Callable[[], Sequence[SlotResult | None]]:
        draws = [draw for slot in slots for draw in slot.draws]
        if any(slot.scored for slot in slots) or any(draw.matcher or draw.seen for draw in draws):
            pytest.fail("a step that needs the host was launched")  # not an error that the engine may recover from
        if self.launch_faults:
            raise self.launch_faults.pop(0)
        self.num_launched += 1
        self.num_behind += bool(self._under_way)
        if len(self._under_way) > 1:
            pytest.fail("a third step is under way")
        own = [slot._replace(token_ids=slot.token_ids.copy(), blocks=list(slot.blocks)) for slot in slots]
        launched = _Launched(own, list(copies), self._under_way[-1] if self._under_way else None)
        self._under_way.append(launched)

        def read() -> Sequence[SlotResult | None]:
            if self._under_way[0] is not launched:
                pytest.fail("a step is read before the one before")
            try:
                chosen = self._compute(launched)
            finally:
                del self._under_way[0]
            return [None if self.is_on_host(slot) else found for slot, found in zip(own, chosen, strict=True)]

        return read

    def _compute(self, launched: _Launched) -> Sequence[tuple[Chosen, ...]]:
        if launched.chosen is None:
            before = launched.before
            drawn = [] if before is None else self._drawn(before)
            for slot in launched.slots:
                if slot.drawn is not None:
                    slot.token_ids[0] = drawn[slot.drawn]
            launched.before = None
            launched.chosen = super().run_step(launched.slots, launched.copies)
        return launched.chosen

    def _drawn(self, launched: _Launched) -> list[int]:
        """Return what a device takes for the tokens of a step; a draw that it cannot finish has a wrong one."""
        found = zip(launched.slots, self._compute(launched), strict=True)
        return [0 if self.is_on_host(slot) else one.token_id for slot, chosen in found for one in chosen]


class _Launched:
    """A step on the way."""

    def __init__(self, slots: list[Slot], copies: list[tuple[int, int]], before: _Launched | None) -> None:
        self.slots, self.copies, self.before = slots, copies, before
        self.chosen: Sequence[tuple[Chosen, ...]] | None = None


class EngineRig:
    """One engine and its frontends: of a stub with these options, or of another runner."""

    def __init__(
        self, options: str = "blocks=64", *, block_tokens: int = 8, runner: GenerateRunner | None = None, **limits: Any
    ) -> None:
        self.runner: Any = runner or FaultyStub(make_card(options), block_tokens)
        defaults = {"max_sequences": 64, "max_prefill_tokens": 64}
        self.engine = Engine(self.runner, EngineLimits(**{**defaults, **limits}))
        self.frontend = Frontend()
        self.now_ns = 1
        self.begun: list[Begin] = []
        self.ooms: list[bool] = []
        self.sizes: list[StepSize] = []
        self._num_jobs = 0

    def submit(
        self,
        prompt: Sequence[int] | bytes,
        *,
        max_tokens: int = 1000,
        frontend: Frontend | None = None,
        deadline_ns: int = FAR_NS,
        is_alone: bool = False,
        **task: Any,
    ) -> Answer:
        """Submit a prompt; task are fields of its `GenerateTask`."""
        asked = GenerateTask(max_tokens, **{"sampling": Sampling(temperature=0.0), **task})
        link = frontend or self.frontend
        request = link.submit(list(prompt), asked, deadline_ns=deadline_ns, flags=FLAG_ALONE * is_alone)
        self._num_jobs += 1
        job = Job(
            request, read_task(request, self.runner.card), len(prompt), number=self._num_jobs,
            eos_token_ids=self.runner.card.generate.eos_token_ids, bans=self.runner.card.generate.bans, is_alone=is_alone, arrived_ns=self.now_ns,
            decoder_start_id=self.runner.card.generate.decoder_start_id,
        )  # fmt: skip
        self.engine.add(job)
        first = self.runner.compile_grammar(asked.grammar_kind, asked.grammar) if asked.grammar else None
        self.engine.start(job, [first.fork() for _ in range(asked.num_choices)] if first is not None else [])
        return link.answers[request.request_id]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_ns += 1_000_000
            self.engine.tend(self.now_ns)
            ended = self.engine.step(lambda: self.now_ns, self.begun.append, self.ooms.append)
            if ended is not None:
                self.sizes.append(ended.size)

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing runs."""
        for _ in range(max_steps):
            if not self.engine.can_run:
                break
            self.step()
        assert not self.engine.can_run, f"not done within {max_steps} steps"

    @property
    def num_used(self) -> int:
        return self.engine.planner.pool.num_used

    def assert_all_given_back(self) -> None:
        """Assert that nothing is left of any request."""
        assert self.num_used == 0
        assert not self.engine.jobs
        assert not self.engine.is_unsent
        assert not self.frontend.num_leased
