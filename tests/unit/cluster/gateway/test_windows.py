"""How much a gateway publishes: twice the room of the hosts, divided over the gateways by the keys that wait there."""

from __future__ import annotations

from sie.cluster.gateway.host_directory import Directory
from sie.cluster.gateway.windows import Windows
from sie.cluster.payloads import VERSION, Beat, Cards, GatewayBeat, ModelBeat
from sie.cluster.subjects import Lane, work_subject
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard

LANE = Lane("p", "l4", "b")
SUBJECT = work_subject(LANE, "m")


def windows(*rooms: int, own: int = 0) -> Windows:
    directory = Directory()
    card = ModelCard(id="m", kind="stub", profiles={"default": {}, "half": {}})
    for number, credit in enumerate(rooms):
        models = {"m": ModelBeat("loaded", True, False, None)}
        directory.hear(Beat(VERSION, f"h{number}", f"h{number}", *LANE[:3], "k", models, credit=credit), 0.0)
        directory.learn(f"h{number}", Cards(VERSION, "k", [ModelEntry(card=card, state="available")]))
    found = Windows(directory, "gw")
    found.own = {SUBJECT: own} if own else {}
    found.renew(0.0)
    return found


def test_a_gateway_alone_publishes_twice_what_hosts_have_room_for():
    assert windows(10, 30).limit(LANE, "m") == windows(10, 30).limit(LANE, "m:half") == 80


def test_gateways_share_by_the_weights_of_their_keys_until_they_fall_silent():
    some = windows(100, own=1)
    some.hear(GatewayBeat(VERSION, "gw", {SUBJECT: 50}), 0.0)  # its own
    some.hear(GatewayBeat(VERSION, "other", {SUBJECT: 3}), 0.0)
    some.hear(GatewayBeat(VERSION, "idle", {}), 0.0)
    some.hear(GatewayBeat(VERSION, "broken", {SUBJECT: -4}), 0.0)
    some.renew(1.0)
    assert some.limit(LANE, "m") == 50
    some.renew(3.0)
    assert some.limit(LANE, "m") == 200


def test_a_request_starts_though_no_host_has_told_of_room():
    assert windows().limit(LANE, "m") == windows(-5).limit(LANE, "m") == 4


def test_a_message_has_at_most_a_quarter_of_a_hosts_room():
    found = [windows(*rooms).together(LANE, "m") for rooms in ((), (3,), (8, 24), (256, 256))]
    assert found == [1, 1, 4, 16]
