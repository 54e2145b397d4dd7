"""Runs the OpenAI Agents SDK, unmodified, against a server: `python agents_sdk_client.py URL`. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (  # pyright: ignore[reportMissingImports]  # in a folder of its own: see the test
    Agent,
    CodeInterpreterTool,
    HostedMCPTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
PYTHON = CALL % ("mistralrs_execute_python", "{\"code\": \"open('a.txt', 'w').write('x'); 6 * 7\"}")
WEATHER = CALL % ("weather", '{"city": "Oslo"}')


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


def script(*answers: str) -> str:
    return "".join(f"[[{answer}]]" for answer in answers)


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
    responses, chat = OpenAIResponsesModel("s", client), OpenAIChatCompletionsModel("s", client)
    interpreter = CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})
    found: dict[str, Any] = {}
    for name, model in (("chat", chat), ("responses", responses)):
        agent = Agent(name="a", model=model, tools=[weather])
        run = await Runner.run(agent, script(WEATHER, "It has {result}"))
        found[f"function {name}"] = run.final_output
        streamed = Runner.run_streamed(agent, script(WEATHER, "It has {result}"))
        found[f"events {name}"] = [
            one.name async for one in streamed.stream_events() if one.type == "run_item_stream_event"
        ]
    agent = Agent(name="a", model=responses, tools=[interpreter])
    run = await Runner.run(agent, script(PYTHON, "Done."))
    found["items"] = [item.type for response in run.raw_responses for item in response.output]
    (text,) = [item for item in run.raw_responses[-1].output if item.type == "message"]
    found["cited"] = [one.filename for one in text.content[0].annotations]
    streamed = Runner.run_streamed(agent, script(PYTHON, "Done."))
    found["raw"] = [one.data.type async for one in streamed.stream_events() if one.type == "raw_response_event"]
    found["streamed"] = streamed.final_output
    mcp = HostedMCPTool({"type": "mcp", "server_label": "local", "require_approval": "never"})
    call = CALL % ("local_add", '{"a": 1, "b": 2}')
    run = await Runner.run(Agent(name="a", model=responses, tools=[mcp]), script(call, "Sum {result}"))
    found["mcp"] = [item.type for response in run.raw_responses for item in response.output]
    found["mcp says"] = run.final_output
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
