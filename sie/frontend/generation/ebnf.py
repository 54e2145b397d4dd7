"""Owns grammars in EBNF, as llama.cpp writes them (GBNF): each becomes Lark, which a worker compiles."""

from __future__ import annotations

from sie.generation import Grammar

_MAX_ERROR_CHARS = 200


def read_ebnf(text: str, field: str) -> Grammar:
    """Return a grammar of the same texts in Lark; its rule `root` is where they begin. Imports llguidance.

    Raises ValueError with what is wrong. The library's parser recurses with each bracket and has no class for its errors.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return Grammar(kind="lark", value=gbnf_to_lark(text), field=field)
    except RecursionError:
        raise ValueError("its brackets lie too deep in each other") from None
    except IndexError:
        raise ValueError("it breaks off") from None
    except Exception as error:  # of a rule that is not there it raises no other
        raise ValueError(str(error)[:_MAX_ERROR_CHARS]) from None
