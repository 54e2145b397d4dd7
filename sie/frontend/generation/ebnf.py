"""Converts grammars in EBNF, as llama.cpp writes them (GBNF), to Lark, which a worker compiles."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.values.errors import BadRequest
from sie.values.generate import Grammar

_MAX_ERROR_CHARS: Final = 200


def read_ebnf(grammar: Grammar) -> Grammar:
    """Return a grammar of the same texts in Lark; its rule `root` is where they begin. Imports llguidance.

    Raises BadRequest with what is wrong. The library's parser recurses with each bracket and has no class for its errors.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return msgspec.structs.replace(grammar, kind="lark", value=gbnf_to_lark(grammar.value))
    except RecursionError:
        problem = "its brackets lie too deep in each other"
    except IndexError:
        problem = "it breaks off"
    except Exception as error:  # of a rule that is not there it raises no other
        problem = str(error)[:_MAX_ERROR_CHARS]
    raise BadRequest(f"Field '{grammar.field}': {problem}", extras={"param": grammar.field})
