"""The page of the API names every route, every error and every refused option that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sie.catalog.options import REFUSED
from sie.frontend.dialects.store.openapi import OPERATIONS as STORE
from sie.frontend.routes.table import TABLE, WEBSOCKETS
from sie.values import errors

DOCS = Path(__file__).parents[4] / "docs"
PAGE = DOCS.joinpath("sie-api.md").read_text(encoding="utf-8")
TENSORS = DOCS.joinpath("tensors.md").read_text(encoding="utf-8")
GENERATION = DOCS.joinpath("generation.md").read_text(encoding="utf-8")
FILES = DOCS.joinpath("files.md").read_text(encoding="utf-8")
SOURCES = Path(errors.__file__).parents[1]
_SILENT = {
    "CLIENT_GONE",
    "INTERNAL_ERROR",
    "MESSAGE_TOO_LARGE",
    "NOT_ALLOWED",
    "QUEUE_TIMEOUT",
    "UNSUPPORTED",
    "UNSUPPORTED_MEDIA_TYPE",
}
"""Codes of classes that are never sent as such, and of the tensor dialects, which send none or their own."""
_OF_TENSORS = frozenset(route.template for route in TABLE if route.envelope in ("kserve", "trtis"))

_OF_STORE = frozenset(operation.template for operation in STORE)
_OF_TEXT = frozenset(route.template for route in TABLE if route.envelope in ("text", "anthropic"))


def codes() -> set[str]:
    """Return the codes of all error classes and those that are given where an error is raised."""
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.SieError)]
    given = {code for path in SOURCES.rglob("*.py") for code in re.findall(r'\bcode="([A-Z_]+)"', path.read_text())}
    return {kind.code for kind in kinds} | given


@pytest.mark.parametrize("path", sorted({route.template for route in TABLE} | WEBSOCKETS.keys()))
def test_route_is_there(path: str) -> None:
    name = path.removeprefix("/v1/models/") if path.startswith("/v1/models/") and "{" not in path else path
    pages = {_OF_TENSORS: TENSORS, _OF_STORE: FILES, _OF_TEXT: GENERATION}
    page = next((page for paths, page in pages.items() if path in paths), PAGE)
    assert re.search(rf"[` ]{re.escape(name)}`", page)


@pytest.mark.parametrize("code", sorted(codes()))
def test_error_is_in_a_table(code: str) -> None:
    rows = [line for line in (PAGE + GENERATION + FILES).splitlines() if line.startswith(f"| `{code}` |")]
    assert rows or code in _SILENT


@pytest.mark.parametrize(
    "kind", [errors.PoisonInput, errors.DeadlineExceeded, errors.ModelLoadFailed, errors.Overloaded]
)
def test_status_is_the_class_s(kind: type[errors.SieError]) -> None:
    assert f"| `{kind.code}` | {kind.http_status} |" in PAGE


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_refused_option_is_named(option: str) -> None:
    assert f"`{option}`" in PAGE
