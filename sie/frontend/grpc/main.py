"""Runs the gRPC process: joins the supervisor as a frontend, listens, and drains on SIGTERM. Must not serve HTTP."""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop

from sie.frontend.connect import connect
from sie.frontend.grpc.app import Dialect, Service
from sie.frontend.grpc.health import Health
from sie.frontend.grpc.kserve import KServeGrpc
from sie.frontend.grpc.methods import HEALTH, KSERVE, REFLECTION, TRTIS
from sie.frontend.grpc.reflection import Reflection
from sie.frontend.grpc.transport.listener import Listener
from sie.frontend.grpc.transport.tls import tls_context
from sie.frontend.grpc.trtis import TrtisGrpc
from sie.frontend.process import FrontendProcess
from sie.frontend.services.kserve_service import KServeService
from sie.frontend.services.trtis_service import TrtisService
from sie.ipc.messages import Launch
from sie.runtime import child_setup
from sie.runtime.logs import configure


def make_service(frontend: FrontendProcess) -> Service:
    """Return the service with all methods and dialects."""
    names = (KSERVE, TRTIS, HEALTH)
    dialects: dict[str, Dialect] = {
        KSERVE: KServeGrpc(frontend, KServeService(frontend)),
        TRTIS: TrtisGrpc(TrtisService(frontend)),
        HEALTH: Health(frontend, ("", *names)),
        **dict.fromkeys(REFLECTION, Reflection((*names, *REFLECTION))),
    }
    return Service(frontend, dialects)


async def serve(launch: Launch) -> None:
    """Serve until SIGTERM, then finish the accepted calls."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    frontend = connect(launch)(loop)
    service = make_service(frontend)
    listener = Listener(service, frontend.settings)
    listener.on_ended, listener.on_checked = frontend.metrics.record_grpc_ended, frontend.metrics.record_grpc_turns
    frontend.count_held = lambda: listener.held_bytes
    await listener.open(launch.host, launch.port, launch.backlog, tls_context(launch, lambda: frontend.certificates))
    child_setup.calm_collector()
    await stopping.wait()
    service.end_streams()
    await listener.close(frontend.settings.server.drain_timeout_s)
    frontend.close()


def main() -> int:
    """Run the gRPC process. The launch record is the only argument."""
    child_setup.exclude_imports_from_collections()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    configure(launch.log_format, launch.log_level, "grpc")  # type: ignore[arg-type]
    uvloop.run(serve(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
