"""Accepts this server on a GPU host, in stages that resume: `python -m tests.gpu`, which is `make gpu`.

A stage that came to its end is kept in the folder and does not run again. A stage that could not run is a failure. This
interpreter runs all of them as it is: nothing is installed or downloaded. Standard library alone, so that it can say what
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.stages import NOT_RUN, ROOT, STAGES, Run, Stage, environment, missing, python

_LEAST_S = 30.0
"""Time that has to be left for a stage to begin."""
_PROBE_TIMEOUT_S = 180.0
_BUILD_TIMEOUT_S = 240.0
_TAIL_LINES = 60
_MAX_PROBLEMS = 12
_PROBE = """
import json, sys
import torch
if sys.argv[1] == "cpu":
    print(json.dumps({"device": "cpu"}))
else:
    torch.cuda.init()
    p = torch.cuda.get_device_properties(0)
    found = {"device": p.name, "count": torch.cuda.device_count(), "memory_gib": round(p.total_memory / 2**30, 1),
             "multiprocessors": p.multi_processor_count, "capability": f"{p.major}.{p.minor}"}
    print(json.dumps(found))
"""
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "msgspec", "granian", "onnxruntime", "pytest")


class Ended(NamedTuple):
    """How a stage's process ended. status None: it was stopped, since its time was over."""

    status: int | None
    log: str
    seconds: float


def main() -> int:
    args = _parse_args()
    # Where files lie in the tree, a folder may be given from the root.
    run = Run(args.device, args.quick, args.folder.resolve())
    (run.folder / "results").mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + args.seconds if args.seconds else float("inf")
    kept = _read(run, args.again)
    _build_kernels()
    facts = _facts(run)
    print(_heading(facts), flush=True)
    wanted = [stage for stage in STAGES if not args.only or stage.name in args.only]
    for stage in wanted:
        if _is_done(stage, kept):
            print(f"== {stage.name}: {kept[stage.name]['state']} before, kept", flush=True)
            continue
        if until_s - time.monotonic() < _LEAST_S:
            break
        print(f"== {stage.name}: {stage.about}", flush=True)
        kept[stage.name] = _result(run, stage, facts, until_s)
        _write(run, kept, facts)
    text = _summary(kept, wanted)
    _write(run, kept, facts)
    print(text, flush=True)
    return int(any(kept.get(stage.name, {}).get("state") != "passed" for stage in wanted))


def _parse_args() -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu rehearses the run without a GPU")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few families")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu", help="of the results [build/gpu]")
    parser.add_argument("--seconds", type=float, default=0, help="stop before this time is over; call again to go on")
    parser.add_argument("--only", action="append", choices=names, help="this stage; repeatable")
    parser.add_argument(
        "--again",
        action="append",
        choices=names,
        default=[],
        help="run this stage again: its tests that have not passed; repeatable",
    )
    return parser.parse_args()


def _read(run: Run, again: Sequence[str]) -> dict[str, Any]:
    """Return the kept results by stage, without those that are to run again. Raises SystemExit for another run's folder."""
    try:
        page = json.loads((run.folder / "stages.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if page["run"] != run.kind:
        sys.exit(f"{run.folder} holds a run of {page['run']}, not {run.kind}: name another --folder")
    kept: dict[str, Any] = page["stages"]
    return {name: result for name, result in kept.items() if name not in again}


def _write(run: Run, kept: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write the results for the next call, and for people."""
    page = json.dumps({"run": run.kind, "facts": facts, "stages": kept}, indent=1)
    (run.folder / "stages.json").write_text(page, encoding="utf-8")
    tables = [text for result in kept.values() if (text := result.get("table"))]
    parts = [_heading(facts), _summary(kept, STAGES), *tables]
    (run.folder / "summary.md").write_text("\n".join(parts), encoding="utf-8")


def _is_done(stage: Stage, kept: dict[str, Any]) -> bool:
    """Return whether a stage came to its end. A host in which faults were found is looked at again."""
    state = kept.get(stage.name, {}).get("state")
    return state == "passed" or (state == "failed" and stage.name != "doctor")


def _build_kernels() -> None:
    """Compile sie/native where there is a compiler: everything works without it, slower."""
    sources = (path.stat().st_mtime for path in (ROOT / "sie" / "native" / "src").iterdir())
    library = ROOT / "sie" / "native" / "libsie_native.so"
    if library.exists() and library.stat().st_mtime > max(sources):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sie.native"], cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        note = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        note = "not ready in time"
    print(f"sie/native: {note.splitlines()[-1] if note else 'no answer'}", flush=True)


def _facts(run: Run) -> dict[str, Any]:
    """Return what the run is on. `error` says why there is no device."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]]),
        "host": f"{len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **_versions()},
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, run.device], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return facts | {"error": f"the device did not answer within {_PROBE_TIMEOUT_S:g} s"}
    if done.returncode == 0:
        return facts | json.loads(done.stdout.splitlines()[-1])
    return facts | {"error": (done.stderr.strip().splitlines() or ["no answer"])[-1]}


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _heading(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    device = ", ".join(f"{key} {value}" for key, value in facts.items() if key in (
        "device", "count", "memory_gib", "multiprocessors", "capability", "error"))  # fmt: skip
    return f"# GPU acceptance\n\n- {facts['date']}: `{facts['command']}`\n- {device}; {facts['host']}\n- {versions}\n"


def _result(run: Run, stage: Stage, facts: dict[str, Any], until_s: float) -> dict[str, Any]:
    """Run one stage and return what is kept of it."""
    command = python(stage, run)
    result: dict[str, Any] = {"stage": stage.name, "date": facts["date"], "command": shlex.join(command)}
    if names := missing(stage.needs):
        return result | {"state": "not run", "problems": [f"cannot be imported: {', '.join(names)}"], "seconds": 0}
    if "error" in facts and stage.name != "doctor":
        return result | {"state": "not run", "problems": [f"no device: {facts['error']}"], "seconds": 0}
    ended = _execute(run, stage, command, until_s)
    problems, counts = _judge(run, stage, ended)
    state = "unfinished" if ended.status is None else "failed" if problems else "passed"
    lines = ended.log.splitlines()
    first_row = next((place for place, line in enumerate(lines) if line.startswith("| ")), None)
    table = "" if first_row is None else "\n".join(lines[first_row:])
    return result | {
        "state": state, "problems": problems, "counts": counts, "seconds": round(ended.seconds, 1),
        "log": lines[-_TAIL_LINES:], "table": table, "left_out": _left_out(run, stage),
    }  # fmt: skip


def _execute(run: Run, stage: Stage, command: list[str], until_s: float) -> Ended:
    """Run a stage's command in a session of its own, showing what it writes, until it ends or its time is over."""
    limit_s = min(float(stage.limit_s), until_s - time.monotonic() - 5)
    if stage.is_pytest:
        command = [*command, *_already_passed(run, stage)]
    began_s = time.monotonic()
    log = run.folder / ".log"
    with log.open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(run, stage), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        file.seek(0)
        text = file.read()
    log.unlink()
    print(text, flush=True)
    return Ended(status, text, time.monotonic() - began_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage's whole session: first as Ctrl-C does, so that tests stop their servers."""
    for number, wait_s in ((signal.SIGINT, 15.0), (signal.SIGKILL, 15.0)):
        if process.poll() is not None and number is signal.SIGINT:
            continue
        for pid in [process.pid] if number is signal.SIGINT else _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def _session(leader: int) -> list[int]:
    """Return the processes of a session: servers that tests started have process groups of their own."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:  # the sixth field; see proc(5)
                found.append(int(folder.name))
    return found


def _lines(run: Run, stage: Stage) -> dict[str, dict[str, Any]]:
    """Return the last line of each test that has run, in this call or an earlier one."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for text in (run.folder / f"{stage.name}.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                found[line["test"]] = line
    return found


def _already_passed(run: Run, stage: Stage) -> list[str]:
    passed = [name for name, line in _lines(run, stage).items() if line["outcome"] == "passed"]
    return [word for name in passed for word in ("--deselect", name)]


def _judge(run: Run, stage: Stage, ended: Ended) -> tuple[list[str], dict[str, int]]:
    """Return what is wrong with a stage, and the tests by outcome."""
    problems: list[str] = []
    counts: Counter[str] = Counter()
    if ended.status is None:
        problems.append(f"stopped after {ended.seconds:.0f} s")
    if stage.is_pytest:
        lines = _lines(run, stage)
        counts.update(line["outcome"] for line in lines.values())
        # On a device no test may be skipped. A rehearsal has tests that need a GPU.
        wrong = ("failed",) if run.device == "cpu" else ("failed", "skipped")
        bad = [line for line in lines.values() if line["outcome"] in wrong]
        problems += [f"{line['outcome']}: {line['test']}: {_last(line['text'])}" for line in bad]
        if not lines and ended.status is not None:
            problems.append("no test ran")
        if ended.status == 5:  # every test had passed before
            return problems, dict(counts)
    if ended.status and not problems:
        problems.append(f"exit status {ended.status}: {_last(ended.log)}")
    return problems, dict(counts)


def _left_out(run: Run, stage: Stage) -> list[str]:
    """Return what kept tests of a stage from being run, and how many."""
    counts = Counter(line["text"] for line in _lines(run, stage).values() if line["outcome"] == NOT_RUN)
    return [f"{count} {NOT_RUN}: {reason}" for reason, count in counts.items()]


def _last(text: str) -> str:
    """Return the line of a text that says most: an assertion's, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("E ")), lines[-1] if lines else "")[:300]


def _summary(kept: dict[str, Any], wanted: Sequence[Stage]) -> str:
    """Return a table of the stages, and what was wrong with each."""
    rows = [("stage", "state", "seconds", "tests")]
    notes: list[str] = []
    for stage in wanted:
        result = kept.get(stage.name, {"state": "not reached", "problems": [], "seconds": 0})
        counts = ", ".join(f"{count} {outcome}" for outcome, count in result.get("counts", {}).items())
        rows.append((stage.name, result["state"], str(result["seconds"]), counts))
        problems = result["problems"]
        notes += [f"- {stage.name}: {text}" for text in result.get("left_out", [])]
        notes += [f"- {stage.name}: {text}" for text in problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            notes.append(f"- {stage.name}: and {len(problems) - _MAX_PROBLEMS} more, see stages.json")
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
    table = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join(["", *table, "", *notes, ""])


if __name__ == "__main__":
    sys.exit(main())
