"""Exit statuses by which a worker tells its supervisor why it ended."""

from __future__ import annotations

from typing import Final

DEVICE_LOST_STATUS: Final = 75
"""A worker that can no longer use its device (EX_TEMPFAIL); a new process may be able to."""
WORN_STATUS: Final = 76
"""An idle worker whose allocator a failed capture left broken; a new process captures nothing."""
