from __future__ import annotations

import pytest

from sie.frontend.http.cors import Cors

APP = "https://app.example"


def preflight(cors, origin=APP, asked=None, method="POST"):
    headers = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": asked}
    answer = cors.preflight({name: value for name, value in headers.items() if value is not None})
    return None if answer is None else dict(answer)


def test_welcome_origin_is_named_and_caches_are_told():
    headers = dict(Cors((APP, "http://localhost:3000")).headers({"origin": APP}))
    assert headers["access-control-allow-origin"] == APP
    assert headers["vary"] == "origin"
    assert headers["access-control-expose-headers"] == "*"  # a list lacked the headers of several APIs
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "http://app.example", "null", "", None]
)
def test_other_origins_are_not_named(origin):
    cors = Cors((APP,))
    assert cors.headers({} if origin is None else {"origin": origin}) == [("vary", "origin")]
    assert preflight(cors, origin) is None


def test_any_origin_is_a_star():
    assert dict(Cors(("*",)).headers({"origin": "https://x"}))["access-control-allow-origin"] == "*"
    assert preflight(Cors(("*",)), "https://x") is not None


def test_preflight_permits_methods_and_the_headers_that_are_asked_for():
    answer = preflight(Cors((APP,)), asked="authorization, x-stainless-os")
    assert answer is not None
    assert answer["access-control-allow-methods"] == "DELETE, GET, POST, PUT"
    assert answer["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert int(answer["access-control-max-age"]) > 0


@pytest.mark.parametrize("asked", [None, "", "a\r\nx: y", "a b", "é", "a," * 2000])
def test_preflight_repeats_nothing_that_is_no_list_of_names(asked):
    answer = preflight(Cors((APP,)), asked=asked)
    assert answer is not None
    assert "authorization" in answer["access-control-allow-headers"]


def test_options_that_are_no_preflight_are_not_answered():
    assert Cors((APP,)).preflight({"origin": APP}) is None
    assert preflight(Cors((APP,)), method=None) is None
