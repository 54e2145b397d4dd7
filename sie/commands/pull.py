"""The command `sie pull`: downloads models into the hub's cache and checks their files, without serving them."""

from __future__ import annotations

import os
from typing import Any

import click

from sie.commands.terminal import fail
from sie.config.bundled import with_bundled_files
from sie.config.flags import ModelsCommand, with_models
from sie.config.settings import load_settings
from sie.config.sources import SettingsError


@click.command(cls=ModelsCommand, help_sections=("models",))
def pull(named: tuple[str, ...], config_file: str | None, **flags: Any) -> int:
    """Download models and check their files, without serving them.

    A MODEL without a directory comes from the hub; files in the cache are not downloaded again. Exit status 1: not every
    model can be served.

    \b
      sie pull org/name
      sie pull org/name@v1.2 other/name
    """
    from sie.catalog.listing import check_models
    from sie.supervisor.card_helper import prepare_models
    from sie.values.card import ModelCard

    given = {name: value for name, value in with_models(flags, named).items() if value is not None and value != ()}
    loaded = with_bundled_files(load_settings(config_file, os.environ, given))
    specs = [spec for spec, _ in check_models(loaded).values()]
    if not specs:
        raise SettingsError("MODEL: no model is named")
    prepared = prepare_models(loaded.settings, specs)
    for spec in specs:
        result = prepared[spec.id]
        if isinstance(result, ModelCard):
            outputs = ", ".join(result.wire_outputs) or "tensors"
            click.echo(
                f"{spec.id}: ready in {result.directory} ({outputs})" if result.directory else f"{spec.id}: ready"
            )
        else:
            fail(result.message)
    return int(not all(isinstance(result, ModelCard) for result in prepared.values()))
