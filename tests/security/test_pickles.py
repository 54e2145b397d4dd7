"""A hostile pickled checkpoint is refused by name: nothing of it runs, and nothing outside of it is read or written."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from sie.catalog.convert import convert
from sie.catalog.pickled import program
from sie.catalog.pickled.program import ZIPPED, Layout, Refusal, Refused
from sie.catalog.pickled.safetensors_file import write_safetensors
from sie.catalog.pickled.torch_file import find_tensors
from sie.values.errors import ModelLoadFailed


class Runs:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def stacked(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def storage(length: int = 4, kind: str = "FloatStorage", key: str = "0") -> bytes:
    return b"(" + short("storage") + named("torch", kind) + short(key) + short("cpu") + number(length) + b"tQ"


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), offset: int = 0, place: bytes | None = None
) -> bytes:
    place = storage() if place is None else place
    arguments = place + number(offset) + sizes(*shape) + sizes(*strides) + b"\x89N"
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def weights(value: bytes, name: str = "w") -> bytes:
    return b"\x80\x02}" + short(name) + value + b"s."


PROGRAMS: dict[str, tuple[bytes, str]] = {
    "os.system by REDUCE": (pickle.dumps(Runs(os.system, "touch CANARY"), 2), "names 'posix.system'"),
    "STACK_GLOBAL of builtins": (weights(stacked("builtins", "eval") + b"(" + short("1") + b"tR"), "names 'builtins.eval'"),
    "exec": (pickle.dumps(Runs(exec, "open('CANARY', 'w')"), 4), "names 'builtins.exec'"),
    "getattr on a module": (pickle.dumps(Runs(getattr, "x", "y"), 4), "names 'builtins.getattr'"),
    "a path of attributes": (
        weights(stacked("torch._utils", "_rebuild_tensor_v2.__globals__")), "_rebuild_tensor_v2.__globals__"
    ),
    "another function of torch": (weights(named("torch.hub", "load")), "names 'torch.hub.load'"),
    "a name split over two instructions": (
        b"\x80\x04" + short("os") + b"\x94" + short("system") + b"\x94h\x00h\x01\x93.", "names 'os.system'"
    ),
    "a storage's type, called": (weights(named("torch", "FloatStorage") + b"(" + number(9) + b"tR"), "calls torch.Float"),
    "a tensor, called": (weights(tensor() + b")R"), "calls a tensor"),
    "a text, called": (weights(short("os.system") + b")R"), "calls a str"),
    "BUILD on a function": (
        weights(named("torch._utils", "_rebuild_tensor_v2") + b"}" + short("__code__") + b"Nsb"), "changes a name"
    ),
    "nested BUILD": (weights(tensor() + b"}" + short("grad") + b"}" + short("x") + b"Nsbsb"), "changes a str"),
    "BUILD on a tensor": (weights(tensor() + b"}b"), "changes a tensor"),
    "NEWOBJ": (b"\x80\x02" + named("collections", "OrderedDict") + b")\x81.", "instruction NEWOBJ"),
    "NEWOBJ_EX": (b"\x80\x04" + named("collections", "OrderedDict") + b")}\x92.", "instruction NEWOBJ_EX"),
    "INST": (b"(ios\nsystem\n.", "instruction INST"),
    "OBJ": (b"(" + named("collections", "OrderedDict") + b"o.", "instruction OBJ"),
    "an extension code": (b"\x80\x02\x82\x01.", "instruction EXT1"),
    "a buffer from outside": (b"\x80\x05\x97.", "instruction NEXT_BUFFER"),
    "a persistent id as text": (b"Pos.system\n.", "instruction PERSID"),
    "a persistent id of another kind": (weights(b"(" + short("module") + b"NNNNtQ"), "persistent id that is not"),
    "a persistent id that is a name": (weights(named("torch", "FloatStorage") + b"Q"), "persistent id that is not"),
    "a storage of a type of its own": (
        weights(b"(" + short("storage") + short("os.system") + short("0") + short("cpu") + number(1) + b"tQ"),
        "without a type and a key",
    ),
    "a whole module": (pickle.dumps(torch.nn.Linear(1, 1), 2), "names 'torch.nn.modules.linear.Linear'"),
    "a tensor's bytes as a pickle in it": (
        pickle.dumps(torch.zeros(1).untyped_storage(), 2), "names 'torch.storage._load_from_bytes'"
    ),
    "a tensor that is read with another sign": (
        weights(tensor()[:-2] + b"}" + short("neg") + b"\x88stR"), "a tensor has metadata"
    ),
    "no dict": (b"\x80\x02" + tensor() + b".", "holds a tensor, not a dict"),
    "no tensor": (weights(number(3)), "is a int, not a tensor"),
    "a key that is no text": (b"\x80\x02}" + number(1) + tensor() + b"s.", "key of its dicts is not a text"),
    "a tuple in a tuple, 200,000 times": (b"\x80\x02)" + b"\x85" * 200_000 + b".", "holds a tuple"),
    "a key in 200,000 tuples": (b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.", "key of its dicts is not a text"),
    "a memo of four billion places": (b"\x80\x02Nr\xff\xff\xff\xff.", "holds a NoneType"),
    "an unwritten place of the memo": (b"\x80\x02h\x07.", "memo that was never written"),
    "an empty stack": (b"\x80\x020.", "empty stack"),
    "a mark that was never set": (b"\x80\x02t.", "mark that was never set"),
    "values left over": (b"\x80\x02NN.", "ends with several values"),
    "a text of 2**62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "is damaged"),
    "a number of a million digits": (b"I" + b"9" * 1_000_000 + b"\n.", "is damaged"),
    "a name that is no UTF-8": (weights(tensor(), "w").replace(b"\x8c\x01w", b"X\x03\x00\x00\x00\xed\xa0\x80"), "is damaged"),
    "an unknown instruction": (b"\x80\x02\xff.", "is damaged"),
    "no end": (b"\x80\x02}", "is damaged"),
    "a negative size": (weights(tensor(shape=(-4,))), "the size of a tensor is negative"),
    "a negative stride": (weights(tensor(strides=(-1,))), "the stride of a tensor is negative"),
    "a negative offset": (weights(tensor(offset=-1)), "the offset of a tensor is negative"),
    "a negative storage": (weights(tensor(place=storage(-4))), "the length of a storage is negative"),
    "a size of 2**80": (weights(tensor(shape=(1 << 80,))), "the size of a tensor is not a number"),
    "a size that is true": (weights(tensor(shape=(5,)).replace(number(5) + b"t", b"\x88t")), "the size of a tensor is not a number"),
    "sizes without strides": (weights(tensor(strides=())), "1 sizes and 0 strides"),
    "a tensor of 17 dimensions": (weights(tensor((1,) * 17, (1,) * 17)), "17 sizes"),
    "a tensor without a storage": (weights(tensor(place=b"N")), "no storage, shape or strides"),
    "a storage of two types": (
        b"\x80\x02}(" + short("a") + tensor() + short("b") + tensor(place=storage(4, "HalfStorage")) + b"u.",
        "two types or two sizes",
    ),
    "a parameter that is no tensor": (
        weights(named("torch._utils", "_rebuild_parameter") + b"(" + short("x") + b"\x89NtR"), "parameter is a str"
    ),
    "pairs that are none": (weights(named("collections", "OrderedDict") + b"(]" + number(1) + b"atR"), "not pairs"),
}  # fmt: skip


@pytest.mark.parametrize("trick", PROGRAMS)
def test_a_hostile_pickle_is_refused_by_name(trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted here without confinement, which would hide a call."""
    monkeypatch.chdir(tmp_path)
    data, reason = PROGRAMS[trick]
    found = msgspec.json.decode(program.answer(ZIPPED + data), type=Layout | Refusal)
    assert isinstance(found, Refusal)
    assert reason in found.reason
    assert len(found.reason) < 300
    assert not list(tmp_path.iterdir())


def archive(
    data: bytes | None = None,
    storages: dict[str, bytes] | None = None,
    *,
    change: Callable[[zipfile.ZipFile], object] = lambda _file: None,
    compression: int = zipfile.ZIP_STORED,
    others: dict[str, bytes] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as file:
        warnings.simplefilter("ignore")  # of names that are there twice
        file.writestr("archive/data.pkl", weights(tensor()) if data is None else data)
        for key, content in (storages or {"0": bytes(16)}).items():
            file.writestr(f"archive/data/{key}", content)
        for name, content in (others or {}).items():
            file.writestr(name, content)
        change(file)
    return buffer.getvalue()


def saved(*, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(64.0)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def legacy(*pickles: bytes) -> bytes:
    head = [pickle.dumps(value, 2) for value in (program.LEGACY_MAGIC, 1001, {"little_endian": True})]
    return b"".join([*head, *pickles])


def link(file: zipfile.ZipFile) -> None:
    file.filelist[1].external_attr = 0o120777 << 16


def encrypt(file: zipfile.ZipFile) -> None:
    file.filelist[1].flag_bits |= 1


def overlap(file: zipfile.ZipFile) -> None:
    file.filelist[2].header_offset = file.filelist[1].header_offset


def reach_out(file: zipfile.ZipFile) -> None:
    file.filelist[1].file_size = file.filelist[1].compress_size = 1 << 40


FILES: dict[str, tuple[bytes, str]] = {
    "a zip bomb": (archive(storages={"0": bytes(1 << 20)}, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "a bomb of entries that share their bytes": (archive(storages={"0": bytes(16), "1": bytes(16)}, change=overlap), "overlap"),
    "a path that leads up": (archive(others={"archive/data/../../../etc/x": b""}), "leads out"),
    "an absolute path": (archive(others={"/etc/x": b""}), "leads out"),
    "a path of another system": (archive(others={"archive\\..\\x": b""}), "leads out"),
    "one name twice": (archive(others={"archive/data/0": b"other"}), "two entries"),
    "a symbolic link in the zip": (archive(change=link), "symbolic link"),
    "an encrypted entry": (archive(change=encrypt), "encrypted"),
    "an entry larger than the file": (archive(change=reach_out), "reaches beyond its end"),
    "two pickles": (archive(others={"other/data.pkl": b""}), "2 files data.pkl"),
    "no pickle": (archive(b"").replace(b"data.pkl", b"data.txt"), "0 files data.pkl"),
    "a TorchScript program": (archive(others={"archive/constants.pkl": b""}), "TorchScript"),
    "big-endian numbers": (archive(others={"archive/byteorder": b"big"}), "big-endian"),
    "a storage that is not there": (archive(weights(tensor(place=storage(key="9")))), "is missing"),
    "a storage by a path": (archive(weights(tensor(place=storage(key="../data.pkl")))), "is missing"),
    "a huge storage": (archive(weights(tensor((1 << 40,), place=storage(1 << 40)))), "should have"),
    "a tensor beyond its storage": (archive(weights(tensor((5,)))), "reaches beyond its storage"),
    "a tensor that begins beyond its storage": (archive(weights(tensor((0,), offset=1 << 40))), "beyond its storage"),
    "a stride beyond its storage": (archive(weights(tensor((2,), (1 << 60,)))), "beyond its storage"),
    "one number for 2**60 values": (archive(weights(tensor((1 << 30, 1 << 30), (0, 0)))), "over 4 times"),
    "a file that is cut": (saved()[:-30], "cut or damaged"),
    "a file that is cut in the middle": (saved()[:200], "cut or damaged"),
    "an old file that is cut": (saved(zipped=False)[:-4], "reaches beyond its end"),
    "an old file that is cut in its pickle": (saved(zipped=False)[:120], "is damaged"),
    "an old file with another length": (
        saved(zipped=False).replace(struct.pack("<q", 64), struct.pack("<q", 65)), "another length"
    ),
    "an old file that runs": (legacy(pickle.dumps(Runs(os.system, "touch CANARY"), 2)), "names 'posix.system'"),
    "an old file that lists other storages": (legacy(weights(tensor()), pickle.dumps(["7"], 2)), "that no tensor has"),
    "an old file that lists one storage twice": (legacy(weights(tensor()), pickle.dumps(["0", "0"], 2)), "list of storages"),
    "an older archive": (b"./\x00" + bytes(600), "neither of the two forms"),
    "a bare pickle": (pickle.dumps(Runs(os.system, "touch CANARY")), "neither of the two forms"),
    "nothing": (b"", "neither of the two forms"),
}  # fmt: skip


@pytest.mark.parametrize("trick", FILES)
def test_a_hostile_file_is_refused_by_name(trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, reason = FILES[trick]
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    with pytest.raises(Refused, match=reason):
        find_tensors(path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_harmless_form_of_the_tricks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(archive())
    assert list(find_tensors(path)) == ["w"]
    path.write_bytes(legacy(weights(tensor()), pickle.dumps(["0"], 2)) + struct.pack("<q", 4) + bytes(16))
    assert list(find_tensors(path)) == ["w"]


_HUGE = 3 << 30
_DECOY = b"PK\x06\x06" + bytes(52)
ENDS: dict[str, bytes] = {
    "in the record of 32 bits": struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, _HUGE, 4, 0),
    "without the record that should have its size": struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0xFFFFFFFF, 4, 0
    ),
    "with a second record in the locator": (
        struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, _HUGE, 4)
        + struct.pack("<4sL4s4xL", b"PK\x06\x07", 0, _DECOY[:4], 1)
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    ),
    "with a second record in a comment": (
        struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, _HUGE, 4)
        + struct.pack("<4sLQL", b"PK\x06\x07", 0, 5 << 30, 1)
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, len(_DECOY))
        + _DECOY
    ),
}


@pytest.mark.parametrize("place", ENDS)
def test_a_list_of_entries_that_would_fill_the_memory_is_not_read(place: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(5 << 30)  # a hole, not bytes on the disk
        file.write(ENDS[place])
    with pytest.raises(Refused, match=r"its list of entries has|its end is not"):
        find_tensors(path)


def test_a_tensor_may_have_any_stride_in_a_dimension_of_size_one(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(archive(weights(tensor((2, 2, 1), (1, 2, 1 << 61))), {"0": struct.pack("<4f", 1, 2, 3, 4)}))
    write_safetensors(path, find_tensors(path), tmp_path / "out", lambda _count: None)
    assert load_file(tmp_path / "out")["w"].flatten().tolist() == [1, 3, 2, 4]


def test_a_name_of_safetensors_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(archive(weights(tensor(), "__metadata__")))
    with pytest.raises(Refused, match="__metadata__"):
        write_safetensors(path, find_tensors(path), tmp_path / "out", lambda _count: None)


def test_a_link_out_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(archive())
    source = tmp_path / "model"
    source.mkdir()
    (source / "pytorch_model.bin").symlink_to(tmp_path / "secret.bin")
    assert "leads out of the model's directory" in refusal(source, tmp_path / "out")


def test_a_link_among_the_small_files_is_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(archive())
    (source / "vocab.txt").symlink_to("/etc/passwd")
    assert "leads out of the model's directory" in refusal(source, tmp_path / "out")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    os.mkfifo(source / "pytorch_model.bin")
    assert "is not a file" in refusal(source, tmp_path / "out")


def refusal(source: Path, target: Path) -> str:
    """Return why a checkpoint is not converted; nothing is left of the attempt."""
    with pytest.raises(ModelLoadFailed) as caught:
        convert("m", str(source), target, lambda _done, _text: None, lambda name: name)
    assert not target.exists()
    assert not list(target.parent.glob(".*"))
    return caught.value.message
