"""Starts the gRPC process: joins the supervisor as a frontend, listens, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
import uvloop

from sie import process
from sie.control_messages import Certificates, Launch
from sie.frontend.kserve import KServe
from sie.frontend.process import FrontendProcess, connect
from sie.frontend.rpc.health import Health
from sie.frontend.rpc.kserve import KServeGrpc
from sie.frontend.rpc.methods import HEALTH, KSERVE, METHODS, REFLECTION, TRTIS
from sie.frontend.rpc.reflection import Reflection
from sie.frontend.rpc.service import Dialect, Service
from sie.frontend.rpc.trtis import TrtisGrpc
from sie.frontend.trtis import Trtis
from sie.logs import configure

_MAX_METADATA_BYTES: Final = 64 * 1024
_MIN_PING_MS: Final = 10_000
"""Clients that ping an idle connection more often are cut off."""


def make_service(frontend: FrontendProcess) -> Service:
    """Return all methods, each with its dialect."""
    pool = ThreadPoolExecutor(2, "decode")
    kserve = KServe(frontend, pool)
    trtis = Trtis(frontend, kserve, pool)
    dialects: dict[str, Dialect] = {
        KSERVE: KServeGrpc(frontend, kserve, pool),
        TRTIS: TrtisGrpc(frontend, trtis, pool),
        HEALTH: Health(frontend),
    }
    return Service(frontend, dialects | dict.fromkeys(REFLECTION, Reflection()))


def open_server(launch: Launch, frontend: FrontendProcess, service: Service) -> grpc.aio.Server:
    """Return a server that listens, with TLS where HTTP has it. Raises RuntimeError when the address is taken."""
    max_bytes = frontend.settings.limits.max_grpc_message_bytes
    server = grpc.aio.server(
        handlers=service.handlers(METHODS),
        options=[
            ("grpc.max_receive_message_length", max_bytes),
            ("grpc.max_send_message_length", -1),  # replies are bounded by max_reply_bytes
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.so_reuseport", 1),  # the supervisor holds the port beside us
        ],
    )
    shown = f"[{launch.host}]" if ":" in launch.host else launch.host
    address = f"{shown}:{launch.port}"
    if not launch.tls_cert:
        server.add_insecure_port(address)
        return server
    server.add_secure_port(address, _credentials(launch, frontend))
    return server


def _credentials(launch: Launch, frontend: FrontendProcess) -> grpc.ServerCredentials:
    """Return credentials that follow the certificate: gRPC asks for it before each handshake."""

    def renewed() -> Any:
        nonlocal known
        latest = frontend.certificates
        if latest is None or latest is known:
            return None
        known = latest
        return _configuration(latest)

    known: Certificates | None = None
    paths = (launch.tls_cert, launch.tls_key, launch.tls_client_ca)
    first = Certificates(*(Path(path).read_bytes() if path else b"" for path in paths))
    return grpc.dynamic_ssl_server_credentials(_configuration(first), renewed, bool(first.client_ca))


def _configuration(certificates: Certificates) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.cert)], certificates.client_ca or None
    )


async def serve(launch: Launch) -> None:
    """Serve until SIGTERM, then finish what was accepted."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    frontend = connect(launch)(loop)
    service = make_service(frontend)
    server = open_server(launch, frontend, service)
    await server.start()
    process.calm_collector()
    await stopping.wait()
    service.end_streams()
    await server.stop(frontend.settings.server.drain_timeout_s)
    frontend.close()


def main() -> int:
    """Run the gRPC process; the launch record is the only argument."""
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    process.die_with_parent(launch.supervisor_pid)
    configure(launch.log_format, launch.log_level, "grpc")  # type: ignore[arg-type]
    uvloop.run(serve(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
