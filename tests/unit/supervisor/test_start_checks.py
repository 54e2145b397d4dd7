"""The checks before a start: a file of MCP servers that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie.supervisor.host_resources import StartError
from sie.supervisor.start_checks import check_mcp


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "mcp_config"),
        ('{"servers": [{"name": "a b", "source": {"type": "Http", "url": "http://a/"}}]}', "name"),
        ('{"servers": [{"name": "a", "source": {"type": "Other"}}]}', "Other"),
        ('{"servers": [{"name": "a", "url": "x", "source": {"type": "Http", "url": "http://a/"}}]}', "url"),
        ('{"servers": [{"name": "a", "source": {"type": "Http", "url": "ftp://a/"}}]}', "url"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(StartError, match=words) as caught:
        check_mcp(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(StartError, match="No such file"):
        check_mcp(str(tmp_path / "none"))
