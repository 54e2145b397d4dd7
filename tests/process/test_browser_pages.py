"""The dashboard, `/chat` and `/docs` in Chromium, driven by Playwright: both schemes, wide and narrow, keyboard, axe."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.process.browser import find_browser
from tests.process.harness import WAIT_S, eventually, start_server
from tests.process.keys import ADMIN, BOTH, entry, write_keys

BINARY = find_browser()
pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium on this machine")
INFER, METRICS = "sie_test-chat-0123456789abcdef", "sie_test-figures-0123456789abcdef"
ANSWER = """# Title
**bold** *em* `a*b` ~~gone~~ 2*3*4 snake_case_name [there](https://example.com/a) https://example.com/b.

- one
- two
  - deeper
3. third

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
x = "<b>" * 2
```
<img src=x onerror=alert(1)> ![pixel](https://example.com/p.png) [bad](javascript:alert(1)) \\*plain\\*"""


@pytest.fixture(scope="module")
def server():
    with start_server("--model", "g=stub:generate,scripted,max_tokens=65536,blocks=8192", "--model", "e=stub:dense=16",
                      "--max-context-tokens", "65536", "--lazy-model", "lazy=stub:generate,load_ms=300",
                      "--devices", "cpu:1", "--frontends", "1") as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=WAIT_S * 1000)  # 5 s otherwise
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, scheme: str = "light", width: int = 1400) -> Iterator[Page]:
    """Yield a page that may write no error to its console."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # pyright: ignore[reportArgumentType]
    context.set_default_timeout(WAIT_S * 1000)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert not [text for text in errors if not re.search("status of 40|REFUSED", text)]  # of requests, which are tested


def ask(page: Page, question: str) -> None:
    """Ask with the keyboard, and wait for the end of the answer."""
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#question").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("The answer is complete.")


def check_look(page: Page, width: int) -> None:
    """The page fits its window, and axe finds nothing."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 380)])
def test_pages_fit_and_axe_finds_nothing(server, browser, scheme, width):
    with opened(browser, f"{server.url}/chat", scheme, width) as page:
        ask(page, f"[[{ANSWER}]]")
        check_look(page, width)
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#models tr")).to_have_count(3)
        check_look(page, width)
        page.get_by_role("link", name="API").click()
        page.locator("#search").fill("embeddings base64")
        expect(page.locator("#post_v1_embeddings summary").first).to_be_visible()
        trial = trial_of(page, "post_v1_embeddings")
        send(trial)
        expect(trial.locator(".answer")).to_contain_text("200 OK")
        page.keyboard.press("Tab")
        expect(trial.locator(".answer")).to_be_focused()  # it scrolls with the keyboard
        check_look(page, width)
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#question")).to_be_focused()


def test_markdown_becomes_nodes_and_nothing_else(server, browser):
    with opened(browser, f"{server.url}/chat") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        ask(page, f"[[{ANSWER}]]")
        reply = page.locator("article").last
        for tag, texts in {"h3": ["Title"], "strong": ["bold"], "em": ["em"], "s": ["gone"], "th": ["a", "b"],
                           "td": ["1", "2"], "blockquote": ["quoted"], "pre": ['x = "<b>" * 2'], "ul ul": ["deeper"]}.items():  # fmt: skip
            assert reply.locator(tag).all_inner_texts() == texts
        assert reply.locator("ol").get_attribute("start") == "3"
        links = [link.get_attribute("href") for link in reply.locator("a").all()]
        assert links == ["https://example.com/a", "https://example.com/b", "https://example.com/p.png"]
        text = reply.inner_text()
        for plain in ("2*3*4 snake_case_name", "<img src=x onerror=alert(1)>", "[bad](javascript:alert(1))", "*plain*"):
            assert plain in text
        assert reply.locator("img, script, [onerror]").count() == 0
        assert all(url.startswith(server.url) for url in asked)


@pytest.mark.timing(forks=True)
def test_no_text_of_a_model_stalls_the_page(server, browser):
    texts = [
        "> " * 8000, "**a " * 5000, "[" * 15000, "`a``" * 4000, "- " * 8000, "|" * 10000 + "\n" + "-|" * 5000,
        "*_" * 8000, "#" * 15000, "1. a\n" * 3000, "\\" * 15000, " " * 15000 + "x", "_a" * 9000, "~~" * 9000, "```" * 5000,
        "a|b\n" * 4000, "[a](http://" * 1800, "http://" + "." * 15000, "-\n" * 8000, "\n" * 15000, "> - " * 4000,
    ]  # fmt: skip
    with opened(browser, f"{server.url}/chat") as page:
        for text in texts:
            took_ms = page.evaluate(
                "(text) => { const began = performance.now(), show = growing(document.createElement('div'));"
                "show(text, false); show(text, true); return performance.now() - began; }", text)  # fmt: skip
            assert took_ms < 2000, text[:20]


def test_an_answer_drawn_in_pieces_is_that_drawn_at_once(server, browser):
    with opened(browser, f"{server.url}/chat") as page:
        same = page.evaluate(
            "(text) => { const grown = document.createElement('div'), whole = document.createElement('div'), show = growing(grown);"
            "for (let i = 1; i <= text.length; i++) show(text.slice(0, i), false);"
            "growing(whole)(text, true); return grown.outerHTML === whole.outerHTML && whole.children.length; }", ANSWER)  # fmt: skip
        assert same == 8


def test_chat_with_the_keyboard_alone(server, browser):
    with opened(browser, f"{server.url}/chat") as page:
        sent: list[dict] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
        expect(page.locator("#question")).to_be_focused()
        page.keyboard.press("Shift+Tab")
        expect(page.locator("summary", has_text="System prompt")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.type("Be short.")
        page.keyboard.press("Tab")
        page.keyboard.type("[[one]]")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("line")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("The answer is complete.")
        expect(page.locator("#question")).to_be_focused()
        page.keyboard.type("[[two]]")
        page.keyboard.press("Enter")
        expect(page.locator("article .after").last).to_have_text(re.compile("tokens"))
        assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
        assert sent[0]["messages"] == [
            {"role": "system", "content": "Be short."}, {"role": "user", "content": "[[one]]\nline"}]  # fmt: skip
        assert sent[1]["messages"][2]["content"] == "one"


def test_an_answer_is_stopped_and_what_came_is_kept(browser):
    with (
        start_server("--model", "g=stub:generate,latency_ms=30", "--devices", "cpu:1", "--frontends", "1") as slow,
        opened(browser, f"{slow.url}/chat") as page,
    ):
        expect(page.locator("#send")).to_be_enabled()
        page.locator("#question").fill("hello " * 300)  # it answers the same: for a minute, and is stopped
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_have_text("Stop")
        expect(page.locator("#status")).to_have_text("Answering. Escape stops.")
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator("article .after").last).to_contain_text("stopped")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)
        slow.stop()
        page.locator("#question").fill("again")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_class("bad")
        expect(page.locator("#question")).to_have_value("again")


def test_a_model_that_is_not_loaded_is_waited_for(server, browser):
    with opened(browser, f"{server.url}/chat") as page:
        expect(page.locator("#model option")).to_have_count(2)
        page.locator("#model").select_option("lazy")
        ask(page, "hi")
        expect(page.locator("article h2").last).to_have_text("lazy")


def test_chat_is_refused_for_keys_without_the_scope(tmp_path, browser):
    keys = write_keys(tmp_path / "keys.toml", entry("chat", INFER, ["infer"]), entry("figures", METRICS, ["metrics"]))
    with (
        start_server("--model", "g=stub:generate,scripted", "--api-keys", str(keys), "--devices", "cpu:1",
                     "--frontends", "1") as closed,
        opened(browser, f"{closed.url}/chat") as page,
    ):  # fmt: skip
        why = page.locator("#ask-key-why")
        expect(why).to_have_text("This server asks for a key with the scope infer.")
        page.keyboard.type(METRICS)
        page.keyboard.press("Enter")
        expect(why).to_contain_text("lacks the scope 'infer'")
        expect(page.locator("#send")).to_be_disabled()
        page.locator("#key").fill(INFER)
        page.keyboard.press("Enter")
        ask(page, "[[in]]")
        assert page.evaluate("JSON.stringify(localStorage)") == json.dumps({})
        page.reload()
        ask(page, "[[still in]]")


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A server that asks for keys, and whose users have one key for each scope."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", entry("app", INFER, ["infer"]),
                      entry("figures", METRICS, ["metrics"]))  # fmt: skip
    with start_server("--model", "org/g=stub:generate,scripted", "--model", "e=stub:dense=16", "--api-keys", str(keys),
                      "--devices", "cpu:1", "--frontends", "1") as running:  # fmt: skip
        yield running


def enter_key(page: Page, key: str) -> None:
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")


def trial_of(page: Page, operation: str) -> Locator:
    """Open one operation of `/docs`, and return its fields and buttons."""
    page.evaluate("(name) => { location.hash = name; }", operation)
    trial = page.locator(f"#{operation} .trial")
    expect(trial.locator(".send")).to_be_visible()
    return trial


def send(trial: Locator) -> None:
    trial.locator(".send").focus()
    trial.page.keyboard.press("Enter")


def test_each_page_keeps_its_key_when_another_page_is_given_one(closed, browser):
    with opened(browser, f"{closed.url}/chat") as page:
        enter_key(page, INFER)
        ask(page, "[[in]]")
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#ask-key-why")).to_have_text("API key 'app' lacks the scope 'metrics'.")
        enter_key(page, METRICS)
        expect(page.locator("#link")).to_have_text("live")
        page.get_by_role("link", name="Chat").click()
        ask(page, "[[still in]]")
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#ask-key")).to_be_hidden()


def test_a_page_uses_the_key_that_another_page_was_given(closed, browser):
    with opened(browser, f"{closed.url}/chat") as page:
        enter_key(page, BOTH)
        ask(page, "[[in]]")
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#link")).to_have_text("live")
        page.get_by_role("link", name="API").click()
        expect(page.locator("#post_v1_generate_model input[name=model]")).to_have_value("org__g")
        expect(page.locator("#locked")).to_be_hidden()


@pytest.mark.parametrize("path", ["/", "/chat", "/docs"])
def test_the_dialog_for_a_key_leaves_a_margin_on_a_narrow_screen(closed, browser, path):
    with opened(browser, closed.url + path, width=380) as page:
        if path == "/docs":
            page.get_by_role("button", name="Enter a key").click()
        box = page.locator("#ask-key").bounding_box()
        assert box is not None
        assert box["x"] >= 12
        assert box["x"] + box["width"] <= 380 - 12
        assert page.locator("#key").evaluate("(it) => it.offsetWidth") >= 180, "room for a key"
        check_look(page, 380)


@pytest.mark.parametrize("path", ["/", "/chat"])
def test_a_key_that_was_not_confirmed_is_not_kept_and_can_be_entered_later(closed, browser, path):
    with opened(browser, closed.url + path) as page:
        page.locator("#key").fill("half a k")
        page.keyboard.press("Escape")
        expect(page.locator("#ask-key")).to_be_hidden()
        assert page.evaluate("sessionStorage.length") == 0
        button = page.get_by_role("button", name="Enter a key")
        button.click()
        enter_key(page, BOTH)
        expect(button).to_be_hidden()
        if path == "/":
            expect(page.locator("#link")).to_have_text("live")
        else:
            ask(page, "[[in]]")


def test_the_link_to_the_metrics_works_with_a_key(closed, browser):
    with opened(browser, closed.url) as page:
        enter_key(page, METRICS)
        expect(page.locator("#link")).to_have_text("live")
        page.get_by_role("link", name="Metrics").click()
        expect(page.locator("body")).to_contain_text("sie_requests_total")


def test_docs_ask_for_a_key_and_then_fill_and_send(closed, browser):
    with opened(browser, f"{closed.url}/docs") as page:
        expect(page.locator("#locked-why")).to_have_text("This server asks for an API key.")
        expect(page.locator("#ask-key")).to_be_hidden()  # the page can be read without a key
        trial = trial_of(page, "post_v1_embeddings")
        trial.locator(".code summary").click()
        expect(trial.locator(".sample")).to_contain_text('-H "Authorization: Bearer $SIE_API_KEY"')
        send(trial)
        expect(page.locator("#ask-key-why")).to_have_text("This server asks for an API key.")
        enter_key(page, "sie_wrong\u2026")
        expect(page.locator("#ask-key-why")).to_have_text("The API key is not known.")
        enter_key(page, INFER)
        expect(trial.locator(".answer")).to_contain_text("200 OK")
        expect(trial.locator(".send")).to_be_focused()
        expect(trial.locator("textarea")).to_have_value(re.compile('"model": "e"'))
        expect(page.locator("#locked")).to_be_hidden()
        for language in ("curl", "python", "javascript"):
            trial.locator(f"[data-lang={language}]").click()
            expect(trial.locator(".sample")).to_contain_text("SIE_API_KEY")
            assert INFER not in page.locator("body").inner_text()
        load = trial_of(page, "post_v1_models_load")
        send(load)
        expect(page.locator("#ask-key-why")).to_have_text("API key 'app' lacks the scope 'admin'.")
        enter_key(page, ADMIN)
        expect(load.locator(".answer")).to_contain_text("200 OK")
        send(trial)
        expect(trial.locator(".answer")).to_contain_text("200 OK")
        page.reload()
        expect(page.locator("#post_v1_embeddings textarea")).to_have_value(re.compile('"model": "e"'))
        trial = trial_of(page, "get_healthz")
        assert "SIE_API_KEY" not in (trial.locator(".sample").text_content() or ""), "a route for everybody"


def test_a_key_for_the_docs_can_be_entered_first_and_what_was_written_stays(closed, browser):
    with opened(browser, f"{closed.url}/docs", "dark", 380) as page:
        trial = trial_of(page, "post_v1_encode_model")
        trial.locator("input[name=model]").fill("mine")
        page.get_by_role("button", name="Enter a key").click()
        check_look(page, 380)
        enter_key(page, METRICS)
        expect(page.locator("#ask-key-why")).to_have_text("API key 'figures' lacks the scope 'infer'.")
        enter_key(page, INFER)
        expect(page.locator("#post_v1_generate_model input[name=model]")).to_have_value("org__g")
        expect(trial.locator("input[name=model]")).to_have_value("mine")
        assert page.evaluate("JSON.stringify(localStorage)") == json.dumps({})


def test_docs_ask_for_no_key_where_a_refusal_has_another_reason(browser):
    with (
        start_server(
            "--model", "e=stub:dense=16", "--admin-from", "nobody", "--devices", "cpu:1", "--frontends", "1"
        ) as alone,
        opened(browser, f"{alone.url}/docs") as page,
    ):
        trial = trial_of(page, "post_v1_models_load")
        send(trial)
        expect(trial.locator(".answer")).to_contain_text("403")
        expect(page.locator("#ask-key")).to_be_hidden()
        expect(trial.locator(".sample")).not_to_contain_text("SIE_API_KEY")


def test_docs_examples_of_a_server_of_texts_are_answered(server, browser):
    with opened(browser, f"{server.url}/docs") as page:
        assert page.get_by_text("Cluster", exact=True).count() == 0
        sent = page.locator("[data-path^='/v2/models/'], [data-path^='/v1/models/'], [data-path^='/v1/generate/']")
        names = [trial.evaluate("(it) => it.closest('.operation').id") for trial in sent.all()]
        assert {"post_v1_models_status", "get_v2_models__ready", "post_v2_models__infer"} <= set(names)
        for name in names:
            trial = trial_of(page, name)
            send(trial)
            expect(trial.locator(".answer"), name).to_contain_text(re.compile("^2\\d\\d "))


FIRST_FRAME = """new Promise((resolve) => {
    const socket = new WebSocket(location.origin.replace("http", "ws") + "/ws/status");
    socket.onmessage = (event) => { socket.close(); resolve(JSON.parse(event.data).history); };
})"""


def test_dashboard_shows_what_was_before_it_was_opened(server, browser):
    with opened(browser, server.url) as page:
        points = eventually(lambda: page.evaluate(FIRST_FRAME), "a point of the history")
        assert set(points[0]) == {"requests_per_s", "generated_per_s", "queued", "p50_s", "p95_s"}
        page.reload()
        expect(page.locator("#link")).to_have_text("live")
        lengths = "charts.map((chart) => chart.ranges.hour[0].length)"
        assert page.evaluate(lengths)[0] >= len(points)
        expect(page.locator(".tile path[d^=M]")).not_to_have_count(0)
        page.get_by_role("button", name="2 minutes").click()
        expect(page.get_by_role("button", name="2 minutes")).to_have_attribute("aria-pressed", "true")
        hidden = "[...document.querySelectorAll('.tile')].map((tile) => tile.querySelector('h2').firstChild.data + tile.hidden)"
        assert page.evaluate(hidden) == ["Requestsfalse", "Encodingfalse", "Generationfalse", "Queuefalse"]
