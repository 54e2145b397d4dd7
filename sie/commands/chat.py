"""The command `sie chat`: a conversation with a served model, in a terminal or for one question.

Answers go to stdout, all other output to stderr. Its imports happen when it runs, because every other `sie` command
imports this file too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from sie.commands.target_options import NumberRange, named_target, target_options, url_option
from sie.commands.terminal import HARMLESS, fail, note

if TYPE_CHECKING:
    from sie.commands.chat_client import Answer, Message
    from sie.loadgen.target import Target

# No line is over 60 characters, so that narrow terminals break none.
_HELP = """\
/reset          forget all but the system message
/system [TEXT]  begin again with this system message, or none
/model [ID]     show the model to ask, or ask another one
/help           show this
/bye            leave
@PATH           attach a file to a question (@"a b.txt")
Enter sends, Alt-Enter begins a new line, and the arrows
show earlier questions. Ctrl-C ends a running answer, Ctrl-D
leaves. A line that begins with a space is no command."""
MAX_PIPED_CHARS = 50 << 20
"""As many as the default of max_generation_body_bytes."""
_LEAVING = frozenset(("/bye", "/exit", "/quit"))


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `talk`: system, temperature, max_tokens, agent, permission."""
    for option in (
        click.option(
            "--permission",
            type=click.Choice(["ask", "auto", "deny"]),
            default="ask",
            show_default=True,
            help="With --agent: whether you are asked before each call of a tool.",
        ),
        click.option(
            "--agent",
            is_flag=True,
            help="Let the server run code and commands for the model, in its sandbox (docs/agents.md).",
        ),
        click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer. Default: all that fit."),
        click.option(
            "--temperature",
            type=NumberRange(0, 2),
            help="Sampling temperature; 0 always takes the most likely token. Default: the model's.",
        ),
        click.option("--system", default="", help="System message to begin with."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("question", nargs=-1)
@url_option("http[s]://HOST:PORT[/PATH] or unix:PATH.")
@click.option(
    "--model", help="Id of the model to ask. Without it the server's default, or the only one that generates."
)
@chat_options
@target_options
def chat(*, question: tuple[str, ...], url: str, **options: Any) -> int:
    """Talk to a model of a running server.

    Asks the QUESTION, or the text from a pipe, and prints the answer; without either, holds a conversation. Prints
    after each answer its number of tokens, tokens a second, and the time to the first text. Exit status 1: the answer
    is missing or not complete.

    \b
      sie chat
      sie chat "What is a fox?" --max-tokens 100
      git diff | sie chat --system "Write a commit message for this change." --model mine
      sie chat --agent "Plot the columns of @data.csv"
    """  # fmt: skip
    from sie.loadgen.target import TargetError

    access = {name: options.pop(name) for name in ("key", "ca_file", "cert_file", "key_file")}
    try:
        target = named_target(url, **access)
        if url.startswith("grpc"):
            raise TargetError(f"{url!r}: text is generated over HTTP")
        return talk(target, question, **options)
    except TargetError as error:
        return fail(str(error))


def talk(target: Target, question: Sequence[str], **options: Any) -> int:
    """Answer one question, from the arguments or a pipe, or hold a conversation. Return the exit status.

    options: model, system, temperature, max_tokens, agent and permission. Raises TargetError if no server answers.
    """
    conversation = _Conversation(target, **options)
    if not question and sys.stdin.isatty():
        target.connect().close()  # report a missing server before the user types
        return _converse(conversation, target.url)
    try:
        text = " ".join(question) or _read_pipe()
    except ValueError as error:
        return fail(str(error))
    return _ask_once(conversation, text, attaches=bool(question)) if text else fail("there is no question")


def _read_pipe() -> str:
    """Return the text from the pipe. Raises ValueError if it is too long, or not UTF-8."""
    try:
        text = sys.stdin.read(MAX_PIPED_CHARS + 1)
        text.encode()
    except UnicodeError:
        raise ValueError("the text from the pipe is not UTF-8 text") from None
    if len(text) > MAX_PIPED_CHARS:
        raise ValueError(f"the text from the pipe is over {MAX_PIPED_CHARS} characters")
    return text.strip()


def _ask_once(talk: _Conversation, text: str, *, attaches: bool) -> int:
    from sie.commands.http_client import ServerError

    try:
        return 0 if talk.say(text, attaches=attaches) else 130
    except BrokenPipeError:  # nobody reads the answer any more; click ends the command without a word
        raise
    except (ServerError, OSError) as error:
        return fail(str(error))


def _converse(conversation: _Conversation, url: str) -> int:
    """Take questions and commands until the end of input."""
    from sie.commands.http_client import ServerError
    from sie.commands.line_editor import LineEditor

    editor = LineEditor()
    note(f"Talking to {url}. /help shows the commands, Ctrl-D leaves.")
    while (line := editor.read()) not in {None, *_LEAVING}:
        assert line is not None
        if line.startswith("/"):
            note(_obey(conversation, *line.split(maxsplit=1)))
        elif line.strip():
            try:
                conversation.say(line.strip(), attaches=True)
            except (ServerError, OSError) as error:
                fail(str(error))
    return 0


def _obey(conversation: _Conversation, command: str, text: str = "") -> str:
    """Run a command; return the message for the user."""
    if command in {"/help", "/?"}:
        return _HELP
    if command == "/reset" and not text:
        conversation.reset(conversation.system)
        return "The conversation is forgotten."
    if command == "/system":
        conversation.reset(text.strip())
        return f"A new conversation, {'with this' if conversation.system else 'without a'} system message."
    if command == "/model":
        if text:
            conversation.model = text.strip()
        model = conversation.model or "the server's default model"
        return f"The next question goes to {model}."
    return f"{command} is unknown, or not used like that.\n{_HELP}"


class _Conversation:
    """The messages so far, and the options of every request."""

    def __init__(
        self, target: Target, *, system: str, model: str | None, agent: bool, permission: str, **options: Any
    ) -> None:
        self._target = target
        self._permission = permission if agent else ""
        self._options = options
        self.model = model
        self.reset(system)

    def reset(self, system: str) -> None:
        """Start a new conversation."""
        from sie.commands.chat_agent import AgentScreen

        self.system = system
        self._messages: list[Message] = []
        self._agent = AgentScreen(self._target, self._permission) if self._permission else None

    def say(self, text: str, *, attaches: bool = False) -> bool:
        """Ask, print the answer as it arrives, and remember both; False when Ctrl-C ended it. Raises ServerError.

        attaches: whether `@PATH` in the text attaches a file; then it raises OSError, too.
        The received part of an interrupted answer is remembered. If it is empty, the question is dropped too.
        """
        from sie.commands.chat_agent import attach
        from sie.commands.chat_client import Answer, Message, Question, ToolEvent, ask

        asked = [*self._messages, Message("user", attach(text) if attaches else text)]
        opening = [Message("system", self.system)] if self.system else []
        fields = self._agent.fields() if self._agent is not None else {}
        question = Question(messages=[*opening, *asked], model=self.model, agent=fields, **self._options)
        answer, screen = Answer(), _Screen()
        try:
            with contextlib.closing(ask(self._target, question, answer)) as pieces:
                for piece in pieces:
                    if isinstance(piece, ToolEvent):
                        screen.end()
                        if self._agent is not None:
                            self._agent.take(piece)
                        continue
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
                note(_figures(answer))


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
            text = text.translate(HARMLESS)
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
            self._ends_line = True


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
