"""Holds the contents of a GGUF file: its metadata, and the table of its tensors. Their values are read when needed."""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.files import refuse


class GgufContents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file. The reader is the library's, and has the file mapped."""

    model_id: str
    path: str
    fields: dict[str, Any]
    """The metadata, without the vocabulary but with named special tokens."""
    reader: Any
    fingerprint: str
    """A digest of the metadata and of the rules for them."""

    @property
    def architecture(self) -> str:
        """The name of its architecture, or empty."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its name, outputs first."""
        return {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in self.reader.tensors}

    def read_tensor(self, name: str) -> Any:
        """Return a small tensor as float32. Raises ModelLoadFailed."""
        from gguf.quants import dequantize

        tensor = next(tensor for tensor in self.reader.tensors if tensor.name == name)
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise refuse(self.model_id, f"its tensor {name!r} cannot be read: {error}") from error

    def vocabulary(self, name: str) -> list[Any]:
        """Return the values of a list of the vocabulary: bytes, or arrays of one number; empty if there is none."""
        field = self.reader.fields.get(f"tokenizer.ggml.{name}")
        return [] if field is None else [field.parts[place] for place in field.data]

    def texts(self, name: str) -> list[str]:
        """Return a list of texts of the vocabulary, such as its tokens; empty if there is none."""
        return [bytes(text).decode("utf-8", "replace") for text in self.vocabulary(name)]

    def token_types(self) -> list[int]:
        """Return the type of each token, as in gguf's `TokenType`; empty in an older file."""
        return [int(number[0]) for number in self.vocabulary("token_type")]
