"""Leased pools: which hosts they get and keep, and when they are active or expired."""

from __future__ import annotations

from typing import Any

import pytest

from sie.cluster.pools import Candidate, Pool, Pools, make_pool, plan_pools, state_of
from sie.values.host_pool import PoolBody

S = 1_000_000_000
NOW = 1_700_000_000 * S


def pool(name: str, **fields: Any) -> Pool:
    created_ns = fields.pop("created_ns", NOW)
    return make_pool(PoolBody(name, **fields), None, 60, created_ns)


def host(name: str, profile: str = "l4", **fields: Any) -> Candidate:
    return Candidate(name, fields.pop("pool", "default"), profile, fields.pop("bundle", "any"), **fields)


def planned(
    known: list[Pool], hosts: list[Candidate], now_ns: int = NOW, *, forgets: bool = True
) -> dict[str, list[str]]:
    pools = plan_pools(Pools(pools={one.name: one for one in known}), hosts, now_ns, forgets=forgets)
    return {name: one.hosts for name, one in pools.pools.items()}


def keeping(one: Pool, *hosts: str) -> Pool:
    return Pool(*[getattr(one, name) for name in one.__struct_fields__[:-1]], hosts=list(hosts))


def test_a_pool_gets_as_many_hosts_of_each_profile_as_it_needs():
    hosts = [host("a"), host("b"), host("c"), host("d", "a100"), host("e", "h100")]
    assert planned([pool("p", gpus={"L4": 2, "a100": 1})], hosts) == {"p": ["a", "b", "d"]}


def test_a_cap_lets_a_pool_grow_and_no_more():
    hosts = [host(name) for name in "abcd"]
    assert planned([pool("p", gpus={"l4": 1}, gpu_caps={"l4": 3})], hosts) == {"p": ["a", "b", "c"]}


@pytest.mark.parametrize("fields", [{"pool": "other"}, {"bundle": "small"}, {"is_live": False}])
def test_hosts_of_another_pool_or_bundle_and_silent_ones_are_not_taken(fields: dict[str, Any]):
    assert planned([pool("p", gpus={"l4": 1}, bundle="any")], [host("a", **fields)]) == {"p": []}


def test_a_host_is_in_one_pool_and_the_older_pool_has_it():
    pools = [pool("young", gpus={"l4": 1}, created_ns=NOW + 1), pool("old", gpus={"l4": 1})]
    assert planned(pools, [host("a")]) == {"old": ["a"], "young": []}


def test_a_pool_keeps_its_hosts_when_better_ones_come():
    one = keeping(pool("p", gpus={"l4": 1}, pinned_models=["m"]), "z")
    assert planned([one], [host("z"), host("a", models=frozenset({"m"}))]) == {"p": ["z"]}


def test_hosts_that_serve_the_pinned_models_come_first():
    hosts = [host("a"), host("b", models=frozenset({"m"}))]
    assert planned([pool("p", gpus={"l4": 1}, pinned_models=["m"])], hosts) == {"p": ["b"]}


def test_a_host_that_is_gone_is_replaced_but_not_by_a_gateway_that_has_just_begun_to_listen():
    one = keeping(pool("p", gpus={"l4": 1}), "gone")
    assert planned([one], [host("a")]) == {"p": ["a"]}
    assert planned([one], [host("a")], forgets=False) == {"p": ["gone"]}


def test_a_smaller_request_gives_hosts_back():
    assert planned([keeping(pool("p", gpus={"l4": 1}), "a", "b")], [host("a"), host("b")]) == {"p": ["a"]}


def test_an_expired_pool_has_no_hosts_and_is_forgotten_after_a_minute():
    one = keeping(pool("p", gpus={"l4": 1}, ttl_seconds=60), "a")
    assert planned([one], [host("a")], NOW + 61 * S) == {"p": []}
    assert Pools(pools={"p": one}).of_host("a", NOW + 61 * S) == ""
    assert planned([one], [host("a")], NOW + 121 * S) == {}


def test_a_plan_of_a_plan_is_the_same():
    pools = Pools(pools={"p": pool("p", gpus={"l4": 2}), "q": pool("q", gpu_caps={"l4": 2})})
    hosts = [host(name) for name in "abc"]
    once = plan_pools(pools, hosts, NOW, forgets=True)
    assert plan_pools(once, hosts[::-1], NOW, forgets=True) == once


def test_a_pool_is_active_when_it_has_what_it_needs():
    one = keeping(pool("p", gpus={"l4": 2}), "a", "b")
    assert state_of(one, [host("a"), host("b", is_live=False)], NOW) == "pending"
    assert state_of(one, [host("a"), host("b")], NOW) == "active"
    assert state_of(one, [host("a"), host("b")], NOW + 61 * S) == "expired"


def test_a_pool_that_reserves_nothing_is_active_where_its_requests_can_run():
    assert state_of(pool("p", bundle="small"), [host("a")], NOW) == "pending"
    assert state_of(pool("p"), [host("a")], NOW) == "active"


def test_an_update_keeps_the_fields_that_it_leaves_out_and_renews():
    one = pool("P", gpus={"l4": 2}, minimum_worker_count=1)
    again = make_pool(PoolBody("p", gpus={"l4": 3}), one, 300, NOW + S)
    assert (again.gpus, again.minimum_worker_count, again.ttl_s) == ({"l4": 3}, 1, 60)
    assert (again.created_ns, again.renewed_ns) == (NOW, NOW + S)
