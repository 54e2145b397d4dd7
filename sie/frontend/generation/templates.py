"""Has chat templates rendered in confined processes, one for each model, and bounds their time, memory and output.

A checkpoint's template is an untrusted program: `{{ 'x' * 2000000000 }}` would take the memory and the GIL of the
process that renders it. That process runs `sie.frontend.generation.template_sandbox`. Must never render here.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sie.runtime.helper import Helper, HelperFailed
from sie.values.errors import BadRequest

_SANDBOX: Final = "sie.frontend.generation.template_sandbox"
_MAX_HELPERS: Final = 8
"""Each takes 20 MB. The one that was idle for longest is ended to make room for another model's."""
_OUTPUT_FACTOR: Final = 8
_OUTPUT_BYTES: Final = 64 << 10
"""The largest prompt: _OUTPUT_FACTOR times the size of template and messages, plus this. It must be tokenised."""


def pack(source: str, variables: dict[str, Any]) -> bytes:
    """Return the request to render a template with variables, plain JSON data."""
    return json.dumps((source, variables)).encode()


def read_reply(reply: bytes) -> str:
    """Return the text in an answer of `template_sandbox`. Raises BadRequest with the reason of a failure."""
    kind, text = reply[:1], reply[1:].decode(errors="surrogatepass")
    if kind == b"b":
        raise BadRequest(text, code="CHAT_TEMPLATE_BROKEN")
    if kind != b"r":
        raise BadRequest(text, extras={"param": "messages"})
    return text


class Templates:
    """The rendering processes. Each model has its own, so no template delays or sees another model's requests."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._helpers: dict[str, Helper] = {}

    async def render(self, model: str, request: bytes) -> str:
        """Return the rendered text of a request from `pack`. Raises BadRequest with the reason of a failure."""
        try:
            reply = await self._helper(model).ask(
                request, timeout_s=self._timeout_s, max_reply_bytes=_OUTPUT_BYTES + _OUTPUT_FACTOR * len(request)
            )
        except TimeoutError:
            text = f"The chat template took longer than template_timeout_s ({self._timeout_s:g} s)"
            raise BadRequest(text, extras={"param": "messages"}) from None
        except HelperFailed as error:
            raise BadRequest(f"The chat template was ended: {error}", extras={"param": "messages"}) from error
        return read_reply(reply)

    def close(self) -> None:
        """End all processes."""
        for helper in self._helpers.values():
            helper.close()
        self._helpers.clear()

    def _helper(self, model: str) -> Helper:
        helper = self._helpers.pop(model, None) or Helper(_SANDBOX)
        self._helpers[model] = helper  # the most recently used one is last
        if len(self._helpers) > _MAX_HELPERS:
            idle = next(
                (name for name, other in self._helpers.items() if other is not helper and not other.is_busy), None
            )
            if idle is not None:
                self._helpers.pop(idle).close()
        return helper
