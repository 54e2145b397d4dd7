from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sie.values.errors import BadRequest
from sie.workers.device import device
from sie.workers.device.device import choose_dtype, cpu_flags, resolve_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "cpu:3"])
def test_every_cpu_worker_has_the_one_cpu(name: str) -> None:
    assert resolve_device(name) == CPU


@pytest.mark.parametrize("name", ["", "gpu", "cpu:x", "cuda:-1", "cuda:9999"])
def test_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(BadRequest):
        resolve_device(name)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2", torch.float32),
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("amx_bf16 amx_tile", torch.bfloat16),
        ("asimd bf16", torch.bfloat16),
    ],
)
def test_auto_is_bf16_where_the_cpu_computes_in_it(
    flags: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags.split()))
    assert choose_dtype("auto", CPU) == dtype


def test_chosen_dtype_is_taken() -> None:
    assert choose_dtype("float32", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_dtype("float16", torch.device("cuda")) == torch.float16


def test_float16_on_a_cpu_is_refused() -> None:
    with pytest.raises(BadRequest, match="float16"):
        choose_dtype("float16", CPU)


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2", "Features\t: fpu avx2"])
def test_flags_are_read_on_either_architecture(line: str, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    assert cpu_flags(path) == {"fpu", "avx2"}


def test_kernel_without_flags_has_none(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "missing") == frozenset()


def test_a_wait_is_for_what_was_launched_on_the_stream_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []
    event = SimpleNamespace(record=streams.append, synchronize=lambda: streams.append("waited"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda found: f"stream of {found}")
    wait = device.wait_later(torch.device("cuda", 1))
    assert streams == ["stream of cuda:1"]
    wait()
    assert streams == ["stream of cuda:1", "waited"]
    device.wait_later(CPU)()
