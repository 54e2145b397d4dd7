from __future__ import annotations

import json

import pytest

from sie.frontend.dialects.kserve.generate import Shown, TextOutputWriter
from sie.frontend.dialects.native.generate import GenerateWriter, named_model
from sie.values.errors import BadRequest, Unavailable
from sie.values.generate import Ended, Finished, GenerateUsage, Started, TextDelta
from sie.values.tensor import TensorRule

RULE = TensorRule(name="m", version="1", platform="sie_generator", inputs=(), outputs=())
ENDED = Ended(GenerateUsage(prompt_tokens=1, completion_tokens=0))


def payloads(data: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]


@pytest.mark.parametrize(
    ("path", "model"),
    [("org__m", "org/m"), ("a__b", "a__b"), ("org__m.1", "org/m.1"), ("org__m_dot_1", "org/m.1"), ("x__y", "x/y")],
)
def test_a_path_names_a_known_model_first(path, model):
    assert named_model(path, {"org/m", "a__b", "org/m.1", "x_dot_y"}) == model


def test_a_slash_is_refused_with_the_right_spelling():
    with pytest.raises(BadRequest, match="'a__b'"):
        named_model("a/b", {"a/b"})


def test_an_error_ends_a_native_stream():
    writer = GenerateWriter("id")
    writer.write([Started(1, 0), TextDelta(0, "a")])
    chunk, done = payloads(writer.write_error(Unavailable("gone", code="WORKER_LOST", retry_after_s=3)))
    assert json.loads(chunk) == {
        "request_id": "id", "seq": 1, "text_delta": "", "done": True, "finish_reason": "error",
        "error": {"code": "WORKER_LOST", "message": "gone", "param": None, "retry_after_s": 3},
    }  # fmt: skip
    assert done == "[DONE]"


def test_an_error_ends_a_stream_of_text_outputs():
    (event,) = payloads(TextOutputWriter(Shown(rule=RULE), ()).write_error(Unavailable("gone")))
    assert json.loads(event) == {"error": "gone"}


@pytest.mark.parametrize("in_pieces", [True, False])
def test_an_empty_stream_has_one_empty_answer(in_pieces):
    writer = TextOutputWriter(Shown(rule=RULE, in_pieces=in_pieces), ())
    (event,) = payloads(writer.write([Started(1, 0), Finished(0, "stop"), ENDED]))
    assert json.loads(event)["text_output"] == ""


def test_pieces_are_sent_once_and_the_prompt_first():
    writer = TextOutputWriter(Shown(rule=RULE, in_pieces=True), ("p",))
    sent = payloads(writer.write([Started(1, 0), TextDelta(0, "a"), TextDelta(0, "b"), Finished(0, "stop"), ENDED]))
    assert [json.loads(event)["text_output"] for event in sent] == ["p", "a", "b"]
