"""What the benchmarks of one device share: its limits, models of random weights that are made on it, and timing.

Nothing here writes or reads a checkpoint: of a model of 8 billion weights, that would take longer than the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import click

from bench.limits import Ceilings, as_figures, measure_ceilings, print_ceilings
from bench.report import RESULTS, facts, print_facts, save

_QUICK_S, _FULL_S = 0.2, 1.0


class Limits(NamedTuple):
    """What the device does at most, in the format of the models."""

    flops: float
    bytes_per_s: float
    ceilings: Ceilings

    def floor_s(self, flop: float, nbytes: float) -> tuple[float, str]:
        """Return the least time for so many operations and bytes, and what takes most of it.

        A GPU computes nothing before its host has launched something; the rest of the launches may fall into that time.
        """
        launch_s = self.ceilings.launch_s
        times = {"products": flop / self.flops, "memory": nbytes / self.bytes_per_s}
        bound = max(times, key=times.__getitem__)
        return launch_s + times[bound], "launch" if launch_s > times[bound] else bound


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of all benchmarks of a device."""
    for option in (
        click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/."),
        click.option("--folder", type=click.Path(path_type=Path), help="Keep the figures here."),
        click.option("--quick", is_flag=True, help="Tiny shapes and short turns: tries the benchmark itself."),
        click.option("--device", default="cuda", show_default=True, help="cpu or cuda."),
    ):
        command = option(command)
    return command


class Session(NamedTuple):
    """One run of a benchmark on a device."""

    known: dict[str, Any]
    limits: Limits
    device: str
    is_quick: bool

    @classmethod
    def start(cls, title: str, method: str, device: str, *, is_quick: bool) -> Session:
        """Print the head of the report and the device's limits, and return both."""
        known = facts(title, method)
        print_facts(known)
        ceilings = measure_ceilings(_QUICK_S if is_quick else _FULL_S, device)
        print_ceilings(ceilings)
        by_cores = ceilings.flops["bfloat16"]
        most = max(by_cores)
        return cls(known, Limits(by_cores[most], ceilings.copied[most], ceilings), device, is_quick)

    def keep(self, name: str, figures: dict[str, Any], folder: Path | None, *, is_saved: bool) -> None:
        """Write the figures where they were asked for."""
        figures = {**figures, "limits": as_figures(self.limits.ceilings)}
        for target in ([folder] if folder else []) + ([RESULTS] if is_saved else []):
            save(name, self.known, figures, folder=target, device=self.device)


def build_random(family: str, values: Mapping[str, Any], device: str, auto: str = "AutoModel") -> Any:
    """Return a model of a family with random weights in bfloat16, made on its device; equal calls give equal weights."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[family](**values)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, auto).from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(requires_grad=False)


def load_built(model: Any, load: Callable[..., Any], *arguments: Any) -> Any:
    """Load a model that exists already as a worker loads a checkpoint: load is a function of the loader."""
    from sie.workers.loading import loader

    with patch.object(loader, "read_pretrained", lambda *_args, **_kwargs: model):
        return load(*arguments, lambda *_: None)


def linear_weights(model: Any) -> int:
    """Return how many weights the model's linear layers have, those of a head among them."""
    import torch

    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))


def call_times(call: Callable[[], object], seconds: float) -> list[float]:
    """Return what each call takes, of as many as end within so many seconds, at least one. A call waits for its device."""
    times: list[float] = []
    began_s = time.perf_counter()
    while not times or time.perf_counter() - began_s < seconds:
        call_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - call_s)
    return times


def free_device(device: str) -> None:
    """Give back what no tensor uses any more."""
    import gc

    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
