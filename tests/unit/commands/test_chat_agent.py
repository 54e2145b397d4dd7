"""The question whether a tool may run, when the user leaves it without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click.termui
import pytest

from sie.commands import chat, chat_agent, chat_client
from sie.commands.chat_client import ToolEvent
from sie.loadgen.target import parse_target


def ask(*_: Any) -> Iterator[ToolEvent]:
    """Stand for a server whose answer begins with an approval."""
    yield ToolEvent("agentic_tool_approval_required", {"approval_id": "appr_1"})


@pytest.mark.parametrize("pressed", [KeyboardInterrupt, EOFError])
def test_leaving_the_question_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, pressed: type[BaseException]
) -> None:
    def leave(_prompt: str) -> str:
        raise pressed

    monkeypatch.setattr(click.termui, "visible_prompt_func", leave)
    monkeypatch.setattr(chat_agent.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(chat_client, "ask", ask)
    conversation = chat._Conversation(
        parse_target("http://127.0.0.1:9"), system="", model=None, agent=True, permission="ask"
    )
    assert conversation.say("List my files.") is False
