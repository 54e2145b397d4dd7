"""Renders settings: a table with sources, JSON, a TOML file to start from, and docs/settings.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from sie.config.reloadable import LIVE
from sie.config.settings import Loaded, Settings, all_keys
from sie.config.sources import CONFIG_VARIABLE, Key

_MAX_VALUE_CHARS = 48


def render_text(loaded: Loaded) -> str:
    """Return every setting, its value and its source, in aligned columns by section."""
    rows = [(key.section, key.name, _literal(loaded.value(key)), str(loaded.sources[key.name])) for key in all_keys()]
    name_width = max(len(row[1]) for row in rows)
    value_width = min(_MAX_VALUE_CHARS, max(len(row[2]) for row in rows))
    lines: list[str] = []
    for section, group in itertools.groupby(rows, key=lambda row: row[0]):
        lines += ["", f"[{section}]"]
        lines += [f"  {name:<{name_width}}  {value:<{value_width}}  {source}" for _, name, value, source in group]
    return "\n".join(lines[1:]) + "\n"


def render_json(loaded: Loaded) -> str:
    """Return `{section: {name: {"value": ..., "source": ...}}}`."""
    tree: dict[str, dict[str, Any]] = {}
    for key in all_keys():
        entry = {"value": loaded.value(key), "source": str(loaded.sources[key.name])}
        tree.setdefault(key.section, {})[key.name] = entry
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def render_toml(loaded: Loaded) -> str:
    """Return a file for `--config` with the current values; defaults are commented out."""
    lines: list[str] = []
    for section, keys in itertools.groupby(all_keys(), key=lambda key: key.section):
        lines += ["", f"[{section}]"]
        for key in keys:
            mark = "# " if loaded.sources[key.name].kind == "default" else ""
            lines.append(f"{mark}{key.name} = {_literal(loaded.value(key))}")
    return "\n".join(lines[1:]) + "\n"


def render_markdown() -> str:
    """Return the documentation page, with defaults instead of current values."""
    return "\n".join(_page()) + "\n"


RENDERERS: dict[str, Callable[[Loaded], str]] = {
    "text": render_text,
    "json": render_json,
    "toml": render_toml,
    "markdown": lambda _: render_markdown(),
}


def _page() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "`make fix` writes this page from the sections in `sie/config`, with `sie config --format markdown`."
    yield ""
    yield "The key `max_body_bytes` under `[limits]` in a TOML file is the flag `--max-body-bytes` and the variable"
    yield "`SIE_MAX_BODY_BYTES`. A flag overrides a variable, a variable overrides the file, and the file overrides the"
    yield f"default. `--config FILE` or `{CONFIG_VARIABLE}` names the file. Repeat a flag to give a list; in a variable white"
    yield "space separates its values. An unknown key or flag stops the start, with exit status 78. An unknown variable"
    yield "that begins with `SIE_` only warns, because another program on the same host may read it. `SIE_URL` and"
    yield "`SIE_API_KEY` are those of client commands, and no settings."
    yield "`sie config` shows each value and its source; `sie config --format toml` writes a file to start from."
    yield ""
    live = ", ".join(f"`{key.name}`" for key in all_keys() if key.name in LIVE)
    yield f"`systemctl reload sie`, which is SIGHUP, makes a running server use new values of: {live}."
    yield "Other changes wait for a restart, and the log names them. A wrong file changes nothing."
    for section, keys in itertools.groupby(all_keys(), key=lambda key: key.section):
        doc = section_doc(section)
        yield from ("", f"## [{section}]", "", doc, "", "| key | default | accepts | meaning |", "|---|---|---|---|")
        yield from (_row(key) for key in keys)


def section_doc(section: str) -> str:
    """Return the first line of a section's docstring."""
    return (type(getattr(Settings(), section)).__doc__ or "").splitlines()[0]


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{_literal(key.default)}`", key.expects, key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _literal(value: Any) -> str:
    """Return `value` in TOML; JSON has the same form for texts, numbers, booleans and lists."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
