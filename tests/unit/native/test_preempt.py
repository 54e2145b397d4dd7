"""Other threads run while a library reads a large vocabulary under the interpreter lock, and what it reads is right."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
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

    _, blind = turns_during(lambda: Tokenizer.from_file(str(path)))
    tokenizer, seen = turns_during(read)
    assert seen > 10 > blind
    assert tokenizer.encode("abcab").tokens == Tokenizer.from_file(str(path)).encode("abcab").tokens == ["abc", "ab"]
    held = [tokenizer]
    del tokenizer
    free(held)
    assert held == []


def test_other_threads_run_while_a_grammars_vocabulary_is_read(path: Path) -> None:
    from llguidance import LLTokenizer

    def read() -> LLTokenizer:
        with preempted("llguidance"):
            return LLTokenizer(str(path))

    tokenizer, seen = turns_during(read)
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
