"""Converts grammars in EBNF, as llama.cpp writes them (GBNF), to Lark, which a worker compiles."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.values.errors import BadRequest
from sie.values.generate import Grammar

_MAX_ERROR_CHARS: Final = 200


def read_ebnf(grammar: Grammar) -> Grammar:
    """Return the same grammar in Lark; its start rule is `root`. Imports llguidance.

    Raises BadRequest with the reason. The library's parser recurses with each bracket and has no own error class.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return msgspec.structs.replace(grammar, kind="lark", value=gbnf_to_lark(grammar.value))
    except RecursionError:
        problem = "its brackets are nested too deeply"
    except IndexError:
        problem = "it ends too early"
    except Exception as error:  # the class that the library raises for a missing rule
        problem = str(error)[:_MAX_ERROR_CHARS]
    raise BadRequest(f"Field '{grammar.field}': {problem}", extras={"param": grammar.field})
