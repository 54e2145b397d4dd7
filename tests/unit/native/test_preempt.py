"""Other threads run while a library reads a large vocabulary under the interpreter lock, and its result is right."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sie import native
from sie.native.preempt import free, preempted
from tests.large_tokenizer import save_large

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled library is not built")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large(tmp_path_factory.mktemp("large") / "tokenizer.json", num_chars=40)


def most_turns_during(work: Callable[[], Any], enough: int) -> tuple[Any, int]:
    """Return what work returns, and how many turns another thread had meanwhile.

    Work runs again where these are not enough: a busy machine may leave the other thread without a core all the time.
    """
    for _ in range(20):
        found, num_turns = turns_during(work)
        if num_turns > enough:
            break
    return found, num_turns


@pytest.fixture
def greedy_threads() -> Iterator[None]:
    """Have threads let go of the interpreter only where their code does, and not when another one has waited."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


def turns_during(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what work returns, and how many turns another thread had meanwhile."""
    turns, is_over = [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            turns[0] += 1
            time.sleep(0.0005)

    other = threading.Thread(target=count)
    other.start()
    while not turns[0]:
        time.sleep(0.0005)
    before = turns[0]
    found, after = work(), turns[0]
    is_over.set()
    other.join()
    return found, after - before


def test_other_threads_run_while_a_tokenizer_is_read_and_freed(path: Path) -> None:
    from tokenizers import Tokenizer

    def read() -> Tokenizer:
        with preempted("tokenizers"):
            return Tokenizer.from_file(str(path))

    tokenizer, seen = most_turns_during(read, 10)
    assert seen > 10
    assert tokenizer.encode("abcab").tokens == Tokenizer.from_file(str(path)).encode("abcab").tokens == ["abc", "ab"]
    held = [tokenizer]
    del tokenizer
    free(held)
    assert held == []


@pytest.mark.usefixtures("greedy_threads")
def test_no_other_thread_runs_while_a_tokenizer_is_read_without_help(path: Path) -> None:
    """Else the test above proves nothing."""
    from tokenizers import Tokenizer

    _, blind = turns_during(lambda: Tokenizer.from_file(str(path)))
    assert blind < 10


def test_other_threads_run_while_a_grammars_vocabulary_is_read(path: Path) -> None:
    from llguidance import LLTokenizer

    def read() -> LLTokenizer:
        with preempted("llguidance"):
            return LLTokenizer(str(path))

    tokenizer, seen = most_turns_during(read, 20)
    assert seen > 20
    assert tokenizer.tokenize_str("abcab") == LLTokenizer(str(path)).tokenize_str("abcab")


def test_many_readers_beside_many_threads_all_come_to_their_end(path: Path) -> None:
    from tokenizers import Tokenizer

    texts, found, failures = ["ab ba abc"] * 50, [], []
    small = Tokenizer.from_file(str(path))

    def read() -> None:
        try:
            with preempted("tokenizers"):
                found.append(Tokenizer.from_file(str(path)).get_vocab_size())
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        assert len(small.encode_batch_fast(texts)) == len(texts)
        assert sum(len(str(number)) for number in range(1000)) == 2890
    assert not failures
    assert found == [small.get_vocab_size()] * 4


def test_an_error_of_the_library_is_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    broken = tmp_path / "tokenizer.json"
    broken.write_text("{" * 1000)
    with pytest.raises(Exception, match=r"key must be a string|expected|EOF"), preempted("tokenizers"):
        Tokenizer.from_file(str(broken))
    assert sys.getswitchinterval() == pytest.approx(0.005)


def run(program: str, *arguments: str) -> None:
    """Run a program in a process of its own, since threads that wait for each other stop the whole process."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_readers_of_tokenizers_with_regular_expressions_do_not_stop_each_other(tmp_path: Path) -> None:
    run(
        """
import sys, threading, time
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from sie.native.preempt import preempted
words = r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+(?!\\S)"
tokenizer = Tokenizer(models.BPE({"a": 0}, []))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated")] * 50)
tokenizer.save(sys.argv[1])
def read():
    while time.monotonic() < ends:
        with preempted("tokenizers"):
            Tokenizer.from_file(sys.argv[1])
ends = time.monotonic() + 1
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
        str(tmp_path / "tokenizer.json"),
    )


def test_a_reader_beside_busy_threads_comes_to_its_end(path: Path) -> None:
    run(
        """
import sys, threading
from tokenizers import Tokenizer
from sie.native.preempt import preempted
is_over = False
def compute():
    while not is_over: sum(range(1000))
threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads: thread.start()
with preempted("tokenizers"):
    Tokenizer.from_file(sys.argv[1])
is_over = True
""",
        str(path),
    )


def test_a_process_ends_well_while_a_daemon_thread_reads(path: Path) -> None:
    run(
        """
import sys, threading, time
from tokenizers import Tokenizer
from sie.native.preempt import preempted
begins = threading.Event()
def read():
    with preempted("tokenizers"):
        begins.set()
        Tokenizer.from_file(sys.argv[1])
threading.Thread(target=read, daemon=True).start()
begins.wait()
for _ in range(20): time.sleep(0.001)
""",
        str(path),
    )
