"""Reads `families.toml` and `catalogue.toml`: the families that are served, and the reference catalogue by family.

docs/models.md has the first as its table; `sie list --catalogue` prints the second.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

Served = Literal["yes", "converted", "no"]

_COLUMNS: Final = {
    "family": "name", "recognised by": "recognised", "outputs": "outputs", "what it computes": "computes",
    "source": "source", "compared with": "oracle", "within": "within", "such as": "example",
}  # fmt: skip
"""The headings of the table in docs/models.md, and the fields below them."""


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A family of checkpoints: one row of the table in docs/models.md, whose cells these are."""

    name: str
    recognised: str
    outputs: str
    computes: str
    source: str
    oracle: str
    within: str
    """The tolerance of the comparison with the oracle."""
    example: str = ""
    """The id of a model in the reference catalogue."""
    test: str
    """The file that compares it."""


class CatalogueRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model of the reference catalogue: whether it is served, by which family, or why not."""

    id: str
    served: Served
    family: str = ""
    reason: str = ""


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models of the catalogue that share a family or a reason."""

    ids: tuple[str, ...]
    family: str = ""
    reason: str = ""
    converted: bool = False


def families() -> tuple[Family, ...]:
    """Return the families in the order of the table."""
    return _read("families.toml", "family", tuple[Family, ...])


def read_catalogue() -> list[CatalogueRow]:
    """Return the models of the reference catalogue, sorted by id without case."""
    rows = [_row(group, model_id) for group in _groups() for model_id in group.ids]
    return sorted(rows, key=lambda row: row.id.lower())


def _row(group: _Group, model_id: str) -> CatalogueRow:
    if not group.family:
        return CatalogueRow(model_id, "no", reason=group.reason)
    return CatalogueRow(model_id, "converted" if group.converted else "yes", family=group.family)


def render_families() -> str:
    """Return the families as the table of docs/models.md."""
    rows = [tuple(_COLUMNS), ("---",) * len(_COLUMNS)]
    rows += [tuple(getattr(family, field) or "-" for field in _COLUMNS.values()) for family in families()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def render_catalogue(rows: list[CatalogueRow]) -> str:
    """Return the rows as aligned columns, and their count in the last line."""
    shown = {"yes": "yes", "converted": "after conversion", "no": "no"}
    table = [("MODEL", "SERVED", "AS, OR WHY NOT")]
    table += [(row.id, shown[row.served], row.family or row.reason) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(2)]
    lines = [f"{first:<{widths[0]}}  {second:<{widths[1]}}  {third}" for first, second, third in table]
    count = Counter(row.served for row in rows)
    served = count["yes"] + count["converted"]
    total = f"{served} of {len(rows)} are served: {count['yes']}, and {count['converted']} after conversion (--convert)"
    return "\n".join([*lines, "", total])


@cache
def _groups() -> tuple[_Group, ...]:
    return _read("catalogue.toml", "models", tuple[_Group, ...])


def _read(name: str, key: str, form: Any) -> Any:
    text = files("sie.catalog").joinpath(name).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)[key], form)


def write_table(page: Path) -> None:
    """Replace the table of families in docs/models.md."""
    text = page.read_text(encoding="utf-8")
    start = text.index(f"| {next(iter(_COLUMNS))} |")
    end = text.index("\n\n", start)
    page.write_text(text[:start] + render_families() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
