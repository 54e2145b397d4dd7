from __future__ import annotations

import pytest

from sie.frontend.app import App
from sie.frontend.http.routes import ROUTES, match, redirect_of
from sie.frontend.routes.embed import Inference
from sie.frontend.routes.generate import TextRoutes
from sie.frontend.routes.kserve import KServe
from sie.frontend.routes.trtis import Trtis


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


def test_every_route_has_a_handler():
    owners = {"kserve": KServe, "trtis": Trtis, "text": TextRoutes, "anthropic": TextRoutes}
    for route in ROUTES:
        owner = owners.get(route.envelope) or (Inference if route.endpoint else App)
        assert callable(getattr(owner, route.handler if owner is not App else f"_{route.handler}", None)), route


@pytest.mark.parametrize(
    ("path", "template", "model"),
    [
        ("/v2/models/org/name/infer", "/v2/models/{model}/infer", "org/name"),
        ("/v2/models/m/versions/3/ready", "/v2/models/{model}/ready", "m/versions/3"),
        ("/v2/models/ready", "/v2/models/{model}", "ready"), ("/v2/models/stats", "/v2/models/stats", ""),
        ("/v2/repository/models/a/b/load", "/v2/repository/models/{model}/load", "a/b"),
        ("/api/infer/m/1", "/api/infer/{model}", "m/1"),
    ],
)  # fmt: skip
def test_a_models_name_may_stand_between(path, template, model):
    found = match(path)
    assert found is not None
    assert (found.route.template, found.model) == (template, model)


@pytest.mark.parametrize(
    "path", ["/v2/models/{model}/infer/x/y", "/v2/repository/models/m", "/v2/repository/models/m/explode"]
)
def test_a_template_is_no_path(path):
    found = match(path)
    assert found is None or found.route.template in ("/v2/models/{model}", "/v2/repository/{model}")
