"""Writes messages in protobuf's text format, and thousands of classes in a fifth of the library's time. Pure.

The library finds each field of each class by reflection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from google.protobuf import text_format
from google.protobuf.text_encoding import CEscape

_CLASSES: Final = "nvidia.inferenceserver.InferResponseHeader.Output.Classes"
_unescaped: Final = re.compile(r"[ !#-&(-\[\]-~]*")
"""Matches a text that has the same characters in its escaped form."""


def in_lines(message: Any) -> str:
    """Return a message in text format, a field in each line."""
    return text_format.MessageToString(message, message_formatter=partial(_format, as_utf8=True))


def one_line(message: Any) -> str:
    """Return a message in text format as the value of a header: ASCII, no control characters."""
    formatter = partial(_format, as_utf8=False)
    text = text_format.MessageToString(message, as_one_line=True, as_utf8=False, message_formatter=formatter)
    return text.rstrip()


def _format(message: Any, indent: int, as_one_line: bool, *, as_utf8: bool) -> str | None:
    """Return the text of the classes of one batch item, or None for any other message, which the library writes."""
    if message.DESCRIPTOR.full_name != _CLASSES or not message.cls:
        return None
    end = " " if as_one_line else "\n" + " " * indent
    field_end = " " if as_one_line else "\n" + " " * (indent + 2)
    parts: list[str] = []
    for found, value in zip(message.cls, _float_texts([found.value for found in message.cls]), strict=True):
        label = found.label
        fields = (
            f"{field_end}idx: {found.idx}" if found.idx else "",
            f"{field_end}value: {value}" if value != "0.0" else "",
            f'{field_end}label: "{_escaped(label, as_utf8=as_utf8)}"' if label else "",
        )
        parts.append(f"cls {{{''.join(fields)}{end}}}")
    return end.join(parts)


def _escaped(text: str, *, as_utf8: bool) -> str:
    return text if _unescaped.fullmatch(text) else CEscape(text.encode(), as_utf8)


def _float_texts(values: Sequence[float]) -> list[str]:
    """Return float32 values as texts, each with the fewest digits that give the same float32.

    The library writes one or more digits too many of some powers of two, and of values below 1.2e-38.
    """
    shortest: list[str] = np.array(values, np.float32).astype(np.str_).tolist()
    return [str(float(text)) for text in shortest]
