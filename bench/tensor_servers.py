"""Lists the contenders of the tensor benchmark: this server, a bare echo of each transport, and Triton if installed.

Run as a program it is the bare gRPC echo: `python -m bench.tensor_servers PORT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
import uvloop

from bench.processes import Program
from bench.report import ROOT
from bench.server import free_port

_READY_S: Final = 60.0
_ROOM: Final = (
    "--max-body-bytes", "285212672", "--max-reply-bytes", "285212672", "--max-large-bytes", "4294967296",
    "--max-pending-reply-bytes", "536870912",
)  # fmt: skip
"""As docs/tensors.md says for large tensors."""
_CONFIG: Final = """
name: "identity"
backend: "python"
max_batch_size: 0
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_IDENTITY: Final = """
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""


class Contender(NamedTuple):
    """A running server; a port of 0 is a protocol that it does not speak."""

    name: str
    program: Program
    http_port: int
    grpc_port: int

    def cpu_s(self) -> float:
        """Return the processor time that it has taken, its children's included."""
        return sum(self.program.cpu_s().values())


@contextlib.contextmanager
def contenders(triton: Path | None) -> Iterator[dict[str, Contender]]:
    """Start them all, each with the model `identity`; triton is the environment in which nvidia-pytriton is installed."""
    with contextlib.ExitStack() as stack:
        found = {
            "sie": _start(stack, "sie", [
                sys.executable, "-m", "sie", "serve", "--model", "identity=stub:tensor", *_ROOM,
                "--port", "{http}", "--grpc-port", "{grpc}",
            ]),
            "grpc.aio echo": _start(stack, "grpc.aio echo", [sys.executable, "-m", "bench.tensor_servers", "{grpc}"]),
            "Granian echo": _start(stack, "Granian echo", [
                sys.executable, "-m", "granian", "--interface", "rsgi", "--port", "{http}", "--loop", "uvloop",
                "bench.tensor_servers:rsgi_echo",
            ]),
        }  # fmt: skip
        if triton is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            command, env = _triton_command(triton, directory)
            found["Triton"] = _start(stack, "Triton", command, env)
        yield found


def _start(
    stack: contextlib.ExitStack, name: str, command: Sequence[str], env: dict[str, str] | None = None
) -> Contender:
    wanted = " ".join(command)
    http_port, grpc_port = (free_port() if form in wanted else 0 for form in ("{http}", "{grpc}"))
    filled = [part.replace("{http}", str(http_port)).replace("{grpc}", str(grpc_port)) for part in command]
    program = Program(filled, env=env, cwd=str(ROOT), may_pause=False)
    stack.callback(program.stop)
    for port in filter(None, (http_port, grpc_port)):
        deadline = time.monotonic() + _READY_S
        while not _listens(port):
            if program.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{program.output()}")
            time.sleep(0.1)
    return Contender(name, program, http_port, grpc_port)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _triton_command(environment: Path, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return Triton's command line and variables; its model and a backend for that Python come to lie in directory."""
    (packages,) = (environment / "lib").glob("python3.*/site-packages")
    home = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    backend = directory / "backends" / "python"
    shutil.copytree(home / "backends" / "python", backend)
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    model = directory / "models" / "identity"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1" / "model.py").write_text(_IDENTITY)
    for program in (home / "bin" / "tritonserver", backend / "triton_python_backend_stub"):
        program.chmod(0o755)
    command = [
        str(home / "bin" / "tritonserver"), f"--model-repository={directory / 'models'}",
        f"--backend-directory={directory / 'backends'}", "--http-port={http}", "--grpc-port={grpc}",
        "--allow-metrics=false", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
    ]  # fmt: skip
    return command, {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
    }


async def rsgi_echo(_scope: Any, protocol: Any) -> None:
    """Answer with the body: the least that Granian can do with one."""
    protocol.response_bytes(200, [("content-type", "application/octet-stream")], await protocol())


async def _echo(message: bytes, _context: Any) -> bytes:
    return message


async def _serve_echo(port: int) -> None:
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        uvloop.run(_serve_echo(int(sys.argv[1])))
