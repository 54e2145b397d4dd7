"""The pages name files, settings, routes and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sie.config.other_servers import HINTS
from sie.config.settings import all_keys
from sie.frontend.routes.table import TABLE
from sie.metrics.definitions import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
_PATH = re.compile(r"`((?:sie|tests|docs|bench|monitoring)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def _ours(page: str) -> list[str]:
    """Return the code in the last cell of each row of a table: the names that this server gives to something."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|") and "---" not in line]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row[-1])]


def test_the_page_for_those_who_come_from_elsewhere_names_what_there_is() -> None:
    named = _ours((ROOT / "docs/coming-from.md").read_text(encoding="utf-8"))
    words = [word for code in named for word in code.split()]
    flags = {word for word in words if word.startswith("--")}
    assert len(flags) > 20
    switches = {f"--no-{key.flag[2:]}" for key in all_keys() if isinstance(key.default, bool)}
    assert flags <= {key.flag for key in all_keys()} | switches | {"--file"}
    routes = {word for word in words if word.startswith(("/v", "/healthz", "/readyz", "/metrics"))}
    assert len(routes) > 8
    assert routes <= {row.template for row in TABLE}
    metrics = {word for word in words if word.startswith("sie_")}
    assert len(metrics) > 10
    assert metrics <= {family.name for family in FAMILIES}


def test_the_flags_of_other_servers_have_the_same_hint_on_the_page_and_on_the_command_line() -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|$", page.split("## Flags")[1].split("## Routes")[0], re.MULTILINE)
    own = {key.flag for key in all_keys()}
    ours_of = {
        flag.replace("_", "-"): ours
        for _, theirs, ours in rows
        for code in re.findall(r"`([^`]+)`", theirs)
        for flag in re.findall(r"--[\w-]+", code)
    }
    assert ours_of.keys() - own == HINTS.keys()
    for flag, hint in HINTS.items():
        names = re.findall(r"--[a-z-]+|[A-Z]+[=@][A-Z]+|[a-z]+(?:_[a-z]+)+", hint)
        assert names, hint
        assert not [name for name in names if f"`{name}" not in ours_of[flag]], flag
