"""Reads multipart forms piece by piece. Bodies of files go to sinks, never into memory. Every call blocks.

Source: RFC 7578, and RFC 2046 for the form of a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sie.values.errors import BadRequest, InputTooLong

_MAX_VALUE_BYTES: Final = 16 * 1024
_MAX_VALUES: Final = 64
_MAX_BOUNDARY_BYTES: Final = 70
_FORM: Final = b"multipart/form-data"


class Sink(Protocol):
    """Where the bytes of a file go."""

    num_bytes: int

    def write(self, data: bytes) -> None:
        """Append bytes."""
        ...

    def discard(self) -> None:
        """Delete what was written."""
        ...


class FilePart:
    """One file of a form."""

    def __init__(self, field: str, name: str, media: str | None, sink: Sink) -> None:
        self.field = field
        self.name = name
        """The file's name as the client wrote it."""
        self.media = media
        """The part's content type, or None."""
        self.sink = sink


class FormReader:
    """Reads one form. Feed it, then take its `values` and `files`. `discard` deletes what was written for files."""

    def __init__(
        self, content_type: str | None, open_sink: Callable[[], Sink], *, max_files: int, max_file_bytes: int,
        setting: str,
    ) -> None:  # fmt: skip
        """Take the request's content type. setting is the name of the setting behind max_file_bytes.

        Raises BadRequest, with status 415 if the body is not a form.
        """
        self.values: dict[str, str] = {}
        self.files: list[FilePart] = []
        self._open_sink = open_sink
        self._max_files = max_files
        self._max_file_bytes = max_file_bytes
        self._setting = setting
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field = ""
        self._text: bytearray | None = None
        self._is_whole = False
        self._parser = MultipartParser(_boundary(content_type), {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        })  # fmt: skip

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises BadRequest, InputTooLong (413) for a large file, and OSError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def finish(self) -> None:
        """Raise BadRequest if the form is not complete."""
        if not self._is_whole:
            raise _malformed("it ends before its last boundary")

    def discard(self) -> None:
        """Delete what was written for files."""
        for part in self.files:
            part.sink.discard()

    def _begin_part(self) -> None:
        self._headers = {}

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = _text(options.get(b"name", b""))
        if b"filename" not in options:
            if len(self.values) >= _MAX_VALUES:
                raise _malformed(f"it has more than {_MAX_VALUES} fields")
            self._text = bytearray()
            return
        if len(self.files) >= self._max_files:
            raise BadRequest(f"The form has more than {self._max_files} files", http_status=422,
                             extras={"param": self._field})  # fmt: skip
        self._text = None
        media = self._headers.get(b"content-type")
        name = _text(options[b"filename"])
        self.files.append(FilePart(self._field, name, _text(media) if media else None, self._open_sink()))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._text is not None:
            self._text += data[start:end]
            if len(self._text) > _MAX_VALUE_BYTES:
                raise _malformed(f"its field '{self._field[:80]}' is over {_MAX_VALUE_BYTES} bytes")
            return
        sink = self.files[-1].sink
        sink.write(data[start:end])
        if sink.num_bytes > self._max_file_bytes:
            text = f"The file is over {self._setting} ({self._max_file_bytes} bytes)"
            raise InputTooLong(text, http_status=413, extras={"param": self._field})

    def _end_part(self) -> None:
        if self._text is not None:
            self.values[self._field] = _text(bytes(self._text))

    def _end(self) -> None:
        self._is_whole = True


def _boundary(content_type: str | None) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind.lower() != _FORM:
        raise BadRequest(f"Content-Type must be multipart/form-data, not {content_type!r}", http_status=415)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
        raise _malformed("its Content-Type has no boundary of 1 to 70 characters")
    return boundary


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _malformed(reason: str) -> BadRequest:
    return BadRequest(f"The body is not a valid multipart form: {reason}")
