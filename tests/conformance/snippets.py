"""Reads the snippets of docs/integrations.md, and fits them to a server of a test.

A comment `<!-- test {...} -->` above a block of code says how it is tested:

    ci       whether the clients that the tests install are enough
    ask      the question in the snippet, to which `answers` are added: a scripted stub gives them in this order
    prints   what the snippet must print
    env      the folder of the environment that `make integrations` made for it, if not `env`
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = Path(__file__).parents[2] / "docs" / "integrations.md"
_BLOCK: Final = re.compile(r"^(?:<!-- test (\{[^\n]*\}) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^## (.+)$", re.MULTILINE)


class Snippet(NamedTuple):
    """One block of the page that is a test."""

    name: str
    """Its heading and its number below it."""
    language: str
    code: str
    is_in_ci: bool
    ask: str
    answers: tuple[str, ...]
    prints: str
    environment: str

    def fitted(self, http_port: int, grpc_port: int) -> str:
        """Return its code for a server of stubs at these ports."""
        script = "".join(f"[[{answer}]]" for answer in self.answers)
        assert not self.ask or self.ask in self.code, f"{self.name} does not ask {self.ask!r}"
        quoted = json.dumps(script)[1:-1]
        code = self.code.replace(self.ask, f"{self.ask} {quoted}") if self.ask else self.code
        return code.replace("127.0.0.1:8080", f"127.0.0.1:{http_port}").replace(
            "127.0.0.1:8001", f"127.0.0.1:{grpc_port}"
        )


def read_snippets() -> list[Snippet]:
    """Return the tested snippets of the page, in its order."""
    text = PAGE.read_text()
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(text)]
    snippets: list[Snippet] = []
    for found in _BLOCK.finditer(text):
        if found[1] is None:
            continue
        heading = [name for start, name in headings if start < found.start()][-1]
        number = 1 + sum(snippet.name.startswith(f"{heading} ") for snippet in snippets)
        rule = json.loads(found[1])
        snippets.append(
            Snippet(
                f"{heading} {number}", found[2], found[3], rule.pop("ci", False), rule.pop("ask", ""),
                tuple(rule.pop("answers", ())), rule.pop("prints"), rule.pop("env", "env"),
            )
        )  # fmt: skip
        assert not rule, f"{heading} {number} has an unknown rule: {rule}"
    return snippets
