"""Finds a tokenizer's special texts in other text: the longest one at each place, in time that grows with the text
alone. Pure.

Some tokenizers have thousands of them (Gemma 3: 6,249). Alternatives tried one after another take half a second for
50,000 times the character with which they begin; here those with a common beginning are tried together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

_Tree = dict[str, Any]
_END: Final = ""
"""Key of a tree in which a text ends; every other one is a character."""
_MAX_DEPTH: Final = 40
"""Most branches on the way to a text; the pattern's compiler goes as deep."""


@functools.lru_cache(maxsize=32)
def find_special(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of these texts; one of none matches nowhere."""
    tree: _Tree = {}
    for text in filter(None, texts):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[_END] = {}
    if not tree:
        return re.compile("(?!)")
    pattern, depth = _write(tree)
    return re.compile(pattern if depth <= _MAX_DEPTH else _one_by_one(texts))


def _one_by_one(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True)))


def _write(tree: _Tree) -> tuple[str, int]:
    """Return the pattern of what goes on from a node, and how many branches lie within each other there.

    Without recursion: a text may be long.
    """
    done: dict[int, tuple[str, int]] = {}
    stack = [tree]
    while stack:
        node = stack[-1]
        open_ones = [child for child in node.values() if id(child) not in done]
        if open_ones:
            stack += open_ones
            continue
        stack.pop()
        done[id(node)] = _join(node, done)
    return done[id(tree)]


def _join(node: _Tree, done: dict[int, tuple[str, int]]) -> tuple[str, int]:
    """Return the same of a node whose children are done; those that go on alike are one."""
    alike: dict[str, list[str]] = {}
    depth = 0
    for char, child in node.items():
        if char != _END:
            rest, inner_depth = done[id(child)]
            depth = max(depth, inner_depth)
            alike.setdefault(rest, []).append(re.escape(char))
    parts = [(chars[0] if len(chars) == 1 else f"[{''.join(chars)}]") + rest for rest, chars in alike.items()]
    if len(parts) == 1 and _END not in node:
        return parts[0], depth
    return (f"(?:{'|'.join(parts)}){'?' if _END in node else ''}", depth + 1) if parts else ("", 0)
