"""The command `sie run`: talks to a model, and serves it for the conversation if no running server has it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec
from click.core import ParameterSource

from sie.commands.chat import chat_options, talk
from sie.commands.target_options import named_target, target_options, url_option
from sie.commands.terminal import fail
from sie.config.flags import model_spec
from sie.runtime.own_modules import run_module

if TYPE_CHECKING:
    from sie.loadgen.target import Target

_POLL_S = 0.1
_STOP_TIMEOUT_S = 60.0
_STOPPED_STATUS = 128 + signal.SIGTERM
_ANSWERS = frozenset({200, 404})


@click.command()
@click.argument("model")
@click.argument("question", nargs=-1)
@url_option("A server that may have the model already.")
@chat_options
@target_options
def run(
    *,
    model: str,
    question: tuple[str, ...],
    url: str,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    agent: bool,
    permission: str,
    **access: str,
) -> int:
    """Talk to MODEL. If no running server has it, serve it for the conversation.

    MODEL is named as for `sie serve`: an id on the hub, ID=DIR, or a path. A server at --url that has the model is
    used. Otherwise one is started on a Unix socket of its own, and stopped at the end; the model is downloaded if it is missing.
    With a QUESTION, or text from a pipe, it prints one answer; without either it is a conversation.

    \b
      sie run ./model.gguf
      sie run org/name "What is a fox?"
    """
    from sie.commands.http_client import ServerError
    from sie.loadgen.target import TargetError

    spec = model_spec(model)
    model_id = spec.partition("=")[0].partition("@")[0]
    options: dict[str, Any] = {
        "system": system, "model": model_id, "temperature": temperature, "max_tokens": max_tokens, "agent": agent,
        "permission": permission,
    }  # fmt: skip
    try:
        target = named_target(url, **access)
        if _has(target, model_id):
            return talk(target, question, **options)
        with _serving(spec, model_id, ["--agent"] if agent else []) as own:
            return 1 if own is None else talk(own, question, **options)
    except (TargetError, ServerError) as error:
        return fail(str(error))


def _has(target: Target, model_id: str) -> bool:
    """Tell whether a running server has the model. False if nobody listens there.

    Raises TargetError or ServerError if the user named the server, and it cannot be asked for another reason.
    """
    from sie.commands.http_client import ServerError, call, refusal
    from sie.loadgen.target import TargetError

    path = _path_of(model_id)
    try:
        status, body = call(target, "GET", path)
        if status not in _ANSWERS:
            raise ServerError(refusal(path, status, body))
    except (TargetError, ServerError) as error:
        is_named = click.get_current_context().get_parameter_source("url") is not ParameterSource.DEFAULT
        if is_named and not isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError)):
            raise
        return False
    return status == 200


class _Model(msgspec.Struct, frozen=True):
    """A model as `/v1/models/ID` describes it."""

    state: str = ""


def _look(target: Target, model_id: str) -> _Model | None:
    """Return the model's state at our own server, or None if it does not answer yet."""
    from sie.commands.http_client import ServerError, call
    from sie.loadgen.target import TargetError

    try:
        status, body = call(target, "GET", _path_of(model_id))
        return msgspec.json.decode(body, type=_Model) if status == 200 else None
    except (TargetError, ServerError, msgspec.DecodeError):
        return None


def _path_of(model_id: str) -> str:
    return f"/v1/models/{quote(model_id)}"  # a file's name may be in any alphabet


@contextmanager
def _serving(spec: str, model_id: str, flags: Sequence[str]) -> Generator[Target | None]:
    """Serve one model on a private Unix socket; yield its address, or None if the model could not be loaded.

    flags are further settings of the server. It does not try a failed load again.

    The server's bar and its warnings go to this terminal. It ignores this terminal's Ctrl-C, which ends an answer. It
    has the settings of `sie serve`, but only the socket's mode protects it: keys and TLS would shut out this client.
    """
    from sie.loadgen.target import parse_target
    from sie.runtime.child_setup import die_with_parent
    from sie.runtime.termination import ended_by_sigterm

    with ended_by_sigterm(_STOPPED_STATUS), tempfile.TemporaryDirectory(prefix="sie-run-") as directory:
        path = Path(directory, "http")
        server = subprocess.Popen(  # noqa: S603  # our own command
            [*run_module("sie"), "serve", *flags, "--model", spec, "--uds", str(path), "--uds-mode", "600",
             "--state-dir", str(Path(directory, "state")), "--frontends", "1", "--grpc-port", "0", "--log-level", "warning",
             "--api-keys", "", "--tls-cert", "", "--tls-key", "", "--tls-client-ca", ""],
            env={**os.environ, "SIE_LOAD_RETRY_S": "0"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent,  # noqa: PLW1509  # no other thread runs here
        )  # fmt: skip
        try:
            target = parse_target(f"unix:{path}")
            yield target if _wait_until_loaded(server, target, model_id) else None
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_loaded(server: subprocess.Popen[bytes], target: Target, model_id: str) -> bool:
    """Wait until the server has loaded its model. Return False if it ended before, or the load failed."""
    while server.poll() is None:
        model = _look(target, model_id) if Path(target.uds).exists() else None
        if model is not None and model.state == "loaded":
            return True
        if model is not None and model.state == "failed":
            return False
        time.sleep(_POLL_S)
    return False
