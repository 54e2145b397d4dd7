"""The name of prepared weights depends on everything that a load's choices depend on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sie import native
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule
from sie.workers.prepared import identity

CPUINFO = (
    "processor : 0\nmodel name : A\nflags : avx2\ncpu MHz : {mhz}\n\nprocessor : 1\nmodel name : A\nflags : avx2\n"
)


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(mhz=2000))
    monkeypatch.setattr(identity, "_CPUINFO", path)
    return path


def _name(folder: Path, model: str = "m") -> identity.Name:
    return identity.name_of(ModelCard(id=model, kind="encoder", directory=str(folder)), "auto")


def test_one_checkpoint_under_two_model_ids_is_prepared_once(tmp_path: Path) -> None:
    assert _name(tmp_path, "mine") == _name(tmp_path, "other")


def test_what_frontends_alone_read_prepares_nothing_anew(tmp_path: Path) -> None:
    rule = GenerateRule(context_length=64, chat_template="{{ a }}", temperature=0.5, repetition_penalty=1.1)
    card = ModelCard(id="m", kind="generator", directory=str(tmp_path), generate=rule)
    changed = msgspec.structs.replace(
        card, generate=GenerateRule(context_length=64), max_sequence_length=32, prompts={"query": "q: "},
        default_prompt="query", profiles={"a": {"normalize": True}}, matryoshka=(32,),
    )  # fmt: skip
    longer = msgspec.structs.replace(card, generate=msgspec.structs.replace(rule, context_length=65))
    assert identity.name_of(card) == identity.name_of(changed)
    assert identity.name_of(card) != identity.name_of(longer)


@pytest.mark.parametrize(
    ("owner", "function", "value"),
    [
        (platform, "machine", "s390x"),
        (torch, "get_num_threads", 77),
        (native, "features", native.Feature(0)),
    ],
)
def test_another_host_has_another_version_of_the_same_model(
    owner: Any, function: str, value: Any, cpuinfo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _name(tmp_path)
    monkeypatch.setattr(owner, function, lambda: value)
    found = _name(tmp_path)
    assert (found.model, found.version == known.version) == (known.model, False)


@pytest.mark.parametrize(
    ("old", "new"), [("model name : A", "model name : B"), ("flags : avx2", "flags : avx512_bf16")]
)
def test_another_processor_has_another_version(old: str, new: str, cpuinfo: Path, tmp_path: Path) -> None:
    known = _name(tmp_path)
    cpuinfo.write_text(CPUINFO.format(mhz=2000).replace(old, new))
    assert _name(tmp_path).version != known.version


def test_the_same_processor_has_the_same_version_at_any_clock(cpuinfo: Path, tmp_path: Path) -> None:
    known = _name(tmp_path)
    cpuinfo.write_text(CPUINFO.format(mhz=3000))
    assert _name(tmp_path) == known
