from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.values.card import ModelCard
from sie.values.errors import Internal
from sie.values.extract import DetectedObject, Extraction, ExtractTask
from sie.values.work import WorkHeader
from sie.workers.model_api import ImageItem
from sie.workers.runners.stub import StubRunner


def _runner(options: str = "") -> StubRunner:
    return StubRunner(stub_card(parse_model_spec(f"a=stub:{options}")))


@pytest.mark.parametrize("dense", [1, 7, 384, 1000])
def test_value_is_signed_shake_byte_over_127(dense: int) -> None:
    text = "grün 🌲".encode()
    rows = _runner(f"dense={dense}").run_texts([text, memoryview(b"")])
    digest = hashlib.shake_256(text).digest(dense)
    expected = [(byte - 256 if byte > 127 else byte) / 127 for byte in digest]
    assert rows.shape == (2, dense)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[0], np.array(expected, dtype=np.float32))
    assert rows[1, 0] == np.float32(np.frombuffer(hashlib.shake_256(b"").digest(1), np.int8)[0] / 127)


def test_row_does_not_depend_on_its_neighbours() -> None:
    texts = [f"text {i}".encode() for i in range(9)]
    runner = _runner()
    alone = np.concatenate([runner.run_texts([text]) for text in texts])
    np.testing.assert_array_equal(runner.run_texts(texts), alone)


def test_no_texts_give_no_rows() -> None:
    assert _runner("dense=5").run_texts([]).shape == (0, 5)


def test_step_takes_its_latency_and_its_tokens() -> None:
    runner = _runner("latency_ms=20,per_token_us=1000")
    started = time.monotonic()
    runner.run_texts([b"x" * 80, b""])
    assert time.monotonic() - started >= 0.020 + 21 * 0.001


def test_load_takes_its_time() -> None:
    started = time.monotonic()
    _runner("load_ms=30")
    assert time.monotonic() - started >= 0.030


def test_card_of_an_encoder_is_refused() -> None:
    with pytest.raises(Internal):
        StubRunner(ModelCard(id="a", kind="encoder"))


def _wants(*outputs: tuple[str, ...]) -> list[WorkHeader]:
    return [WorkHeader("a", "encode", 1, (), output_types=names) for names in outputs]


def test_every_output_is_its_documented_digest() -> None:
    text = "grün 🌲 und mehr".encode()
    runner = StubRunner(stub_card(parse_model_spec("a=stub:dense=5,sparse=1000,multivector=3")))
    outputs = runner.run_wants([np.frombuffer(text, np.uint8)], _wants(("dense", "sparse", "multivector")))
    assert outputs.dense is not None
    np.testing.assert_array_equal(outputs.dense, _runner("dense=5").run_texts([text]))
    entries = outputs.ragged["sparse"][0]
    assert entries is not None
    digest = hashlib.shake_256(b"sparse" + text).digest(64)
    indices = sorted({int.from_bytes(digest[i : i + 4], "little") % 1000 for i in range(0, 64, 4)})
    assert entries[0].tolist() == indices
    np.testing.assert_allclose(entries[1], [(1 + index % 127) / 127 for index in indices], rtol=1e-6)
    rows = outputs.ragged["multivector"][0]
    assert rows is not None
    assert rows.shape == (-(-len(text) // 4), 3)
    digest = hashlib.shake_256((2).to_bytes(4, "little") + text).digest(3)
    np.testing.assert_allclose(rows[2], [(byte - 256 if byte > 127 else byte) / 127 for byte in digest], rtol=1e-6)


def test_outputs_that_nobody_wants_are_left_out() -> None:
    runner = StubRunner(stub_card(parse_model_spec("a=stub:sparse=9,multivector=3")))
    assert runner.card.outputs == ("dense", "sparse", "multivector")
    outputs = runner.run_wants([b"x", b"y"], _wants(("sparse",), ("sparse", "multivector")))
    assert outputs.dense is None
    assert [rows is None for rows in outputs.ragged["multivector"]] == [True, False]


def test_objects_of_an_image_are_their_documented_digest() -> None:
    runner = _runner("dense=4,extract,image")
    rows = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    task = ExtractTask(labels=("cat", "dog", "sofa"), threshold=0.2)
    text, image = runner.run_extract([b"one two", ImageItem((rows,))], [task, task])
    assert text == runner.run_extract([b"one two"], [task])[0]
    expected: list[DetectedObject] = []
    for label in task.labels:
        pixels = (5).to_bytes(4, "little") + (7).to_bytes(4, "little") + rows.tobytes()
        digest = hashlib.shake_256(b"object" + label.encode() + b"\0" + pixels).digest(11)
        score = int.from_bytes(digest[:3], "little") / 2**24
        left, top, right, bottom = (int.from_bytes(digest[i : i + 2], "little") for i in (3, 5, 7, 9))
        x, y = left % 7, top % 5
        if score >= 0.2:
            expected.append(DetectedObject(label, score, (x, y, 1 + right % (7 - x), 1 + bottom % (5 - y))))
    assert image == Extraction(objects=sorted(expected, key=lambda found: -found.score))
    [alone] = runner.run_extract([ImageItem((rows,))], [ExtractTask()])
    assert [found.label for found in alone.objects] == ["object"]
