from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sie.frontend.models.admin import ModelAdmin, check_admin
from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import Manage, Managed, ModelEntry, Models
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Forbidden, ModelLoadFailed, SieError, to_wire

LOCAL = {"host": "127.0.0.1:8080", "content-type": "application/json"}


@pytest.mark.parametrize("client", ["127.0.0.1:5000", "127.8.8.8:5000", "[::1]:5000", "[::ffff:127.0.0.1]:5000", "::1"])
@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "127.0.0.1"])
def test_client_on_this_host_may_manage(client, host):
    check_admin("loopback", client, {**LOCAL, "host": host})
    check_admin("loopback", client, {**LOCAL, "host": host, "origin": f"http://{host}"})


@pytest.mark.parametrize(
    ("client", "changes", "reason"),
    [
        ("192.168.0.9:5000", {}, "not on this host"),
        ("[2001:db8::1]:5000", {}, "not on this host"),
        ("", {}, "not on this host"),
        ("127.0.0.1:5000", {"origin": "http://evil.example"}, "another site"),
        ("127.0.0.1:5000", {"origin": "http://127.0.0.1:9999"}, "another site"),
        ("127.0.0.1:5000", {"origin": "null"}, "another site"),
        ("127.0.0.1:5000", {"host": "evil.example:8080", "origin": "http://evil.example:8080"}, "not a loopback"),
        ("127.0.0.1:5000", {"host": "localhost.evil.example"}, "not a loopback"),
        ("127.0.0.1:5000", {"host": ""}, "not a loopback"),
        ("127.0.0.1:5000", {"content-type": "text/plain"}, "Content-Type"),
        ("127.0.0.1:5000", {"content-type": "application/x-www-form-urlencoded"}, "Content-Type"),
        ("127.0.0.1:5000", {"x-forwarded-for": "10.0.0.1"}, "proxy"),
        ("127.0.0.1:5000", {"via": "1.1 front"}, "proxy"),
    ],
)
def test_other_clients_may_not_manage(client, changes, reason):
    with pytest.raises(Forbidden, match="admin_from") as caught:
        check_admin("loopback", client, {**LOCAL, **changes})
    assert reason in caught.value.message
    assert (caught.value.http_status, caught.value.code) == (403, "FORBIDDEN")
    check_admin("everybody", client, {**LOCAL, **changes})


def test_setting_can_refuse_everybody():
    with pytest.raises(Forbidden, match="admin_from is 'nobody'"):
        check_admin("nobody", "127.0.0.1:5000", LOCAL)


def test_question_without_a_body_needs_no_content_type():
    check_admin("loopback", "127.0.0.1:5000", {"host": "localhost:1"}, has_body=False)


# --- the routes ----------------------------------------------------------------------------------------------------------


class Office:
    """One frontend's admin, with a supervisor that answers what `states` says, one word after the other."""

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.asked: list[Manage] = []
        self.table = ModelTable(ThreadPoolExecutor(1), lambda _model: None)
        self.admin = ModelAdmin(self.table, self._send)
        self.tell("available")

    def tell(
        self, state: Any, error: SieError | None = None, *, reloading: bool = False, is_outdated: bool = False
    ) -> None:
        entry = ModelEntry(
            card=ModelCard(id="m", kind="stub", profiles={"default": {}, "p": {}}), state=state, workers=(0,) if state == "loaded" else (),
            error=to_wire(error) if error else None, reloading=reloading, is_outdated=is_outdated,
        )  # fmt: skip
        self.table.update(Models((entry,), True))

    def _send(self, message: Manage) -> None:
        self.asked.append(message)
        asyncio.get_running_loop().call_soon(self._answer, message.number)

    def _answer(self, number: int) -> None:
        first, *rest = self.states
        self._tell(first)
        self.admin.on_begun(Managed(number))
        for state in rest:
            asyncio.get_running_loop().call_soon(self._tell, state)

    def _tell(self, word: Any) -> None:
        if isinstance(word, dict):
            self.tell(**word)
        else:
            self.tell(word) if isinstance(word, str) else self.tell("failed", word)

    def ask(self, verb: str, body: Any, timeout_s: float = 5.0) -> tuple[int, Any]:
        return asyncio.run(self._ask(verb, json.dumps(body).encode(), timeout_s))

    async def _ask(self, verb: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
        answer = await self.admin.serve(verb, body, time.monotonic_ns() + int(timeout_s * 1e9))
        return answer.http_status, json.loads(answer.body)


@pytest.mark.parametrize(
    ("verb", "states", "status"),
    [
        ("load", ["loading", "loaded"], "loaded"),
        ("load", ["loaded"], "loaded"),
        ("unload", ["unloading", "available"], "unloaded"),
        ("unload", ["available"], "unloaded"),
        ("reload", ["unloading", "loading", "loaded"], "loaded"),
    ],
)
def test_answer_comes_when_it_is_done(verb, states, status):
    office = Office(*states)
    assert office.ask(verb, {"model_id": "m"}) == (200, {"model_id": "m", "status": status})
    assert [(message.action, message.model) for message in office.asked] == [(verb, "m")]


def test_entry_of_a_profile_stands_for_its_model():
    office = Office("loaded")
    assert office.ask("load", {"model_id": "m:p"}) == (200, {"model_id": "m:p", "status": "loaded"})
    assert [message.model for message in office.asked] == ["m"]
    assert office.ask("load", {"model_id": "m:x"})[0] == 404


def test_what_goes_on_at_the_deadline_is_202():
    assert Office("loading").ask("load", {"model_id": "m"}, 0.05) == (202, {"model_id": "m", "status": "loading"})


def test_load_that_fails_says_why():
    error = ModelLoadFailed("there is no file", extras={"error_class": "STORAGE"})
    http_status, answer = Office(error).ask("load", {"model_id": "m"})
    assert (http_status, answer["status"], answer["error"]) == (502, "failed", "there is no file")
    assert answer["detail"] == {"code": "MODEL_LOAD_FAILED", "message": "there is no file", "error_class": "STORAGE"}


RENEWED = {"state": "loaded", "reloading": True}
OUTDATED = {"state": "loaded", "error": ModelLoadFailed("no model"), "is_outdated": True}


def test_a_staged_reload_is_awaited_and_its_failure_is_reported():
    assert Office(RENEWED, "loaded").ask("reload", {"model_id": "m"}) == (200, {"model_id": "m", "status": "loaded"})
    assert Office(RENEWED).ask("reload", {"model_id": "m"}, 0.05) == (202, {"model_id": "m", "status": "reloading"})
    http_status, answer = Office(RENEWED, OUTDATED).ask("reload", {"model_id": "m"})
    assert (http_status, answer["status"], answer["error"]) == (502, "loaded", "no model")
    assert answer["detail"]["code"] == "MODEL_LOAD_FAILED"


def test_what_serves_from_before_its_files_changed_is_loaded_and_says_so():
    expected = (200, {"model_id": "m", "status": "loaded", "error": "no model"})
    assert Office(OUTDATED).ask("load", {"model_id": "m"}) == expected


def test_status_sends_nothing_to_the_supervisor():
    office = Office()
    assert office.ask("status", {"model_id": "m"}) == (200, {"model_id": "m", "status": "unloaded"})
    assert office.asked == []


@pytest.mark.parametrize(
    ("state", "status"),
    [("unloading", "reloading"), ("available", "reloading"), ("loading", "reloading"), ("loaded", "loaded")],
)
def test_a_reload_is_called_one_until_it_is_over(state, status):
    office = Office()
    office.tell(state, reloading=True)
    assert office.ask("status", {"model_id": "m"}) == (200, {"model_id": "m", "status": status})


@pytest.mark.parametrize("verb", ["load", "unload", "reload", "status"])
def test_unknown_model_is_404_in_both_shapes(verb):
    office = Office()
    http_status, answer = office.ask(verb, {"model_id": "x"})
    assert (http_status, answer["status"], answer["detail"]["code"]) == (404, "not_found", "MODEL_NOT_FOUND")
    assert office.asked == []


@pytest.mark.parametrize("body", [{}, [], "m", {"model_id": 1}])
def test_body_of_another_shape_is_refused(body):
    with pytest.raises(BadRequest, match="model_id"):
        Office().ask("load", body)


def test_supervisor_that_does_not_answer_is_504():
    office = Office()
    office._answer = lambda _number: None  # type: ignore[method-assign]
    with pytest.raises(SieError) as caught:
        office.ask("load", {"model_id": "m"}, 0.05)
    assert caught.value.http_status == 504
