"""Writes the report of a chaos run, one page that needs nothing else: `python tests/chaos/page.py FOLDER`.

`report.md` beside it is the same table as text, to be kept under `bench/results`.

It shows every figure beside what is demanded of it, also of the rows that failed, and which rows did not run and why.
"""

from __future__ import annotations

import html
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("granian", "uvloop", "msgspec", "numpy")
_WIDTH, _HEIGHT, _MARGIN = 860, 220, 48
_MAX_POINTS = 4000

NOT_RUN = {
    "F16, F26, F34": "for files, templates and schemas: tests/process has them",
    "F45 to F51": "for servers that are joined by NATS: rows C1 to C9 are for them",
}

_METHOD = (
    "Every request of every load was checked: one outcome, the digest of its own input, none later than its deadline plus "
    "a second. Latencies count from when a request was due (open loop)."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; color: #1c2430; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #dde3ea; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap } .ok { color: #0a6b38 } .bad { color: #b3261e; font-weight: 600 }
.sub { color: #5a6675; font-size: .9rem } svg { width: 100%; height: auto; background: #f7f9fb; border-radius: 6px }
@media (prefers-color-scheme: dark) { body { color: #dfe5ec; background: #14181d } td, th { border-color: #2c343d } svg { background: #1b2128 } .ok { color: #5fd38d } .bad { color: #ff8a80 } .sub { color: #93a0ae } }
"""


def render(rows: Sequence[dict[str, Any]], facts: dict[str, str]) -> str:
    """Return the page."""
    num_failed = sum(row["outcome"] == "failed" for row in rows)
    verdict = f"{len(rows)} rows ran, {num_failed} of them failed" if num_failed else f"all {len(rows)} rows held"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Chaos report</title><style>{_STYLE}</style><h1>Chaos report: {verdict}</h1>",
        "<table>",
        *(f"<tr><th>{html.escape(name)}<td>{html.escape(value)}</tr>" for name, value in facts.items()),
        f"</table><h2>What is demanded, and what was measured</h2><p class=sub>{_METHOD}</p>",
        "<table><tr><th>row<th>what happens<th>figure<th>demanded<th class=n>measured</tr>",
        *map(_row, rows),
        "</table>",
        *(_plot(row, plot) for row in rows for plot in row["plots"]),
        "<h2>Rows that are not here</h2><table>",
        *(f"<tr><td>{html.escape(name)}<td>{html.escape(reason)}</tr>" for name, reason in NOT_RUN.items()),
        "</table></html>",
    ]
    return "\n".join(parts)


def render_text(rows: Sequence[dict[str, Any]], facts: dict[str, str]) -> str:
    """Return the table as Markdown."""
    lines = [*(f"- {name}: {value}" for name, value in facts.items()), "", _METHOD, ""]
    lines += ["| row | what happens | figure | demanded | measured |", "|---|---|---|---|---:|"]
    for row in rows:
        head = f"{row['row']}{'' if row['outcome'] == 'passed' else ' ' + row['outcome']} | {row['fault']}"
        if not row["figures"]:
            lines.append(f"| {head} | {row['reason'].replace('|', '/')} | | |")
        for figure in row["figures"]:
            value = f"{_number(figure['value'])} {figure['unit'].removesuffix(' more')}".strip()
            lines.append(f"| {head} | {figure['name']} | {figure['demand']} | {value} |")
            head = " | "
    lines += ["", *(f"- not here: {name}: {reason}" for name, reason in NOT_RUN.items())]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    verdict = {"passed": "", "failed": "<div class=bad>failed</div>", "skipped": "<div class=sub>skipped</div>"}
    head = f"<td>{row['row']}{verdict[row['outcome']]}<td>{html.escape(row['fault'])}"
    reason = f"<div class='sub bad'>{html.escape(row['reason'])}</div>" if row["reason"] else ""
    head += f"{reason}<div class=sub>{row['took_s']:.0f} s</div>"
    lines: list[str] = []
    for figure in row["figures"] or [{"name": "", "demand": "", "value": None, "unit": "", "is_met": True}]:
        mark = "bad" if not figure["is_met"] else "ok" if figure["demand"] else ""
        value = "" if figure["value"] is None else f"{_number(figure['value'])} {figure['unit'].removesuffix(' more')}"
        cells = f"<td>{html.escape(figure['name'])}<td>{html.escape(figure['demand'])}<td class='n {mark}'>{value}"
        lines.append(f"<tr>{head if not lines else '<td><td>'}{cells}</tr>")
    return "".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def _plot(row: dict[str, Any], plot: dict[str, Any]) -> str:
    """Return points over a scale that begins at zero, faults as lines, as one drawing."""
    points = plot["points"]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1
    top = max(y for _, y in points) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x / right * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN / 2 - y / top * (_HEIGHT - _MARGIN)

    marks = "".join(f"<line x1={at(x, 0)[0]:.1f} x2={at(x, 0)[0]:.1f} y1={at(0, top)[1]:.0f} y2={at(0, 0)[1]:.0f} />"
                    for x in plot["marks"])  # fmt: skip
    shown = points[:: max(1, len(points) // _MAX_POINTS)]
    dots = "".join(
        f"<circle cx={at(x, y)[0]:.1f} cy={at(x, y)[1]:.1f} r={2 if len(shown) > 50 else 4} />" for x, y in shown
    )
    x_name, y_name = plot["axes"]
    labels = (
        f"<text x=4 y={at(0, top)[1] + 4:.0f}>{top:,.0f} {y_name}</text><text x=4 y={at(0, 0)[1]:.0f}>0</text>"
        f"<text x={_WIDTH - _MARGIN} y={_HEIGHT - 2} text-anchor=end>{right:,.0f} {x_name}</text>"
    )
    return (
        f"<h2>{row['row']}: {html.escape(plot['title'])}</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img>"
        f"<g stroke='#d97706' stroke-opacity=.35>{marks}</g><g fill='#2563eb' fill-opacity=.6>{dots}</g>"
        f"<g fill=currentColor font-size=11>{labels}</g></svg>"
    )


def _facts() -> dict[str, str]:
    memory = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    root = Path(__file__).resolve().parents[2]
    git = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{cpus[0] if cpus else platform.machine()}, {os.cpu_count()} cores, {int(memory) >> 20} GiB, "
        f"Linux {platform.release()}",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        "commit": git.stdout.strip() or "unknown",
        "load average": ", ".join(f"{value:.1f}" for value in os.getloadavg())
        + " over the last 1, 5 and 15 minutes, the "
        "rows' own load included; over twice the cores, figures of time are rather the machine's",
        "length": "long" if os.environ.get("CHAOS") == "long" else "short, times may be over by a factor of four",
        "seed": os.environ.get("CHAOS_SEED", "20260"),
        "again": "make chaos",
    }


def main() -> None:
    folder = Path(sys.argv[1])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: int(row["row"][1:]))
    page = folder / "report.html"
    facts = _facts()
    page.write_text(render(rows, facts))
    page.with_suffix(".md").write_text(f"# Chaos\n\n{render_text(rows, facts)}")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
