"""Lets a benchmark talk to a library in another process: lines of JSON on its standard input and output.

The answering side needs nothing but the standard library, since it runs in the environments of peers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.processes import Program

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def answer_questions(load: Callable[[], tuple[dict[str, Any], Answer]]) -> None:
    """Load what answers, say hello with the first thing that it returns, and answer until there are no more questions.

    Standard output belongs to the answers: what libraries print goes to standard error.
    """
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hello, answer = load()
    lines.write(json.dumps(hello) + "\n")
    for line in sys.stdin:
        lines.write(json.dumps(answer(json.loads(line))) + "\n")


class Respondent:
    """A program that answers questions, and is kept from running while there are none."""

    def __init__(self, program: Program, timeout_s: float) -> None:
        """Wait until it has loaded what it needs. Raises RuntimeError with its output."""
        self.program = program
        self._timeout_s = timeout_s
        self.hello = self._answer()
        program.pause()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return its answer. Raises RuntimeError with its output when it ends, or needs too long."""
        self.program.resume()
        self.program.write_line(json.dumps(question).encode())
        answer = self._answer()
        self.program.pause()
        return answer

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.program.read_line(self._timeout_s))
        return answer
