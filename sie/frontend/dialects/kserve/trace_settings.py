"""Describes the trace and log settings of KServe v2, which clients can read but not change.

Pure. The server's own settings decide how it traces and logs (`sie serve --tracing`, `--log-level`).
Source: Triton's trace and logging extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from sie.frontend.inputs.bounded_json import decode_typed
from sie.values.errors import BadRequest

TRACE: Final[dict[str, Any]] = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip
"""Numbers are texts, as in the protocol."""
_LEVELS: Final = ("debug", "info", "warning", "error")
_GIVEN: Final = msgspec.json.Decoder(dict[str, Any])
_MAX_SETTINGS: Final = 64


def log_settings(level: str) -> dict[str, Any]:
    """Return the log settings for one of our log levels."""
    rank = _LEVELS.index(level)
    return {
        "log_file": "", "log_info": rank <= 1, "log_warning": rank <= 2, "log_error": True,
        "log_verbose_level": int(rank == 0), "log_format": "default",
    }  # fmt: skip


def decode_settings(body: bytes) -> dict[str, Any]:
    """Return the settings in the body of a request; an empty body has none. Raises BadRequest."""
    return decode_typed(_GIVEN, body) if body else {}


def check_unchanged(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise BadRequest if a setting is unknown or would change. null means the default, which is the present value."""
    if len(given) > _MAX_SETTINGS:
        raise BadRequest(f"a request may hold at most {_MAX_SETTINGS} settings")
    for name, value in given.items():
        if name not in own:
            raise BadRequest(f"unknown setting '{name[:64]}'")
        if value is not None and not any(type(value) is type(same) and value == same for same in _forms(own[name])):
            raise BadRequest(f"setting '{name}' cannot be changed through this API; use the server's own settings")


def _forms(setting: Any) -> tuple[Any, ...]:
    """Return the forms of a setting that count as equal: a text and a list of this one text, which gRPC sends."""
    if isinstance(setting, list):
        texts = cast("list[Any]", setting)
        return (texts, texts[0]) if len(texts) == 1 else (texts,)
    return (setting, [setting]) if isinstance(setting, str) else (setting,)
