"""The state of models and workers that frontends get, and whether the server is ready."""

from __future__ import annotations

from sie.values.errors import Internal, to_wire
from tests.unit.supervisor.test_loads import Office, in_office


@in_office()
async def test_failed_models_are_shown_in_the_metrics_until_they_load(office: Office) -> None:
    office.report("p", "failed", error=to_wire(Internal("slow", extras={"error_class": "NETWORK"})))
    office.loads.want("l")
    await office.broadcasts()
    assert office.children.failed == {"p": True}
    office.loads.manage("load", "p")
    await office.broadcasts()
    assert office.children.failed == {"p": True}, "an alert does not end with a new try"
    office.report("p", "loaded")
    await office.broadcasts()
    assert office.children.failed == {"p": False}


@in_office()
async def test_changes_of_one_turn_are_one_broadcast(office: Office) -> None:
    office.report("p", "loading")
    office.report("p", "loaded")
    office.state.broadcast()
    (models,) = await office.broadcasts()
    assert models.entries[0].workers == (0,)


@in_office()
async def test_server_is_ready_when_preloaded_models_are_and_says_so_once(office: Office) -> None:
    office.state.broadcast()
    (models,) = await office.broadcasts()
    assert (models.ready, models.reason) == (False, "not loaded: p (loading)")
    office.not_ready = "frontends are starting"
    office.report("p", "loaded")
    (models,) = await office.broadcasts()
    assert (models.ready, models.reason) == (False, "frontends are starting")
    office.not_ready = ""
    for _ in range(2):
        office.state.broadcast()
        (models,) = await office.broadcasts()
        assert (models.ready, models.reason) == (True, "")
    assert office.num_ready == 1


@in_office()
async def test_a_start_goes_on_while_something_is_under_way_and_not_while_a_failed_load_waits(office: Office) -> None:
    assert office.state.is_progressing()
    office.report("p", "failed", error=to_wire(Internal("torn")))
    assert not office.state.is_progressing()
    office.not_ready = "frontends are starting"
    assert office.state.is_progressing()
