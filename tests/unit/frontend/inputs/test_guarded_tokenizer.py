"""Texts for a tokenizer whose rules may take long: read as ever if a trial was quick, refused in time if not."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from sie.frontend.inputs import guarded_tokenizer
from sie.frontend.inputs.guarded_tokenizer import GuardedTokenizer
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal

HARMS = ("x" * 20 + "z") * 400
"""8 KB for which the expression takes 6 s, each of its matches just under the library's own limit."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the trial as long as it takes to get a core; its processor time is limited as ever."""
    monkeypatch.setattr(guarded_tokenizer, "_WAIT_S", 50.0)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    gc.collect()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), made).result()  # so that closed connections are let go
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def saved(tmp_path: Path, pattern: str) -> ModelCard:
    library = Library(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "z": 3}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(pattern), "isolated")]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    return ModelCard(id="m", kind="encoder", tokenizer_file=str(tmp_path / "tokenizer.json"), max_sequence_length=64)


@pytest.mark.usefixtures("patient")
def test_quick_text_has_the_tokens_of_the_library(tmp_path: Path, loop: asyncio.AbstractEventLoop):
    card = saved(tmp_path, "(x+x+)+y|a|b")
    guarded, plain = Tokenizer.load(card, loop), Tokenizer.load(card)
    assert isinstance(guarded.backend, GuardedTokenizer)
    assert guarded.pool is not None
    assert not guarded.may_read_now(["a"])
    assert plain.may_read_now(["a"])
    for texts in (["a b z ab"], ["a", "b b"], ["a " * 10_000]):
        assert guarded.encode_texts(texts)[0].tolist() == plain.encode_texts(texts)[0].tolist()
    assert guarded.encode_pairs("a", ["b", "z"])[0].tolist() == plain.encode_pairs("a", ["b", "z"])[0].tolist()
    assert guarded.backend.encode_batch([["a", "b"]], is_pretokenized=True)[0].ids == [1, 2]
    with pytest.raises(BadRequest, match="surrogate"):
        guarded.encode_texts(["\ud800"])


@pytest.mark.timing
def test_text_that_takes_long_is_refused_and_the_next_one_read(tmp_path: Path, loop: asyncio.AbstractEventLoop):
    tokenizer = Tokenizer.load(saved(tmp_path, "(x+x+)+y"), loop)
    tokenizer.encode_texts(["a"])
    began_s = time.monotonic()
    with pytest.raises(BadRequest, match="takes too long for a text"):
        tokenizer.encode_texts([HARMS])
    assert time.monotonic() - began_s < 4.0
    assert tokenizer.encode_texts(["a b"])[0].tolist() == [1, 2]


@pytest.mark.usefixtures("patient")
def test_text_on_which_the_library_gives_up_is_an_error(tmp_path: Path, loop: asyncio.AbstractEventLoop):
    tokenizer = Tokenizer.load(saved(tmp_path, "(x+x+)+y"), loop)
    with pytest.raises((Internal, BadRequest)):
        tokenizer.encode_texts(["x" * 40])
    assert tokenizer.encode_texts(["a b"])[0].tolist() == [1, 2]


@pytest.mark.usefixtures("patient")
def test_process_ends_with_its_tokenizer(tmp_path: Path, loop: asyncio.AbstractEventLoop):
    others = psutil.Process().children()
    tokenizer = Tokenizer.load(saved(tmp_path, r"\s+$"), loop)
    tokenizer.encode_texts(["a"])
    [process] = [
        child
        for child in psutil.Process().children()
        if child not in others and "split_trial" in " ".join(child.cmdline())
    ]
    del tokenizer
    gc.collect()
    process.wait(60)
