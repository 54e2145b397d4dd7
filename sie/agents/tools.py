"""Lists the tools of the server: what the model reads about them, and how events and approvals name them.

Source of the names and of the fields: generation API reference, section 8.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from sie.values.agent import AgentTask, McpChoice, McpServerTools
from sie.values.generate import Tool

PYTHON: Final = "mistralrs_execute_python"
RESET_PYTHON: Final = "mistralrs_reset_python_session"
SHELL: Final = "mistralrs_shell"
SURFACE: Final = "mistralrs_surface_outputs"
READ_FILE: Final = "mistralrs_read_file"
LIST_FILES: Final = "mistralrs_list_files"
SEARCH: Final = "mistralrs_search_the_web"
READ_PAGE: Final = "mistralrs_website_content_extractor"

ToolType = Literal["code_execution", "shell", "web_search", "custom"]
Kind = Literal["code_execution", "web_search", "shell", "file", "custom", "external"]


class ServerTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. type is the `tool_type` of its events; kind and label are for approvals."""

    name: str
    description: str
    parameters: dict[str, Any]
    type: ToolType
    kind: Kind
    label: str
    source: Literal["built_in", "external", "mcp"] = "built_in"
    server: str = ""
    """The label of its MCP server."""


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_OUTPUTS: Final = {
    "type": "array",
    "items": _object(["name"], name=_TEXT, format=_TEXT),
    "description": "Files that this call makes, to be given to the user.",
}
_FILES: Final = (
    ServerTool(
        name=SURFACE, type="custom", kind="file", label="File outputs",
        description="Give files of the working directory to the user.",
        parameters=_object(["outputs"], outputs={"type": "array", "items": _TEXT}),
    ),
    ServerTool(
        name=READ_FILE, type="custom", kind="file", label="File access",
        description="Read a part of a text file, from character `start` to before character `end`; at most 65536 characters.",
        parameters=_object(["file_id"], file_id={**_TEXT, "description": "Its id, or its path in the working directory."},
                           start=_COUNT, end=_COUNT),
    ),
    ServerTool(
        name=LIST_FILES, type="custom", kind="file", label="File access",
        description="List the files of the working directory.", parameters=_object([]),
    ),
)  # fmt: skip
_CODE: Final = (
    ServerTool(
        name=PYTHON, type="code_execution", kind="code_execution", label="Python code",
        description="Run Python code. Variables stay for later calls. The value of the last expression is returned. Files that "
        "it makes in the working directory are given to the user.",
        parameters=_object(["code"], code=_TEXT, outputs=_OUTPUTS),
    ),
    ServerTool(
        name=RESET_PYTHON, type="code_execution", kind="code_execution", label="Python code",
        description="Forget all variables of the Python session. Files stay.", parameters=_object([]),
    ),
)  # fmt: skip
_SHELL: Final = (
    ServerTool(
        name=SHELL, type="shell", kind="shell", label="Shell command",
        description="Run shell commands, one after the other, in one shell. The working directory stays for later calls.",
        parameters=_object(
            ["commands"], commands={"type": "array", "items": _TEXT}, outputs=_OUTPUTS,
            timeout_ms={**_COUNT, "minimum": 1}, max_output_length={**_COUNT, "minimum": 1},
        ),
    ),
)  # fmt: skip
_SEARCH: Final = (
    ServerTool(
        name=SEARCH, type="web_search", kind="web_search", label="Web search",
        description="Search the web.", parameters=_object(["query"], query=_TEXT),
    ),
    ServerTool(
        name=READ_PAGE, type="web_search", kind="web_search", label="Web page extraction",
        description="Read the text of a web page.", parameters=_object(["url"], url=_TEXT),
    ),
)  # fmt: skip
_BY_NAME: Final = {tool.name: tool for tool in (*_CODE, *_SHELL, *_FILES, *_SEARCH)}
NAMES: Final = frozenset(_BY_NAME)
"""The names of all tools of the server; a client's function cannot have one of them."""


def tools_of(task: AgentTask) -> list[ServerTool]:
    """Return the tools that a request may use."""
    found = [
        *(_CODE if task.code_field else ()),
        *(_SHELL if task.shell_field else ()),
        *(_SEARCH if task.search_field else ()),
    ]
    return [*found, *(_FILES if task.code_field or task.shell_field else ())]


def find_tool(name: str) -> ServerTool:
    """Return a tool of the server, or what stands for a client's function that is dispatched."""
    return _BY_NAME.get(name) or ServerTool(
        name=name, type="custom", kind="external", label=name, description="", parameters={}, source="external"
    )


def mcp_tools(choice: McpChoice, server: McpServerTools) -> list[ServerTool]:
    """Return the tools of an MCP server that a request may use."""
    return [
        ServerTool(
            name=tool.name, type="custom", kind="custom", label=tool.own_name, description=tool.description,
            parameters=tool.parameters, source="mcp", server=server.label,
        )
        for tool in server.tools if choice.tools is None or tool.own_name in choice.tools
    ]  # fmt: skip


def as_function(tool: ServerTool) -> Tool:
    """Return a tool as the model is told of it. Its arguments always follow its schema, as far as that can be compiled."""
    return Tool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=True,
        is_lenient=tool.source == "mcp",
    )  # fmt: skip
