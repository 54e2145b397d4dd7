from __future__ import annotations

import pytest

from sie.frontend.app import App
from sie.frontend.inference import Inference
from sie.frontend.routes import ROUTES, match, redirect_of


@pytest.mark.parametrize(
    ("path", "handler", "model"),
    [
        ("/v1/encode/m", "encode", "m"),
        ("/v1/encode/org/model", "encode", "org/model"),
        ("/v1/encode/org/model/", "encode", "org/model/"),
        ("/v1/encode/", "encode", ""),
        ("/v1/encode/v1/models", "encode", "v1/models"),
        ("/v1/embeddings", "embeddings", ""),
        ("/v1/models", "list_models", ""),
        ("/v1/models/org/model:p", "show_model", "org/model:p"),
        ("/healthz", "healthz", ""),
        ("/readyz", "readyz", ""),
        ("/health", "health", ""),
        ("/metrics", "metrics", ""),
        ("/", "home", ""),
    ],
)
def test_path_finds_its_handler_and_its_model(path, handler, model):
    found = match(path)
    assert found is not None
    assert (found.route.handler, found.model) == (handler, model)


@pytest.mark.parametrize(
    "path", ["", "/v1", "/v1/", "/v1/encode", "/v1/embeddings/", "/healthz/", "/V1/models", "//", "/x"]
)
def test_unknown_path_has_no_route(path):
    assert match(path) is None


@pytest.mark.parametrize(("path", "target"), [("/v1/encode", "/v1/encode/"), ("/v1/models", None), ("/x", None)])
def test_missing_tail_is_redirected_unless_the_path_itself_is_served(path, target):
    assert redirect_of(path) == target


def test_every_route_has_a_handler_of_its_own():
    shared = {"manage_model", "openapi"}
    own = [route.handler for route in ROUTES if route.handler not in shared]
    assert len(set(own)) == len(own)
    for route in ROUTES:
        assert callable(
            getattr(Inference, route.handler, None) if route.endpoint else getattr(App, f"_{route.handler}", None)
        )
