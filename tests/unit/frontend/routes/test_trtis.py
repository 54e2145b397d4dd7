"""The TensorRT Inference Server v1 API over HTTP: work that must leave the event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from sie.frontend.dialects.trtis import infer
from sie.frontend.http.exchange import Exchange
from sie.frontend.routes.trtis import Trtis
from sie.values.errors import BadRequest


@pytest.mark.parametrize(("num_dims", "leaves"), [(4, False), (15_000, True)])
def test_long_header_is_parsed_on_a_thread(monkeypatch: pytest.MonkeyPatch, num_dims: int, leaves: bool):
    """Protobuf's parser of text held the event loop for 0.2 s."""
    threads: list[int] = []

    def parse(_text: str) -> Any:
        threads.append(threading.get_ident())
        raise BadRequest("parsed")

    monkeypatch.setattr(infer, "parse_infer_head", parse)
    with ThreadPoolExecutor(1) as pool:
        process: Any = SimpleNamespace(tensors=SimpleNamespace(table={"m"}), decode_pool=pool)
        header = f'input {{ name: "x" dims: [{",".join("1" * num_dims)}] }}'
        exchange = Exchange(SimpleNamespace(headers={"nv-inferrequest": header}), None, 0)
        exchange.model = "m"
        with pytest.raises(BadRequest, match="parsed"):
            asyncio.run(Trtis(process).infer(exchange))
    assert (threads != [threading.get_ident()]) == leaves
