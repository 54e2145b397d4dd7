"""A tokenizer whose rules may take long: each text is first split in a confined process, within a limit of time.

Only a text that the process split quickly is read here. The calls block, so they belong on the tokenizer's own thread:
no request for another model waits for them (docs/decisions/034).
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import tokenizers

from sie.runtime.helper import Helper, HelperFailed
from sie.values.errors import BadRequest, Internal

_MODULE: Final = "sie.frontend.inputs.split_trial"
_PROCESSOR_S: Final = 0.1
_PROCESSOR_S_PER_CHAR: Final = 2e-6
"""Real rules take 0.1 to 0.5 us."""
_WAIT_S: Final = 2.0
"""Added to the processor time that an answer may take, because the process may wait for a core."""
_PATIENCE_S: Final = 60.0
"""Longest wait for an answer, with earlier texts and the start of a process; it ends if the event loop has stopped."""
_MAX_REPLY_BYTES: Final = 64
_SHORT_CHARS: Final = 16
"""Texts of our own that a caller may read on the event loop. No expression takes long for them."""

Text = str | Sequence["Text"]


class GuardedTokenizer:
    """The library's tokenizer, with the same methods; those that read texts try them first."""

    def __init__(
        self, model_id: str, library: tokenizers.Tokenizer, rules: bytes, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Guard a library's tokenizer. rules are those of `text_rules.rules_to_try`; loop runs in another thread."""
        self._model_id = model_id
        self._library = library
        self._rules = rules.decode()
        self._loop = loop
        self._helper = Helper(_MODULE)
        self.pool = ThreadPoolExecutor(1, "guarded")
        """The thread on which to read texts."""
        weakref.finalize(self, _close, loop, self._helper, self.pool).atexit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def encode(self, text: Any, **options: Any) -> tokenizers.Encoding:
        """See the library. The batch call lets other threads run."""
        return self.encode_batch([text], **options)[0]

    def encode_batch(self, texts: Any, **options: Any) -> list[tokenizers.Encoding]:
        """See the library. Raises BadRequest for texts that take too long."""
        return self._read(self._library.encode_batch, texts, options)

    def encode_batch_fast(self, texts: Any, **options: Any) -> list[tokenizers.Encoding]:
        """See the library. Raises BadRequest for texts that take too long."""
        return self._read(self._library.encode_batch_fast, texts, options)

    def _read(self, read: Callable[..., Any], texts: Sequence[Text], options: dict[str, Any]) -> Any:
        self._try(list(_flat(texts)))
        return read(texts, **options)

    def _try(self, texts: list[str]) -> None:
        num_chars = sum(map(len, texts))
        if asyncio._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]  # its public form raises
            assert num_chars <= _SHORT_CHARS, "texts are read on the tokenizer's own thread"
            return
        try:
            request = json.dumps((self._rules, texts), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise TypeError from error  # as the library
        limit_s = _PROCESSOR_S + _PROCESSOR_S_PER_CHAR * num_chars
        asking = self._helper.ask(request, timeout_s=_WAIT_S + limit_s, max_reply_bytes=_MAX_REPLY_BYTES)
        try:
            took_s = int(asyncio.run_coroutine_threadsafe(asking, self._loop).result(_PATIENCE_S)) / 1e9
        except HelperFailed:
            raise Internal(f"The tokenizer of model '{self._model_id}' failed") from None
        except TimeoutError:
            took_s = float("inf")
        if took_s > limit_s:
            raise BadRequest(
                f"The tokenizer of model '{self._model_id}' takes too long for a text: its own regular expressions may "
                f"take {limit_s:.2g} s for {num_chars} characters"
            )


def _flat(texts: Sequence[Text]) -> Iterator[str]:
    """Yield all texts, those of pairs and of split texts too."""
    for text in texts:
        if isinstance(text, str):
            yield text
        else:
            yield from _flat(text)


def _close(loop: asyncio.AbstractEventLoop, helper: Helper, pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=False)
    if not loop.is_closed():
        loop.call_soon_threadsafe(helper.close)
