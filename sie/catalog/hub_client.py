"""Bounds the waits of the hub library's HTTP client, and asks a busy hub again.

The library waits for ever for the answer that names a revision's commit, gives up at its first 503, and resumes a file
after a connection that was closed, but not after one that was reset.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from httpx2 import Client, Request, Response

BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that another try may change."""
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_LONGEST_WAIT_S: Final = 300.0  # the hub counts requests in windows of five minutes


def use_patient_clients(on_wait: Callable[[str], None], pauses_s: Sequence[float] = PAUSES_S) -> None:
    """Let every later request of the hub's library have a timeout, and be tried again after each pause at a busy hub.

    The hub's own `Retry-After` counts instead of a pause. on_wait is called with the reason of each wait. A hub that
    stays busy raises HfHubHTTPError. From then on no request is tried again, so that one outage is waited for once.
    """
    from huggingface_hub.utils import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    patience = _Patience(on_wait, pauses_s)

    def make_client() -> Client:
        client = default_client_factory()
        client.send = partial(patience.send, client.send)  # `get` and `stream` both send with it
        return client

    set_client_factory(make_client)


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds the hub asks not to be asked, if it does."""
    wanted = headers.get("Retry-After", "").strip()
    if wanted.isdecimal():
        return float(wanted)
    try:
        from huggingface_hub.utils import parse_ratelimit_headers
    except ImportError:  # an older library does not read them
        return None
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


class _Patience:
    """Sends the requests of every client and thread of a download."""

    def __init__(self, on_wait: Callable[[str], None], pauses_s: Sequence[float]) -> None:
        self._on_wait = on_wait
        self._pauses_s = pauses_s

    def send(self, send: Callable[..., Response], request: Request, **options: Any) -> Response:
        from huggingface_hub.utils import hf_raise_for_status

        _limit_silence(request)
        response = send(request, **options)
        until_s = time.monotonic() + _LONGEST_WAIT_S
        for pause_s in self._pauses_s:
            if response.status_code not in BUSY or not self._waits(response, pause_s, until_s):
                break
            response.close()
            response = send(request, **options)
        if response.status_code in BUSY:
            self._pauses_s = ()
            hf_raise_for_status(response)  # the library would ask a status as often again, but not an error
        return _resumable(response)

    def _waits(self, response: Response, pause_s: float, until_s: float) -> bool:
        """Wait until the hub may be asked again; return whether that is soon enough."""
        asked_s = asked_wait_s(response.headers)
        wait_s = pause_s if asked_s is None else asked_s
        if time.monotonic() + wait_s > until_s:
            return False
        self._on_wait(f"{response.url.host} answered {response.status_code}: asking again in {wait_s:g} s")
        time.sleep(wait_s)
        return True


def _limit_silence(request: Request) -> None:
    """Give each part of a request that may take for ever the library's own limit for silence, in seconds."""
    from huggingface_hub import constants

    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        part: constants.HF_HUB_DOWNLOAD_TIMEOUT if limit_s is None else limit_s for part, limit_s in limits.items()
    }


def _resumable(response: Response) -> Response:
    """Let a reset connection look like a closed one, after which the library resumes the file."""
    http = importlib.import_module(type(response).__module__.partition(".")[0])  # its name depends on the library's age
    iter_raw = response.iter_raw

    def iterate(chunk_size: int | None = None) -> Iterator[bytes]:
        try:
            yield from iter_raw(chunk_size)
        except http.NetworkError as error:
            raise http.RemoteProtocolError(str(error)) from error

    response.iter_raw = iterate
    return response
