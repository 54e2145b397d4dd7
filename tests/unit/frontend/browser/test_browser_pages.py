"""The dashboard and `/chat`: self-contained, and their policy allows exactly what is in them."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from sie.config.limits import Limits
from sie.frontend import browser
from sie.frontend.openapi import docs_page
from sie.frontend.routes.table import TABLE

pytestmark = pytest.mark.parametrize("name", ["dashboard", "chat"])


def policy(name):
    directives = dict(browser.headers(name))["content-security-policy"].split("; ")
    return {name: rest for name, _, rest in (directive.partition(" ") for directive in directives)}


def test_policy_names_the_hash_of_each_inline_block_and_nothing_looser(name):
    text = browser.page(name).decode()
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert policy(name)[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy(name)["default-src"] == "'none'"
    assert "unsafe" not in str(policy(name))


def test_page_refers_to_no_other_host_and_needs_no_inline_attribute(name):
    text = browser.page(name).decode().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://\w", text)
    markup = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"\s(?:on\w+|style)=", markup)


def test_page_never_turns_text_into_markup(name):
    assert not re.findall(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", browser.page(name))


def test_pages_keep_their_keys_in_the_same_way(name):
    docs = docs_page.page(TABLE, Limits(), is_gateway=False)
    blocks = [re.findall(rb"// ---- API keys.*?\n}\n", page, re.DOTALL) for page in (browser.page(name), docs)]
    assert len(blocks[0]) == 1
    assert blocks[0] == blocks[1]
    for page in (browser.page(name), docs):
        assert page.count(b"Storage.") == 2, "only these lines read and write the kept keys"


def test_page_is_html_that_is_not_sniffed(name):
    headers = dict(browser.headers(name))
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert browser.page(name).startswith(b"<!doctype html>")
