"""Cleans the names and media types that clients give their files. Pure. A name is shown, and never becomes a path."""

from __future__ import annotations

import mimetypes
import re
import unicodedata
from typing import Final

OCTETS: Final = "application/octet-stream"
_UNNAMED: Final = "unnamed"
_MAX_NAME_BYTES: Final = 255
_MAX_FORMAT_CHARS: Final = 16
_MEDIA: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_FORMAT: Final = re.compile(rf"[a-z0-9]{{1,{_MAX_FORMAT_CHARS}}}")
_TEXTUAL: Final = frozenset({
    "application/json", "application/ld+json", "application/x-ndjson", "application/xml", "application/javascript",
    "application/x-yaml", "application/yaml", "application/toml", "application/x-sh", "application/sql",
})  # fmt: skip
_CONTROL: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that a name may not hold: they could forge a header, a log line or a listing."""
_TYPES: Final = mimetypes.MimeTypes(())
"""The types that Python itself knows, and some that its older versions lack. Those of hosts differ."""
for _type, _extension in (("text/markdown", ".md"), ("application/yaml", ".yaml"), ("application/yaml", ".yml"),
                          ("application/toml", ".toml"), ("image/webp", ".webp")):  # fmt: skip
    _TYPES.add_type(_type, _extension)


def clean_name(name: str) -> str:
    """Return the last part of a file's name without control characters, at most 255 bytes long."""
    last = re.split(r"[/\\]", name)[-1]
    shown = "".join(char for char in last if unicodedata.category(char) not in _CONTROL).strip()
    short = shown.encode("utf-8", "ignore")[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return short if short.strip(".") else _UNNAMED


def format_of(name: str) -> str:
    """Return the lower-case extension of a name, or an empty text."""
    extension = name.rpartition(".")[2].lower() if "." in name else ""
    return extension if _FORMAT.fullmatch(extension) else ""


def media_type(given: str | None, name: str) -> str:
    """Return the media type of a file: the client's, else that of the name's extension.

    Clients without a better idea say `application/octet-stream`, which counts as none.
    """
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != OCTETS and _MEDIA.fullmatch(kind):
        return kind
    guessed, encoding = _TYPES.guess_type(f"x.{format_of(name)}")
    return guessed if guessed is not None and encoding is None else OCTETS


def is_textual(media: str) -> bool:
    """Tell whether a media type says that a file is text."""
    return media.startswith("text/") or media in _TEXTUAL or media.endswith(("+json", "+xml"))
