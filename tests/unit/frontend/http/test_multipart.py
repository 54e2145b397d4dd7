"""Forms: files to sinks as they arrive, however the bytes are cut, and what is malformed refused."""

from __future__ import annotations

import pytest

from sie.frontend.http.multipart import FormReader
from sie.values.errors import BadRequest, InputTooLong

KIND = "multipart/form-data; boundary=XX"


class Memory:
    def __init__(self) -> None:
        self.data = b""
        self.is_discarded = False

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def write(self, data: bytes) -> None:
        self.data += data

    def discard(self) -> None:
        self.is_discarded = True


def part(name: str, value: bytes, filename: str | None = None, kind: str | None = None) -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"' + (
        f'; filename="{filename}"' if filename is not None else ""
    )
    return head.encode() + (f"\r\nContent-Type: {kind}" if kind else "").encode() + b"\r\n\r\n" + value + b"\r\n"


def reader(**limits: int) -> FormReader:
    return FormReader(KIND, Memory, **{"max_files": 3, "max_file_bytes": 1000, **limits}, setting="max_file_bytes")  # type: ignore[arg-type]


def read(body: bytes, step: int = 1 << 20, **limits: int) -> FormReader:
    form = reader(**limits)
    for start in range(0, len(body), step):
        form.feed(body[start : start + step])
    form.finish()
    return form


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1000])
def test_form_is_the_same_however_it_is_cut(step: int) -> None:
    data = b"\r\n--X\r\n--\r\nXX\r\r\n" * 9
    body = (
        part("purpose", b"user_data")
        + part("file", data, "a/b é.bin", "Image/PNG")
        + part("file", b"", "")
        + b"--XX--\r\n"
    )
    form = read(body, step)
    assert form.values == {"purpose": "user_data"}
    assert [(one.field, one.name, one.media, one.sink.data) for one in form.files] == [  # type: ignore[attr-defined]
        ("file", "a/b é.bin", "Image/PNG", data), ("file", "", None, b""),
    ]  # fmt: skip
    form.discard()
    assert all(one.sink.is_discarded for one in form.files)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [None, "", "application/json", "multipart/mixed; boundary=XX", "text/plain"])
def test_body_that_is_no_form_is_415(kind: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        FormReader(kind, Memory, max_files=1, max_file_bytes=1, setting="s")
    assert caught.value.http_status == 415


@pytest.mark.parametrize(
    "kind", ["multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'x' * 71}"]
)
def test_form_needs_a_boundary(kind: str) -> None:
    with pytest.raises(BadRequest, match="boundary"):
        FormReader(kind, Memory, max_files=1, max_file_bytes=1, setting="s")


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"--XX", part("file", b"x", "a"), part("file", b"x", "a") + b"--XX\r\n", b"--YY\r\n", b"--XX\r\nbad\0header\r\n\r\n",
     b"--XX\r\n" + b"a: " + b"x" * 100_000 + b"\r\n\r\n", b"--XX\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
     part("v", b"x" * 20_000) + b"--XX--\r\n", b"".join(part(f"v{n}", b"x") for n in range(70)) + b"--XX--\r\n"],
    ids=range(11),
)  # fmt: skip
def test_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not a valid multipart form") as caught:
        read(body)
    assert caught.value.http_status == 400


def test_large_file_is_refused_while_it_arrives() -> None:
    form = reader(max_file_bytes=10)
    with pytest.raises(InputTooLong, match="max_file_bytes") as caught:
        form.feed(part("file", b"x" * 50, "a")[:-4])
    assert (caught.value.http_status, caught.value.extras) == (413, {"param": "file"})
    read(part("file", b"x" * 10, "a") + b"--XX--\r\n", max_file_bytes=10)


def test_too_many_files_are_refused() -> None:
    with pytest.raises(BadRequest, match="more than 3 files"):
        read(part("file", b"", "a") * 4 + b"--XX--\r\n")
