"""Runs a product and a Triton kernel on each device: `python -m sie.doctor.device_trial cuda`, a process of its own.

It writes lines of JSON: `{"doing": text}` before each step, so that a hang or a crash can be named, and one line with the
result of each device. `cpu` in place of `cuda` tries the product alone.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from typing import Any

_SIDE = 256
_MAX_DIFFERENCE = 0.01
"""Relative, of a product whose results are rounded to 8 bits."""


def main() -> None:
    (kind,) = sys.argv[1:]
    _say(doing="importing torch")
    import torch

    torch.manual_seed(0)
    if kind != "cuda":
        _try_device(kind, "processor", "")
        return
    _say(doing="starting CUDA")
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        torch.cuda.set_device(index)  # Triton launches on the current device
        _try_device(f"cuda:{index}", properties.name, str(getattr(properties, "uuid", "")))


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)  # noqa: T201  # the answer of this process


def _try_device(device: str, name: str, uuid: str) -> None:
    began_s = time.monotonic()
    _say(doing=f"computing on {device}")
    error = _fault(_check_product, device)
    kernel_error = ""
    if not error and device != "cpu":
        _say(doing=f"compiling a kernel for {device}")
        kernel_error = _fault(_check_kernel, device)
    took_s = time.monotonic() - began_s
    _say(device=device, name=name, uuid=uuid, error=error, kernel_error=kernel_error, seconds=took_s)


def _fault(check: Any, device: str) -> str:
    try:
        check(device)
    except Exception as error:  # drivers and compilers raise anything; the text is the answer
        return f"{type(error).__name__}: {error}"[:2000]
    return ""


def _check_product(device: str) -> None:
    import torch

    has_bf16 = not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)
    left, right = (torch.randn(_SIDE, _SIDE).to(torch.bfloat16 if has_bf16 else torch.float16) for _ in range(2))
    expected = left.float() @ right.float()
    zeros = torch.zeros(_SIDE, _SIDE, device=device)
    found = ((left.to(device) @ right.to(device)).float() + zeros).cpu()
    difference = float((found - expected).norm() / expected.norm())
    if not difference < _MAX_DIFFERENCE:
        raise ValueError(f"a product of matrices is wrong by {difference:.2g}")


def _check_kernel(device: str) -> None:
    import torch

    if find_spec("triton") is None:
        raise ImportError("Triton is not installed")
    from sie.doctor.trial_kernel import double

    source = torch.arange(1024, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    double(source, target)
    if not torch.equal(target.cpu(), source.cpu() * 2):
        raise ValueError("a kernel of Triton computes wrong values")


if __name__ == "__main__":
    main()
