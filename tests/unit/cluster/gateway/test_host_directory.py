"""A gateway's picture of its hosts: silence, leaving, states of models, and the choice of a lane."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sie.cluster.gateway.cluster_status import cluster_status
from sie.cluster.gateway.fair_queue import Caller
from sie.cluster.gateway.host_directory import FORGET_S, STALE_S, Directory, choose_lane
from sie.cluster.gateway.requested_placement import Placement, Places, read_placement
from sie.cluster.gateway.text_client import choose_host, prefix_of
from sie.cluster.payloads import VERSION, Beat, Cards, ModelBeat
from sie.cluster.subjects import Lane
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import Unavailable
from sie.values.generate import ChatMessage, GenerateRequest

SERVED, COLD = ModelBeat("loaded", is_served=True), ModelBeat("available", is_served=False)


def beat(host: str, models: dict[str, ModelBeat], **fields: Any) -> Beat:
    return Beat(VERSION, host, host, fields.pop("pool", "p"), fields.pop("profile", "l4"), "b", "k", models, **fields)


def hear(directory: Directory, *beats: Beat, now_s: float = 0.0, profiles: tuple[str, ...] = ()) -> None:
    options: dict[str, dict[str, Any]] = {name: {} for name in profiles}
    for one in beats:
        directory.hear(one, now_s)
        entries = [
            ModelEntry(card=ModelCard(id=name, kind="stub", profiles=options), state="available") for name in one.models
        ]
        directory.learn(one.host, Cards(VERSION, "k", entries))


def states(directory: Directory, now_s: float) -> dict[str, tuple[str, bool, bool]]:
    found = directory.models(now_s)
    assert found is not None
    return {entry.card.id: (entry.state, bool(entry.workers), entry.recovering) for entry in found.entries}


def test_cards_are_asked_for_once_until_they_change():
    directory = Directory()
    assert directory.hear(beat("h", {"m": SERVED}), 0.0)
    directory.learn("h", Cards(VERSION, "k", []))
    assert not directory.hear(beat("h", {"m": SERVED}), 1.0)


def test_a_model_is_served_if_any_live_host_serves_it():
    directory = Directory()
    hear(directory, beat("h1", {"m": COLD}), beat("h2", {"m": SERVED, "n": COLD}))
    assert states(directory, 0.5) == {"m": ("loaded", True, False), "n": ("available", False, False)}
    assert directory.models(0.6) is None


def test_a_model_has_failed_only_where_no_host_could_still_load_it():
    failed = ModelBeat("failed", is_served=False)
    directory = Directory()
    hear(directory, beat("h1", {"m": failed, "n": failed}), beat("h2", {"m": COLD, "n": failed}))
    assert states(directory, 0.5) == {"m": ("available", False, False), "n": ("failed", False, False)}


def test_while_all_hosts_are_silent_their_models_are_coming_back_and_not_unknown():
    directory = Directory()
    hear(directory, beat("h", {"m": SERVED}))
    assert states(directory, STALE_S + 0.1) == {"m": ("loaded", False, True)}
    assert list(directory.lanes("m", STALE_S + 0.1)) == [Lane("p", "l4", "b")]
    assert directory.stale(STALE_S + 0.1) == {"h"}
    assert directory.names({"h"}) == "h (h)"
    directory.forget_old(FORGET_S + 1)
    assert not directory.names({"h"})
    assert states(directory, FORGET_S + 1) == {}


def test_a_host_that_leaves_gets_no_new_work():
    directory = Directory()
    hear(directory, beat("h1", {"m": SERVED}, is_draining=True), beat("h2", {"m": SERVED}, profile="a100"))
    assert list(directory.lanes("m", 0.5)) == [Lane("p", "a100", "b")]
    assert len(directory.beating(0.5)) == 2


def test_a_model_of_a_host_that_has_left_is_gone_at_once():
    directory = Directory()
    hear(directory, beat("h1", {"m": SERVED}), beat("h2", {"m": COLD}))
    hear(directory, beat("h1", {"m": SERVED}, is_draining=True), now_s=1.0)
    hear(directory, beat("h2", {"m": COLD}), now_s=4.0)
    assert states(directory, 4.5) == {"m": ("available", False, False)}
    assert not directory.lanes("m", 4.5)


def test_where_the_last_host_leaves_a_client_is_told_to_wait_and_not_that_the_model_does_not_exist():
    directory = Directory()
    hear(directory, beat("h1", {"m": SERVED}, is_draining=True), now_s=time.monotonic())
    with pytest.raises(Unavailable) as refused:
        Places(directory, "p", Counter()).enter({}, Caller())
    assert (refused.value.code, refused.value.retry_after_s) == ("PROVISIONING", 5)


def test_work_waits_for_a_model_that_is_coming_back_on_the_only_host():
    directory = Directory()
    hear(directory, beat("h", {"m": ModelBeat("loaded", is_served=False, is_coming_back=True)}))
    assert list(directory.lanes("m", 0.5)) == [Lane("p", "l4", "b")]
    assert states(directory, 0.5) == {"m": ("loaded", False, True)}


def test_work_waits_for_a_model_that_is_coming_back_in_one_pool_while_another_pool_serves_it():
    directory = Directory()
    hear(
        directory, beat("h1", {"m": SERVED}, pool="q"),
        beat("h2", {"m": ModelBeat("loaded", is_served=False, is_coming_back=True)}),
    )  # fmt: skip
    assert list(directory.lanes("m", 0.5, lambda lane: lane.pool == "p")) == [Lane("p", "l4", "b")]


def test_a_change_on_one_host_is_told_to_who_waits_there_whatever_others_say():
    directory = Directory()
    hear(directory, beat("h1", {"m": SERVED}), beat("h2", {"m": ModelBeat("loading", is_served=False)}, pool="q"))
    assert directory.models(0.5) is not None
    assert directory.models(0.5) is None
    hear(directory, beat("h2", {"m": SERVED}, pool="q"))
    assert directory.models(0.5) is not None


def test_a_profile_that_not_all_hosts_have_is_known_and_its_requests_go_to_those():
    now_s = time.monotonic()
    for first, second in (("a100", "l4"), ("l4", "a100")):
        directory = Directory()
        for profile in (first, second):
            names = ("default", "short") if profile == "l4" else ()
            hear(directory, beat(profile, {"m": SERVED}, profile=profile), now_s=now_s, profiles=names)
        places = Places(directory, "p", Counter({Lane("p", "l4", "b"): 100}))
        found = directory.models(now_s)
        assert found is not None
        assert set(found.entries[0].card.profiles) == {"default", "short"}
        assert places.choose("m")[0].profile == "a100", "it has less to do"
        assert places.choose("m:short")[0].profile == "l4"
        assert [host.beat.host for host in places.hosts("m:short")] == ["l4"]
        assert [host.beat.host for host in directory.offering("m:short", now_s)] == ["l4"]


def test_the_lane_with_the_least_work_for_each_worker_is_chosen():
    directory = Directory()
    hear(
        directory, beat("h1", {"m": SERVED}, queued_tokens=100, num_workers=1),
        beat("h2", {"m": SERVED}, profile="a100", queued_tokens=150, num_workers=2),
    )  # fmt: skip
    lanes = directory.lanes("m", 0.5)
    big, small = Lane("p", "a100", "b"), Lane("p", "l4", "b")
    assert choose_lane(lanes, {}) == big
    assert choose_lane(lanes, {big: 60}) == small


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [({}, ("own", "")), ({"x-sie-machine-profile": "L4"}, ("own", "l4")), ({"x-sie-pool": "p"}, ("p", "")),
     ({"x-sie-machine-profile": "p/l4"}, ("p", "l4")),
     ({"x-sie-machine-profile": "q/l4", "x-sie-pool": "p"}, ("p", "l4"))],
)  # fmt: skip
def test_headers_name_pool_and_profile(headers: dict[str, str], wanted: tuple[str, str]):
    assert read_placement(headers, "own") == Placement(*wanted)


def ask(text: str, *more: ChatMessage) -> GenerateRequest:
    return GenerateRequest(model="m", messages=[ChatMessage(role="user", content=text), *more])


def test_turns_of_a_conversation_go_to_one_host_until_it_has_much_more_to_do():
    hosts: Any = [SimpleNamespace(beat=beat(f"h{n}", {"m": SERVED}, num_workers=1)) for n in range(4)]
    answer, question = ChatMessage(role="assistant", content="b"), ChatMessage(role="user", content="c")
    chosen = {choose_host(hosts, prefix_of(ask(f"{n}")), {}).beat.host for n in range(64)}
    assert len(chosen) == 4
    for n in range(16):
        first = choose_host(hosts, prefix_of(ask(f"{n}", answer)), {}).beat.host
        assert choose_host(hosts, prefix_of(ask(f"{n}", answer, question)), {}).beat.host == first
        assert choose_host(hosts, prefix_of(ask(f"{n}", answer)), {first: 3}).beat.host != first
        left: Any = [host for host in hosts if host.beat.host != first]
        assert choose_host(left, prefix_of(ask(f"{n}", answer)), {}).beat.host != first


def test_heartbeats_that_say_nothing_new_cost_little_in_a_large_cluster():
    directory = Directory()
    for number in range(50):
        hear(directory, beat(f"h{number}", {f"m{model}": SERVED for model in range(30)}))
    began_s = time.thread_time()
    assert directory.models(0.0) is not None
    once_s = time.thread_time() - began_s
    for _ in range(100):
        directory.hear(beat("h0", {f"m{model}": SERVED for model in range(30)}), 0.5)
        assert directory.models(0.5) is None
    assert time.thread_time() - began_s - once_s < 20 * once_s
    hear(directory, beat("h0", {"new": SERVED}), now_s=0.5)
    assert directory.models(0.5) is not None


def test_a_profile_is_shown_as_loaded_where_hosts_serve_it():
    directory = Directory()
    hear(directory, beat("h", {"m": SERVED}), profiles=("default", "short"))
    entries = [ModelEntry(card=ModelCard(id=name, kind="stub"), state="loaded") for name in ("m", "m:short", "m:long")]
    shown = cluster_status(directory.beating(0.0), entries)["models"]
    assert [(model["state"], model["worker_count"]) for model in shown] == [
        ("loaded", 1),
        ("loaded", 1),
        ("available", 0),
    ]
