"""Right answers are distinguished from wrong ones."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from sie.loadgen import DIALECTS
from sie.loadgen.channels import Response
from sie.loadgen.dialects import Answer, OpenAiEmbeddings, SieEncode, WrongAnswerError
from sie.loadgen.generator import Call
from sie.loadgen.judge import Judge, lowest_cosine
from sie.loadgen.plan import make_dialect
from sie.loadgen.runs import Run, Sample

ROWS = np.array([[3, 4], [1, 0]], np.float32)
CALLS = [Call(b"", ("one two", "three"))]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


def embeddings(rows: np.ndarray) -> Response:
    data = [
        {"index": index, "embedding": base64.b64encode(row.tobytes()).decode()}
        for index, row in reversed(list(enumerate(rows)))
    ]
    return Response("", _HEAD, msgspec.json.encode({"data": data, "usage": {"prompt_tokens": 9}}))


def run_with(response: Response) -> Run:
    run = Run("")
    run.samples.append(Sample(0, 1, response))
    run.call_counts[0] = 3
    return run


def test_the_lowest_cosine_of_any_row_counts():
    assert lowest_cosine(ROWS, ROWS) == pytest.approx(1)
    assert lowest_cosine(ROWS, np.array([[3, 4], [0, 1]], np.float32)) == pytest.approx(0)
    with pytest.raises(WrongAnswerError):
        lowest_cosine(ROWS, ROWS[:1])


def test_scores_are_compared_as_numbers():
    assert lowest_cosine(ROWS[:, :1], ROWS[:, :1] + 0.01) == 1
    assert lowest_cosine(ROWS[:, :1], ROWS[:, :1] + 0.2) == 0


def test_a_judge_passes_what_is_right_and_counts_tokens():
    judge = Judge(OpenAiEmbeddings("m", "binary"), [Answer(ROWS, 9)], CALLS)
    run = run_with(embeddings(ROWS * 2))
    assert judge.check(run) == (1, pytest.approx(1), None)
    assert judge.num_tokens(run) == 27


def test_time_beyond_the_forward_pass_is_latency_less_what_the_answer_tells():
    items = [{"dense": {"values": row}} for row in ROWS.tolist()]
    reply = {"items": items, "usage": {"input_tokens": 9}, "timing": {"inference_ms": 1.5}}
    run = Run("")
    run.samples += [
        Sample(0, latency_ns, Response("", _HEAD, msgspec.json.encode(reply))) for latency_ns in (4_000_000,) * 3
    ]
    assert Judge(SieEncode("m", "json"), [Answer(ROWS, 9)], CALLS).check(run).beyond_ms == pytest.approx(2.5)


def test_a_judge_stops_at_a_wrong_answer():
    judge = Judge(OpenAiEmbeddings("m", "binary"), [Answer(ROWS, 9)], CALLS)
    with pytest.raises(WrongAnswerError):
        judge.check(run_with(embeddings(ROWS[::-1])))


def test_tokens_that_no_answer_tells_are_those_of_the_texts():
    judge = Judge(OpenAiEmbeddings("m", "binary"), [Answer(ROWS)], CALLS)
    assert judge.num_tokens(run_with(embeddings(ROWS))) == 3 * (4 + 3)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"items": [{}], "usage": {}}', b'{"items": [], "usage": {"input_tokens": 1}}']
)
def test_a_body_of_another_form_is_a_wrong_answer(body: bytes):
    with pytest.raises(WrongAnswerError):
        SieEncode("m", "json").read(Response("", _HEAD, body))


def test_every_dialect_can_be_made():
    for name in DIALECTS:
        make_dialect(name, "m", "binary")
    with pytest.raises(ValueError, match="JSON"):
        make_dialect("trtis", "m", "json")
    with pytest.raises(ValueError, match="labels"):
        make_dialect("openai", "m", "binary", ("a",))
