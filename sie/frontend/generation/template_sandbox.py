"""Renders chat templates in Jinja's sandbox. A confined process runs this module (`sie.runtime.confined`).

A template comes from the operator, with a checkpoint or in a file, never from a client. It sees plain data, cannot
change it, and has the same globals and filters as in transformers. `sie.frontend.generation.templates` bounds its
cost. Source: transformers 5.23 utils/chat_template_utils.py.
"""

from __future__ import annotations

import functools
import importlib
import json
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser
from jinja2.utils import Namespace

for _name in ("jinja2.constants", "jinja2.debug", "html", "pprint", "textwrap", "unicodedata"):
    importlib.import_module(_name)  # filters import these at their first use, which a confined process cannot

_MAX_REASON_CHARS: Final = 2000


def answer(request: bytes) -> bytes:
    """Return `r` and the rendered template, or `b` or `m` and the reason for a failure.

    request: JSON of the template's source and its variables. `b`: the template is broken. `m`: it fails for these
    messages.
    """
    source, variables = json.loads(request)
    try:
        template = _compile(source)
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
        return _reason(b"b", f"The model's chat template is broken: {error}")
    try:
        return b"r" + template.render(**variables).encode(errors="surrogatepass")
    except jinja2.TemplateError as error:
        return _reason(b"m", f"The chat template refused the messages: {error}")
    except MemoryError:
        return _reason(b"m", "The chat template wants more memory than a template may have")
    except Exception as error:  # a template may fail like any program
        return _reason(b"m", f"The chat template cannot render these messages: {type(error).__name__}: {error}")


def _reason(kind: bytes, text: str) -> bytes:
    return kind + text[:_MAX_REASON_CHARS].encode(errors="surrogatepass")


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


# --- the sandbox ----------------------------------------------------------------------------------------------------


class _GenerationTag(ext.Extension):
    """Accepts `{% generation %}`, which marks the model's text for training, and ignores it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 wants a set here

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore: through them a template could reach Python itself."""

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
    """Replaces `dict` in a template."""

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
    environment: Any = sandbox.ImmutableSandboxedEnvironment(  # Any, because its tables are untyped
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_PlainDict(), namespace=_PlainNamespace
    )
    return environment


# The first failure and the first date read files, so both happen here, before the process loses access to files.
answer(b"[\"{{ strftime_now('%c') }}{{ 1 / 0 }}\", {}]")
