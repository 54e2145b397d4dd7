"""The command `sie convert`: makes a complete directory with safetensors of a checkpoint with pickled weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

from sie.commands.terminal import fail


@click.command()
@click.argument("source", type=click.Path())
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
    from sie.catalog.files import open_checkpoint
    from sie.catalog.lora import CONFIG_FILE
    from sie.catalog.spec import ModelSpec
    from sie.runtime.progress import Progress
    from sie.values.errors import SieError

    named = {name: directory for name, _, directory in (encoder.rpartition("=") for encoder in encoders)}
    if problem := _why_not(Path(source), Path(target)):
        return fail(problem)
    progress = Progress(sys.stderr, "text", verb="Converting")
    done = source
    try:
        if not needs_conversion(open_checkpoint(source, source)):
            return fail(_why_nothing(Path(source)))
        convert_directory(
            source,
            source,
            Path(target).absolute(),
            lambda fraction, text: progress.update(source, fraction, text),
            lambda name: _encoder_directory(source, named, name),
        )
        done = f"{target} is complete, but cannot be served"
        is_adapter = Path(target, CONFIG_FILE).exists()
        outputs = "adapter" if is_adapter else ", ".join(make_card(ModelSpec(id=target), target).wire_outputs)
    except SieError as error:
        progress.close()
        return fail(f"{done}: {error.message.partition(' cannot be loaded: ')[2] or error.message}")
    finally:
        progress.close()
    click.echo(f"{target}: ready ({outputs})")
    return 0


def _encoder_directory(source: str, named: Mapping[str, str], name: str) -> str:
    """Return the directory that was given for an encoder. Raises ModelLoadFailed without one."""
    from sie.catalog.files import refuse

    directory = named.get(name) or named.get("")
    if directory is None:
        raise refuse(source, f"it needs files of its encoder {name!r}: name their directory with --encoder")
    return directory


def _why_not(source: Path, target: Path) -> str:
    """Return why one of the directories cannot be used, and what to do; empty if both can."""
    if source.is_file():
        return f"{source} is a file; name its directory, which has the model's other files, too"
    if not source.is_dir():
        return f"there is no directory {source}; `sie pull --convert MODEL` downloads and converts a model of the hub"
    if target.exists():
        return f"{target} exists already; name a new directory"
    parent = target.absolute().parent
    return "" if parent.is_dir() else f"there is no directory {parent}; make it first"


def _why_nothing(source: Path) -> str:
    if any(source.glob("**/*.safetensors")):
        return f"{source} has nothing to convert: its weights are safetensors; `sie serve {source}` takes them"
    return f"{source} has nothing to convert: there is no pytorch_model*.bin, adapter_model.bin or head of bge-m3 in it"
