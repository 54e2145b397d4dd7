"""Drives a headless Chromium over its own DevTools protocol, without any installed driver."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.process.harness import WAIT_S, Output

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_TIMEOUT_S = WAIT_S
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-port=0", "--window-size=1240,800",
)  # fmt: skip


def find_browser() -> str | None:
    """Return the path of a Chromium of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `logged` holds what the page wrote to its console and every error that it did not catch."""

    def __init__(self, socket: ClientConnection) -> None:
        self.logged: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of one command of the protocol."""
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **session}))
        while True:
            message = json.loads(self._socket.recv(WAIT_S))
            if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.logged.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, what: str, timeout_s: float = 60.0) -> Any:
        """Return the first true value of an expression, asked every 50 ms."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline_s, (
                f"not within {timeout_s:g} s: {what}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def press(self, key: str, code: int) -> None:
        """Press and release a key, wherever the focus is."""
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)


@contextlib.contextmanager
def open_page(binary: str, url: str) -> Iterator[Page]:
    """Yield a tab of a fresh browser at a URL; show the page's own errors when the test fails."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        assert process.stderr is not None
        output = Output(process.stderr)
        try:
            line = output.find("DevTools listening on ", START_TIMEOUT_S, lambda: process.poll() is not None)
            with connect(line.split("DevTools listening on ")[1].strip(), max_size=None, max_queue=None) as socket:
                page = Page(socket)
                page.open(url)
                try:
                    yield page
                except BaseException:
                    print("--- the page's console ---", *page.logged, sep="\n")
                    raise
        finally:
            process.kill()
            process.wait(WAIT_S)
            output.close()
