"""The file of MCP servers has commands that run with the server's rights, so it is checked before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sie.config.mcp_config import McpConfig, read_mcp_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mcp.json"
    path.write_text("{}")
    path.chmod(0o644)
    return path


def test_a_file_of_the_server_s_user_is_read(file: Path) -> None:
    assert read_mcp_config(str(file)) == McpConfig()


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_to_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ValueError, match="chmod go-w"):
        read_mcp_config(str(file))


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstat", lambda _fd: os.stat_result((0o100644, 1, 1, 1, 4321, 0, 2, 0, 0, 0)))
    with pytest.raises(ValueError, match="uid 4321"):
        read_mcp_config(str(file))


def test_a_pipe_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 30)
    for name in ("pipe", "huge"):
        with pytest.raises(ValueError, match=r"regular file|over 4 MiB"):
            read_mcp_config(str(tmp_path / name))
