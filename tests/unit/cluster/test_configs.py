"""The shared configuration as a value: profiles are only added, repetitions and old epochs are noticed."""

from __future__ import annotations

import pytest

from sie.cluster.configs import Configs, add_config, decoder
from sie.cluster.gateway.config_service import read_config
from sie.cluster.payloads import decode, encode
from sie.values.errors import SieError
from sie.values.shared_config import AdapterSettings, ModelConfig, ProfileConfig, config_hash

THRESHOLD = "sie_id: m\nprofiles: {p: {adapter_options: {runtime: {threshold: %s}}}}"


def config(model: str = "m", pool: str | None = None, **profiles: int) -> ModelConfig:
    made = {name: ProfileConfig(None, AdapterSettings({"max_seq_length": length})) for name, length in profiles.items()}
    return ModelConfig(model, pool=pool, profiles=made)


def add(known: Configs, one: ModelConfig, *, key: str = "", digest: str = "d", epoch: int | None = None) -> Configs:
    return add_config(known, one, digest, key, epoch)


def refused(known: Configs, one: ModelConfig, **fields: object) -> tuple[int, str]:
    with pytest.raises(SieError) as caught:
        add(known, one, **fields)  # type: ignore[arg-type]
    return caught.value.http_status, caught.value.code


def test_profiles_are_added_and_each_change_has_an_epoch():
    first = add(Configs(), config(a=1))
    second = add(first, config(b=2))
    assert list(second.models["m"].profiles) == ["a", "b"]
    assert (first.epoch, second.epoch, add(second, config(a=1)).epoch) == (1, 2, 2)


def test_a_profile_or_a_field_with_another_value_is_a_conflict():
    known = add(Configs(), ModelConfig("m", hf_id="m", hf_revision="one"))
    assert refused(add(known, config(a=1)), config(a=2)) == (409, "CONFIG_CONFLICT")
    assert refused(known, ModelConfig("m", hf_revision="two")) == (409, "CONFIG_CONFLICT")
    assert add(known, ModelConfig("m", max_sequence_length=5)).models["m"].hf_revision == "one"


def test_a_change_on_an_old_epoch_is_a_conflict():
    known = add(Configs(), config(a=1), epoch=0)
    assert refused(known, config(b=1), epoch=0) == (409, "CONFIG_CONFLICT")
    assert add(known, config(b=1), epoch=1).epoch == 2


def test_a_repetition_with_its_key_changes_nothing_and_another_body_is_refused():
    known = add(Configs(), config(a=1), key="k", epoch=0)
    assert add(known, config(a=1), key="k", epoch=0) == known
    assert known.changes["k"].created == ["a"]
    assert refused(known, config(b=1), key="k", digest="other") == (422, "IDEMPOTENCY_KEY_REUSED")


def test_keys_are_remembered_for_the_latest_changes():
    known = Configs()
    for number in range(300):
        known = add(known, config(a=1), key=f"k{number}")
    assert len(known.changes) == 256
    assert "k299" in known.changes


def test_the_hash_is_of_what_a_pool_takes_and_not_of_its_order():
    one, other = config("x", a=1, b=2), config("y", pool="p", a=1)
    known = add(add(Configs(), one), other)
    assert known.hash_of("q") == config_hash([one])
    assert known.hash_of("p") == config_hash([other, config("x", b=2, a=1)]) != known.hash_of("q")
    assert (Configs().hash_of("p"), len(known.hash_of("p"))) == ("", 64)


def test_a_configuration_is_read_from_yaml_and_json():
    yaml = b"sie_id: org/m\nprofiles:\n  short:\n    adapter_options:\n      runtime: {max_seq_length: 64}\n"
    json = b'{"sie_id": "org/m", "profiles": {"short": {"adapter_options": {"runtime": {"max_seq_length": 64}}}}}'
    assert read_config(yaml) == read_config(json) == config("org/m", short=64)


@pytest.mark.parametrize("value", ["2026-01-02", "!!binary aGk=", "!!set {a}", ".nan", "{a: {b: 1.0}}"])
def test_a_configuration_is_read_as_all_will_have_it_so_a_repetition_is_no_conflict(value: str):
    known = add(Configs(), read_config((THRESHOLD % value).encode()))
    stored = decode(encode(known), decoder)
    assert add(stored, read_config((THRESHOLD % value).encode())) == stored


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sie_id: [", "flow"),
        ("- sie_id", "object"),
        ("sie_id: a:b", "':'"),
        ("{sie_id: m, hf_id: n}", "'hf_id' differs"),
        ("{sie_id: m, hf_id: m, weights_path: x}", "both"),
        (r'{sie_id: m, weights_path: "a\0b"}', "control characters"),
        ("{sie_id: m, weights_path: a/%s}" % ("x" * 256), "255 bytes"),
        ("{sie_id: m, tasks: {}}", "tasks"),
        ("{sie_id: m, profiles: {p: {adapter_path: x}}}", "adapter_path"),
        ("{sie_id: m, profiles: {p: {adapter_options: {runtime: {colour: red}}}}}", "colour"),
        ("{sie_id: m, profiles: {'a b': {}}}", "a b"),
        ("{sie_id: &x m, hf_id: *x}", "aliases"),
        ("\x00", "special characters"),
        ("[" * 65_000, "nested"),
        ("{a: " * 16_000, "nested"),
        ("- " * 32_000, "nested"),
        ("? " * 32_000, "nested"),
        ("".join("\n" + " " * level + "a:" for level in range(300)), "nested"),
        ("sie_id: !!timestamp foo", "tag"),
        ("sie_id: !!int ''", "tag"),
        ("sie_id: !!bool foo", "tag"),
        ("sie_id: !!float x", "float"),
        ("sie_id: m\nmax_sequence_length: 0b", "max_sequence_length"),
        (f"sie_id: m\nmax_sequence_length: {'9' * 5000}", "not valid"),
        (f"sie_id: m\nmax_sequence_length: {2**64}", "64 bits"),
        ("sie_id: m\nmax_sequence_length: 1" + ":1" * 30_000, "not valid"),
        ("sie_id: m\nprofiles: {? [a] : {}}", "not valid"),
        ("sie_id: m\nprofiles: {? {a: 1} : {}}", "not valid"),
        ("sie_id: m\nprofiles: !!omap [a]", "not valid"),
        ("sie_id: m\n<<: 3", "not valid"),
        (THRESHOLD % "{null: 1}", "str keys"),
        (THRESHOLD % "{1.5: 1}", "str keys"),
        (THRESHOLD % "{true: 1}", "str keys"),
        (THRESHOLD % 2**70, "serialize ints"),
        (THRESHOLD % r'"\ud800"', "surrogates"),
    ],
)
def test_what_is_no_configuration_is_refused_with_the_reason(body: str, said: str):
    with pytest.raises(SieError, match=said) as caught:
        read_config(body.encode())
    assert caught.value.http_status == 422
