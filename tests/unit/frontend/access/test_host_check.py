from __future__ import annotations

import pytest

from sie.config.sections import Access, Server
from sie.config.settings import Settings
from sie.frontend.access.host_check import HostCheck, open_host_check
from sie.ipc.messages import Launch
from sie.values.errors import Forbidden

CHECK = HostCheck(("my-alias", ""), ("sie.example", "[2001:DB8::1]"), ("https://app.example",))


def headers(host: str | None, origin: str | None = None) -> dict[str, str]:
    return {name: value for name, value in (("host", host), ("origin", origin)) if value is not None}


@pytest.mark.parametrize("origin_of", [lambda _: None, lambda host: f"http://{host}", lambda host: f"https://{host}"])
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080", "127.8.8.8", "localhost:8080", "LOCALHOST", "localhost.", "localhost.:8080", "[::1]:8080", "[::1]",
        "[0:0:0:0:0:0:0:1]:1", "[::ffff:127.0.0.1]:8080", "my-alias:8080", "sie.example", "SIE.Example.:443",
        "[2001:db8::1]:80",
    ],
)  # fmt: skip
def test_own_names_and_pages_are_allowed(host, origin_of):
    CHECK.check(headers(host, origin_of(host)))


def test_client_other_than_a_browser_may_omit_both_headers():
    CHECK.check({})
    CHECK.check(headers(""))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "127.0.0.1:x@evil.com", "127.0.0.1@evil.com", "localhost@evil.com",
        "127.0.0.1:8080:evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "evil.localhost.com", "0.0.0.0:8080", "[::]:1",
        "8.8.8.8", "[2001:db8::2]", "[::1", "::1]", "[::1]evil.com", "[127.0.0.1]evil.com:80", "127.0.0.1\tevil.com",
        "127.0.0.1, evil.com", "localhost..", ".", ":8080", "http://localhost", "localhost/", "localhost:123456", "x" * 5000,
        "not-sie.example", "ſie.example", "127.0.0.1\u00a0",
    ],
)  # fmt: skip
def test_foreign_host_is_refused_by_the_name_of_the_setting(host):
    for origin in (None, f"http://{host}", "https://app.example"):
        with pytest.raises(Forbidden, match="allowed_host") as caught:
            CHECK.check(headers(host, origin))
        assert caught.value.message.startswith("Host is ")
        assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "null", "", "file://", "http://", "http://localhost:3000", "http://127.0.0.1:8080",
        "http://localhost:8080.evil.com", "http://localhost:8080@evil.com", "http://evil.com/localhost:8080",
        "chrome-extension://abc", "http://app.example", "https://app.example.evil.com", "http://my-alias:1", "x" * 5000,
    ],
)  # fmt: skip
def test_foreign_origin_is_refused_by_the_names_of_the_settings(origin):
    for host in ("localhost:8080", "my-alias", None, "sie.example"):
        with pytest.raises(Forbidden, match="cors_origin or allowed_host") as caught:
            CHECK.check(headers(host, origin))
        assert caught.value.message.startswith("Origin is ")


@pytest.mark.parametrize("origin", ["https://app.example", "https://sie.example", "http://sie.example:81"])
def test_origin_in_a_setting_is_allowed(origin):
    for host in ("localhost:8080", "sie.example", None):  # a proxy may keep the client's Host, or send its own
        CHECK.check(headers(host, origin))


def test_every_origin_may_where_cors_lets_all_and_a_foreign_host_may_not():
    check = HostCheck((), (), ("*",))
    check.check(headers("localhost", "http://evil.example"))
    with pytest.raises(Forbidden):
        check.check(headers("evil.example", "http://evil.example"))


@pytest.mark.parametrize(
    ("access", "launch", "is_checked"),
    [
        ({}, {"host": "127.0.0.1"}, True),
        ({}, {"host": "127.0.1.1"}, True),
        ({}, {"host": "::1"}, True),
        ({"tls_cert": "c", "tls_key": "k"}, {"host": "::1"}, True),
        ({}, {"host": "0.0.0.0"}, False),
        ({}, {"host": "192.168.0.9"}, False),
        ({}, {"host": "::"}, False),
        ({"api_keys": "keys.toml"}, {"host": "127.0.0.1"}, False),
        ({"allowed_hosts": ("*",)}, {"host": "127.0.0.1"}, False),
        ({"uds": "/run/s"}, {"host": "", "listen_fd": 3}, False),
    ],
)
def test_only_a_loopback_address_without_keys_is_checked(access, launch, is_checked):
    settings = Settings(server=Server(host="alias"), access=Access(**access))
    record = Launch(control_path="", supervisor_pid=1, role="frontend", slot=0, incarnation=1, **launch)
    assert (open_host_check(settings, record) is not None) == is_checked
