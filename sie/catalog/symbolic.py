"""Checks the size expressions in a saved program. Allows only arithmetic, never code.

torch passes these texts to `sympy.sympify`, which evaluates them as Python. Pure.
"""

from __future__ import annotations

import ast
from typing import Any, Final

_MAX_CHARS: Final = 10_000
_MAX_EXPONENT: Final = 16
_MAX_NUMBER: Final = 1 << 64
_FUNCTIONS: Final = frozenset(
    {
        "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Abs", "floor", "ceiling",
        "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt",
        "IntTrueDiv", "FloatTrueDiv", "ToFloat", "PythonMod", "ModularIndexing", "LShift", "RShift", "PowByNatural",
        "Where", "Identity", "Eq", "Equality", "Ne", "Unequality", "Lt", "StrictLessThan", "Le", "LessThan", "Gt",
        "StrictGreaterThan", "Ge", "GreaterThan", "And", "Or", "Not", "BooleanTrue", "BooleanFalse",
    }
)  # fmt: skip
_POWERS: Final = frozenset({"Pow", "PowByNatural"})
_NAMES: Final = frozenset({"true", "false", "oo", "int_oo", "True", "False"})
_PLAIN: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv,
    ast.Mod, ast.USub, ast.UAdd, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.keyword,
)  # fmt: skip


class SymbolicError(ValueError):
    """The text is not an allowed expression."""


def check_expression(text: Any) -> None:
    """Raise SymbolicError unless a text is arithmetic of symbols (`s77`), whole numbers and torch's own functions."""
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        raise SymbolicError("a size that is not an expression")
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            _check_node(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SymbolicError(f"a size is given as {text[:100]!r}, which is not arithmetic") from None


def _check_node(node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
            raise SymbolicError(ast.dump(node.func))
        if node.func.id in _POWERS and not _is_small(node.args[1:]):
            raise SymbolicError("a large power")
    elif isinstance(node, ast.Name):
        if node.id not in _FUNCTIONS and node.id not in _NAMES and not _is_symbol(node.id):
            raise SymbolicError(node.id)
    elif isinstance(node, ast.Constant):
        _check_constant(node.value)
    elif not isinstance(node, _PLAIN):
        raise SymbolicError(type(node).__name__)


def _check_constant(value: Any) -> None:
    if isinstance(value, str):
        if not _is_symbol(value):
            raise SymbolicError(value)
    elif not isinstance(value, bool | int | float) or abs(value) > _MAX_NUMBER:
        raise SymbolicError("a number that is not a size")


def _is_symbol(text: str) -> bool:
    """Tell whether a text is a torch symbol: letters for its kind, and a number."""
    kind = text.rstrip("0123456789")
    return text.isascii() and kind != text and (kind.isalpha() or kind in ("unbacked_", "u_", "s_")) and len(kind) < 12


def _is_small(arguments: list[ast.expr]) -> bool:
    numbers = [node.value for argument in arguments for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return len(numbers) == 1 and isinstance(numbers[0], int) and numbers[0] <= _MAX_EXPONENT
