"""What a request with a session continues (decision 050)."""

from __future__ import annotations

import pytest

from sie.agents.store.splicing import splice
from sie.values.generate import ChatMessage, ToolCall

CALL = ChatMessage(role="assistant", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),))
RESULT = ChatMessage(role="tool", content="42", tool_call_id="c")


def said(text: str) -> list[ChatMessage]:
    """Return messages from short words: `u1` is a user's, `a1` the assistant's, `s1` a system message; `call`, `result`."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    known = {"call": CALL, "result": RESULT}
    return [known.get(word) or ChatMessage(role=roles[word[0]], content=word) for word in text.split()]


@pytest.mark.parametrize(
    ("stored", "incoming", "expected"),
    [
        ("", "u1", "u1"),
        ("u1 a1", "u1 a1 u2", "u1 a1 u2"),
        ("u1 call result a1", "u1 a1 u2", "u1 call result a1 u2"),
        ("u1 call result a1", "u1 call result a1 u2", "u1 call result a1 u2"),
        ("u1 call", "u1 call result", "u1 call result"),
        ("u1 call", "result", "u1 call result"),
        ("u1 a1", "u2", "u1 a1 u2"),
        ("u1 a1", "u2 u3", "u1 a1 u2 u3"),
        ("s1 u1 a1", "u2", "s1 u1 a1 u2"),
        ("s1 u1 a1", "s2 u2", "s2 u1 a1 u2"),
        ("s1 u1 a1", "s2 u1 a1 u2", "s2 u1 a1 u2"),
        ("s1 u1 a1", "u1 a1 u2", "u1 a1 u2"),
        ("u1 call result a1 u2 a2", "u1 a1 u3", "u1 call result a1 u3"),
        ("u1 a1 u2 a2", "u1 a9 u2", "u1 a9 u2"),
        ("u1 a1", "u9 a9 u2", "u9 a9 u2"),
        ("u1 a1", "u1", "u1"),
        ("u1 call result a1", "u1", "u1"),
        ("u1 call result a1 u2 call result a2", "u1 a1 u2", "u1 call result a1 u2"),
        ("s1", "u1", "u1"),
    ],
)
def test_request_continues_a_session(stored: str, incoming: str, expected: str) -> None:
    assert splice(said(stored), said(incoming)) == said(expected)


def test_stored_reasoning_stays_with_a_message_that_the_client_repeats() -> None:
    thought = ChatMessage(role="assistant", content="a1", reasoning="because")
    assert splice([*said("u1"), thought], said("u1 a1 u2")) == [*said("u1"), thought, *said("u2")]


def test_a_stream_showed_the_texts_of_all_rounds_as_one() -> None:
    looked = ChatMessage(role="assistant", content="I look. ", tool_calls=CALL.tool_calls)
    stored = [*said("u1"), looked, RESULT, *said("a1")]
    joined = ChatMessage(role="assistant", content="I look. a1")
    assert splice(stored, [*said("u1"), joined, *said("u2")]) == [*stored, *said("u2")]


def test_arguments_in_another_form_are_the_same_call() -> None:
    spaced = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments="{ }"),))
    assert splice(said("u1 call"), [*said("u1"), spaced, RESULT]) == said("u1 call result")
