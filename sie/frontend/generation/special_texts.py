"""Finds a tokenizer's special texts in other text: the longest one at each place, in time that depends only on the
text's length. Pure.

Some tokenizers have thousands of them (Gemma 3: 6,249). A pattern that tries them one after another takes half a second
for 50,000 copies of their first character. So texts with a common beginning share a branch here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

_Tree = dict[str, Any]
_END: Final = ""
"""Key that marks the end of a text in a tree; every other key is a character."""
_MAX_DEPTH: Final = 40
"""Most nested branches on the way to a text; the regex compiler recurses to the same depth."""


@functools.lru_cache(maxsize=32)
def find_special(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of these texts. Without texts it matches nowhere."""
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
    """Return the pattern of the texts below a node, and its depth of nested branches.

    Does not recurse, because a text may be long.
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
    """Return the pattern and depth of a node whose children are done. Children with equal patterns share one."""
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
