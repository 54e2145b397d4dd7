"""Reads lines from a person at a terminal: with a history that is kept, and with several lines in one input."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent

_PROMPT = "> "


class LineEditor:
    """One terminal. Enter ends an input; Alt-Enter begins a new line in it."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(), multiline=True, key_bindings=_keys(), prompt_continuation="  ",
            enable_history_search=True, output=None if sys.stdout.isatty() else create_output(stdout=sys.stderr),
        )  # fmt: skip

    def read(self) -> str | None:
        """Return the next input: an empty text for Ctrl-C, None for Ctrl-D or the end of input."""
        try:
            return self._session.prompt(_PROMPT)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the history of earlier conversations, in a file that only this user can read."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    path = Path(base, "sie/chat_history")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    except OSError:  # the home directory is read-only
        return InMemoryHistory()
    return FileHistory(str(path))
