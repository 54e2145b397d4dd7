"""The compilation of grammars beside the step loop, with a model whose work is done by hand."""

import select
import threading
from types import SimpleNamespace

from sie.values.errors import BadRequest
from sie.values.generate import GenerateTask, Sampling
from sie.workers.generation.grammars import Compiler
from sie.workers.generation.sequences import Job

DEADLINE_S = 30
SECOND_NS = 1_000_000_000


class SlowRunner:
    """Waits before it has read its vocabulary, and before it has compiled a grammar."""

    def __init__(self):
        self.is_read, self.is_compiled = threading.Event(), threading.Event()

    def prepare_grammars(self):
        assert self.is_read.wait(DEADLINE_S)

    def compile_grammar(self, kind, text):
        assert self.is_compiled.wait(DEADLINE_S)
        raise BadRequest(f"{kind} {text}")


def collect(compiler, now_ns):
    assert select.select([compiler.event_fd], [], [], DEADLINE_S)[0]
    compiler.collect(now_ns)


def test_the_time_of_a_grammar_starts_when_the_vocabulary_has_been_read():
    compiler, runner, ended = Compiler(timeout_s=1.0), SlowRunner(), []
    task = GenerateTask(1, 1, Sampling(), grammar_kind="regex", grammar="a")
    job = Job(SimpleNamespace(ended=False), task, 1, number=1, eos_token_ids=())
    compiler.add(job, runner, lambda _, compiled: ended.append(str(compiled)))
    try:
        compiler.tend(100 * SECOND_NS)
        assert not ended
        runner.is_read.set()
        collect(compiler, 100 * SECOND_NS)
        compiler.tend(100 * SECOND_NS + SECOND_NS // 2)
        assert not ended
        compiler.tend(101 * SECOND_NS)
        assert ended == ["grammar: it did not compile within grammar_timeout_s (1 s)"]
    finally:
        runner.is_read.set()
        runner.is_compiled.set()
    collect(compiler, 102 * SECOND_NS)
    assert (compiler.num_threads, len(ended)) == (0, 1)
