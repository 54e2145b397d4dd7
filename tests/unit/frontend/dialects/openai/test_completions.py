"""What a body of completions is read as, and which of its choices are shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.openai import completions
from sie.frontend.dialects.openai.completions import CompletionsWriter, decode_completions, encode_completions
from sie.frontend.dialects.openai.text_fields import Shown
from sie.values.errors import BadRequest
from sie.values.generate import (
    ChoiceReply,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    LogprobText,
    PromptScored,
)

USAGE = GenerateUsage(prompt_tokens=1, completion_tokens=1)


def read(**fields: Any) -> tuple[GenerateRequest, Shown]:
    return decode_completions(msgspec.json.encode({"prompt": "hi", **fields}), "application/json", Limits())


def choice(text: str, *logprobs: float) -> ChoiceReply:
    return ChoiceReply(text=text, logprobs=[LogprobText(text="x", raw=b"x", logprob=value) for value in logprobs])


def test_best_of_shows_the_likeliest_tokens_of_each_prompt() -> None:
    request, shown = read(prompt=["a", "b"], n=2, best_of=3)
    assert (request.num_choices, request.logprobs, shown.num_choices) == (3, 0, 4)
    choices = [
        choice("worst", -9.0), choice("long", -1.0, -1.0, -1.0), choice("short", -2.0),
        choice("first", -1.0), choice("second", -1.0), choice("third", -1.0),
    ]  # fmt: skip
    answer = msgspec.json.decode(encode_completions(GenerateReply(model="m", choices=choices, usage=USAGE), shown, ()))
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [
        (0, "long"), (1, "short"), (2, "first"), (3, "second"),
    ]  # fmt: skip
    assert [one["logprobs"] for one in answer["choices"]] == [None] * 4, "nobody asked for them"


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"n": 2}])
def test_best_of_that_is_n_changes_nothing(fields: dict[str, Any]) -> None:
    request, shown = read(stream=True, **fields)
    assert (request.num_choices, request.logprobs, shown.num_hidden) == (fields.get("n", 1), None, 0)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [1, 2]}, {"prompt": [[1]]}, {"echo": True, "logprobs": 0}, {"truncate_sequence": True}],
)
def test_fields_that_do_not_work_with_suffix_are_refused_by_name(fields: dict[str, Any]) -> None:
    assert read(suffix="b", echo=True)[0].suffix == "b"
    assert not read(suffix="", **fields)[0].suffix
    with pytest.raises(BadRequest) as caught:
        read(suffix="b", **fields)
    assert caught.value.extras["param"] == "suffix"


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 2, "stream": True}])
def test_best_of_that_cannot_be_served_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.extras["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_repeats_its_prompt_which_is_written_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def find(prompt: str, tokens: Any) -> list[int]:
        found.append(prompt)
        return [0] * len(tokens)

    monkeypatch.setattr(completions, "find_offsets", find)
    _, shown = read(prompt=["x", "xx"], n=2, echo=True, logprobs=1, stream=stream)
    scored = [tuple(choice("", *[-1.0] * size).logprobs) for size in (1, 2)]
    if stream:
        writer = CompletionsWriter(shown, "m", ["x", "xx"])
        events = b"".join(writer.write([PromptScored(number, tokens)]) for number, tokens in enumerate(scored))
        choices = [msgspec.json.decode(line[6:])["choices"][0] for line in events.split(b"\n\n") if line]
    else:
        reply = GenerateReply(model="m", choices=[choice("")] * 4, usage=USAGE, scored=[*scored])
        choices = msgspec.json.decode(encode_completions(reply, shown, ["x", "xx"]))["choices"]
    assert found == ["x", "xx"]
    assert [one["text"] for one in choices] == ["x", "x", "xx", "xx"]
    assert [one["logprobs"]["tokens"] for one in choices] == [["x"], ["x"], ["x", "x"], ["x", "x"]]
    assert [one["logprobs"]["token_logprobs"] for one in choices] == [[None], [None], [None, -1.0], [None, -1.0]]
