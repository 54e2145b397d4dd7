"""The agent's part of `sie chat`: shows the calls of tools, saves their pictures, asks for approvals, attaches files.

All of it goes to stderr. The output of tools was written by strangers, so control characters are left out.
"""

from __future__ import annotations

import base64
import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from sie.commands.chat_client import ToolEvent
from sie.commands.http_client import ServerError, call, refusal
from sie.commands.terminal import HARMLESS, note
from sie.loadgen.target import Target

_MAX_LINES: Final = 20
_ATTACHED: Final = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S+))')
_SUFFIXES: Final = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
_CHOICES: Final = "Run it? [y]es, [a]lways in this conversation, [n]o"


class AgentScreen:
    """Shows what the tools of one conversation do. session names it for the server."""

    def __init__(self, target: Target, permission: str) -> None:
        self._target = target
        self._permission = permission
        self._directory: Path | None = None
        self._num_pictures = 0
        self.session = secrets.token_hex(16)

    def fields(self) -> dict[str, Any]:
        """Return the fields by which a request asks for the tools."""
        return {
            "enable_code_execution": True, "enable_shell": True, "agent_permission": self._permission,
            "session_id": self.session,
        }  # fmt: skip

    def take(self, event: ToolEvent) -> None:
        """Show an event, or ask about it. Raises ServerError if the server does not take the decision."""
        data = event.data
        if event.name == "agentic_tool_approval_required":
            self._decide(data)
        elif event.name == "file_produced":
            self._show_file(data.get("file", {}))
        elif data.get("phase") == "calling":
            _show(data.get("tool_name", ""), _asked(data.get("data", {})))
        else:
            self._show_result(data.get("data", {}))

    def _show_result(self, data: dict[str, Any]) -> None:
        texts = [
            str(data[name]) for name in ("stdout", "stderr", "result", "exception", "content", "note") if data.get(name)
        ]
        if data.get("sources"):
            texts += [str(source) for source in data["sources"]]
        _show("result", "\n".join(texts) or "(nothing)")
        for picture in data.get("images_base64", ()):
            note(f"  picture: {self._save(picture, '.png')}")

    def _show_file(self, file: dict[str, Any]) -> None:
        name = str(file.get("name", "")).translate(HARMLESS)
        if file.get("code"):
            note(f"  file {name}: {str(file.get('message', '')).translate(HARMLESS)}")
            return
        suffix = _SUFFIXES.get(file.get("mime_type", ""))
        where = f", saved as {self._save(file['data_base64'], suffix)}" if suffix and file.get("data_base64") else ""
        note(f"  file {name} ({file.get('bytes')} bytes, {file.get('id')}){where}")

    def _save(self, data: str, suffix: str) -> Path:
        """Write a picture under a name of ours, and return its path."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="sie-chat-"))
        self._num_pictures += 1
        path = self._directory / f"picture-{self._num_pictures}{suffix}"
        path.write_bytes(base64.b64decode(data))
        return path

    def _decide(self, data: dict[str, Any]) -> None:
        """Ask the user, and tell the server. Nobody to ask means no."""
        answer = _prompt() if sys.stdin.isatty() else "n"
        word = answer.strip().lower()
        is_approved = word in {"y", "yes", "a", "always"}
        decision: dict[str, Any] = {"decision": "approve" if is_approved else "deny"}
        if word in {"a", "always"}:
            decision["remember_for_session"] = True
        elif not is_approved and word not in {"", "n", "no"}:
            decision["message"] = answer.strip()
        path = f"/v1/agent/approvals/{data.get('approval_id', '')}"
        status, body = call(self._target, "POST", path, decision)
        if status not in {200, 404}:  # 404: its time was over, and the answer goes on
            raise ServerError(refusal(path, status, body))


def _prompt() -> str:
    """Return what the user types. Raises KeyboardInterrupt on Ctrl-C and Ctrl-D, which end this answer alone."""
    try:
        return click.prompt(f"{_CHOICES}, or the reason for the model", default="n", show_default=False, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None


def _asked(data: dict[str, Any]) -> str:
    """Return what a call will do."""
    if "commands" in data:
        return "\n".join(str(one) for one in data["commands"])
    for name in ("code", "query"):
        if name in data:
            return str(data[name])
    return msgspec.json.encode(data.get("arguments", {})).decode()


def _show(title: str, text: str) -> None:
    lines = text.translate(HARMLESS).strip().splitlines()
    hidden = len(lines) - _MAX_LINES
    shown = [*lines[:_MAX_LINES], *([f"[and {hidden} more lines]"] if hidden > 0 else [])]
    note("\n".join([f"· {title.translate(HARMLESS)}", *(f"  {line}" for line in shown)]))


def _path_of(word: str) -> Path:
    """Return the path that a word names; punctuation after it belongs to the sentence, unless there is such a file."""
    path = Path(word)
    return path if path.is_file() else Path(word.rstrip("?!.,;:)"))


def attach(text: str) -> str | Sequence[dict[str, Any]]:
    """Return a question's content: its text, and the files that it names with `@`. A word that names no file is text.

    One that looks like a path, with a slash or a dot, is noted, because a file was perhaps meant.
    """
    paths = [Path(quoted) if quoted else _path_of(plain) for quoted, plain in _ATTACHED.findall(text)]
    for path in paths:
        if not path.is_file() and (len(path.parts) > 1 or path.suffix):
            note(f"  not attached: there is no file {path}")
    files = [path for path in dict.fromkeys(paths) if path.is_file()]
    if not files:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for path in files:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append({"type": "file", "file": {"filename": path.name, "file_data": data}})
        note(f"  attached {path.name}")
    return parts
