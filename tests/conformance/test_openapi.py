"""A running server against its own document: schemathesis, the examples, and the page in a browser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.browser import find_browser, open_page
from tests.process.harness import WAIT_S, start_server
from tests.process.wire import get, post_json, samples

HERE = Path(__file__).parent
BROWSER = find_browser()
INFERENCE = ("/v1/encode/{model}", "/v1/score/{model}", "/v1/extract/{model}", "/v1/rerank", "/v1/embeddings")
NOT_CHECKED = "positive_data_acceptance"
"""What a model can do, such as how many dimensions it has, is no part of a schema that all models share."""


@pytest.fixture(scope="module")
def server():
    stub = "stub:dense=16,sparse=100,multivector=8,score,extract"
    with start_server(
        "--model", f"stub/all={stub}", "--model", "stub/image=stub:dense=8,image", "--default-model", "stub/all",
        "--frontends", "1", "--model", "stub/tensor=stub:tensor", "--repository-control", "explicit",
    ) as running:  # fmt: skip
        yield running


@pytest.mark.timeout(900)
def test_live_server_conforms_to_its_document(server, tmp_path):
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{server.url}/openapi.json", "--phases", "examples,coverage,fuzzing", "--max-examples", "4", "--seed", "1", "--exclude-checks", NOT_CHECKED,
        "--continue-on-failure", "--warnings", "off", "--no-color", "--suppress-health-check", "filter_too_much,too_slow", "--request-timeout", f"{WAIT_S:g}",
    ]  # fmt: skip
    # Nothing else: each request looks through the whole environment for proxies, three times, and for a .netrc at home,
    # which takes two readings of /etc/passwd where HOME is not set.
    env = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path),
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    answered = samples(server.port)
    for path in INFERENCE:
        statuses = {
            dict(labels)["status"]
            for (name, labels) in answered
            if name == "http_requests_total" and path in dict(labels).values()
        }
        assert {"200", "400"} <= statuses, f"{path} was not tried in earnest: {statuses}"
        assert not {status for status in statuses if status >= "500"}


def test_examples_of_the_document_are_accepted(server):
    document = get(server.port, "/openapi.json").json()
    for template in INFERENCE:
        example = document["paths"][template]["post"]["requestBody"]["content"]["application/json"]["example"]
        named = {**example, "model": "stub/all"} if "model" in example else example
        response = post_json(server.port, template.format(model="stub/all"), named)
        assert response.status == 200, (template, response.body)


def test_document_is_one_under_both_names(server):
    response = get(server.port, "/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.body == get(server.port, "/api-doc/openapi.json").body


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_page_sends_an_example_and_shows_the_answer(server):
    trial = "document.querySelector('[data-path=\"/v1/encode/{model}\"]')"
    with open_page(BROWSER, f"{server.url}/docs") as page:
        model = f"{trial}.querySelector('input[name=model]')"
        page.wait(f"{trial} && {model}.value.startsWith('stub/')", "the name of a loaded model in the operation")
        page.run(f"{model}.value = 'stub/all'")
        page.run(f"{trial}.querySelector('.send').click()")
        answer = f"{trial}.querySelector('.answer')"
        page.wait(f"!{answer}.hidden", "an answer")
        assert page.run(f"{answer}.textContent").startswith("200 OK")
        assert '"dims": 16' in page.run(f"{answer}.textContent")
        page.run(f"{model}.value = 'stub/none'")
        page.run(f"{trial}.querySelector('.send').click()")
        page.wait(f"{answer}.textContent.startsWith('404')", "the error")
        assert not page.logged or "404" in page.logged[-1], page.logged
