"""Bounds the pictures of calls. A stranger's program made them, and a run holds them until it ends. Pure."""

from __future__ import annotations

from typing import Any, Final

_FIELDS: Final = ("images_base64", "video_frames_base64")
_OVERHEAD_CHARS: Final = 1024
"""Characters that each picture counts for besides its length, so that many empty ones are bounded, too."""


def bound_pictures(data: dict[str, Any], max_chars: int) -> tuple[dict[str, Any], int, int]:
    """Return the fields of a call with the pictures that max_chars of base64 hold, the room left, and the number left out."""
    bounded, num_left_out = dict(data), 0
    for field in _FIELDS:
        if field in data:
            bounded[field] = []
            for picture in data[field]:
                size = len(picture) + _OVERHEAD_CHARS
                if size > max_chars:
                    num_left_out += 1
                    continue
                bounded[field].append(picture)
                max_chars -= size
    return bounded, max_chars, num_left_out


def note_left_out(num_pictures: int, whole: str) -> str:
    """Return what a model and a client read about pictures that were left out of one call, or of one request."""
    return f"pictures left out, because they were too many or too large for {whole}: {num_pictures}"
