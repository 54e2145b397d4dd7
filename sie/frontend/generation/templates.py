"""Owns chat templates: compiled once, rendered in a sandbox, ended when they take too long.

A template is the operator's: it comes with a checkpoint or from a file, never from a client. It sees plain data, cannot
change it, and has the globals and filters that transformers gives it. Source: transformers 5.23
utils/chat_template_utils.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, Final, Generic, TypeVar, cast

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser
from jinja2.utils import Namespace

from sie.values.errors import BadRequest

_T = TypeVar("_T")


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Return a compiled template. Raises BadRequest for one that does not parse."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise BadRequest(f"The model's chat template is broken: {error}", code="CHAT_TEMPLATE_BROKEN") from error


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Return what a template makes of variables, plain JSON data. Raises BadRequest with what it says is wrong."""
    try:
        return template.render(**variables)
    except jinja2.TemplateError as error:
        raise BadRequest(f"The chat template refused the messages: {error}", extras={"param": "messages"}) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        text = f"The chat template cannot render these messages: {type(error).__name__}: {error}"
        raise BadRequest(text, extras={"param": "messages"}) from error


# --- the sandbox ----------------------------------------------------------------------------------------------------


class _GenerationTag(ext.Extension):
    """Lets `{% generation %}` through, which marks what the model writes, for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 wants a set here

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, by which a template could reach Python itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


class _PlainDict:
    """What `dict` is in a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # the host's time zone, as the library has it


@functools.cache
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment: Any = sandbox.ImmutableSandboxedEnvironment(  # any: its tables are untyped
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_PlainDict(), namespace=_PlainNamespace
    )
    return environment


# --- the time limit -------------------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """Raised in a thread whose work takes too long; no `except Exception` on its way stops it."""


_set_async_exc: Final = cast("Callable[[ctypes.c_ulong, Any], int]", ctypes.pythonapi.PyThreadState_SetAsyncExc)


async def run_limited(pool: Executor, limit_s: float, work: Callable[[], _T]) -> _T:
    """Return what work returns, run on a thread of the pool; the time it waits for one does not count.

    Raises BadRequest when it takes longer than limit_s, at its next Python instruction.
    """
    loop = asyncio.get_running_loop()
    job = _Job(work, limit_s)

    def watch() -> None:
        nonlocal timer
        if not job.try_interrupt(time.monotonic()):
            timer = loop.call_later(limit_s, watch)

    timer = loop.call_later(limit_s, watch)
    try:
        return await loop.run_in_executor(pool, job.run)
    finally:
        timer.cancel()


class _Job(Generic[_T]):
    """One piece of work on a thread, and the way to end it."""

    def __init__(self, work: Callable[[], _T], limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._thread_id = 0
        self._began_s = 0.0

    def run(self) -> _T:
        thread_id = threading.get_ident()
        with self._lock:
            self._thread_id, self._began_s = thread_id, time.monotonic()
        try:
            try:
                return self._work()
            finally:
                with self._lock:
                    self._thread_id = 0  # ORDER: from here on nothing is raised in this thread ...
                _set_async_exc(ctypes.c_ulong(thread_id), None)  # ... and what was not raised yet never will be
        except _TimeUp:
            text = f"The chat template took longer than template_timeout_s ({self._limit_s:g} s)"
            raise BadRequest(text, extras={"param": "messages"}) from None

    def try_interrupt(self, now_s: float) -> bool:
        """End the work if it runs for the limit; False while it does not."""
        with self._lock:
            if not self._thread_id or now_s - self._began_s < self._limit_s:
                return False
            _set_async_exc(ctypes.c_ulong(self._thread_id), ctypes.py_object(_TimeUp))
            return True
