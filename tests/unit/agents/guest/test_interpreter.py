"""What the interpreter answers about code that gives odd texts. Its own process would end with an error in it."""

from __future__ import annotations

import json

import msgspec
import pytest

from sie.agents.guest import interpreter

CLASS = "class A:\n    def __{}__(self):\n        {}\n"


@pytest.mark.parametrize(
    ("code", "field", "text"),
    [
        (r"raise ValueError('bad \ud800 text')", "exception", r"bad \ud800 text"),
        (CLASS.format("repr", r"return 'x\udcff'") + "A()", "result", r"x\udcff"),
        (r"raise SystemExit('\ud800')", "exception", r"SystemExit: \ud800"),
        (CLASS.format("str", "1 / 0") + "raise SystemExit(A())", "exception", "SystemExit: <exception str() failed>"),
        ("class M(type):\n    __name__ = 7\nclass A(metaclass=M): pass\nA()", "result_type", "7"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
    ],
)
def test_every_text_of_code_can_be_sent(code: str, field: str, text: str) -> None:
    made = interpreter.run(code, {})
    assert msgspec.json.decode(json.dumps(made)) == made
    assert text in made[field]
