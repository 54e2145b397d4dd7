"""Names the exceptions that end work on purpose. All others are failures, also those that are not an `Exception`.

A panic of a library in Rust, for example, is a BaseException that an error boundary must answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

ENDS_OF_WORK: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
