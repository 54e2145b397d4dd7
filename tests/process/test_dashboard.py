"""The page at `/` as people use it, in a headless Chromium."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.process.browser import Page, find_browser, open_page
from tests.process.harness import WAIT_S, eventually, start_server
from tests.process.keys import entry, write_keys
from tests.process.wire import encode, get

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
PAGE_KEY = "sie_test-page-0123456789abcdef"
ROW = "[...document.querySelectorAll('#models tr')].find((row) => row.innerText.startsWith('{}'))"


def row(model: str, rest: str) -> str:
    """Return an expression about a model's row; undefined while there is none."""
    return ROW.format(model) + "?." + rest


def state(model: str, value: str) -> str:
    return row(model, f"querySelector('.state').textContent === '{value}'")


def button(model: str) -> str:
    return row(model, "querySelector('button')")


def wait_button(page: Page, model: str, label: str) -> None:
    is_ready = f"{button(model)}?.textContent === '{label}' && {button(model)}.ariaDisabled === 'false'"
    page.wait(is_ready, f"{label} {model} can be clicked")


def click(page: Page, model: str, label: str) -> None:
    wait_button(page, model, label)
    page.run(f"{button(model)}.click()")


@pytest.fixture(scope="module")
def server():
    with start_server(
        "--model", "stub/pre=stub:dense=16,memory_mb=10", "--lazy-model", "stub/lazy=stub:dense=16,memory_mb=10",
        "--lazy-model", "stub/big=stub:dense=16,memory_mb=99", "--max-model-bytes", str(50 << 20), "--frontends", "1",
        "--tick-timeout-s", "3",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def page(server):
    assert BROWSER is not None
    with open_page(BROWSER, server.url) as opened:
        yield opened


def test_page_shows_the_models_as_they_are(server, page):
    page.wait(state("stub/pre", "loaded"), "the preloaded model")
    page.wait(state("stub/lazy", "available"), "the lazy model")
    page.wait("document.getElementById('link').textContent === 'live'", "live")
    assert page.run("document.querySelectorAll('[src], link[href^=http]').length") == 0, "nothing comes from elsewhere"
    assert encode(server.port, "stub/pre", ["x"] * 3).status == 200
    page.wait("document.getElementById('totals').textContent.startsWith('1 request')", "the request is counted")


def test_a_version_is_shown_only_where_there_are_several(page):
    page.wait("typeof latest !== 'undefined' && latest && document.title.startsWith('sie')", "the first frame")
    shown = "((models) => { const was = latest; latest = { models }; const name = shownName(models[0].name); latest = was; return name; })"
    assert page.run(f"{shown}([{{name: 'm/versions/1'}}, {{name: 'n/versions/2'}}])") == "m"
    assert page.run(f"{shown}([{{name: 'm/versions/1'}}, {{name: 'm/versions/2'}}])") == "m/versions/1"
    assert page.run(f"{shown}([{{name: 'refused/versions'}}])") == "refused"
    assert page.run(f"{shown}([{{name: 'org/m'}}])") == "org/m"
    assert page.run(f"{shown}([{{name: 'org/versions/x'}}])") == "org/versions/x"


def test_model_is_loaded_and_unloaded_with_one_click(server, page):
    click(page, "stub/lazy", "Load")
    page.wait(state("stub/lazy", "loaded"), "loaded")
    assert encode(server.port, "stub/lazy", ["x"]).status == 200
    click(page, "stub/lazy", "Unload")
    page.wait(state("stub/lazy", "available"), "unloaded")
    assert get(server.port, "/v1/models/stub/lazy").json()["state"] == "available"


def test_unload_of_a_preloaded_model_is_confirmed_first(server, page):
    is_open = "document.getElementById('confirm').open"
    click(page, "stub/pre", "Unload")
    page.wait(is_open, "the question")
    assert "stub/pre" in page.run("document.getElementById('confirm').innerText")
    page.press("Escape", 27)
    page.wait(f"!{is_open}", "the question has gone")
    assert get(server.port, "/v1/models/stub/pre").json()["state"] == "loaded"
    click(page, "stub/pre", "Unload")
    page.run("document.querySelector('#confirm button.danger').click()")
    page.wait(state("stub/pre", "available"), "unloaded")
    click(page, "stub/pre", "Load")
    page.wait(state("stub/pre", "loaded"), "loaded again")


def test_keyboard_alone_is_enough_and_the_focus_stays(page):
    wait_button(page, "stub/lazy", "Load")
    page.run(f"{button('stub/lazy')}.focus()")
    page.press("Enter", 13)
    wait_button(page, "stub/lazy", "Unload")
    page.press("Enter", 13)
    page.wait(state("stub/lazy", "available"), "unloaded")
    assert page.run(f"document.activeElement === {button('stub/lazy')}")


def test_screen_reader_hears_which_model_each_button_is_for(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    names = {node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "button"}
    assert {"Unload stub/pre", "Load stub/lazy", "Load stub/big"} <= names


def test_failure_is_shown_where_it_happened(page):
    click(page, "stub/big", "Load")
    page.wait(state("stub/big", "failed"), "refused")
    page.wait(row("stub/big", "innerText.includes('99 MiB on cpu')"), "the reason")
    assert not page.run(row("stub/pre", "innerText.includes('MiB on cpu')"))


def test_page_says_when_it_is_cut_off_and_comes_back_by_itself(server, page):
    (frontend,) = server.frontends()
    wait_button(page, "stub/lazy", "Load")
    page.run(f"{button('stub/lazy')}.focus()")
    os.kill(frontend, signal.SIGSTOP)
    page.wait("document.getElementById('link').textContent.startsWith('no news')", "stale")
    page.wait("document.getElementById('main').classList.contains('stale')", "the figures are grey")
    # The supervisor kills it, as it does not answer, and starts another.
    page.wait("document.getElementById('link').textContent === 'live'", "live again")
    wait_button(page, "stub/lazy", "Load")
    assert page.run(f"document.activeElement === {button('stub/lazy')}"), "the keyboard is where it was"
    eventually(lambda: server.frontends() not in ([], [frontend]), "another frontend")
    errors = [line for line in page.logged if "exceptionDetails" in line]
    assert not errors, errors


def test_generating_models_show_their_sequences_and_no_others_do(server, page):
    assert page.run("document.getElementById('generation').hidden"), "nothing generates here"
    assert BROWSER is not None
    with (
        start_server(
            "--model", "v=stub:dense=8", "--model", "g=stub:generate,latency_ms=30", "--devices", "cpu"
        ) as other,
        open_page(BROWSER, other.url) as opened,
    ):
        opened.wait("document.getElementById('generation')?.hidden === false", "the panel")
        cell = "document.querySelector('#generating td[data-label=\"{}\"]').innerText"
        body = {"messages": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{other.url}/v1/chat/completions", json=body, timeout=WAIT_S):
            opened.wait(f"{cell.format('Running')} === '1'", "a running choice")
            opened.wait(f"parseInt({cell.format('KV blocks')}) > 0", "its blocks")
            opened.wait(f"parseFloat({cell.format('Tokens/s')}) > 3", "its tokens")
            opened.wait(f"{cell.format('First token')}.includes(' ms')", "its first token")
        opened.wait(f"{cell.format('Running')} === '0'", "nothing runs any more")
        assert opened.run("[...document.querySelectorAll('#generating tr')].map((row) => row.cells[0].innerText)") == [
            "g"
        ]


def test_docs_fill_search_and_send_examples(server):
    assert BROWSER is not None
    with open_page(BROWSER, f"{server.url}/docs") as docs:
        docs.wait(
            "document.querySelector('input[name=model]')?.value === 'stub/pre'", "a loaded model is in the example"
        )
        assert docs.run("[...document.querySelectorAll('.operation')].every((it) => !it.checkVisibility())"), (
            "groups are shut"
        )
        docs.run("location.hash = 'post_v1_encode_model'; document.querySelector('.send').click()")
        docs.wait("document.querySelector('.answer').textContent.startsWith('200')", "the answer")
        assert docs.run("document.querySelector('.answer').checkVisibility()")
        docs.run("document.querySelector('.send').focus()")
        docs.press("Enter", 13)
        docs.wait("document.querySelector('.send').ariaDisabled === 'false'", "the second answer")
        assert docs.run("document.activeElement === document.querySelector('.send')"), "the keyboard is where it was"
        for language, start in (
            ("curl", "curl -s -X POST"),
            ("python", "import urllib"),
            ("javascript", "const response"),
        ):
            docs.run(f"document.querySelector('[data-lang={language}]').click()")
            sample = docs.run("document.querySelector('.sample').textContent")
            assert sample.startswith(start)
            assert "/v1/encode/stub/pre" in sample
        docs.run("document.querySelector('[data-lang=python]').click()")
        code = docs.run("document.querySelector('.sample').textContent")
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
        assert json.loads(ran.stdout)["model"] == "stub/pre"
        docs.run(
            "(() => { const box = document.getElementById('search'); box.value = 'embeddings base64';"
            "box.dispatchEvent(new Event('input')); })()"
        )
        shown = "[...document.querySelectorAll('.operation')].filter((it) => it.checkVisibility()).map((it) => it.id)"
        assert docs.run(shown) == ["post_v1_embeddings"]
        docs.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=True)
        assert docs.run("document.documentElement.scrollWidth") <= 360
        assert docs.logged == []


def test_buttons_are_off_where_models_may_not_be_managed():
    assert BROWSER is not None
    with (
        start_server("--model", "stub/pre=stub:dense=16", "--admin-from", "nobody") as server,
        open_page(BROWSER, server.url) as page,
    ):
        page.wait(state("stub/pre", "loaded"), "the model")
        page.wait(f"{button('stub/pre')}.title.includes('admin_from')", "why it is off")
        assert page.run(f"{button('stub/pre')}.ariaDisabled") == "true"
        page.run(f"{button('stub/pre')}.click()")
        assert not page.run("document.getElementById('confirm').open")


def test_page_asks_for_a_key_and_keeps_it_for_the_tab(tmp_path):
    assert BROWSER is not None
    keys = write_keys(tmp_path / "keys.toml", entry("page", PAGE_KEY, ["metrics", "admin"]))
    with (
        start_server("--model", "stub/pre=stub:dense=16", "--api-keys", str(keys)) as server,
        open_page(BROWSER, server.url) as page,
    ):
        is_open = "document.getElementById('ask-key')?.open"
        enter = "document.getElementById('key').value = '{}'; document.querySelector('#ask-key button').click()"
        page.wait(is_open, "the question")
        assert not page.run("document.getElementById('models').innerText.includes('stub/pre')")
        page.run(enter.format("sie_wrong"))
        page.wait("document.getElementById('ask-key-why').textContent === 'The API key is not known.'", "why not")
        page.wait(is_open, "the question again")
        page.run(enter.format(PAGE_KEY))
        page.wait(state("stub/pre", "loaded"), "the model")
        page.wait("document.getElementById('link').textContent === 'live'", "live")
        click(page, "stub/pre", "Unload")
        page.run("document.querySelector('#confirm button.danger').click()")
        page.wait(state("stub/pre", "available"), "unloaded with the key")
        page.call("Page.reload")
        page.wait(state("stub/pre", "available"), "the key is still known")
        assert not page.run(is_open)


def test_running_agents_are_counted(page):
    assert BROWSER is not None
    totals = "document.getElementById('totals')?.textContent"
    with (
        start_server("--model", "g=stub:generate,scripted", "--agent", "--sandbox", "off", "--devices", "cpu") as other,
        open_page(BROWSER, other.url) as opened,
    ):
        opened.wait(f"{totals}.includes('answered')", "the figures")
        assert not opened.run(f"{totals}.includes('agent')")
        call = {"name": "mistralrs_shell", "arguments": {"commands": ["sleep 300"]}}
        body = {"messages": f"[[<tool_call>{json.dumps(call)}</tool_call>]]", "enable_shell": True, "stream": True}
        with httpx.stream("POST", f"{other.url}/v1/chat/completions", json=body, timeout=WAIT_S):
            opened.wait(f"{totals}.includes('1 running agent')", "the agent")
        opened.wait(f"!{totals}.includes('agent')", "its end with its client")
