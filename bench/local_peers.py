"""Asks llama.cpp and mistral.rs to generate, each in its own environment. Reads GGUF files only.

llama.cpp is driven through `llama_decode` itself, all streams in one batch a step, without its own sampling: the
likeliest token is looked up in the logits. mistral.rs takes texts, one stream each; tokens count from when all streams have
their first.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import cycle, islice
from typing import Any

from bench.questions import Answer
from bench.timed_generation import Arguments, Instants, Prompts, answer_by_steps, now, timed

_ROOM_TOKENS = 2048
"""Of each stream's context."""
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_WORDS = (
    "river stone market window garden winter bridge letter engine summer harbor island forest silver morning evening"
)


class _LlamaSteps:
    """Contexts of one model, one for each number of streams."""

    def __init__(self, model: Any, threads: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]  # only where it is installed

        self._api = llama_cpp
        self._model = model
        self._threads = threads
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._contexts: dict[int, Any] = {}
        self._batch = llama_cpp.llama_batch_init(_ROOM_TOKENS, 0, 1)
        self._context: Any = None
        self._ends: list[int] = []
        self._last: list[int] = []

    def read(self, prompts: Prompts) -> None:
        count = len(prompts)
        self._context = self._contexts.get(count) or self._contexts.setdefault(count, self._new_context(count))
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._ends, self._last = [0] * count, [0] * count
        self._decode(prompts)

    def step(self) -> None:
        self._decode([(token,) for token in self._last])

    def _decode(self, parts: Prompts) -> None:
        """Run the next tokens of each stream, and look up the likeliest behind the last of them."""
        import numpy as np

        batch, size, drawn = self._batch, 0, list[int]()
        for stream, ids in enumerate(parts):
            for token in ids:
                batch.token[size], batch.pos[size], batch.logits[size] = token, self._ends[stream], 0
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, stream
                self._ends[stream] += 1
                size += 1
            batch.logits[size - 1] = 1
            drawn.append(size - 1)
        batch.n_tokens = size
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode ended with {status}")
        for stream, place in enumerate(drawn):
            logits = self._api.llama_get_logits_ith(self._context, place)
            self._last[stream] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def _new_context(self, num_streams: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = num_streams * _ROOM_TOKENS
        params.n_batch = _ROOM_TOKENS
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = self._threads
        params.swa_full = False  # what its own server does: layers with a window keep no more than that
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        return context


def load_llama_cpp(args: Arguments) -> tuple[dict[str, Any], Answer]:
    """Return its version, features of the processor included, and what answers. Raises RuntimeError."""
    import llama_cpp  # pyright: ignore[reportMissingImports]  # only where it is installed

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(args.model).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp did not read the file")
    steps = _LlamaSteps(model, args.threads)
    built = llama_cpp.llama_print_system_info().decode().strip(" |")
    version = f"llama-cpp-python {metadata.version('llama_cpp_python')} ({built})"
    return {"version": version}, answer_by_steps(steps, steps.vocabulary)


def load_mistralrs(args: Arguments) -> tuple[dict[str, Any], Answer]:
    """Return its version and what answers; the number of threads is rayon's, an environment variable."""
    import mistralrs  # pyright: ignore[reportMissingImports]  # only where it is installed

    which = mistralrs.Which.GGUF(str(args.model.parent), args.model.name)
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(_PLAIN_TEMPLATE)
        template.flush()
        # Without prefixes kept from one question to the next: each prompt has to be read.
        runner = mistralrs.Runner(which=which, prefix_cache_n=0, jinja_explicit=template.name)
    words_a_token = len(_WORDS.split()) / len(runner.tokenize_text(_WORDS, False, None))

    def answer(question: dict[str, Any]) -> dict[str, float]:
        began = now()
        # Of different lengths: prompts of one length go into one step, on which it fails on a CPU (0.9.5).
        counts = [round(words_a_token * question["prompt"]) + stream for stream in range(question["streams"])]
        streams = [
            runner.send_chat_completion_request(
                mistralrs.ChatCompletionRequest(
                    messages=[{"role": "user", "content": " ".join(islice(cycle(_WORDS.split()), count))}], model="default",
                    max_tokens=question["tokens"], temperature=0.0, ignore_eos=True, stream=True,
                )
            )
            for count in counts
        ]  # fmt: skip
        with ThreadPoolExecutor(len(streams)) as pool:
            read = list(pool.map(_read_stream, streams))
        if any(len(times) != question["tokens"] for times, _ in read):
            raise RuntimeError(f"not {question['tokens']} tokens: {[len(times) for times, _ in read]}")
        first = max(times[0] for times, _ in read)
        last = max(times[-1] for times, _ in read)
        later = sum(time.wall_s > first.wall_s for times, _ in read for time in times)
        return timed(first.since(began), sum(count for _, count in read), last.since(first), later)

    return {"version": f"mistralrs {metadata.version('mistralrs')}"}, answer


def _read_stream(stream: Any) -> tuple[list[Instants], int]:
    """Return when each token came, and the number of the prompt's."""
    times: list[Instants] = []
    num_prompt = 0
    for chunk in stream:
        times.append(now())
        num_prompt = chunk.usage.prompt_tokens if chunk.usage else num_prompt
    return times, num_prompt
