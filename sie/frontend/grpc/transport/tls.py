"""Configures TLS of the gRPC listener. Each new connection must get the latest certificate, without a restart."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

from sie.ipc.messages import Certificates, Launch


def tls_context(launch: Launch, latest: Callable[[], Certificates | None]) -> ssl.SSLContext | None:
    """Return the listener's TLS context, or None without TLS. latest returns renewed certificates, or None."""
    if not launch.tls_cert:
        return None
    paths = (launch.tls_cert, launch.tls_key, launch.tls_client_ca)
    known: Certificates | None = None
    current = first = _context(Certificates(*(Path(path).read_bytes() if path else b"" for path in paths)))

    def choose(session: ssl.SSLObject, _name: str | None, _context_then: ssl.SSLContext) -> None:
        nonlocal known, current
        renewed = latest()
        if renewed is not None and renewed is not known:
            known, current = renewed, _context(renewed)
        session.context = current

    first.sni_callback = choose  # called in each handshake, even if the client names no host
    return first


def _context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if certificates.client_ca:
        context.load_verify_locations(cadata=certificates.client_ca.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    # Python loads a certificate only from a file. A memfd has no name, so a killed process leaves nothing behind.
    with os.fdopen(os.memfd_create("certificate", os.MFD_CLOEXEC), "wb") as file:
        file.write(certificates.cert + b"\n" + certificates.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
