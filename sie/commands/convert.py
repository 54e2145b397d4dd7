"""The command `sie convert`: makes a complete directory with safetensors of a checkpoint with pickled weights."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sie.commands.terminal import fail


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("target", type=click.Path())
@click.option(
    "--encoder",
    "encoders",
    multiple=True,
    metavar="[NAME=]DIR",
    help="Directory of an encoder that a GLiNER model names.",
)
def convert(source: str, target: str, encoders: tuple[str, ...]) -> int:
    """Convert a checkpoint's pickled weights to safetensors, in a new directory.

    SOURCE is only read, and its pickles are never run. For models on the hub: `sie pull --convert MODEL`.

    \b
      sie convert ./bge-m3 ./bge-m3-safetensors
      sie convert ./gliner ./gliner-complete --encoder ./deberta-v3-base
    """
    from sie.catalog.cards import make_card
    from sie.catalog.convert import convert as convert_directory
    from sie.catalog.convert import needs_conversion
    from sie.catalog.files import open_checkpoint, refuse
    from sie.catalog.lora import CONFIG_FILE
    from sie.catalog.spec import ModelSpec
    from sie.runtime.progress import Progress
    from sie.values.errors import SieError

    named = {name: directory for name, _, directory in (encoder.rpartition("=") for encoder in encoders)}

    def find_encoder(name: str) -> str:
        directory = named.get(name) or named.get("")
        if directory is None:
            raise refuse(source, f"it needs files of its encoder {name!r}: name their directory with --encoder")
        return directory

    if Path(target).exists():
        return fail(f"{target} exists already; name a new directory")
    progress = Progress(sys.stderr, "text", verb="Converting")
    try:
        if not needs_conversion(open_checkpoint(source, source)):
            return fail(f"{source} has nothing to convert")
        convert_directory(
            source,
            source,
            Path(target).absolute(),
            lambda done, text: progress.update(source, done, text),
            find_encoder,
        )
        is_adapter = Path(target, CONFIG_FILE).exists()
        outputs = "adapter" if is_adapter else ", ".join(make_card(ModelSpec(id=target), target).wire_outputs)
    except SieError as error:
        return fail(error.message)
    finally:
        progress.close()
    click.echo(f"{target}: ready ({outputs})")
    return 0
