"""Says why a download failed: the class of the error, its cause, and the setting that changes it."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sie.catalog.hub_client import BUSY, asked_wait_s
from sie.catalog.spec import ModelSpec

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_STORAGE_ERRNOS: Final = {
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.EFBIG,
    errno.ENOTDIR,
}
_KEY: Final = "the token of HF_TOKEN or `hf auth login`"
_NO_HUB: Final = "HF_ENDPOINT must be the address of a hub, and no proxy or login page may answer in its place"


def classify(error: BaseException) -> str:
    """Return the `error_class` of a download error. Source: SIE API reference, section 12."""
    from huggingface_hub import errors as hub

    error = _cause(error)
    if isinstance(error, hub.HfHubHTTPError):
        return _class_of_status(error)
    if isinstance(error, hub.HFValidationError) or _is_unsendable(error):
        return "CONFIG"
    if isinstance(error, TimeoutError) or _is_transport(error, "TimeoutException"):
        return "TIMEOUT"
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return "STORAGE"
    if isinstance(error, hub.LocalEntryNotFoundError | ConnectionError) or _is_transport(error) or _not_of_hub(error):
        return "NETWORK"
    return "NETWORK" if "Consistency check failed" in str(error) else "UNKNOWN"


def explain(error: BaseException, spec: ModelSpec) -> str:
    """Return why a download failed, and what the user can do. Only other reasons are quoted from the library."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    error = _cause(error)
    if isinstance(error, hub.HfHubHTTPError):
        return _explain_status(error, spec)
    if isinstance(error, hub.OfflineModeIsEnabled):
        return "it is not on this machine, or only in part, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    if isinstance(error, hub.HFValidationError):
        return f"{spec.id!r} is not the id of a model: it is NAME or OWNER/NAME of letters, digits, '-', '_' and '.'"
    if _is_unsendable(error):
        return _explain_unsendable(error)
    if reason := _not_of_hub(error):
        return f"{constants.ENDPOINT} does not answer as a hub: {reason}; {_NO_HUB}"
    if _is_transport(error):
        return _explain_connection(error)
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return _explain_storage(error, constants.HF_HUB_CACHE)
    where = f"asking {constants.ENDPOINT}: " if classify(error) in ("NETWORK", "TIMEOUT") else ""
    return where + first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, else the error's name."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shown_size(num_bytes: int) -> str:
    """Return a number of bytes as the hub's pages show it."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _cause(error: BaseException) -> BaseException:
    """Return the hub's error, if the library says only that the files are not in the cache either."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None else error


def _is_transport(error: BaseException, name: str = "RequestError") -> bool:
    """Tell whether the library's HTTP client raised an error of this name; its package has had several names."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0].startswith("httpx") for base in type(error).__mro__
    )


def _is_unsendable(error: BaseException) -> bool:
    """Tell whether a setting keeps every request from being made."""
    names = ("UnsupportedProtocol", "LocalProtocolError", "InvalidURL")
    is_of_proxy = isinstance(error, ImportError | ValueError) and "proxy" in str(error).lower()
    return is_of_proxy or isinstance(error, UnicodeEncodeError) or any(_is_transport(error, name) for name in names)


def _not_of_hub(error: BaseException) -> str:
    """Return what shows that another server than a hub answered; empty if nothing does."""
    from huggingface_hub.errors import FileMetadataError

    if isinstance(error, json.JSONDecodeError):
        return "it sent something else than JSON"
    if isinstance(error, FileMetadataError):
        return "it sent a file without its commit and hash"
    if _is_transport(error, "TooManyRedirects"):
        return "it redirects for ever"
    return "its JSON lacks fields" if isinstance(error, KeyError | TypeError | AttributeError | AssertionError) else ""


def _class_of_status(error: HfHubHTTPError) -> str:
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        return "GATED"
    if isinstance(error, hub.RepositoryNotFoundError | hub.RevisionNotFoundError | hub.RemoteEntryNotFoundError):
        return "NOT_FOUND"
    status = error.response.status_code
    return "GATED" if status == 401 or (status == 403 and _is_of_hub(error)) else "NETWORK"


def _is_of_hub(error: HfHubHTTPError) -> bool:
    """Tell whether a hub refused, and not a server before it."""
    return not {"x-error-code", "x-error-message"}.isdisjoint(error.response.headers)


def _explain_status(error: HfHubHTTPError, spec: ModelSpec) -> str:
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    hub_url = constants.ENDPOINT
    if isinstance(error, hub.GatedRepoError):
        return f"{hub_url} gives its files only to accounts with access; ask for it there, and set HF_TOKEN"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"it has no revision {spec.revision!r} at {hub_url}"
    if isinstance(error, hub.RepositoryNotFoundError):
        token = f"{_KEY} has no access to it" if get_token() else "HF_TOKEN is not set to a key for it"
        return f"{hub_url} has no model of this name, or it is private and {token}"
    url, status = error.response.url, error.response.status_code
    answer = f"{url.scheme}://{url.netloc.decode()} answered {status} {error.response.reason_phrase}".rstrip()
    if status in BUSY:
        return answer + _advice_on_busy(error)
    if _is_of_hub(error):
        answer += f" ({' '.join((error.server_message or '').split())})"
    if status == 401:
        return f"{answer}: " + (f"{_KEY} may have expired; set a new one" if get_token() else "set HF_TOKEN")
    if _is_of_hub(error):
        return answer + (f": {_KEY} needs access to this repository" if status == 403 else "")
    if status in (403, 407):
        way = _through_proxy(str(url)) or "; HTTPS_PROXY and NO_PROXY choose the way to it"
        return f"{answer}, not as a hub: a proxy, a firewall or the server of the files refuses this host{way}"
    return f"{answer}, not as a hub: {_NO_HUB}"


def _advice_on_busy(error: HfHubHTTPError) -> str:
    """Return what the user can do about a hub that stays busy."""
    from huggingface_hub import get_token

    wait_s = asked_wait_s(error.response.headers)
    asked = f" and asks to wait {wait_s:g} s" if wait_s else ""
    if error.response.status_code != 429:
        return f"{asked}; try again later, or set HF_ENDPOINT to a mirror"
    return f"{asked}; try again later" + ("" if get_token() else ", or set HF_TOKEN: accounts may ask more often")


def _explain_unsendable(error: BaseException) -> str:
    from huggingface_hub import constants

    if isinstance(error, UnicodeEncodeError) or _is_transport(error, "LocalProtocolError"):
        return f"{_KEY} has characters that no token has; copy it again"  # the error would show the token
    if isinstance(error, ImportError | ValueError):
        return f"{constants.ENDPOINT} cannot be asked{_through_proxy(constants.ENDPOINT)}: {first_line(error)}"
    return f"HF_ENDPOINT is {constants.ENDPOINT!r}, which is not the address of a hub: {first_line(error)}"


def _explain_connection(error: BaseException) -> str:
    from huggingface_hub import constants

    request = getattr(error, "_request", None)  # its property raises where there is none
    url = constants.ENDPOINT if request is None else f"{request.url.scheme}://{request.url.netloc.decode()}"
    proxy = _through_proxy(url)
    if _is_transport(error, "TimeoutException"):
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT if request is None else request.extensions["timeout"]["read"]
        limits = "HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT set the limits"
        return f"{url} did not answer within {limit_s:g} s{proxy}; {limits}"
    certificates = "; SSL_CERT_FILE names the certificates to trust" if "CERTIFICATE_VERIFY" in str(error) else ""
    setting = "" if proxy or certificates else "; HF_ENDPOINT is the hub's address, and HTTPS_PROXY that of a proxy"
    return f"{url} cannot be reached{proxy}: {first_line(error)}{certificates}{setting}"


def _through_proxy(url: str) -> str:
    """Return the proxy of an address and the variable that names it, without its password; empty if there is none."""
    parts, proxies = urlsplit(url), getproxies()
    name = next((name for name in (parts.scheme, "all") if name in proxies), "")
    if not name or proxy_bypass(parts.netloc):
        return ""
    return f" through the proxy {proxies[name].rpartition('@')[2].rpartition('//')[2]} ({name.upper()}_PROXY, NO_PROXY)"


def _explain_storage(error: OSError, cache: str) -> str:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shown_size(shutil.disk_usage(cache).free)} free)"
    return f"{error.filename or cache}{free}: {error.strerror}; HF_HOME names the directory for downloads"
