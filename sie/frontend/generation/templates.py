"""Has chat templates rendered in confined processes, one for each model, and bounds their time, memory and output.

A checkpoint's template is a stranger's program: `{{ 'x' * 2000000000 }}` would take the memory and the interpreter lock of
the process that renders it. `sie.frontend.generation.template_sandbox` is what runs there. Must never render here.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sie.runtime.helper import Helper, HelperFailed
from sie.values.errors import BadRequest

_SANDBOX: Final = "sie.frontend.generation.template_sandbox"
_MAX_HELPERS: Final = 8
"""Of 20 MB each. The one that was idle for longest makes room for a further model's."""
_OUTPUT_FACTOR: Final = 8
_OUTPUT_BYTES: Final = 64 << 10
"""A prompt may be so many times as large as template and messages together, and so much larger. Somebody must tokenise it."""


def pack(source: str, variables: dict[str, Any]) -> bytes:
    """Return the request to render a template with variables, plain JSON data."""
    return json.dumps((source, variables)).encode()


def read_reply(reply: bytes) -> str:
    """Return the text in what `template_sandbox.answer` returns. Raises BadRequest with what is wrong."""
    kind, text = reply[:1], reply[1:].decode(errors="surrogatepass")
    if kind == b"b":
        raise BadRequest(text, code="CHAT_TEMPLATE_BROKEN")
    if kind != b"r":
        raise BadRequest(text, extras={"param": "messages"})
    return text


class Templates:
    """The processes that render; models share none, so that no template delays, or sees, what is another model's."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._helpers: dict[str, Helper] = {}

    async def render(self, model: str, request: bytes) -> str:
        """Return what a model's template makes of a request that `pack` made. Raises BadRequest with what is wrong."""
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
        self._helpers[model] = helper  # the last used is the last
        if len(self._helpers) > _MAX_HELPERS:
            idle = next(
                (name for name, other in self._helpers.items() if other is not helper and not other.is_busy), None
            )
            if idle is not None:
                self._helpers.pop(idle).close()
        return helper
