"""The helper process that turns a spec into a card: `python -m sie.catalog.prepare REQUEST`.

It is a separate process because it may take minutes, use the network and import transformers; the supervisor never does
these. REQUEST is a `Request` as JSON. Standard output carries JSON lines: any number of `Report`, then one `Ready`
(`Fetched` for an adapter, `Found` for model repositories) or `Failed`. The exit status is 1 after Failed, else 0. All
other output goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sie.catalog.architecture import read_model_config
from sie.catalog.cards import complete_card, make_card
from sie.catalog.chat_pairs import read_pair_template
from sie.catalog.checkpoint_card import check_before_weights
from sie.catalog.files import open_checkpoint, refuse
from sie.catalog.generation import finish_generator
from sie.catalog.gguf_file import SUFFIX, find_gguf
from sie.catalog.gli import check_union
from sie.catalog.hub import (
    CONFIGURATION,
    Progress,
    directory_hint,
    fetch,
    find_cached,
    list_files,
    remove_partial_files,
)
from sie.catalog.image_to_text import finish_image_to_text
from sie.catalog.lora import CONFIG_FILE, WEIGHTS_FILE
from sie.catalog.spec import ModelSpec, RepositoryModel, check_model_id
from sie.catalog.text_ends import with_text_ends
from sie.catalog.tokenizer import check_pieces, convert_tokenizer
from sie.catalog.tokenizer_settings import with_tokenizer_settings
from sie.catalog.weights import with_num_weights
from sie.runtime import child_setup, confined
from sie.values.card import ModelCard
from sie.values.errors import Internal, ModelLoadFailed, SieError, WireError, to_wire

NOT_FETCHED: Final = "NOT_FETCHED"
_SHOWN_FILES: Final = 5


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The work to prepare. cache_dir keeps converted tokenizers and weights."""

    spec: ModelSpec
    cache_dir: str
    is_adapter: bool = False
    """Whether the spec is that of an adapter on the hub, which only has to be fetched."""
    is_check: bool = False
    """Whether nothing may be downloaded: a hub model that is not on this machine is an error of class NOT_FETCHED."""
    converts: bool = False
    """Whether pickled weights are fetched and converted."""
    chat_template: str = ""
    """Path of the template for generators without their own; empty for none."""
    repositories: tuple[str, ...] = ()
    """Model repositories to search for the spec's model, or for all models when its id is empty."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The progress: a fraction 0 to 1, and the current activity."""

    fraction: float
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The last line, when a model was prepared."""

    card: ModelCard


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The last line, when an adapter was fetched."""

    directory: str


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The last line, when model repositories were read."""

    models: list[RepositoryModel]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last line, when it failed. The extras of error hold `error_class`."""

    error: WireError


Message = Report | Ready | Fetched | Found | Failed


def prepare(request: Request, on_progress: Progress) -> ModelCard:
    """Return the card of a model with all its files on this machine, tokenizer included; downloads missing files.

    With is_check it downloads nothing. Raises ModelLoadFailed.
    """
    card = _prepare(request, on_progress)
    for path in (card.tokenizer_file, card.static_queries.tokenizer_file if card.static_queries else ""):
        if path:
            check_pieces(card.id, path)
    return card


def _prepare(request: Request, on_progress: Progress) -> ModelCard:
    spec = request.spec
    if spec.stub is not None:
        return make_card(spec, "")
    if spec.tensor is not None:
        from sie.catalog.tensor_rule import read_tensor_card  # imports protobuf

        return read_tensor_card(spec)
    check_union(spec)
    directory = _locate(request, on_progress)
    if gguf := find_gguf(spec.id, directory):
        card = _read_gguf(spec, gguf, request, on_progress)
        return card if card.generate is None else finish_generator(card, request.chat_template)
    card = make_card(spec, directory)
    if "auto_map" in open_checkpoint(card.id, card.directory).read_object("config.json"):
        on_progress(1.0, "checking the architecture")
        read_model_config(card.id, card.directory, card.config_changes, card.config_part)
    if not card.tokenizer_file:
        on_progress(1.0, "converting the tokenizer")
        path = convert_tokenizer(card.id, card.directory, request.cache_dir)
        card = msgspec.structs.replace(card, tokenizer_file=path)
    card = with_tokenizer_settings(card, request.cache_dir)
    card = finish_image_to_text(with_text_ends(card, request.cache_dir), request.cache_dir)
    if card.score is not None and card.score.from_chat:
        on_progress(1.0, "reading the chat template")
        score = msgspec.structs.replace(card.score, template=read_pair_template(card))
        card = msgspec.structs.replace(card, score=score)
    if card.generate is not None:
        card = finish_generator(card, request.chat_template)
    return with_num_weights(card)


def _locate(request: Request, on_progress: Progress) -> str:
    """Return the directory of a model's files, converted if that is asked for and needed."""
    spec = request.spec
    if spec.directory is None:
        directory = _find(request) if request.is_check else _fetch(request, on_progress)
    else:
        directory = spec.directory
    if not request.converts or find_gguf(spec.id, directory):
        return directory
    from sie.catalog.convert import convert_cached  # the supervisor imports this module, and converts nothing

    def find_encoder(name: str) -> str:
        return _fetch_encoder(spec.id, name, on_progress)

    converted = convert_cached(
        spec.id, directory, request.cache_dir, on_progress, find_encoder, is_check=request.is_check
    )
    if converted is None:
        raise ModelLoadFailed("its files are not converted yet", extras={"error_class": NOT_FETCHED})
    return converted


def _fetch_encoder(model_id: str, name: str, on_progress: Progress) -> str:
    """Return the directory of an encoder that a GLiNER model names. Raises ModelLoadFailed."""
    from sie.catalog.gliner_parts import ENCODER_FILES

    try:
        check_model_id(name)
    except SieError as error:
        advice = "`sie convert --encoder DIR` takes its directory"
        raise refuse(model_id, f"its encoder {name!r} is not the id of a model on the hub; {advice}") from error
    return fetch(ModelSpec(id=name), on_progress, ENCODER_FILES)


def _fetch(request: Request, on_progress: Progress) -> str:
    """Return the directory of a model's snapshot. The weights are fetched only if the configuration can be served."""
    spec = request.spec
    directory = fetch(spec, on_progress, CONFIGURATION, "reading the configuration")
    if not Path(directory).exists():  # the library makes none for nothing
        raise refuse(spec.id, _no_configuration(spec))
    check_before_weights(spec.id, directory)
    spec = msgspec.structs.replace(spec, revision=Path(directory).name)
    directory = fetch(spec, on_progress)
    return fetch(spec, on_progress, _missing_weights(spec, directory)) if request.converts else directory


def _no_configuration(spec: ModelSpec) -> str:
    files = [file.path for file in list_files(spec) if file.path.endswith(SUFFIX)]
    if not files:
        return "its repository has no config.json"
    listed = ", ".join(files[:_SHOWN_FILES]) + ", ..." * (len(files) > _SHOWN_FILES)
    return f"its repository has no config.json; download one of its GGUF files ({listed}) and name its path instead"


def _missing_weights(spec: ModelSpec, directory: str) -> list[str]:
    from sie.catalog.convert import missing_weights

    return missing_weights(open_checkpoint(spec.id, directory))


def _find(request: Request) -> str:
    """Return the directory that `_fetch` would return, or raise its error, from this machine's cache only."""
    spec = request.spec
    if directory := find_cached(spec, CONFIGURATION):
        check_before_weights(spec.id, directory)
    directory = find_cached(spec)
    if directory and request.converts:
        directory = find_cached(spec, _missing_weights(spec, directory))
    if directory:
        return directory
    reason = f"it is not downloaded yet{directory_hint(spec.id)}"
    raise ModelLoadFailed(reason, extras={"error_class": NOT_FETCHED})


def _read_gguf(spec: ModelSpec, path: str, request: Request, on_progress: Progress) -> ModelCard:
    from sie.catalog.gguf_file import read_gguf_card  # imports gguf

    on_progress(0.0, "reading the GGUF file")
    return complete_card(read_gguf_card(spec.id, path, request.cache_dir, spec.pooling), spec)


def main(arguments: list[str]) -> int:
    """Run the helper and return its exit status."""
    # Libraries print. Only our lines may reach the reader of standard output.
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        request = msgspec.json.decode(arguments[0], type=Request)
        last = _answer(request, lambda fraction, text: _send(lines, Report(fraction, text)))
        _send(lines, last)
    except SieError as error:
        _send(lines, Failed(to_wire(error)))
        return 1
    except BaseException as error:  # the reader must always get a last line, also after a panic in Rust
        reason = f"{type(error).__name__}: {error}"
        _send(lines, Failed(to_wire(Internal(reason, extras={"error_class": "UNKNOWN"}))))
        return 1
    return 0


def _leave(*_: object) -> None:
    """End at once, and leave no part of a file behind. Threads may be downloading, so nothing waits for them."""
    remove_partial_files()
    os._exit(128 + signal.SIGTERM)


def _answer(request: Request, on_progress: Progress) -> Ready | Fetched | Found:
    if request.repositories:
        from sie.catalog.repository_layout import find_models  # imports protobuf

        return Found(find_models(request.repositories, request.spec.id))
    if request.is_adapter:
        return Fetched(fetch(request.spec, on_progress, [CONFIG_FILE, WEIGHTS_FILE]))
    return Ready(prepare(request, on_progress))


def _send(lines: BinaryIO, message: Message) -> None:
    lines.write(msgspec.json.encode(message) + b"\n")
    lines.flush()


if __name__ == "__main__":
    child_setup.exclude_imports_from_collections()
    confined.give_up_privileges()
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
