"""No shipped file can be made to run data that it reads: its imports and calls are checked (S1, S4, S5)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import sie

ROOT = Path(sie.__file__).parent
DESERIALISERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
IN_SANDBOXES = Path("agents/guest")
"""What runs code there runs it in a sandbox: that is its purpose."""


@cache
def trees() -> list[tuple[Path, ast.AST]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    """Return the top-level package of each import, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@cache
def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return each call by the dotted name it is written with."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_can_unpickle():
    guilty = {str(path): imported(tree) & DESERIALISERS for path, tree in trees() if imported(tree) & DESERIALISERS}
    assert guilty == {}


def test_nothing_reads_weights_that_may_run_code():
    bad = {"torch.load", "np.load", "numpy.load", "torch.hub.load", "yaml.load"}
    assert [(str(path), name) for path, tree in trees() for name, _ in calls(tree) if name in bad] == []


def test_nothing_is_compiled_from_text():
    ours = [(path, tree) for path, tree in trees() if not path.is_relative_to(IN_SANDBOXES)]
    assert [(str(path), name) for path, tree in ours for name, _ in calls(tree) if name in RUNS_CODE] == []


@pytest.mark.parametrize("argument", ["trust_remote_code", "shell", "weights_only", "allow_pickle"])
def test_no_argument_opens_the_door(argument):
    """A value that is not the literal that closes it counts as open."""
    closed = {"trust_remote_code": False, "shell": False, "weights_only": True, "allow_pickle": False}[argument]
    for path, tree in trees():
        for name, call in calls(tree):
            for keyword in call.keywords:
                if keyword.arg == argument:
                    value = keyword.value
                    assert isinstance(value, ast.Constant), f"{path}: {name}"
                    assert value.value is closed, f"{path}: {name}"
