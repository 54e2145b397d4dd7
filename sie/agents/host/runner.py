"""Runs the calls of tools. At most `agent_running` of those that compute run at once; others wait their turn.

A mistake in a call's arguments is a result for the model, not an error: the model may do better next time. So is a host
that has no disk, memory, process or descriptor left for a call: the run goes on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec

from sie.agents import tools
from sie.agents.host.kept_files import FileKeeper
from sie.agents.host.mounts import MountError, Mounts
from sie.agents.host.python_session import PythonSession, Ran
from sie.agents.host.sandboxed import Bounds, Sandboxed
from sie.agents.host.sessions import Session, Sessions
from sie.agents.host.shown_files import FileReader, ShownFile, for_model
from sie.agents.host.workdir import read_text
from sie.agents.messages import FindFiles, FoundFiles, RunTool, ToolResult, failed
from sie.agents.pictures import bound_pictures, note_left_out
from sie.agents.store.store import Store
from sie.config.agent_settings import Agents
from sie.runtime.logs import get_logger
from sie.runtime.sandbox import WORK, Program, Sandbox
from sie.values.agent import AgentFile
from sie.values.errors import Forbidden, Unavailable, text_without_paths

_log = get_logger(__name__)
_MAX_SCRIPT_BYTES: Final = 100_000
"""A shell takes its script as one argument, which the kernel limits."""
_MAX_READ_CHARS: Final = 65_536
_SHELL_CHARS: Final = 4096
_LOST: Final = (
    "An earlier call was ended in its middle, so this is a new Python session, without the variables of earlier calls"
)
_MAX_PICTURE_CHARS: Final = 48 << 20
"""The pictures of one call, in base64. The interpreter keeps to less, but its code may answer in its place."""
_to_json: Final = msgspec.json.Encoder().encode


class _Output(msgspec.Struct):
    name: str
    format: str | None = None


class _Python(msgspec.Struct):
    code: str
    outputs: list[_Output] = []


class _Shell(msgspec.Struct):
    commands: list[str] | str
    outputs: list[_Output] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Surface(msgspec.Struct):
    outputs: list[str | _Output]


class _ReadFile(msgspec.Struct):
    file_id: str
    start: int = 0
    end: int | None = None


class _Nothing(msgspec.Struct):
    pass


class Tools:
    """The tools that work in a session's directory. others runs every other tool.

    max_inline_bytes: the largest content of a file that is in an answer.
    """

    def __init__(
        self, settings: Agents, sandbox: Sandbox, sessions: Sessions, bounds: Bounds, store: Store, *, python: str,
        max_inline_bytes: int, others: Callable[[RunTool], Awaitable[ToolResult]],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._sandbox = sandbox
        self._sessions = sessions
        self._bounds = bounds
        self._python = python
        self._others = others
        self._running = asyncio.Semaphore(settings.agent_running)
        self._files = FileReader(
            store.blobs, max_inline_bytes, max_file_bytes=settings.sandbox_file_bytes, max_files=settings.sandbox_files,
            max_call_bytes=min(settings.sandbox_disk_bytes, store.settings.max_key_files_bytes),
        )  # fmt: skip
        self._keeper = FileKeeper(store)
        self._mounts = Mounts(store.blobs, sandbox, bounds)
        self._tools: dict[
            str, tuple[type[msgspec.Struct], Callable[[Session, RunTool, Any], Awaitable[ToolResult]]]
        ] = {
            tools.SURFACE: (_Surface, self._surface),
            tools.READ_FILE: (_ReadFile, self._read_file),
            tools.LIST_FILES: (_Nothing, self._list_files),
        }
        if settings.has_code:
            self._tools |= {
                tools.PYTHON: (_Python, self._run_python),
                tools.RESET_PYTHON: (_Nothing, self._reset_python),
            }
        if settings.has_shell:
            self._tools[tools.SHELL] = (_Shell, self._run_shell)

    async def run(self, call: RunTool) -> ToolResult:
        """Run one call. Raises Forbidden for a tool of this server that is off, and Overloaded."""
        try:
            return await self._run(call)
        except (OSError, MemoryError, RuntimeError) as error:
            return failed(f"The call did not run: {_shortage(error, call.name)}")

    async def _run(self, call: RunTool) -> ToolResult:
        found = self._tools.get(call.name) if not call.server else None
        if found is None:
            return await self._others(call)
        kind, work = found
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return failed(f"The arguments are wrong: {error}")
        async with self._sessions.use(call.owner, call.session) as session:
            try:
                await asyncio.to_thread(self._mounts.prepare, session, call.inputs, call.skills)
                await self._keeper.renew(session)
                return await work(session, call, arguments)
            except MountError as error:
                return failed(str(error))

    async def find_files(self, question: FindFiles) -> FoundFiles:
        """Return the files that a request asked for by name. Raises Overloaded, and Unavailable if the host cannot look."""
        place = (question.run_id, question.round, question.turn)
        try:
            async with self._sessions.use(question.owner, question.session) as session:
                found = await self._keep(session, self._files.show, place, tools.SURFACE, question.names)
        except (OSError, MemoryError, RuntimeError) as error:
            raise Unavailable(f"The files were not looked for: {_shortage(error, tools.SURFACE)}") from error
        return FoundFiles(tuple(found))

    async def _keep(self, session: Session, show: Callable[..., Iterator[ShownFile]], *what: Any) -> list[AgentFile]:
        """Return the files that show finds in a session, after they were kept."""
        return await self._keeper.keep(session.owner, await asyncio.to_thread(show, session, *what))

    # --- Python -----------------------------------------------------------------------------------------------------

    async def _run_python(self, session: Session, call: RunTool, arguments: _Python) -> ToolResult:
        self._check_sandbox()
        async with self._running:
            began_s = time.monotonic()
            has_lost = session.python is not None and not session.python.is_running
            ran = await self._python_of(session)
            python = session.python
            if python is not None and not ran.was_ended:
                ran = await python.run(arguments.code, self._settings.code_timeout_s)
            elapsed_ms = int((time.monotonic() - began_s) * 1e3)
            if ran.was_ended:
                session.python = None
            names = [output.name for output in arguments.outputs]
            files = await self._keep(session, self._files.show_news, _place(call), call.name, names)
        assert python is not None
        limit = self._settings.max_result_chars
        stdout, stderr = python.box.stdout.take(limit), python.box.stderr.take(limit)
        exception = ran.exception[-limit:] if ran.exception else None
        result = ran.result[:limit] if ran.result else None
        shown: dict[str, Any] = {
            "stdout": stdout, "stderr": stderr, "result": result, "exception": exception, "working_directory": WORK,
            "execution_time_ms": elapsed_ms,
        }  # fmt: skip
        pictures = {"images_base64": ran.images, "video_frames_base64": ran.frames}
        pictures, _, num_left_out = bound_pictures(pictures, _MAX_PICTURE_CHARS)
        num_left_out += ran.num_left_out
        notes = [_LOST] * has_lost + [note_left_out(num_left_out, "one call")] * bool(num_left_out)
        note = "\n".join(notes) or None
        data = {**shown, **pictures, "note": note}
        data |= {"video_frame_count": ran.num_frames} if ran.frames else {}
        told = {
            "status": "error" if exception else "success", **shown, "result_type": ran.result_type,
            "images": len(pictures["images_base64"]) or None, "note": note, "files": [for_model(file) for file in files],
        }  # fmt: skip
        lines = [f"{name}: {value}" for name, value in (("stdout", stdout), ("stderr", stderr), ("result", result),
                                                        ("exception", exception), ("note", note)) if value]  # fmt: skip
        return ToolResult(content=_dump(told), record="\n".join(lines), data=_given(data), files=tuple(files))

    async def _python_of(self, session: Session) -> Ran:
        """Have a running interpreter in the session; return what its start gave."""
        if session.python is not None and session.python.is_running:
            return Ran()
        if session.python is not None:
            await session.python.close()
        python = PythonSession(self._sandbox, session.home, self._bounds, self._python)
        ran = await python.start()
        session.python = python
        return ran

    async def _reset_python(self, session: Session, _call: RunTool, _arguments: _Nothing) -> ToolResult:
        if session.python is not None:
            await session.python.close()
            session.python = None
        return _plain("The Python session is empty now")

    # --- shell ------------------------------------------------------------------------------------------------------

    async def _run_shell(self, session: Session, call: RunTool, arguments: _Shell) -> ToolResult:
        self._check_sandbox()
        commands = [arguments.commands] if isinstance(arguments.commands, str) else arguments.commands
        script = "\n".join(commands)
        if len(script.encode()) > _MAX_SCRIPT_BYTES or "\0" in script:
            return failed(f"The commands are longer than {_MAX_SCRIPT_BYTES} bytes, or hold a null byte")
        most_s = self._settings.shell_timeout_s
        timeout_s = min(most_s, arguments.timeout_ms / 1e3) if arguments.timeout_ms else most_s
        async with self._running:
            box = Sandboxed(self._sandbox, session.home, self._bounds)
            box.start(Program(command=("/bin/sh", "-c", script)))
            status, is_late = await _to_end(box, timeout_s)
            names = [output.name for output in arguments.outputs]
            files = await self._keep(session, self._files.show_news, _place(call), call.name, names)
        limit = min(arguments.max_output_length or _SHELL_CHARS, self._settings.max_result_chars)
        stderr = box.stderr.take(limit)
        if box.reason and not is_late:
            stderr += f"\nThe commands were ended: {box.reason}"
        data: dict[str, Any] = {
            "stdout": box.stdout.take(limit), "stderr": stderr, "exit_code": status, "working_directory": WORK,
            "status": "timeout" if is_late else "error" if status or box.reason else "success", "timed_out": is_late,
        }  # fmt: skip
        told = {**data, "files": [for_model(file) for file in files]}
        return ToolResult(content=_dump(told), record=_dump(data), data=data, files=tuple(files))

    # --- files ------------------------------------------------------------------------------------------------------

    async def _surface(self, session: Session, call: RunTool, arguments: _Surface) -> ToolResult:
        names = [one if isinstance(one, str) else one.name for one in arguments.outputs]
        files = await self._keep(session, self._files.show, _place(call), call.name, names)
        return _plain(_dump({"files": [for_model(file) for file in files]}), files=tuple(files))

    async def _read_file(self, session: Session, _call: RunTool, arguments: _ReadFile) -> ToolResult:
        name = session.ids.get(arguments.file_id, arguments.file_id)
        start = max(0, arguments.start)
        end = min(start + _MAX_READ_CHARS, arguments.end if arguments.end is not None else start + _MAX_READ_CHARS)
        try:
            place = name.removeprefix(f"{WORK}/")
            text, passed, about = await asyncio.to_thread(read_text, session.work, place, start, end)
        except (OSError, ValueError):
            return failed(f"There is no file {arguments.file_id!r}")
        told = {
            "name": name,
            "start": start,
            "end": min(end, passed),
            "bytes": about.st_size,
            "text": text,
        }
        return _plain(_dump(told))

    async def _list_files(self, session: Session, _call: RunTool, _arguments: _Nothing) -> ToolResult:
        ids = {name: file_id for file_id, name in session.ids.items()}
        files = [
            _given({"id": ids.get(name), "name": name, "bytes": seen.size})
            for name, seen in sorted(session.seen.items())
        ]
        return _plain(_dump({"files": files}))

    def _check_sandbox(self) -> None:
        """Raise Forbidden without a sandbox, unless the operator turned it off."""
        if self._sandbox.mode == "off" and self._settings.sandbox != "off":
            reason = f": {text_without_paths(self._sandbox.problem)}" if self._sandbox.problem else ""
            text = f"This host has no sandbox for code and commands{reason} (see `sie doctor`); the operator may set `--sandbox off`"
            raise Forbidden(text, code="SANDBOX_MISSING")


def _shortage(error: Exception, tool: str) -> str:
    """Return what the host lacks, without its paths. Raises the error again if it is of another kind."""
    if isinstance(error, RuntimeError) and "thread" not in str(error):  # one that cannot start is a RuntimeError, too
        raise error
    _log.warning("a call of %s did not run: %s: %s", tool, type(error).__name__, error)
    if isinstance(error, OSError) and error.strerror:
        return f"the server's host says {error.strerror!r}"
    return "the server's host has no room for it now"


async def _to_end(box: Sandboxed, timeout_s: float) -> tuple[int, bool]:
    """Wait for a program's end, and end it after its time. Return its exit status and whether it was late."""
    watch = asyncio.ensure_future(box.watch())
    is_late = False
    try:
        await asyncio.wait((box.ended,), timeout=timeout_s)
        if not box.ended.done():
            is_late = True
            box.end(f"its time ({timeout_s:g} s) was over")
        return await asyncio.shield(box.ended), is_late
    finally:
        watch.cancel()
        box.end("its caller gave up")


def _place(call: RunTool) -> tuple[str, int, int]:
    return call.run_id, call.round, call.turn


def _plain(text: str, *, files: tuple[AgentFile, ...] = ()) -> ToolResult:
    return ToolResult(content=text, record=text, data={"content": text}, files=files)


def _given(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in data.items() if value not in (None, "", [])}


def _dump(value: Any) -> str:
    return _to_json(_given(value) if isinstance(value, dict) else value).decode()
