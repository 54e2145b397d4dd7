"""A worker process that generates: parallel streams, other models beside it, and which input is blamed when it dies."""

from __future__ import annotations

import os
import signal
import time

from sie.config.sections import Memory
from sie.config.settings import Settings
from tests.process.harness import WAIT_S, eventually, paused
from tests.process.worker_process import WorkerProcess, start_worker
from tests.unit.workers.generation_rig import MODEL, echo

SETTINGS = Settings(memory=Memory(request_segment_bytes=8 << 20, reply_segment_bytes=8 << 20))


def generator(options: str) -> str:
    return f"{MODEL}=stub:generate,{options}"


def test_sixteen_streams_make_progress_together() -> None:
    with start_worker(generator("latency_ms=2,blocks=2048"), settings=SETTINGS) as worker:
        with paused(worker.process.pid):  # so that it hears of all at once
            streams = [worker.frontend.generate(b"stream %02d" % i, ignore_eos=True, max_tokens=400) for i in range(16)]
        worker.wait(lambda: max(map(worker.num_tokens, streams)) >= 100, "a hundred tokens")
        counts = [worker.num_tokens(stream) for stream in streams]
        assert max(counts) - min(counts) <= 3, counts
        worker.wait(lambda: all(worker.frontend.answers[stream].is_over for stream in streams), "their ends")
        for number, stream in enumerate(streams):
            assert worker.frontend.answers[stream].tokens == [echo(list(b"stream %02d" % number), count=400)]
        worker.wait(lambda: worker.value("sie_kv_cache_blocks_used") == 0, "all blocks back")
        worker.wait(lambda: worker.value("sie_generated_tokens_total") == 16 * 400, "all tokens counted")
        worker.wait(lambda: worker.value("sie_sequences_completed_total") == 16, "all sequences counted")


def test_long_prompt_stalls_no_stream() -> None:
    with start_worker(generator("per_token_us=50,blocks=2048"), settings=SETTINGS) as worker:
        stream = worker.frontend.generate(b"stream", ignore_eos=True, max_tokens=4000)
        worker.wait(lambda: worker.num_tokens(stream) > 5, "the stream")
        with paused(worker.process.pid):  # or the stream may be over before the prompt comes
            before = worker.num_tokens(stream)
            long = worker.frontend.generate(bytes(65 + i % 26 for i in range(2000)), max_tokens=2)
        worker.wait(lambda: worker.num_tokens(long), "the long prompt's first token")
        # 256 tokens of the prompt a step: the stream has one in each.
        assert worker.num_tokens(stream) - before >= 2000 // 256


def test_client_that_leaves_frees_its_blocks_within_a_step() -> None:
    with start_worker(generator("latency_ms=20"), settings=SETTINGS) as worker:
        worker.frontend.generate(b"stays", ignore_eos=True)
        leaves = worker.frontend.generate(b"x" * 1000, ignore_eos=True, num_choices=4)
        worker.wait(lambda: worker.num_tokens(leaves) > 3, "both")
        assert worker.value("sie_kv_cache_blocks_used") > 30
        with paused(worker.process.pid):
            worker.frontend.drain()
            before = worker.num_tokens(leaves)
            worker.frontend.cancel(leaves)
        worker.wait(lambda: worker.frontend.answers[leaves].is_cancelled, "the end of it")
        assert worker.num_tokens(leaves) - before <= 2, "the step that ran when it left, and what that had not sent"
        worker.wait(lambda: worker.value("sie_kv_cache_blocks_used") <= 2, "its blocks")


def test_texts_and_streams_on_one_worker_both_make_progress() -> None:
    encoder = "stub/e=stub:dense=16,latency_ms=3"
    with start_worker(generator("latency_ms=3"), encoder, settings=SETTINGS) as worker:
        streams = [worker.frontend.generate(b"stream", ignore_eos=True) for _ in range(4)]

        def both_have_come_far() -> bool:
            while worker.frontend.num_encoding < 8:
                worker.frontend.encode("stub/e", b"text")
            return min(len(worker.frontend.encoded), *map(worker.num_tokens, streams)) >= 60

        worker.wait(both_have_come_far, "sixty of each")


def test_worker_that_dies_while_it_decodes_blames_nobody() -> None:
    with start_worker(generator("latency_ms=5"), settings=SETTINGS) as worker:
        stream = worker.frontend.generate(b"stream", ignore_eos=True)
        worker.wait(lambda: worker.num_tokens(stream) > 5, "the stream")
        kill(worker)
        assert worker.page.read().entries == []


def test_worker_that_a_prompt_kills_blames_that_prompt() -> None:
    options = "latency_ms=5,kill_on=poison"
    with start_worker(generator(options), settings=SETTINGS) as worker:
        stream = worker.frontend.generate(b"stream", ignore_eos=True)
        worker.wait(lambda: worker.num_tokens(stream) > 5, "the stream")
        poison = worker.frontend.generate(b"a poison prompt")
        eventually(lambda: worker.process.poll() is not None, "its death")
        status = worker.page.read()
        assert status.phase == "step"
        assert [entry.request_id for entry in status.entries] == [poison]


def test_step_that_hangs_is_found_by_its_allowance() -> None:
    with start_worker(generator("hang_on=stuck"), settings=SETTINGS) as worker:
        worker.frontend.generate(b"stuck")
        eventually(lambda: worker.page.read().phase == "step", "the step")
        status = worker.page.read()
        assert status.started_ns <= time.monotonic_ns()
        assert 0 < status.allowed_ns < 2_000_000_000


def kill(worker: WorkerProcess) -> None:
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait(WAIT_S)
