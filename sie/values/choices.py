"""Names the choices of a field in msgspec's text for a value that is none of them. msgspec itself names the value only."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union

import msgspec

_REFUSED: Final = "Invalid enum value "
_AT: Final = " - at `"
_MOST_SHOWN: Final = 80
"""Most characters of a refused value that are shown."""


def with_choices(error: msgspec.MsgspecError, form: Any) -> str:
    """Return the text of an error, with the choices of the field if a value is none of them.

    form is the type that was asked for. `Invalid enum value 'x' - at `$.a`` becomes
    `Invalid enum value 'x', expected 'y' or 'z' - at `$.a``.
    """
    text = str(error)
    if not text.startswith(_REFUSED):
        return text
    head, at, path = text.rpartition(_AT)
    if not at:
        head, path = text, ""
    choices = list(dict.fromkeys(_choices([form], _steps(path))))
    if len(head) > _MOST_SHOWN:
        head = f"{head[:_MOST_SHOWN]}...'"
    expected = f", expected {_listed(choices)}" if choices else ""
    return f"{head}{expected}{at}{path}"


def _listed(choices: list[Any]) -> str:
    shown = [repr(choice) for choice in choices]
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _steps(path: str) -> list[str]:
    """Return the steps of a path: the name of a field, or `[` for an element of a list or a map."""
    names = path.removesuffix("`").removeprefix("$").replace("[", ".[").split(".")
    return [name[:1] if name.startswith("[") else name for name in names if name and name != "]"]


def _choices(forms: list[Any], steps: list[str]) -> Iterator[Any]:
    for step in steps:
        forms = [inner for form in forms for plain in _plain(form) for inner in _inner(plain, step)]
    for form in forms:
        for plain in _plain(form):
            if typing.get_origin(plain) is Literal:
                yield from typing.get_args(plain)


def _plain(form: Any) -> Iterator[Any]:
    """Return the members of a union, without annotations."""
    if typing.get_origin(form) is Annotated:
        yield from _plain(typing.get_args(form)[0])
    elif typing.get_origin(form) in (Union, types.UnionType):
        for member in typing.get_args(form):
            yield from _plain(member)
    else:
        yield form


def _inner(form: Any, step: str) -> Iterator[Any]:
    """Return the types of a field of a struct, or of the elements of a list or map."""
    if step == "[":
        yield from typing.get_args(form)[-1:]
    elif isinstance(form, type) and issubclass(form, msgspec.Struct):
        yield from (field.type for field in msgspec.structs.fields(form) if field.encode_name == step)
