from __future__ import annotations

import pytest

from sie.frontend.http.near_routes import hint_for
from sie.frontend.routes.table import TABLE, find_route


@pytest.mark.parametrize(
    ("path", "template", "model"),
    [
        ("/v1/encode/m", "/v1/encode/{model}", "m"),
        ("/v1/encode/org/model", "/v1/encode/{model}", "org/model"),
        ("/v1/encode/org/model/", "/v1/encode/{model}", "org/model/"),
        ("/v1/encode/", "/v1/encode/{model}", ""),
        ("/v1/encode/v1/models", "/v1/encode/{model}", "v1/models"),
        ("/v1/embeddings", "/v1/embeddings", ""),
        ("/v1/models", "/v1/models", ""),
        ("/v1/models/org/model:p", "/v1/models/{model}", "org/model:p"),
        ("/healthz", "/healthz", ""),
        ("/readyz", "/readyz", ""),
        ("/health", "/health", ""),
        ("/metrics", "/metrics", ""),
        ("/", "/", ""),
    ],
)
def test_path_finds_its_route_and_its_model(path, template, model):
    found = TABLE.match(path)
    assert found is not None
    assert (found.route.template, found.model) == (template, model)


@pytest.mark.parametrize(
    "path", ["", "/v1", "/v1/", "/v1/encode", "/v1/embeddings/", "/healthz/", "/V1/models", "//", "/x"]
)
def test_unknown_path_has_no_route(path):
    assert TABLE.match(path) is None


@pytest.mark.parametrize(("path", "target"), [("/v1/encode", "/v1/encode/"), ("/v1/models", None), ("/x", None)])
def test_missing_tail_is_redirected_unless_the_path_itself_is_served(path, target):
    assert TABLE.redirect_of(path) == target


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
    found = TABLE.match(path)
    assert found is not None
    assert (found.route.template, found.model) == (template, model)


@pytest.mark.parametrize(
    "path", ["/v2/models/{model}/infer/x/y", "/v2/repository/models/m", "/v2/repository/models/m/explode"]
)
def test_a_template_does_not_match_as_a_path(path):
    found = TABLE.match(path)
    assert found is None or found.route.template in ("/v2/models/{model}", "/v2/repository/{model}")


@pytest.mark.parametrize(
    ("path", "known", "expected"),
    [
        ("/v2/models/m/infer", set(), ("/v2/models/{model}/infer", "m", "")),
        ("/v2/models/m/versions/3/infer", {"m"}, ("/v2/models/{model}/infer", "m", "3")),
        ("/v2/models/m/ready", {"m/ready"}, ("/v2/models/{model}", "m/ready", "")),
        ("/v2/models/m/infer/infer", {"m/infer"}, ("/v2/models/{model}/infer", "m/infer", "")),
        ("/v2/models/m/versions/x/infer", {"m"}, None),
        ("/v2/models/m/trace/setting", {"m"}, ("/v2/models/{model}/trace/setting", "m", "")),
    ],
)
def test_the_known_names_decide_which_part_of_a_path_is_the_model(path, known, expected):
    found = find_route(path, known)
    assert (found and (found.route.template, found.model, found.version)) == expected


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v2/models/m/foo", " Did you mean GET /v2/models/{model}?"),
        ("/v2/models/m/inferr", " Did you mean POST /v2/models/{model}/infer?"),
        ("/v1/responses/x/cancle", " Did you mean POST /v1/responses/{response_id}/cancel?"),
        *(
            (f"/v2/models/org/m/{tail}", " The version of a model is a number: /v2/models/{model}/versions/{version}.")
            for tail in ("versions/x", "versions/x/infer", "versions/", "versions", "versions/1x/ready")
        ),
    ],
)
def test_an_unknown_path_is_told_the_nearest_route(path, hint):
    assert hint_for(path, TABLE) == hint
