"""The pages name files, settings, routes and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    assert flags <= {key.flag for key in all_keys()} | {"--file"}
    routes = {word for word in words if word.startswith(("/v", "/healthz", "/readyz", "/metrics"))}
    assert len(routes) > 8
    assert routes <= {row.template for row in TABLE}
    metrics = {word for word in words if word.startswith("sie_")}
    assert len(metrics) > 10
    assert metrics <= {family.name for family in FAMILIES}
