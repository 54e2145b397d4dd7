"""Draw a comparison that `bench peers --save` has kept: throughput against latency, one line for each server.

The picture lies beside the figures, with the same name. Needs matplotlib (`make bench` installs it).
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import msgspec

from bench.catalog import OURS
from bench.contenders import Load, Turn
from bench.peers import LOADS

_SIZE = (8.0, 5.0)
_OWN_COLOUR = "#d62728"
_COLOURS: Final = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f", "#17becf")
_CURVE: Final = tuple(load for load in LOADS if load.items == 1 and load.mix == "mixed" and load.connections)
"""The loads that differ in nothing but the number of connections."""


@click.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(result: Path) -> None:
    """Draw the picture of RESULT, a JSON file of `bench peers --save`."""
    page = msgspec.json.decode(result.read_bytes())
    turns = msgspec.convert(page.get("turns", []), list[Turn])
    if not turns:
        raise click.ClickException(f"{result} holds no comparison")
    path = result.with_suffix(".png")
    draw(page, turns, path)
    print(f"drawn as {path}")


def draw(page: dict[str, Any], turns: list[Turn], path: Path) -> None:
    """Write a PNG: on the left p50, on the right p99, both over tokens a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] * 1.5, _SIZE[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    colours = iter(_COLOURS)
    for name in dict.fromkeys(turn.contender for turn in turns if turn.p50_ms is not None):
        colour = _OWN_COLOUR if name == OURS else next(colours, "#000000")
        for axis, percentile in zip(axes, ("p50_ms", "p99_ms"), strict=True):
            points = [point for load in _CURVE if (point := _point(turns, name, load, percentile)) is not None]
            axis.plot(
                *zip(*points, strict=True), marker="o", color=colour, label=name, linewidth=2 if name == OURS else 1.3
            )
    for axis, title in zip(axes, ("p50", "p99"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens a second", title=title)
        axis.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel("latency of a request, ms")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    counts = ", ".join(str(load.connections) for load in _CURVE)
    machine = page["machine"]
    figure.suptitle(
        f"1 text a request, mixed lengths, {counts} connections\n{machine['cpu']}, {machine['cores']} cores, {page['date'][:10]}, "
        f"commit {page['commit']}",
        fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=110)


def _point(turns: list[Turn], name: str, load: Load, percentile: str) -> tuple[float, float] | None:
    own = [turn for turn in turns if (turn.contender, turn.load) == (name, load.name) and turn.texts]
    if not own:
        return None
    return median(turn.tokens_per_s for turn in own), median(getattr(turn, percentile) for turn in own)
