"""Listening addresses and transports: TLS, client certificates, a Unix socket, and warnings about exposed addresses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import psutil
import pytest

from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, free_port, run_to_end, start_server
from tests.process.keys import INFER, bearer, write_keys
from tests.process.wire import get, raw_request, read_response

HEALTHCHECK = Path(__file__).resolve().parents[2] / "deploy/healthcheck.py"
STUB = ("--model", "stub/a=stub:dense=16")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")


def openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Return a directory with an authority, and certificates of it for the server and for a client."""
    home = tmp_path_factory.mktemp("pki")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca", cwd=home)
    for name, extension in (
        ("server", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ("client", "extendedKeyUsage=clientAuth"),
    ):
        openssl(
            "req",
            *key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
            "-addext",
            extension,
            cwd=home,
        )
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2",
            "-copy_extensions", "copy", "-out", f"{name}.pem", cwd=home,
        )  # fmt: skip
    openssl("ec", "-in", "server.key", "-aes128", "-passout", "pass:x", "-out", "locked.key", cwd=home)
    return home


def client_context(pki: Path, *, shows_certificate: bool = False, offers: tuple[str, ...] = ()) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    if shows_certificate:
        context.load_cert_chain(pki / "client.pem", pki / "client.key")
    if offers:
        context.set_alpn_protocols(list(offers))
    return context


def get_tls(port: int, context: ssl.SSLContext, path: str = "/readyz", headers=None) -> int:
    connection = http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=context)
    try:
        connection.request("GET", path, headers=headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def check_bench(pki: Path, port: int) -> None:
    """`sie bench` reaches a server over TLS, with the certificate that it asks for and not without."""
    command = [
        sys.executable, "-m", "sie", "bench", "--url", f"https://localhost:{port}", "--model", "stub/a", "--key", INFER,
        "--ca", str(pki / "ca.pem"), "--seconds", "0.2", "--connections", "3", "--distinct", "8", "--items", "40",
    ]  # fmt: skip
    shown = ["--cert", str(pki / "client.pem"), "--cert-key", str(pki / "client.key")]
    assert subprocess.run(command, timeout=WAIT_S, capture_output=True, check=False).returncode == 1
    subprocess.run([*command, *shown], timeout=WAIT_S, capture_output=True, check=True)


def check_attackers(server: Server, pki: Path, context: ssl.SSLContext) -> None:
    """Handshakes that are begun, cut, or none delay nobody's, and old versions are refused, over HTTP and gRPC."""
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    first = hello.read()
    with contextlib.ExitStack() as stack:
        for port in (server.port, server.grpc_port):
            for data in (
                b"",
                first[:40],
                first,
                b"\x16\x03\x01\x40\0" + bytes(100),
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(200),
            ):
                for _ in range(25):
                    stack.enter_context(socket.create_connection(("localhost", port), 10)).sendall(data)
        began_s = time.monotonic()
        for _ in range(5):
            assert get_tls(server.port, context) == 200
        assert time.monotonic() - began_s < 60  # those of the others do not end meanwhile
    for port, version in ((server.port, ssl.TLSVersion.TLSv1_2), (server.grpc_port, ssl.TLSVersion.TLSv1_1)):
        old = client_context(pki, shows_certificate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old.minimum_version, old.maximum_version = min(version, old.minimum_version), version
        old.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection(("localhost", port), 10) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(plain, server_hostname="localhost")


@needs_openssl
def test_tls_serves_http_1_alone_and_to_clients_with_a_certificate_alone(pki, tmp_path):
    keys = write_keys(tmp_path / "keys.toml")
    with start_server(
        *STUB, "--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key"),
        "--tls-client-ca", str(pki / "ca.pem"), "--api-keys", str(keys), "--host", "localhost",
        "--grpc-port", str(free_port()),
    ) as server:  # fmt: skip
        shown = client_context(pki, shows_certificate=True)
        assert get_tls(server.port, shown) == 200
        assert get_tls(server.port, shown, "/v1/models") == 401
        assert get_tls(server.port, shown, "/v1/models", bearer(INFER)) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get_tls(server.port, client_context(pki))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(server.port, "/readyz")
        check_bench(pki, server.port)
        check_attackers(server, pki, shown)
        offers = client_context(pki, shows_certificate=True, offers=("h2", "http/1.1"))
        with (
            socket.create_connection(("localhost", server.port), 10) as plain,
            offers.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            assert (secured.selected_alpn_protocol(), secured.version()) == ("http/1.1", "TLSv1.3")


@needs_openssl
@pytest.mark.parametrize(
    ("cert", "key", "ca", "parts"),
    [
        ("server.pem", "", "", ["tls_cert", "tls_key"]),
        ("", "server.key", "", ["tls_key", "tls_cert"]),
        ("", "", "ca.pem", ["tls_client_ca", "tls_cert"]),
        ("none.pem", "server.key", "", ["tls_cert", "none.pem", "cannot be read"]),
        ("server.pem", "none.key", "", ["tls_key", "none.key", "cannot be read"]),
        ("server.pem", "client.key", "", ["tls_cert", "tls_key"]),
        ("server.key", "server.key", "", ["tls_cert", "PEM"]),
        ("server.pem", "locked.key", "", ["tls_key", "encrypted"]),
        ("server.pem", "server.key", "server.key", ["tls_client_ca", "PEM"]),
    ],
)
def test_certificate_files_that_cannot_serve_stop_the_start(pki, cert, key, ca, parts):
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": ca}
    status, said = run_to_end(
        *STUB, *(word for flag, name in given.items() if name for word in (flag, str(pki / name)))
    )
    assert status == EX_CONFIG, said
    assert all(part in said for part in parts), said
    assert "Traceback" not in said


# --- a Unix socket -----------------------------------------------------------------------------------------------------


def ask(path: Path, request: bytes):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(str(path))
        sock.sendall(request)
        return read_response(sock)


@pytest.fixture
def short_path():
    """Return a path that fits into a socket's address."""
    with tempfile.TemporaryDirectory(prefix="sie-") as home:
        yield Path(home, "sie.sock")


def test_unix_socket_is_shared_by_all_frontends_and_is_the_only_way_in(short_path):
    with start_server(*STUB, "--uds", str(short_path), "--uds-mode", "600", "--frontends", "2") as server:
        assert short_path.stat().st_mode & 0o777 == 0o600
        for pid in server.pids():
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper of the start, which has ended
                assert not psutil.Process(pid).net_connections("inet")
        seen: set[str] = set()

        def is_shared() -> bool:
            seen.add(ask(short_path, raw_request("/v1/encode/x", b"{}")).headers["x-sie-runtime-instance"])
            return len(seen) == 2

        eventually(is_shared, "an answer of each frontend")
        body = json.dumps({"model_id": "stub/a"}).encode()
        fields = {"host": "localhost", "content-type": "application/json"}
        assert ask(short_path, raw_request("/v1/models/status", body, fields)).status == 200
        status, said = run_to_end(*STUB, "--uds", str(short_path))
        assert (status, "another server listens" in said) == (EX_CONFIG, True), said
        assert ask(short_path, raw_request("/readyz", method="GET")).status == 200
    assert not short_path.exists()


def test_what_a_killed_server_left_is_replaced_and_nothing_else_is(short_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_path))
        dead.listen()
    with start_server(*STUB, "--uds", str(short_path)):
        assert ask(short_path, raw_request("/readyz", method="GET")).status == 200
    short_path.write_text("mine")
    status, said = run_to_end(*STUB, "--uds", str(short_path))
    assert (status, "is not a socket" in said) == (EX_CONFIG, True), said
    assert short_path.read_text() == "mine"
    status, said = run_to_end(*STUB, "--uds", str(short_path.parent / "none" / "s"))
    assert (status, "uds" in said) == (EX_CONFIG, True), said


# --- open doors --------------------------------------------------------------------------------------------------------


def test_address_that_others_can_reach_is_warned_of(tmp_path):
    with start_server(*STUB, "--host", "0.0.0.0", "--api-keys", str(write_keys(tmp_path / "keys.toml"))) as server:
        server.log_line("there is no tls_cert: API keys and texts cross the network unencrypted")
        assert "anyone who can reach" not in server.output.text()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "1.2.3.4:80", "http://localhost", "x" * 300])
def test_malformed_host_is_named(host):
    status, said = run_to_end(*STUB, "--host", host)
    assert status == EX_CONFIG, said
    assert "host: " in said
    assert "Traceback" not in said


def is_healthy(runtime_dir: Path) -> bool:
    """Return what the HEALTHCHECK of the image finds."""
    env = {**os.environ, "SIE_RUNTIME_DIR": str(runtime_dir)}
    return subprocess.run([sys.executable, HEALTHCHECK], env=env, timeout=WAIT_S, check=False).returncode == 0


@needs_openssl
@pytest.mark.parametrize("demands", [(), ("tls",), ("tls", "client")], ids=["http", "https", "client certificates"])
def test_the_images_check_finds_port_and_scheme_itself(demands, pki, tmp_path):
    files = {"tls": ("--tls-cert", "server.pem", "--tls-key", "server.key"), "client": ("--tls-client-ca", "ca.pem")}
    flags = [word if word.startswith("--") else str(pki / word) for name in demands for word in files[name]]
    with start_server(*STUB, *flags, "--runtime-dir", str(tmp_path / "run"), is_stopped=True) as server:
        assert is_healthy(tmp_path / "run")
        server.stop()
        assert not is_healthy(tmp_path / "run")
