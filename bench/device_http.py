"""Measures how long a lone client waits for a short text's vector over HTTP, from a server on the device."""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.device import Session, build_random, call_times
from bench.server import running_server

_WORDS: Final = 8
"""Words of the text, each one token; two special tokens are added."""
_SECONDS, _QUICK_SECONDS = 3.0, 0.3
_WARM_UPS: Final = 20
_START_S: Final = 90.0
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def measure_lone(session: Session, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the latencies of one connection whose requests have one text, to a BERT of these values.

    Where the server does not start, the figures are missing and `absent` says why.
    """
    device = "cpu:1" if session.device == "cpu" else session.device
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as folder:
        directory = _write(Path(folder) / "lone", values)
        arguments = (
            "--model", f"lone={directory}", "--devices", device, "--dtype", "bfloat16", "--runtime-dir", f"{folder}/run",
            "--cache-dir", f"{folder}/cache", "--state-dir", f"{folder}/state",
        )  # fmt: skip
        try:
            with running_server(*arguments, timeout_s=_START_S) as server:
                return _latencies(server.target.port, _QUICK_SECONDS if session.is_quick else _SECONDS)
        except (RuntimeError, OSError) as error:
            return {"absent": (str(error).strip().splitlines() or ["no answer"])[-1][:300]}


def _write(directory: Path, values: Mapping[str, Any]) -> Path:
    """Write a checkpoint of random weights with a tokenizer that knows some words; return its directory."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    build_random("bert", values, "cpu").save_pretrained(directory)
    words = [*_SPECIAL, *(f"w{number}" for number in range(200))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=256, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(directory)  # fmt: skip
    return directory


def _latencies(port: int, seconds: float) -> dict[str, Any]:
    text = " ".join(f"w{number}" for number in range(_WORDS))
    body = json.dumps({"items": [{"text": text}]})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)) as connection:
        ask = partial(_ask, connection, body)
        for _ in range(_WARM_UPS):
            ask()
        began_s = time.perf_counter()
        times = call_times(ask, seconds)
        spent_s = time.perf_counter() - began_s
    p50_ms, p99_ms = (1e3 * np.percentile(times, (50, 99))).tolist()
    return {
        "tokens": _WORDS + 2, "requests": len(times), "p50_ms": p50_ms, "p99_ms": p99_ms, "max_ms": 1e3 * max(times),
        "requests_per_s": len(times) / spent_s,
    }  # fmt: skip


def _ask(connection: http.client.HTTPConnection, body: str) -> None:
    headers = {"content-type": "application/json", "accept": "application/json"}
    connection.request("POST", "/v1/encode/lone", body, headers)
    with connection.getresponse() as response:
        answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {answer[:200].decode(errors='replace')}")
