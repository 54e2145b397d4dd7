"""Exit statuses: of a worker, by which the supervisor learns why it ended, and of a server that cannot start."""

from __future__ import annotations

from typing import Final

DEVICE_LOST_STATUS: Final = 75
"""A worker that can no longer use its device (EX_TEMPFAIL); a new process may be able to."""
WORN_STATUS: Final = 76
"""An idle worker whose allocator a failed capture left broken; a new process captures nothing."""
CONFIG_STATUS: Final = 78
"""A server whose settings, models or host prevent its start (EX_CONFIG); the next start would end in the same way."""
