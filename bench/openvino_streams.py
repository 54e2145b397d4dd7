"""Generates streams of text with OpenVINO GenAI in its own environment: its continuous batching, in process.

A question is {"prompts": texts, "tokens": of each, "temperature": 0 for the likeliest}. The answer has, for each stream, the seconds to its first token and to its end.
Prefixes are not kept: each prompt has to be read.
"""

from __future__ import annotations

import argparse
import time
from importlib import metadata
from typing import Any

from bench.questions import Answer, answer_questions

_CACHE_GIB = 2


def _load(directory: str, threads: int) -> tuple[dict[str, Any], Answer]:
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]  # only where it is installed

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = _CACHE_GIB, False
    pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig(max_new_tokens=question["tokens"], ignore_eos=True)
        if question["temperature"]:
            config.do_sample, config.temperature = True, question["temperature"]
        began_s = time.perf_counter()
        handles = [pipeline.add_request(place, text, config) for place, text in enumerate(question["prompts"])]
        first_s, all_s, counts = ([0.0] * len(handles) for _ in range(3))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now_s = time.perf_counter() - began_s
            for place, handle in enumerate(handles):
                if handle.can_read():
                    counts[place] += sum(len(output.generated_ids) for output in handle.read().values())
                    first_s[place] = first_s[place] or now_s
                    all_s[place] = now_s
        if any(count != question["tokens"] for count in counts):
            raise RuntimeError(f"not {question['tokens']} tokens: {counts}")
        return {"first_s": first_s, "all_s": all_s}

    return {"version": f"openvino-genai {metadata.version('openvino-genai')}"}, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a converted model")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    answer_questions(lambda: _load(args.model, args.threads))


if __name__ == "__main__":
    main()
