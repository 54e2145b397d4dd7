"""What the interpreter answers about code that gives odd texts. Its own process would end with an error in it."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

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


def test_a_traceback_shows_the_lines_of_this_code_and_of_earlier_code() -> None:
    variables: dict[str, object] = {}
    interpreter.run("def divide(number):\n    return 1 / number  # in the first", variables)
    interpreter.run("x = 1", variables)
    lines = interpreter.run("x = 0\ndivide(x)  # in the last", variables)["exception"].splitlines()
    assert "    divide(x)  # in the last" in lines
    assert "    return 1 / number  # in the first" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(("max_chars", "num_kept"), [(40, 3), (1 << 20, 16)])
def test_pictures_over_the_limits_are_counted(monkeypatch: pytest.MonkeyPatch, max_chars: int, num_kept: int) -> None:
    def savefig(buffer: io.BytesIO, **_: str) -> None:
        buffer.write(b"123456789")

    plots = SimpleNamespace(
        get_fignums=lambda: [*range(20)],
        figure=lambda _number: SimpleNamespace(savefig=savefig),
        close=lambda _which: None,
    )
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plots)
    monkeypatch.setattr(interpreter, "_MAX_PICTURE_CHARS", max_chars)
    made = interpreter.run("1", {})
    assert made["images"] == ["MTIzNDU2Nzg5"] * num_kept
    assert made["num_left_out"] == 20 - num_kept
