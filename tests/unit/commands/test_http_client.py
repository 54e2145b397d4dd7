"""What the commands say when a server answers in a way that they did not expect."""

from __future__ import annotations

import http.client

import pytest

from sie.commands.http_client import Connection, ServerError, call, conversing, refusal
from sie.loadgen.target import parse_target

HINT = "; the address of a server with TLS begins with https://"


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("http://host", http.client.BadStatusLine("\x15\x03\x03"), f"the answer is not HTTP{HINT}"),
        ("http://host", ConnectionResetError("reset"), f"reset{HINT}"),
        ("http://host", http.client.RemoteDisconnected("closed"), f"closed{HINT}"),
        ("https://host", ConnectionResetError("reset"), "reset"),
        ("unix:/nowhere", ConnectionResetError("reset"), "reset"),
        ("http://host", BrokenPipeError("pipe"), "pipe"),
    ],
)
def test_a_broken_connection_is_explained(url: str, error: Exception, said: str) -> None:
    target = parse_target(url)
    with pytest.raises(ServerError) as caught, conversing(Connection(target, 1.0), target, 1.0):
        raise error
    assert str(caught.value) == f"the connection to {url} broke: {said}"


def test_a_refusal_without_a_reason_says_what_is_missing() -> None:
    assert refusal("/ws/status", 403, b"").endswith("status 403: the key lacks the scope 'metrics'")
    assert refusal("/v1/models", 403, b"").endswith("status 403")
    assert refusal("/ws/status", 401, b"").endswith("give it with --key or SIE_API_KEY")
    assert refusal("/v1/models", 400, b"This port speaks gRPC.") == "This port speaks gRPC."
    assert refusal("/v1/models", 502, b"<html>Bad gateway</html>").endswith("status 502")
    assert refusal("/v1/models", 401, b'{"error": "no"}') == "no; a key is given with --key or SIE_API_KEY"
    assert refusal("/v1/models", 404, b'{"detail": {"message": "no such model"}}') == "no such model"


def test_an_address_of_grpc_is_refused_before_it_is_asked() -> None:
    with pytest.raises(ServerError, match=r"'grpc://host:1' is an address of gRPC"):
        call(parse_target("grpc://host:1"), "GET", "/")
