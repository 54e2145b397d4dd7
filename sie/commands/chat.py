"""The command `sie chat`: a conversation with a served model, in a terminal or for one question.

Answers go to stdout, all other output to stderr. Its imports happen when it runs, because every other `sie` command
imports this file too.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from sie.commands.target_options import target_options

if TYPE_CHECKING:
    from sie.commands.chat_client import Answer, Message
    from sie.loadgen.target import Target

_HELP = """\
/reset          forget the conversation; the system message stays
/system [TEXT]  begin anew with this system message, or with none
/help           show this
Ctrl-C ends a running answer, Ctrl-D leaves. A line that begins with a space is never a command."""

# Do not send a model's text to a terminal unchanged: escape sequences rename windows, move the cursor, fill clipboards.
_HARMLESS = dict.fromkeys((*range(32), *range(127, 160)), "�") | {9: "\t", 10: "\n", 13: None}


@click.command()
@click.argument("question", nargs=-1)
@click.option(
    "--url", default="http://127.0.0.1:8080", show_default=True, help="http[s]://HOST:PORT[/PATH] or unix:PATH."
)
@click.option(
    "--model", help="Id of the model to ask. Without it the server's default, or the only one that generates."
)
@click.option("--system", default="", help="System message to begin with.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 takes the likeliest token. Default: the model's.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer. Default: all that fit.")
@target_options
def chat(
    *,
    question: tuple[str, ...],
    url: str,
    model: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    **access: str,
) -> int:
    """Talk to a model that a server serves.

    Asks the QUESTION, or what comes through a pipe, and prints the answer; without either it is a conversation. After
    each answer: its tokens, tokens a second, and the time to the first one. Exit status 1: no whole answer to the
    question.

    \b
      sie chat
      sie chat "What is a fox?" --max-tokens 100
      git diff | sie chat --system "Write a commit message for this change." --model mine
    """  # fmt: skip
    from sie.loadgen.target import TargetError, parse_target

    try:
        target = parse_target(url, **access)
        if url.startswith("grpc"):
            raise TargetError(f"{url!r}: text is generated over HTTP")
        talk = _Conversation(target, system, model=model, temperature=temperature, max_tokens=max_tokens)
        if not question and sys.stdin.isatty():
            target.connect().close()  # report a missing server before the user types
            return _converse(talk, url)
    except TargetError as error:
        return _fail(str(error))
    text = " ".join(question) or sys.stdin.read().strip()
    return _ask_once(talk, text) if text else _fail("there is no question")


def _ask_once(talk: _Conversation, text: str) -> int:
    from sie.commands.chat_client import ChatError

    try:
        return 0 if talk.say(text) else 130
    except ChatError as error:
        return _fail(str(error))


def _converse(talk: _Conversation, url: str) -> int:
    """Take questions and commands until the end of input."""
    from sie.commands.chat_client import ChatError

    with contextlib.suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401  `input` then has a history and can be edited

    _note(f"Talking to {url}. /help shows the commands, Ctrl-D leaves.")
    while (line := _read_line()) is not None:
        if line.startswith("/"):
            _note(_obey(talk, *line.split(maxsplit=1)))
        elif line.strip():
            try:
                talk.say(line.strip())
            except ChatError as error:
                _fail(str(error))
    return 0


def _read_line() -> str | None:
    """Return a line, an empty one for Ctrl-C, None at the end of input."""
    try:
        return input("> ")
    except KeyboardInterrupt:
        click.echo()
        return ""
    except EOFError:
        click.echo()
        return None


def _obey(talk: _Conversation, command: str, text: str = "") -> str:
    """Run a command; return the message for the user."""
    if command == "/help":
        return _HELP
    if command == "/reset" and not text:
        talk.reset(talk.system)
        return "The conversation is forgotten."
    if command == "/system":
        talk.reset(text.strip())
        return "A new conversation, " + ("with this system message." if talk.system else "without a system message.")
    return f"{command} is no command, or not used like that.\n{_HELP}"


class _Conversation:
    """The messages so far, and the options of every request."""

    def __init__(self, target: Target, system: str, **options: Any) -> None:
        self._target = target
        self._options = options
        self.reset(system)

    def reset(self, system: str) -> None:
        """Start a new conversation."""
        self.system = system
        self._messages: list[Message] = []

    def say(self, text: str) -> bool:
        """Ask, print the answer as it arrives, and remember both; False when Ctrl-C ended it. Raises ChatError.

        The received part of an interrupted answer is remembered. If it is empty, the question is dropped too.
        """
        from sie.commands.chat_client import Answer, Message, Question, ask

        asked = [*self._messages, Message("user", text)]
        opening = [Message("system", self.system)] if self.system else []
        question = Question(messages=[*opening, *asked], **self._options)
        answer, screen = Answer(), _Screen()
        try:
            with contextlib.closing(ask(self._target, question, answer)) as pieces:
                for piece in pieces:
                    screen.show(piece.text, is_reasoning=piece.is_reasoning)
        except KeyboardInterrupt:
            return False
        else:
            return True
        finally:
            screen.end()
            if answer.text:
                self._messages = [*asked, Message("assistant", answer.text)]
            if answer.first_s is not None:
                _note(_figures(answer))


class _Screen:
    """Prints one answer. Reasoning is dim; without a terminal, only the answer itself is printed."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_reasoning = False
        self._ends_line = True

    def show(self, text: str, *, is_reasoning: bool) -> None:
        """Print a piece at once."""
        if not self._is_terminal:
            text = "" if is_reasoning else text
        else:
            text = text.translate(_HARMLESS)
            if self._is_reasoning and not is_reasoning:
                click.echo("\n", nl=not self._ends_line)
            self._is_reasoning = is_reasoning
        if text:
            self._ends_line = text.endswith("\n")
            click.echo(click.style(text, dim=True) if is_reasoning else text, nl=False)

    def end(self) -> None:
        """Leave the cursor at the beginning of a line."""
        if not self._ends_line:
            click.echo()


def _figures(answer: Answer) -> str:
    parts = [answer.model]
    if answer.num_tokens is not None:
        cut = " (cut off there)" if answer.finish_reason == "length" else ""
        parts.append(f"{answer.num_tokens} token{'s' * (answer.num_tokens != 1)}{cut}")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.first_token_s is not None:
        parts.append(f"first token after {answer.first_token_s * 1e3:.0f} ms")
    if answer.finish_reason is None:
        parts.append("ended early")
    return " · ".join(part for part in parts if part)


def _note(text: str) -> None:
    click.secho(text.translate(_HARMLESS), err=True, dim=True)


def _fail(text: str) -> int:
    click.echo(f"sie: {text.translate(_HARMLESS)}", err=True)
    return 1
