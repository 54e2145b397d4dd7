"""A Python session inside a sandbox: runs one piece of code after another in the same variables.

argv[1] is the descriptor of a socket to the agent process. Each message on it is a 4-byte little-endian size and JSON.
Output goes to the ordinary descriptors 1 and 2. SIGINT interrupts the code, and the session lives on.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import io
import itertools
import json
import linecache
import os
import signal
import struct
import sys
import traceback
from types import CodeType, ModuleType
from typing import Any, Final, NoReturn

_SIZE: Final = struct.Struct("<I")
_MAX_REPR: Final = 65_536
_MAX_PICTURES: Final = 16
_MAX_FRAMES: Final = 16
_MAX_PICTURE_BYTES: Final = 8 << 20
_MAX_PICTURE_CHARS: Final = 44 << 20
"""All pictures of a call in base64. The agent process takes a little more."""
_numbers: Final = itertools.count(1)


def main() -> None:
    """Answer each request until the agent process closes the socket."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")
    builtins.input = _no_input
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = os.getpid()
    _write(channel, {"number": 0})
    while (request := _read(channel)) is not None:
        made = run(request["code"], vars(module))
        if os.getpid() != own:  # the code has forked, and its child has nothing to answer
            os._exit(0)
        _write(channel, {"number": request["number"], **made})


def run(code: str, variables: dict[str, Any]) -> dict[str, Any]:
    """Run code in these variables. Return the value of its last expression, the pictures it made, and what it raised."""
    made: dict[str, Any] = {"result": None, "result_type": None, "exception": None}
    made |= {"images": [], "frames": [], "num_left_out": 0}
    value = None
    try:
        body, last = _compile(code)
        exec(body, variables)  # noqa: S102  # to run it is the purpose of this process
        value = eval(last, variables) if last is not None else None  # noqa: S307  # as above
        if value is not None:
            variables["_"] = value
            made["result"], made["result_type"] = _clean(repr(value)[:_MAX_REPR]), _clean(str(type(value).__name__))
        _add_pictures(made, value)
    except KeyboardInterrupt:
        made["exception"] = "KeyboardInterrupt: the time for this call is over"
    except SystemExit as left:
        made["exception"] = _clean("".join(traceback.format_exception_only(left))[-_MAX_REPR:].rstrip())
    except BaseException:  # whatever the code raises is its answer
        made["exception"] = _clean(_trace())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, KeyboardInterrupt):  # the code closed it
            stream.flush()
    return made


def _compile(code: str) -> tuple[CodeType, CodeType | None]:
    """Return the statements, and the last one alone if it is an expression. Tracebacks show their lines from then on."""
    name = f"<code {next(_numbers)}>"  # functions of earlier code keep their own lines
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        last = compile(expression, name, "eval")
    return compile(tree, name, "exec"), last


def _clean(text: str) -> str:
    """Return a text that UTF-8 can hold: the agent process ends an interpreter whose answer has half a surrogate pair."""
    return str.encode(text, errors="backslashreplace").decode()


def _trace() -> str:
    """Return the traceback of the error in flight, without the frames of this file."""
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames))[-_MAX_REPR:].rstrip()


def _add_pictures(made: dict[str, Any], value: Any) -> None:
    """Add the open figures of matplotlib, and a picture or an animation that is the value. Neither library is imported."""
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is not None:
        numbers = plots.get_fignums()
        made["num_left_out"] += len(numbers[_MAX_PICTURES:])
        for number in numbers[:_MAX_PICTURES]:
            buffer = io.BytesIO()
            plots.figure(number).savefig(buffer, format="png")
            _add_picture(made, "images", buffer)
        plots.close("all")
    pictures = sys.modules.get("PIL.Image")
    if pictures is None or not isinstance(value, pictures.Image):
        return
    num_frames = getattr(value, "n_frames", 1)
    if num_frames == 1:
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        _add_picture(made, "images", buffer)
        return
    made["num_frames"] = num_frames
    for place in range(min(num_frames, _MAX_FRAMES)):
        value.seek(place * num_frames // min(num_frames, _MAX_FRAMES))
        buffer = io.BytesIO()
        value.convert("RGBA").save(buffer, format="PNG")
        _add_picture(made, "frames", buffer)


def _add_picture(made: dict[str, Any], field: str, buffer: io.BytesIO) -> None:
    """Add a picture to `images` or `frames`, or count it as left out."""
    data = buffer.getvalue()
    text = base64.b64encode(data).decode()
    num_chars = len(text) + sum(map(len, [*made["images"], *made["frames"]]))
    if len(data) > _MAX_PICTURE_BYTES or num_chars > _MAX_PICTURE_CHARS or len(made[field]) >= _MAX_PICTURES:
        made["num_left_out"] += 1
    else:
        made[field].append(text)


def _no_input(*_: object) -> NoReturn:
    raise RuntimeError("input() is not available: nobody reads the question")


def _read(channel: int) -> dict[str, Any] | None:
    head = _read_exactly(channel, _SIZE.size)
    body = _read_exactly(channel, _SIZE.unpack(head)[0]) if head is not None else None
    return json.loads(body) if body is not None else None


def _read_exactly(channel: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = os.read(channel, min(size, 1 << 20))
        except KeyboardInterrupt:  # it came after the code had ended
            continue
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(channel: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    view = memoryview(_SIZE.pack(len(body)) + body)
    while view:
        try:
            view = view[os.write(channel, view) :]
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    main()
