"""The table of families and the reference catalogue say the same, and docs/models.md shows them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from sie.catalog.families import CatalogueRow, families, read_catalogue, render_families, write_table
from sie.commands.cli import cli

ROOT = Path(__file__).parents[3]
NUM_MODELS = 212


def test_the_page_has_the_table_of_the_data() -> None:
    assert f"\n{render_families()}\n" in (ROOT / "docs/models.md").read_text(), "`make fix` writes it"


def test_writing_the_table_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# before\n\n| family | old |\n| --- | --- |\n| x | y |\n\n## after\n")
    write_table(page)
    assert page.read_text() == f"# before\n\n{render_families()}\n\n## after\n"


def test_every_family_is_compared_by_a_test_that_exists() -> None:
    for family in families():
        assert "def test_" in (ROOT / family.test).read_text(), family.name
        assert all(msgspec.structs.asdict(family)[field] for field in ("oracle", "within", "source")), family.name


def test_an_example_is_served_as_its_family() -> None:
    by_id = {row.id: row for row in read_catalogue()}
    for family in families():
        assert not family.example or by_id[family.example].family == family.name


def test_every_model_of_the_catalogue_is_listed_once_with_a_known_family_or_a_reason() -> None:
    rows = read_catalogue()
    assert len({row.id for row in rows}) == len(rows) == NUM_MODELS
    names = {family.name for family in families()}
    for row in rows:
        assert (row.family in names) if row.served != "no" else (row.reason and not row.family), row


def test_the_command_ends_with_the_count() -> None:
    result = CliRunner().invoke(cli, ["models", "--catalogue"], standalone_mode=False)
    *lines, empty, last = result.output.splitlines()
    assert (len(lines), empty) == (NUM_MODELS + 1, "")
    counts = {kind: sum(row.served == kind for row in read_catalogue()) for kind in ("yes", "converted", "no")}
    served = counts["yes"] + counts["converted"]
    assert last.startswith(f"{served} of {NUM_MODELS} are served: {counts['yes']}, and {counts['converted']} after")
    as_json = CliRunner().invoke(cli, ["models", "--catalogue", "--json"], standalone_mode=False)
    assert msgspec.json.decode(as_json.output, type=list[CatalogueRow]) == read_catalogue()
