"""The OpenAI Agents SDK, unmodified. It needs another version of websockets than sie-sdk, so it has a folder of its own.

`make agents-sdk` installs it there; without it, this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import WAIT_S, eventually, start_server
from tests.process.test_agents import Client
from tests.process.test_mcp import stdio

SDK = Path(__file__).parents[2] / "build" / "agents-sdk"
pytestmark = pytest.mark.skipif(not SDK.is_dir(), reason="run `make agents-sdk`")


def test_the_agents_sdk_runs_functions_tools_and_mcp(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"servers": [stdio("local")]}))
    with start_server(
        "--model", "s=stub:generate,scripted", "--agent", "--sandbox-nice", "10", "--frontends", "1", "--mcp-config", str(path)
    ) as server:  # fmt: skip
        client = Client(server, "unused")
        client.wait_for_tools()
        models = client.openai.models
        eventually(lambda: models.retrieve("s").model_extra["mcp_servers_connected"] == 1, "the MCP server")  # type: ignore[index]
        script = Path(__file__).with_name("agents_sdk_client.py")
        ran = subprocess.run(
            [sys.executable, str(script), server.url], env={**os.environ, "PYTHONPATH": str(SDK)}, timeout=WAIT_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for name in ("chat", "responses"):
        assert found[f"function {name}"] == "It has 21 degrees in Oslo"
        assert found[f"events {name}"] == ["tool_called", "tool_output", "message_output_created"]
    assert found["items"] == ["code_interpreter_call", "message"]
    assert found["cited"] == ["a.txt"]
    assert found["streamed"] == "Done."
    assert found["raw"][:2] == ["response.created", "response.in_progress"]
    assert found["raw"][-1] == "response.completed"
    assert (found["mcp"], found["mcp says"]) == (["mcp_call", "message"], "Sum 3")
