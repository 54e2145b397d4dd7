"""Makes a stub model fail deliberately, so that each failure can be tested from outside without a broken device.

Settings refuse such a stub without `test`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sie.values.card import StubOptions
from sie.workers.device.faults import DeviceLostError
from sie.workers.device.memory import wear_out

Text = bytes | memoryview | NDArray[np.uint8]


class StubFaults:
    """The faults that one stub's options request."""

    def __init__(self, options: StubOptions, slot: int) -> None:
        """Take the stub's options; slot is the worker's slot."""
        self._lost_file = Path(options.lost_file) if options.lost_file else None
        self._slot = slot
        self._fail = options.fail
        self._fail_on = options.fail_on.encode()
        self._kill_on = options.kill_on.encode()
        self._hang_on = options.hang_on.encode()

    def load(self) -> None:
        """Fail a load: raise OSError, which does not tell the loader the cause, or DeviceLostError as `step` does."""
        self._need_device()
        if self._fail == "load":
            raise OSError("a stub's load fails (fail=load)")

    def step(self, texts: Sequence[Text]) -> None:
        """Fail the step for these texts, end the worker now or when it is idle, or never return, if a fault matches.

        Raises MemoryError, or DeviceLostError as if a CUDA device were lost.
        """
        self._need_device()
        contents = [bytes(text) for text in texts]
        if self._kill_on and any(self._kill_on in text for text in contents):
            os.abort()  # a crash in native code: SIGKILL looks like an operator's action, and then no input is blamed
        if self._hang_on and any(self._hang_on in text for text in contents):
            _hang()
        if self._fail in ("oom", "sticky", "worn") and any(self._fail_on in text for text in contents):
            if self._fail == "worn":
                wear_out("a stub's step, fail=worn")
                return
            if self._fail == "oom":
                raise MemoryError("a stub's step finds no memory (fail=oom)")
            raise DeviceLostError("CUDA error: device-side assert triggered (a stub's step, fail=sticky)")

    def _need_device(self) -> None:
        if self._lost_file is not None and self._lost_file.exists() and self._lost_file.read_text() == str(self._slot):
            raise DeviceLostError("CUDA error: no CUDA-capable device is detected (a stub's, lost_file)")

    def spoil(self, values: NDArray[np.float32], texts: Sequence[Text]) -> NDArray[np.float32]:
        """Return the rows (n, d), one for each text, with NaN at the start of rows that `fail=nan` matches."""
        if self._fail == "nan":
            for row, text in zip(values, texts, strict=True):
                if self._fail_on in bytes(text):
                    row[0] = np.nan
        return values


def _hang() -> None:
    while True:
        time.sleep(1)
