"""MCP servers of the operator's: real ones on loopback, and ones that hang, die and flood."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from sie.agents.host.mcp_servers import McpServers
from sie.agents.messages import RunTool
from sie.config.mcp_config import McpConfig
from tests.process.harness import WAIT_S, eventually, free_port, start_server
from tests.process.test_agents import CHAT, Client, call, script

DOUBLE = str(Path(__file__).with_name("mcp_double.py"))
SILENT = ("sleep", ("600",))


def stdio(
    name: str, command: str = sys.executable, args: tuple[str, ...] = (DOUBLE, "stdio"), **fields: Any
) -> dict[str, Any]:
    source = {"type": "Process", "command": command, "args": args, "env": {"MARK": name}}
    return {"name": name, "source": source, **fields}


@contextlib.contextmanager
def double(way: str, port: int = 0) -> Iterator[int]:
    """Yield the port of a running server."""
    port = port or free_port()
    with subprocess.Popen([sys.executable, DOUBLE, way, str(port)], stderr=subprocess.DEVNULL) as process:
        try:

            def answers() -> bool:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    return True
                return False

            eventually(answers, "the MCP server")
            yield port
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server with an MCP server for each transport."""
    path = tmp_path_factory.mktemp("mcp") / "mcp.json"
    with double("http") as http, double("websocket") as websocket:
        servers = [
            stdio("local", tool_prefix="l"),
            {"name": "web", "source": {"type": "Http", "url": f"http://127.0.0.1:{http}/mcp"}},
            {
                "name": "socket",
                "bearer_token": "secret",
                "source": {"type": "WebSocket", "url": f"ws://127.0.0.1:{websocket}/"},
            },
            stdio("odd", args=(DOUBLE, "careless")),
            {"name": "off", "enabled": False, "source": {"type": "Http", "url": "http://127.0.0.1:1/"}},
        ]
        path.write_text(json.dumps({"servers": servers, "tool_timeout_secs": 20}))
        with start_server(
            "--model", "s=stub:generate,scripted", "--frontends", "1", "--mcp-config", str(path)
        ) as server:
            made = Client(server, "unused")

            def connected() -> bool:
                return made.openai.models.retrieve("s").model_extra["mcp_servers_connected"] == 4  # type: ignore[index]

            eventually(connected, "all MCP servers")
            yield made


def mcp(label: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, **fields}


def test_models_say_what_is_connected(client: Client) -> None:
    extra: Any = client.openai.models.retrieve("s").model_extra
    assert (extra["mcp_servers_connected"], extra["mcp_tools_count"]) == (4, 26)
    assert [one.model_extra["mcp_tools_count"] for one in client.openai.models.list()] == [26, 26]  # type: ignore[index]


@pytest.mark.parametrize(("label", "name"), [("local", "l_add"), ("web", "web_add"), ("socket", "socket_add")])
def test_every_transport_runs_a_call(client: Client, label: str, name: str) -> None:
    question = [{"role": "user", "content": script(call(name, a=20, b=22), "It is {result}")}]
    events = list(client.events(messages=question, tools=[mcp(label)]))
    progress = [data for event, data in events if event]
    assert [(one["phase"], one["tool_name"], one["data"]) for one in progress] == [
        ("calling", name, {"tool_type": "custom", "arguments": {"a": 20, "b": 22}}),
        ("complete", name, {"tool_type": "custom", "content": "42"}),
    ]
    said = "".join(
        data["choices"][0]["delta"].get("content", "") for event, data in events if not event and data != "[DONE]"
    )
    assert said == "It is 42"


def test_a_tool_whose_schema_no_grammar_can_express_is_called(client: Client) -> None:
    """One such tool had every request that picked its server refused, and its client could mend nothing."""
    made = client.chat(call("odd_plain", x=1), "{result}", tools=[mcp("odd")])
    assert made["choices"][0]["message"]["content"] == '{"x": 1}'
    assert (
        "answered with an error"
        in client.chat(call("odd_odd"), "{result}", tools=[mcp("odd")])["choices"][0]["message"]["content"]
    )


def test_messages_name_a_server_in_a_toolset(client: Client) -> None:
    body = {
        "model": "s",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": script(call("l_add", a=1, b=2), "{result}")}],
    }
    made = client.post("/v1/messages", **body, tools=[{"type": "mcp_toolset", "mcp_server_name": "local"}]).json()
    assert made["content"][0]["text"] == "3"
    refused = client.post("/v1/messages", **body, mcp_servers=[{"type": "url", "url": "http://a/", "name": "a"}])
    assert (refused.status_code, "mcp_servers" in refused.json()["error"]["message"]) == (400, True)


def test_responses_have_an_item_for_each_call(client: Client) -> None:
    api, tools = client.openai, [mcp("local", require_approval="never", allowed_tools=["add", "fail"])]
    made = api.responses.create(model="s", input=script(call("l_add", a=1, b=2) + call("l_fail"), "done"), tools=tools)  # type: ignore[arg-type]
    good, bad, _ = made.output
    assert (good.type, good.server_label, good.name, good.output, good.error) == (
        "mcp_call",
        "local",
        "l_add",
        "3",
        None,
    )  # type: ignore[union-attr]
    assert json.loads(good.arguments) == {"a": 1, "b": 2}  # type: ignore[union-attr]
    assert (bad.type, bad.status, bad.output) == ("mcp_call", "failed", None)  # type: ignore[union-attr]
    assert "Error executing tool fail" in str(bad.error)  # type: ignore[union-attr]
    assert list(api.responses.retrieve(made.id, stream=True))[-1].response.output == made.output  # type: ignore[union-attr]
    again = api.responses.create(model="s", input=script("Again."), previous_response_id=made.id)
    assert again.output_text == "Again."
    assert made.tools[0].server_label == "local"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (mcp("none"), "tools[0].server_label"),
        (mcp("off"), "tools[0].server_label"),
        (mcp(""), "tools[0].server_label"),
        (mcp("local", server_url="http://127.0.0.1/"), "tools[0].server_url"),
        (mcp("local", headers={"a": "b"}), "tools[0].headers"),
        (mcp("local", connector_id="c"), "tools[0].connector_id"),
        (mcp("local", require_approval="always"), "tools[0].require_approval"),
        (mcp("local", allowed_tools=["nothing"]), "tools[0].server_label"),
        (mcp("local", allowed_tools="add"), "tools[0].allowed_tools"),
    ],
)  # fmt: skip
def test_a_request_picks_labels_and_nothing_else(client: Client, tool: dict[str, Any], param: str) -> None:
    answer = client.post(CHAT, messages=[{"role": "user", "content": "x"}], tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_tool_that_was_not_picked_is_not_called(client: Client) -> None:
    question = [{"role": "user", "content": script(call("l_die") + call("web_add", a=1, b=2), "x")}]
    tools = [mcp("local", allowed_tools=["add"])]
    made = client.post(CHAT, messages=question, tools=tools).json()
    assert "agentic_tool_calls" not in made
    assert "l_die" in made["choices"][0]["message"]["content"], "what is not one of the tools is a text"
    taken = {"type": "function", "function": {"name": "l_add", "parameters": {"type": "object"}}}
    answer = client.post(CHAT, messages=question, tools=[*tools, taken])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_approval_names_the_source(client: Client) -> None:
    question = [{"role": "user", "content": script(call("l_add", a=1, b=2), "{result}")}]
    asked: list[Any] = []
    for name, data in client.events(messages=question, tools=[mcp("local")], agent_permission="ask"):
        if name == "agentic_tool_approval_required":
            asked.append(data["tool"])
            answer = client.post(f"/v1/agent/approvals/{data['approval_id']}", decision="approve")
            assert answer.status_code == 200
    assert asked == [{"source": "mcp", "kind": "custom", "label": "add"}]


# --- servers that misbehave, in a host of their own -------------------------------------------------------------------


def tool(name: str, server: str = "d") -> RunTool:
    return RunTool(
        owner="", session="s", run_id="r", round=0, turn=0, name=f"{server}_{name}", arguments="{}", server=server
    )


def programs(mark: str) -> list[psutil.Process]:
    """Return the programs that were started with this mark."""
    return [one for one in psutil.Process().children(recursive=True) if _mark_of(one) == mark]


def _mark_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("MARK", "")
    return ""


def with_servers(work: Any, *servers: dict[str, Any], timeout_s: float = 20.0, **bounds: int) -> None:
    config = msgspec.convert({"servers": servers, "tool_timeout_secs": timeout_s}, McpConfig)

    async def main() -> None:
        made = McpServers(config, **{"max_bytes": 1 << 20, "max_chars": 1000, **bounds})
        made.open()
        try:
            await asyncio.wait_for(work(made), WAIT_S)
        finally:
            await made.close()

    asyncio.run(main())
    assert not [one for server in servers for one in programs(server["name"])], "a program outlives its connection"


async def connected(servers: McpServers, place: int = 0, *, state: bool = True) -> None:
    while servers.list_tools().servers[place].is_connected != state:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "words", "timeout_s"),
    [
        ("die", "connection", WAIT_S),
        ("flood", "connection", WAIT_S),
        ("hang", "did not answer within", 10.0),  # on a busy machine its start alone takes seconds
    ],
    ids=["die", "flood", "hang"],
)
def test_a_server_that_dies_floods_or_hangs_is_cut_and_comes_back(name: str, words: str, timeout_s: float) -> None:
    async def work(servers: McpServers) -> None:
        await connected(servers)
        result = await servers.run(tool(name))
        assert result.problem
        assert words in result.content, result.content
        await connected(servers, state=False)
        while "[... 100000 characters in all]" not in (await servers.run(tool("large"))).content:
            await connected(servers)  # so soon after its start, an answer may be late again

    with_servers(work, stdio("d"), timeout_s=timeout_s)


@pytest.mark.parametrize("program", [SILENT, ("cat", ("/dev/zero",))], ids=["silent", "endless"])
def test_a_server_that_never_or_always_speaks_does_not_hold_the_others(program: tuple[str, tuple[str, ...]]) -> None:
    async def work(servers: McpServers) -> None:
        await connected(servers, 1)
        assert (await servers.run(tool("large", "e"))).content.startswith("yyy")
        assert "not connected" in (await servers.run(tool("add"))).content

    with_servers(work, stdio("d", *program), stdio("e"))


def test_a_server_over_http_that_was_restarted_is_found_again() -> None:
    port = free_port()

    async def work(servers: McpServers) -> None:
        with double("http", port):
            await connected(servers)
            assert not (await servers.run(tool("large"))).problem
            failed = await servers.run(tool("fail"))
            assert "Error executing tool fail" in failed.content
            assert servers.list_tools().servers[0].is_connected, "an error of a tool is not one of its server"
        assert "broke" in (await servers.run(tool("large"))).content
        await connected(servers, state=False)
        with double("http", port):
            await connected(servers)
            assert not (await servers.run(tool("large"))).problem

    with_servers(work, {"name": "d", "source": {"type": "Http", "url": f"http://127.0.0.1:{port}/mcp"}})


def test_an_answer_that_cannot_be_read_costs_its_call_and_not_the_connection() -> None:
    """Every other user's call broke, and the program lost its state."""

    async def work(servers: McpServers) -> None:
        await connected(servers)
        (program,) = programs("d")
        result = await servers.run(tool("odd"))
        assert "answered with an error" in result.problem
        assert (await servers.run(tool("plain"))).content == "{}"
        assert programs("d") == [program], "the program was ended"

    with_servers(work, stdio("d", args=(DOUBLE, "careless")))


async def learn(servers: McpServers, by: str, argument: str) -> None:
    """Let a server learn two tools by a call, and wait until each of them is listed."""
    for name in ("first", "second"):
        learns = msgspec.structs.replace(tool(by), arguments=json.dumps({argument: name}))
        assert not (await servers.run(learns)).problem
        while f"d_{name}" not in {one.name for one in servers.list_tools().servers[0].tools}:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


def test_tools_are_listed_anew_when_a_server_says_that_they_have_changed() -> None:
    async def work(servers: McpServers) -> None:
        await connected(servers)
        await learn(servers, "plain", "learns")

    with_servers(work, stdio("d", args=(DOUBLE, "careless")))


def test_tools_are_listed_anew_when_a_subscription_says_that_they_have_changed() -> None:
    """From 2026-07-28 on, a server tells of changes on the stream of `subscriptions/listen` alone."""

    async def work(servers: McpServers) -> None:
        await connected(servers)
        await learn(servers, "learn", "name")

    with double("http") as port:
        with_servers(work, {"name": "d", "source": {"type": "Http", "url": f"http://127.0.0.1:{port}/mcp"}})
    with_servers(work, stdio("d"))


def test_a_call_that_is_given_up_leaves_the_connection() -> None:
    async def work(servers: McpServers) -> None:
        await connected(servers)
        task = asyncio.create_task(servers.run(tool("hang")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.3)
        assert (await servers.run(tool("large"))).content.startswith("yyy")

    with_servers(work, stdio("d"))


def test_a_program_ends_with_the_agent_process(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"servers": [stdio("ends", *SILENT)]}))
    with start_server("--model", "s=stub:generate,scripted", "--frontends", "1", "--mcp-config", str(path)) as server:
        (program,) = eventually(lambda: programs("ends"), "the program")
        answer = Client(server, "").post(CHAT, messages=[{"role": "user", "content": "x"}], tools=[mcp("ends")])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "mcp_not_connected")
        psutil.Process(program.ppid()).kill()
        program.wait(WAIT_S)
