"""Reads a checkpoint for the benchmarks of generation as the server's prepare helper does, GGUF files included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sie.catalog.gguf_file import find_gguf
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard


def read_card(model: Path, cache: str) -> ModelCard:
    """Return the card of a directory or a GGUF file; a converted tokenizer comes to lie in the folder cache.

    Raises ModelLoadFailed.
    """
    directory = find_gguf("model", str(model)) or str(model)
    return prepare(Request(spec=ModelSpec(id="model", directory=directory), cache_dir=cache), lambda *_: None)


def packaged_gemma() -> Path:
    """Return Gemma 3 270M, the GGUF file that `make bench` has fetched."""
    from tests.gguf_models import gemma_file

    return gemma_file()


def as_checkpoint(model: Path) -> Path:
    """Return a directory with a model's weights in bfloat16 and its tokenizer, for servers that read no GGUF file.

    One that is made lies beside the file, so that it is made once.
    """
    if model.is_dir():
        return model
    import torch
    import transformers

    directory = model.with_suffix(".checkpoint")
    if not (directory / "config.json").exists():
        own = {"gguf_file": model.name}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.bfloat16, **own)
        transformers.AutoTokenizer.from_pretrained(model.parent, **own).save_pretrained(directory)
        loaded.hf_quantizer = (
            None  # its weights are plain numbers by now, and save_pretrained refuses the file's format
        )
        vars(loaded.config).pop("quantization_config", None)
        loaded.save_pretrained(directory)
    return directory
