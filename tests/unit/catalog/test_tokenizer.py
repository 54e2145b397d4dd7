"""The cache of converted tokenizers: whatever is in it, a model gets a whole one, or its load fails for a stated reason."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from sie.catalog.tokenizer import keep_tokenizer
from sie.values.errors import ModelLoadFailed

TEXT = '{"version":"1.0","model":{"type":"WordLevel","vocab":{}}}'


@pytest.mark.parametrize(
    "content", [b"", TEXT[:30].encode(), TEXT.encode() + b"x", b"\0" * 50, b"[]", b"{}", b"\xff\xfe"]
)
def test_damaged_file_of_the_cache_is_made_anew(tmp_path: Path, content: bytes):
    path = Path(keep_tokenizer("m", str(tmp_path), "name", lambda: TEXT))
    assert keep_tokenizer("m", str(tmp_path), "name", pytest.fail) == str(path)
    path.write_bytes(content)
    assert keep_tokenizer("m", str(tmp_path), "name", lambda: TEXT) == str(path)
    assert path.read_text() == TEXT


def test_full_disk_is_a_failed_load_and_leaves_no_part_of_a_file(tmp_path: Path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ModelLoadFailed, match="cannot be written") as caught:
            keep_tokenizer("m", str(tmp_path), "name", lambda: TEXT * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.extras["error_class"] == "STORAGE"
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []
