"""Run one library that generates in this process and answer questions about its speed (`bench.timed_generation`).

Needs that library alone; those of other environments are in `bench.local_peers`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.local_peers import load_llama_cpp, load_mistralrs
from bench.questions import Answer, answer_questions
from bench.timed_generation import Arguments, Prompts, answer_by_requests, answer_by_steps, make_prompts
from sie import __version__

_STEP_TOKENS = 512
"""What a step takes of prompts on a CPU by default while nothing decodes."""

Part = tuple[int, Sequence[int], int]
"""A stream's number, its next tokens, and the place of the first one."""


class SieSteps:
    """A worker's own steps, the engine left out: a step is asked for as soon as the last one ends."""

    def __init__(self, runner: Any, step_tokens: int = _STEP_TOKENS) -> None:
        """Take a loaded model, and the most tokens of prompts in a step."""
        from sie.values.generate import Sampling

        self._runner = runner
        self._step_tokens = step_tokens
        self._greedy = Sampling(temperature=0.0)
        self._blocks: list[range] = []
        self._ends: list[int] = []
        self.last: list[int] = []
        """The token that was chosen last, of each stream."""

    def read(self, prompts: Prompts) -> None:
        per_stream = self._runner.num_blocks // len(prompts)
        self._blocks = [range(place * per_stream, (place + 1) * per_stream) for place in range(len(prompts))]
        self._ends = [len(prompt) for prompt in prompts]
        self.last = [0] * len(prompts)
        parts: list[Part] = []
        for stream, prompt in enumerate(prompts):
            for first in range(0, len(prompt), self._step_tokens):
                part = prompt[first : first + self._step_tokens]
                if sum(len(ids) for _, ids, _ in parts) + len(part) > self._step_tokens:
                    self._run(parts)
                    parts = []
                parts.append((stream, part, first))
        self._run(parts)

    def step(self) -> None:
        self._run(self._next_parts())

    def step_ahead(self, count: int) -> None:
        """Choose `count` more tokens of each, as the engine does on a GPU: a step begins before the one before is read."""
        read = None
        for _ in range(count):
            parts = self._next_parts()
            slots = self._slots(parts)
            if read is not None:
                slots = [slot._replace(drawn=stream) for stream, slot in enumerate(slots)]
            before, read = read, self._runner.launch_step(slots)
            if before is not None:
                self._take(parts, before())
        if read is not None:
            self._take(self._parts(), read())

    def rewind(self, count: int, tokens: Sequence[int]) -> None:
        """Go back by `count` steps, to where these tokens were the last ones; their successors are computed again."""
        self._ends = [end - count for end in self._ends]
        self.last = list(tokens)

    def _parts(self) -> list[Part]:
        return [(stream, (token,), self._ends[stream]) for stream, token in enumerate(self.last)]

    def _next_parts(self) -> list[Part]:
        parts = self._parts()
        self._ends = [end + 1 for end in self._ends]
        return parts

    def _run(self, parts: Sequence[Part]) -> None:
        self._take(parts, self._runner.run_step(self._slots(parts)))

    def _slots(self, parts: Sequence[Part]) -> list[Any]:
        import numpy as np

        from sie.workers.model_api import Draw, Slot

        slots: list[Any] = []
        for stream, ids, start in parts:
            end = start + len(ids)
            draws = (Draw(self._greedy, 0, end),) if end == self._ends[stream] else ()
            blocks = self._blocks[stream][: -(-end // self._runner.block_tokens)]
            slots.append(Slot(np.array(ids, np.int32), start, blocks, draws))
        return slots

    def _take(self, parts: Sequence[Part], results: Sequence[Any]) -> None:
        for (stream, _, _), chosen in zip(parts, results, strict=True):
            if chosen:
                self.last[stream] = chosen[0].token_id


def _sie(args: Arguments) -> tuple[dict[str, Any], Answer]:
    import torch

    from bench.checkpoint import read_card
    from sie.config.generation_settings import Generation
    from sie.workers.loading.loader import load_generator

    torch.set_num_threads(args.threads)
    settings = Generation(weights=args.weights)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as cache:
        card = read_card(args.model, cache)
        runner = load_generator(card, "cpu", "bfloat16", settings, lambda *_: None)
    vocabulary = int(runner.model.get_input_embeddings().weight.shape[0])
    return {"version": __version__, "read_bytes": runner.read_bytes}, answer_by_steps(SieSteps(runner), vocabulary)


def _transformers(args: Arguments) -> tuple[dict[str, Any], Answer]:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    auto: Any = transformers.AutoModelForCausalLM
    is_gguf = args.model.suffix == ".gguf"
    own = {"gguf_file": args.model.name} if is_gguf else {}
    directory = args.model.parent if is_gguf else args.model
    model = auto.from_pretrained(directory, dtype=getattr(torch, args.weights), **own).eval()
    model.generation_config.eos_token_id = None
    table = model.get_input_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters())
    read_bytes = weights if model.get_output_embeddings().weight is table else weights - table.nbytes

    def ask(question: dict[str, Any]) -> int:
        ids = torch.tensor(make_prompts(question, len(table)))
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        model.generate(ids, max_new_tokens=question["tokens"], **arguments)
        return ids.numel()

    return {"version": metadata.version("transformers"), "read_bytes": read_bytes}, answer_by_requests(ask)


_LIBRARIES: dict[str, Callable[[Arguments], tuple[dict[str, Any], Answer]]] = {
    "sie": _sie,
    "transformers": _transformers,
    "llama.cpp": load_llama_cpp,
    "mistralrs": load_mistralrs,
}


def main() -> None:
    args = _parse_args()
    answer_questions(lambda: _LIBRARIES[args.name](Arguments(args.model, args.weights, args.threads)))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(_LIBRARIES))
    parser.add_argument("--model", required=True, type=Path, help="directory of a checkpoint, or a GGUF file")
    parser.add_argument("--weights", default="bfloat16", help="format of the weights; a GGUF file's own elsewhere")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
