"""Asks the server of this container for `/healthz`: the image's HEALTHCHECK. Status 0 means that a frontend answers.

A server holds the lock of its port in SIE_RUNTIME_DIR, so another port needs no second setting here. HTTPS is tried when
HTTP fails.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from pathlib import Path
from typing import Final

from sie.runtime.server_locks import locked_ports

_TIMEOUT_S: Final = 2.0


def answers(connection: http.client.HTTPConnection) -> bool:
    """Return whether a frontend answers on this connection. It may demand a certificate of its clients instead."""
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    finally:
        connection.close()


def is_healthy(port: int) -> bool:
    """Return whether the server at this port of the container answers."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False  # its certificate has the name that clients know
    trusting.verify_mode = ssl.CERT_NONE
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    return answers(plain) or answers(
        http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=trusting)
    )


if __name__ == "__main__":
    ports = locked_ports(Path(os.environ["SIE_RUNTIME_DIR"]))
    sys.exit(0 if ports and all(map(is_healthy, ports)) else 1)
