"""Writes `/docs`: the OpenAPI document as one self-contained page, rendered here and not by a script in the browser.

`page.html` holds the page's frame, its style and the script of "Send". Everything from the document is escaped.
"""

from __future__ import annotations

import functools
import html
import json
import string
from typing import Any, Final

from sie.config.limits import Limits
from sie.frontend.http.html import read_page
from sie.frontend.http.routing import RouteTable
from sie.frontend.openapi import document
from sie.frontend.openapi.server_operations import CLUSTER_TAG

_Json = dict[str, Any]
_BOUNDS: Final = (
    ("minItems", "maxItems", " entries"),
    ("minLength", "maxLength", " characters"),
    ("minimum", "maximum", ""),
)

_NEEDS: Final = (
    ("/v1/encode", "dense"), ("/v1/embeddings", "dense"), ("/v1/score", "score"), ("/v1/rerank", "score"), ("/v2/rerank", "score"),
    ("/rerank", "score"), ("/score", "score"), ("/v1/extract", "json"), ("/classify", "json"), ("/v1/chat", "generate"),
    ("/v1/completions", "generate"), ("/v1/messages", "generate"), ("/v1/responses", "generate"),
    ("/v1/generate", "generate"), ("/v2/models/{model}/generate", "generate"), ("/v2/models/{model}/infer", "tensor dense"),
    ("/v2/models", "tensor any"), ("/v2/repository", "tensor any"), ("/api/", "tensor any"), ("/v1/models", "any"),
)  # fmt: skip
"""The beginnings of paths, and the kinds of model that their examples name, the best first. The first path that fits counts."""


@functools.lru_cache(maxsize=2)
def page(table: RouteTable, limits: Limits, *, is_gateway: bool) -> bytes:
    """Return the page, UTF-8 HTML; only a gateway's page shows the routes of a cluster."""
    frame = read_page(__package__ or __name__, "page.html")
    described = document(table, limits)
    for route in table:
        for method in route.methods:
            described["paths"][route.template][method.lower()]["x-scope"] = route.need
    if not is_gateway:
        described["tags"] = [tag for tag in described["tags"] if tag["name"] != CLUSTER_TAG]
    return render(described, frame).encode()


def render(described: _Json, frame: str) -> str:
    """Return the frame with an OpenAPI document in it."""
    tags = [(tag, _operations_of(described, tag["name"])) for tag in described["tags"]]
    schemas = described["components"]["schemas"]
    return string.Template(frame).substitute(
        version=_text(described["info"]["version"]),
        about="".join(f"<p>{_prose(part)}</p>" for part in described["info"]["description"].split("\n\n")),
        nav="".join(_nav(tag, operations) for tag, operations in tags),
        operations="".join(_section(tag, operations, schemas) for tag, operations in tags),
        types="".join(_type(name, schema) for name, schema in sorted(schemas.items())),
    )


def _operations_of(described: _Json, tag: str) -> list[tuple[str, str, _Json]]:
    return [
        (method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if tag in operation["tags"]
    ]


def _nav(tag: _Json, operations: list[tuple[str, str, _Json]]) -> str:
    links = "".join(
        f'<a href="#{operation["operationId"]}"><b class="{method}">{method.upper()}</b> {_text(path)}</a>'
        for method, path, operation in operations
    )
    return f"<details><summary>{_text(tag['name'])}</summary>{links}</details>"


def _section(tag: _Json, operations: list[tuple[str, str, _Json]], schemas: _Json) -> str:
    body = "".join(_operation(method, path, operation, schemas) for method, path, operation in operations)
    count = f"<small>{len(operations)} routes</small>"
    return (
        f'<details class="group"><summary><h2>{_text(tag["name"])} {count}</h2></summary>'
        f"<p>{_prose(tag['description'])}</p>{body}</details>"
    )


def _operation(method: str, path: str, operation: _Json, schemas: _Json) -> str:
    title = f'<b class="{method}">{method.upper()}</b> <code>{_text(path)}</code>'
    parts = [
        f'<details class="panel operation" id="{operation["operationId"]}">',
        f"<summary><h3>{title} <span>{_text(operation['summary'])}</span></h3></summary>",
    ]
    if "description" in operation:
        parts.append(f"<p>{_prose(operation['description'])}</p>")
    body = operation.get("requestBody")
    if body is not None:
        name = _ref_name(next(iter(body["content"].values()))["schema"])
        parts.append(f"<h4>Body: {_prose(' or '.join(f'`{media}`' for media in body['content']))}</h4>")
        parts.append(_fields(schemas[name]))
    parts.append(_trial(method, path, operation))
    parts.append("<h4>Answers</h4>" + _responses(operation["responses"]))
    return "".join([*parts, "</details>"])


def _responses(responses: _Json) -> str:
    rows: list[str] = []
    for status, response in responses.items():
        content = response.get("content", {})
        media = " or ".join(content)
        schema: _Json = next(iter(content.values())).get("schema", {}) if content else {}
        kind = _kind(schema) if "$ref" in schema else ""
        rows.append(
            f"<tr><td><b>{status}</b></td><td>{_prose(response['description'])}</td><td>{kind}</td>"
            f"<td><small>{_text(media)}</small></td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _trial(method: str, path: str, operation: _Json) -> str:
    """Return the fields and the button that send a request from the page."""
    fields: list[str] = []
    for parameter in operation.get("parameters", ()):
        value = _text(parameter["example"])
        fields.append(f'<label>{_text(parameter["name"])} <input name="{parameter["name"]}" value="{value}"></label>')
    if "requestBody" in operation:
        content = next(iter(operation["requestBody"]["content"].values()))
        if "example" not in content:
            return ""  # a form of files
        example = _text(json.dumps(content["example"], indent=2))
        fields.append(f'<textarea aria-label="Body" rows="{example.count(chr(10)) + 1}">{example}</textarea>')
    return (
        f'<div class="trial" data-method="{method.upper()}" data-path="{_text(path)}" data-needs="{_needs(path)}" data-scope="{_text(operation["x-scope"])}">'
        f'<h4>Try it</h4>{"".join(fields)}<button type="button" class="send">Send</button><pre class="answer" tabindex="0" hidden></pre>'
        '<details class="code"><summary>As code</summary><div class="tabs">'
        '<button type="button" data-lang="curl" aria-pressed="true">curl</button>'
        '<button type="button" data-lang="python" aria-pressed="false">Python</button>'
        '<button type="button" data-lang="javascript" aria-pressed="false">JavaScript</button>'
        '<button type="button" class="copy">Copy</button></div><pre class="sample" tabindex="0"></pre></details></div>'
    )


def _needs(path: str) -> str:
    """Return the kinds of model for an example of this path: an output, `tensor` for an input, or `any`; empty for none."""
    return next((needed for start, needed in _NEEDS if path.startswith(start)), "")


def _type(name: str, schema: _Json) -> str:
    about = f"<p>{_prose(schema['description'])}</p>" if "description" in schema else ""
    return f'<section class="panel" id="type-{_text(name)}"><h3>{_text(name)}</h3>{about}{_fields(schema)}</section>'


def _fields(schema: _Json) -> str:
    required = schema.get("required", ())
    if not schema.get("properties"):
        return ""
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code>{' <em>required</em>' if name in required else ''}</td>"
        f"<td>{_kind(field)}</td><td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table>{rows}</table>"


def _kind(schema: _Json) -> str:
    """Describe a type in words, with a link to each named type."""
    if "$ref" in schema:
        name = _text(_ref_name(schema))
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [_kind(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema:
        return " or ".join(f"<code>{_text(json.dumps(value))}</code>" for value in schema["enum"] if value is not None)
    kind = _text(str(schema.get("type", "anything")))
    if schema.get("type") == "array" and schema.get("items"):
        kind = f"array of {_kind(schema['items'])}"
    elif "prefixItems" in schema:
        return f"array of {len(schema['prefixItems'])} {_kind(schema['prefixItems'][0])}"
    bounded = [(schema.get(low), schema.get(high), unit) for low, high, unit in _BOUNDS]
    return kind + "".join(_bound(*bound) for bound in bounded)


def _bound(low: float | None, high: float | None, unit: str) -> str:
    if low is None and high is None:
        return ""
    words = f"at most {high:,}" if low is None else f"at least {low:,}" if high is None else f"{low:,} to {high:,}"
    return f" <small>({words}{unit})</small>"


def _ref_name(schema: _Json) -> str:
    return schema["$ref"].rpartition("/")[2]


def _text(text: str) -> str:
    return html.escape(text)


def _prose(text: str) -> str:
    """Return a text as HTML, with the parts between backticks as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
