"""Draw what `bench peers --save` or `bench generate --save` has kept.

Of servers: throughput against latency, one line for each. Of generation: tokens a second under each load, a bar for each
contender. The picture lies beside the figures, with the same name. Needs matplotlib (`make bench` installs it).
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import msgspec

from bench.catalog import OURS
from bench.contenders import Load, Turn
from bench.generate import Generated
from bench.generators import is_ours
from bench.peers import LOADS

_SIZE = (8.0, 5.0)
_OWN_COLOUR = "#d62728"
_OTHER_COLOUR = "#7f7f7f"
_COLOURS: Final = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f", "#17becf")
_DOTS_PER_INCH = 110
_CURVE: Final = tuple(load for load in LOADS if load.items == 1 and load.mix == "mixed" and load.connections)
"""The loads that differ in nothing but the number of connections."""


@click.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(result: Path) -> None:
    """Draw the picture of RESULT, a JSON file that `bench peers --save` or `bench generate --save` wrote."""
    page = msgspec.json.decode(result.read_bytes())
    if not page.get("turns"):
        raise click.ClickException(f"{result} holds no comparison")
    path = result.with_suffix(".png")
    if "bandwidths" in page:
        draw_generation(page, msgspec.convert(page, Generated), path)
    else:
        draw(page, msgspec.convert(page["turns"], list[Turn]), path)
    print(f"drawn as {path}")


def draw_generation(page: dict[str, Any], generated: Generated, path: Path) -> None:
    """Write a PNG: a panel for each load, a bar for each contender; a line is as far as the memory lets one stream go."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]  # only where it is installed
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # only where it is installed

    loads = list(dict.fromkeys(turn.load for turn in generated.turns))
    names = generated.names()[::-1]
    figure = Figure(figsize=(_SIZE[0] * 1.5, 1.5 + 0.4 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, load in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads, strict=True):
        rates = [median(generated.rates(name, load) or [0.0]) for name in names]
        colours = [_OWN_COLOUR if is_ours(name) else _OTHER_COLOUR for name in names]
        axis.bar_label(axis.barh(names, rates, color=colours), fmt="{:,.0f}", padding=2, fontsize=8)
        if load == "1 stream":
            for place, name in enumerate(names):
                axis.vlines(generated.limit(name), place - 0.4, place + 0.4, color="black", linewidth=1)
        axis.set(title=load, xlabel="tokens a second")
        axis.margins(x=0.2)
        axis.label_outer()
    figure.suptitle(f"{page['title']}\n{_where(page)}", fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _where(page: dict[str, Any]) -> str:
    machine = page["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {page['date'][:10]}, commit {page['commit']}"


def draw(page: dict[str, Any], turns: list[Turn], path: Path) -> None:
    """Write a PNG: on the left p50, on the right p99, both over tokens a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]  # only where it is installed
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # only where it is installed

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
    figure.suptitle(f"1 text a request, mixed lengths, {counts} connections\n{_where(page)}", fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _point(turns: list[Turn], name: str, load: Load, percentile: str) -> tuple[float, float] | None:
    own = [turn for turn in turns if (turn.contender, turn.load) == (name, load.name) and turn.texts]
    if not own:
        return None
    return median(turn.tokens_per_s for turn in own), median(getattr(turn, percentile) for turn in own)
