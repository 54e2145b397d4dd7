"""Converts grammars in EBNF, as llama.cpp writes them (GBNF), to Lark, which a worker compiles."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.values.errors import BadRequest
from sie.values.generate import Grammar

_MAX_CHARS: Final = 16 * 1024
"""The library's conversion takes time with the square of the rules: 0.1 s for 16 KB, over 20 s for 158 KB."""
_MAX_ERROR_CHARS: Final = 200


def read_ebnf(grammar: Grammar) -> Grammar:
    """Return the same grammar in Lark; its start rule is `root`. Imports llguidance.

    Raises BadRequest with the reason. The library's parser recurses with each bracket and has no own error class.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(grammar.value) > _MAX_CHARS:
        raise _refused(grammar, f"in EBNF it may have {_MAX_CHARS} characters, but it has {len(grammar.value)}")
    try:
        return msgspec.structs.replace(grammar, kind="lark", value=gbnf_to_lark(grammar.value))
    except RecursionError:
        problem = "its brackets are nested too deeply"
    except IndexError:
        problem = "it ends too early"
    except Exception as error:  # the class that the library raises for a missing rule
        problem = str(error)[:_MAX_ERROR_CHARS]
    raise _refused(grammar, problem)


def _refused(grammar: Grammar, problem: str) -> BadRequest:
    return BadRequest(f"Field '{grammar.field}': {problem}", extras={"param": grammar.field})
