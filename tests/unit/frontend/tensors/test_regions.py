"""Regions of clients' shared memory: what may be registered, by whom it is seen, and how bytes are copied."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.tensors.regions import Regions
from sie.values.errors import BadRequest, NotFound, Overloaded, SieError
from sie.values.inference import Timing
from sie.values.tensor import RegionPart, Tensor, TensorReply, TensorRequest

LIMITS = Limits(max_client_regions=2, max_client_region_bytes=1 << 16, max_body_bytes=1024)
WHOLE = RegionPart("r", 0, 16)


class Host:
    """Shared memory in a folder, and two frontends that see it."""

    def __init__(self, folder: Path) -> None:
        self.shm = folder / "shm"
        self.shm.mkdir()
        (self.shm / "seg").write_bytes(bytes(range(16)))
        self.limits = LIMITS
        self.one, self.other = (Regions(folder / "regions", lambda: self.limits, str(self.shm)) for _ in range(2))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def request(*parts: RegionPart, **stores: RegionPart) -> TensorRequest:
    inputs = [Tensor("x", "UINT8", (part.nbytes,), memoryview(b""), part) for part in parts]
    return TensorRequest(model="m", inputs=inputs, stores=stores)


def reply(data: bytes) -> TensorReply:
    return TensorReply(model="m", outputs=[Tensor("y", "UINT8", (len(data),), memoryview(data))], timing=Timing())


def test_a_region_is_read_and_written_through_any_frontend(host: Host):
    host.one.register("", RegionPart("r", 2, 10), "/seg")
    assert [region.shown() for region in host.other.all_of("")] == [
        {"name": "r", "key": "/seg", "offset": 2, "byte_size": 10}
    ]
    asked = request(RegionPart("r", 1, 4), y=RegionPart("r", 6, 4))
    filled = host.other.filled("", asked)
    assert (bytes(filled.inputs[0].data), filled.uses_regions, filled.inputs[0].part) == (
        bytes([3, 4, 5, 6]),
        True,
        None,
    )
    (output,) = host.other.stored("", asked, reply(b"abc")).outputs
    assert (bytes(output.data), output.part) == (b"", RegionPart("r", 6, 3))
    assert (host.shm / "seg").read_bytes() == bytes(range(8)) + b"abc" + bytes(range(11, 16))
    host.one.unregister("", "r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        host.other.filled("", asked)


def test_a_key_sees_its_own_regions_only(host: Host):
    host.one.register("alice", WHOLE, "/seg")
    assert host.one.all_of("bob") == []
    with pytest.raises(NotFound):
        host.one.filled("bob", request(WHOLE))
    host.one.unregister("bob", "r")
    host.one.unregister("bob")
    host.one.register("bob", WHOLE, "/seg")  # the name is free for another key
    host.one.unregister("bob")
    assert [region.name for region in host.one.all_of("alice")] == ["r"]


@pytest.mark.parametrize(
    "key", ["../secret", "/a/b", "//seg", "..", ".", "", "/", "seg\0", "/link", "/folder", "/pipe", "/none"]
)
def test_only_plain_objects_of_shared_memory_are_opened(host: Host, key: str):
    (host.shm.parent / "secret").write_bytes(bytes(16))
    (host.shm / "link").symlink_to(host.shm.parent / "secret")
    (host.shm / "folder").mkdir()
    os.mkfifo(host.shm / "pipe")
    with pytest.raises(BadRequest, match="shared memory region"):
        host.one.register("", WHOLE, key)
    assert host.one.all_of("") == []


def test_an_object_of_another_user_is_refused_unless_a_setting_names_the_user(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    owner = (host.shm / "seg").stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(BadRequest, match="Unable to open shared memory region"):
        host.one.register("", WHOLE, "/seg")
    host.limits = msgspec.structs.replace(LIMITS, client_region_users=(str(owner),))
    host.one.register("", WHOLE, "/seg")


def test_limits_are_named(host: Host):
    for name in ("a", "b"):
        host.one.register("", RegionPart(name, 0, 16), "seg")
    for part, reason in (
        (RegionPart("c", 0, 16), "max_client_regions is 2"), (RegionPart("a", 0, 1 << 17), "max_client_region_bytes"),
        (RegionPart("c", 8, 16), "exceed its 16 bytes"), (RegionPart("c", 0, 0), "exceed its 16 bytes"),
        (RegionPart("", 0, 16), "1 to 256 characters"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=reason):
            host.one.register("", part, "/seg")
    host.one.unregister("", "b")
    with pytest.raises(BadRequest, match="region 'a' already in manager"):
        host.other.register("", RegionPart("a", 0, 16), "/seg")
    with pytest.raises(BadRequest, match=r"max_body_bytes \(1024\)"):
        host.one.filled("", request(*[RegionPart("a", 0, 16)] * 65))
    host.limits = Limits()
    with pytest.raises(SieError, match="max_client_regions is 0") as caught:
        host.one.register("", WHOLE, "/seg")
    assert caught.value.code == "UNSUPPORTED"
    with pytest.raises(NotFound):
        host.one.filled("", request(RegionPart("a", 0, 1)))


def test_inputs_of_running_requests_have_a_limit_together(host: Host):
    host.limits = msgspec.structs.replace(LIMITS, max_held_bytes=100)
    with host.one.holding(60):
        with pytest.raises(Overloaded, match=r"max_held_bytes \(100\)"), host.one.holding(41):
            pass
        with host.one.holding(40):
            pass
    with host.one.holding(100):
        pass


def test_a_range_outside_of_the_region_is_refused_before_the_model_runs(host: Host):
    host.one.register("", WHOLE, "/seg")
    for asked in (
        request(RegionPart("r", 9, 8)),
        request(RegionPart("r", 1 << 62, 8)),
        request(y=RegionPart("r", 0, 17)),
    ):
        with pytest.raises(BadRequest, match="Invalid offset"):
            host.one.filled("", asked)
    with pytest.raises(BadRequest, match="should be at least 3 bytes"):
        host.one.stored("", request(y=RegionPart("r", 0, 2)), reply(b"abc"))


def test_a_region_that_shrinks_or_is_replaced_is_an_error_and_no_fault(host: Host):
    host.one.register("", WHOLE, "/seg")
    os.truncate(host.shm / "seg", 4)
    with pytest.raises(BadRequest, match="smaller than when it was registered"):
        host.one.filled("", request(WHOLE))
    with pytest.raises(BadRequest, match="smaller than when it was registered"):
        host.one.stored("", request(y=WHOLE), reply(bytes(16)))
    assert (host.shm / "seg").stat().st_size == 4
    (host.shm / "new").write_bytes(bytes(16))
    (host.shm / "new").rename(host.shm / "seg")
    with pytest.raises(BadRequest, match="was replaced"):
        host.one.filled("", request(WHOLE))
