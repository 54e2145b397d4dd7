"""Run one library in this process and answer questions about its speed (`bench.questions`). Needs that library alone.

A question has texts, and either items and seconds (encode them, so many at a time, again and again for so long; 0 is once,
to warm up) or vectors (write their vectors there).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.questions import Answer, answer_questions

BATCH = 32
"""Texts at a time where a library has no way of its own."""
_STEP_TOKENS = {"cpu": 1024}
_GPU_STEP_TOKENS = 16384
"""What `max_step_tokens` is by default."""
Encode = Callable[[list[str]], tuple[Any, int]]
"""Texts to (n, d) vectors and the number of tokens, special ones included."""


def main() -> None:
    args = _parse_args()
    package, load = LIBRARIES[args.name]

    def start() -> tuple[dict[str, Any], Answer]:
        encode = load(args)
        return {"version": metadata.version(package)}, lambda question: _answer(encode, question)

    answer_questions(start)


def _answer(encode: Encode, question: dict[str, Any]) -> dict[str, Any]:
    if "vectors" not in question:
        return _time(encode, question["texts"], question["items"], question["seconds"])
    np.save(question["vectors"], encode(question["texts"])[0])
    return {}


def _time(encode: Encode, texts: list[str], items: int, seconds: float) -> dict[str, float]:
    """Encode all the texts again and again, whole turns only, until the time is over."""
    batches = [texts[start : start + items] for start in range(0, len(texts), items)]
    num_texts = num_tokens = 0
    times_ms: list[float] = []
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while not num_texts or time.perf_counter() - began_s < seconds:
        for batch in batches:
            call_s = time.perf_counter()
            num_tokens += encode(batch)[1]
            times_ms.append(1e3 * (time.perf_counter() - call_s))
        num_texts += len(texts)
    spent = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    p50_ms, p99_ms = np.percentile(times_ms, (50, 99)).tolist()
    return {"texts": num_texts, "tokens": num_tokens, "p50_ms": p50_ms, "p99_ms": p99_ms, **spent}


def sentence_transformers(args: argparse.Namespace) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(args.threads)
    model = SentenceTransformer(
        args.model, device=args.device, model_kwargs={"dtype": getattr(torch, args.dtype)}, local_files_only=True
    )

    def encode(texts: list[str]) -> tuple[Any, int]:
        rows = model.encode(texts, batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
        return rows, _count_tokens(texts, _max_length(args.model))

    return encode


def onnxruntime(args: argparse.Namespace) -> Encode:
    import onnxruntime as ort
    import torch

    options = ort.SessionOptions()
    options.intra_op_num_threads = args.threads
    pooled, tokenizer = _pooled_model(args.model), _padding_tokenizer(args.model)
    example = torch.ones(2, 8, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        axes = {0: "n", 1: "t"}
        torch.onnx.export(
            pooled, (example, example), f"{folder}/model.onnx", dynamo=False, input_names=["ids", "mask"],
            output_names=["dense"], dynamic_axes={"ids": axes, "mask": axes},
        )  # fmt: skip
        session = ort.InferenceSession(f"{folder}/model.onnx", options)
    return _in_batches(tokenizer, lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0])


def openvino(args: argparse.Namespace) -> Encode:
    import openvino as ov  # pyright: ignore[reportMissingImports]  # only where it is installed
    import torch

    example = torch.ones(2, 8, dtype=torch.int64)
    model = ov.convert_model(_pooled_model(args.model), example_input=(example, example))
    precision = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    streams = args.threads
    compiled = ov.Core().compile_model(
        model,
        "CPU",
        {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": args.threads},
    )
    tokenizer = _padding_tokenizer(args.model)

    def encode(texts: list[str]) -> tuple[Any, int]:
        done: dict[int, Any] = {}
        queue = ov.AsyncInferQueue(compiled, streams)
        queue.set_callback(lambda request, number: done.__setitem__(number, request.get_output_tensor(0).data.copy()))
        order, batches, num_tokens = _batches(tokenizer, texts)
        for number, inputs in enumerate(batches):
            queue.start_async(inputs, number)
        queue.wait_all()
        return _in_order(order, [done[number] for number in range(len(batches))]), num_tokens

    return encode


def sie_engine(args: argparse.Namespace) -> Encode:
    """Run what a frontend and a worker do between them: tokenise, pack into steps, run, finish; no wire, no rings."""
    import torch

    from sie import native
    from sie.catalog.cards import make_card
    from sie.catalog.spec import ModelSpec
    from sie.frontend.inputs.tokenize import Tokenizer
    from sie.workers.loading.loader import load_encoder

    torch.set_num_threads(args.threads)
    native.allow(allowed=args.kernels)
    card = make_card(ModelSpec(id="model", directory=args.model, encoder_weights=args.weights), args.model)
    runner: Any = load_encoder(card, args.device, args.dtype, lambda _fraction, _text: None)
    tokenizer = Tokenizer.load(card)
    budget = _STEP_TOKENS.get(args.device, _GPU_STEP_TOKENS)

    def encode(texts: list[str]) -> tuple[Any, int]:
        ids, bounds = tokenizer.encode_texts(texts)
        items = [ids[start:end] for start, end in itertools.pairwise(bounds.tolist())]
        rows: list[Any] = []
        step: list[Any] = []
        for item in (*items, None):
            if item is None or sum(map(len, step)) + len(item) > budget:
                rows.append(runner.run_tokens(step))
                step = []
            step.append(item)
        return np.concatenate(rows), len(ids)

    return encode


def _pooled_model(directory: str) -> Any:
    """Return the transformer with mean pooling and unit length, in fp32: what other runtimes convert."""
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(directory, attn_implementation="eager", local_files_only=True)

        def forward(self, ids: Any, mask: Any) -> Any:
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            seen = mask[..., None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * seen).sum(1) / seen.sum(1), dim=-1)

    return Pooled().eval()


def _padding_tokenizer(directory: str) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
    tokenizer.enable_truncation(_max_length(directory))
    tokenizer.enable_padding()
    return tokenizer


def _max_length(directory: str) -> int:
    return int(json.loads(Path(directory, "sentence_bert_config.json").read_text())["max_seq_length"])


def _batches(tokenizer: Any, texts: list[str]) -> tuple[list[int], list[list[Any]], int]:
    """Return the order by length, batches of padded ids and masks, and the number of tokens without padding."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    batches: list[list[Any]] = []
    num_tokens = 0
    for start in range(0, len(order), BATCH):
        encoded = tokenizer.encode_batch([texts[number] for number in order[start : start + BATCH]])
        mask = np.array([one.attention_mask for one in encoded], np.int64)
        batches.append([np.array([one.ids for one in encoded], np.int64), mask])
        num_tokens += int(mask.sum())
    return order, batches, num_tokens


def _in_order(order: list[int], parts: list[Any]) -> Any:
    rows = np.concatenate(parts)
    answer = np.empty_like(rows)
    answer[order] = rows
    return answer


def _in_batches(tokenizer: Any, run: Callable[[Any, Any], Any]) -> Encode:
    def encode(texts: list[str]) -> tuple[Any, int]:
        order, batches, num_tokens = _batches(tokenizer, texts)
        return _in_order(order, [run(*batch) for batch in batches]), num_tokens

    return encode


def _count_tokens(texts: list[str], limit: int) -> int:
    """Count tokens of texts whose words are one each: sentence-transformers does not tell."""
    return sum(min(limit, len(text.split()) + 2) for text in texts)


LIBRARIES: dict[str, tuple[str, Callable[[argparse.Namespace], Encode]]] = {
    "sentence-transformers": ("sentence-transformers", sentence_transformers),
    "onnxruntime": ("onnxruntime", onnxruntime),
    "openvino": ("openvino", openvino),
    "sie": ("ringserve", sie_engine),
}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(LIBRARIES))
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True, help="sie: the compiled ones")
    parser.add_argument("--weights", choices=["auto", "int8"], default="auto", help="sie: of linear layers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
