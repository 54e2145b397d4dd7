from __future__ import annotations

import msgspec
import pytest

from sie.catalog.cards import make_card
from sie.catalog.spec import ModelSpec, parse_model_spec
from sie.catalog.stub import END_OF_TEXT, count_stub_tokens, stub_card
from sie.values.card import ImageRule, StubOptions
from sie.values.errors import BadRequest


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("BAAI/bge-m3", ModelSpec(id="BAAI/bge-m3")),
        ("BAAI/bge-m3:default@main", ModelSpec(id="BAAI/bge-m3", revision="main")),
        ("BAAI/bge-m3@main", ModelSpec(id="BAAI/bge-m3", revision="main")),
        ("BAAI/bge-m3@refs/pr/1", ModelSpec(id="BAAI/bge-m3", revision="refs/pr/1")),
        ("a=/data/m", ModelSpec(id="a", directory="/data/m")),
        ("a/b=models/m@v1", ModelSpec(id="a/b", directory="models/m", revision="v1")),
        ("a=/data/me@home/m", ModelSpec(id="a", directory="/data/me@home/m")),
        ("a=/data/x=y", ModelSpec(id="a", directory="/data/x=y")),
        ("a=stub:", ModelSpec(id="a", stub=StubOptions())),
        ("a=stub:score,image=0", ModelSpec(id="a", stub=StubOptions(score=True, image=False))),
        (
            "a=stub:dense=8,latency_ms=1.5,per_token_us=20,load_ms=3,max_tokens=16",
            ModelSpec(id="a", stub=StubOptions(dense=8, latency_ms=1.5, per_token_us=20.0, load_ms=3.0, max_tokens=16)),
        ),
    ],
)
def test_spec_is_read(text: str, spec: ModelSpec) -> None:
    assert parse_model_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 to 256"),
        ("x" * 257, "1 to 256"),
        ("/data/model", "write ID=/data/model"),
        ("../model", "write ID=../model"),
        ("a/../b", "'..' part"),
        ("a//b", "empty"),
        ("a/", "end with '/'"),
        ("a b", "only contain"),
        ("modèle", "only contain"),
        ("a:fast", "profile"),
        ("a\n", "only contain"),
        ("a@", "not a revision"),
        ("a@x..y", "not a revision"),
        ("a=/m@", "not a revision"),
        ("a=", "no directory"),
        ("a=stub:densse=8", "did you mean 'dense'"),
        ("a=stub:dense", "exactly one value"),
        ("a=stub:image,image", "exactly one value"),
        ("a=stub:image=perhaps", "bool"),
        ("a=stub:dense=8,dense=9", "exactly one value"),
        ("a=stub:dense=wide", "int"),
        ("a=stub:dense=0", "at least 1"),
        ("a=stub:dense=100000", "but must be at most"),
        ("a=stub:latency_ms=-1", "at least 0"),
        ("a=stub:generate,dense=8", "a stub that generates has no option 'dense'"),
        ("a=stub:generate,blocks=0", "at least 1"),
        ("a=stub:latency_ms=nan", "at least 0"),
        ("a=stub:latency_ms=inf", "at least 0"),
    ],
)
def test_bad_spec_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_model_spec(text)
    assert reason in caught.value.message


def test_stub_card_says_what_the_options_say() -> None:
    card = stub_card(parse_model_spec("sie/stub=stub:dense=8,max_tokens=16"))
    assert (card.id, card.kind, card.dims, card.max_sequence_length) == ("sie/stub", "stub", {"dense": 8}, 16)
    assert not card.normalize


def test_stub_that_generates_does_nothing_else() -> None:
    card = stub_card(parse_model_spec("a=stub:generate,max_tokens=64"))
    assert (card.kind, card.outputs, card.vocab_size, card.max_sequence_length) == ("stub", ("generate",), 257, 64)
    assert card.generate is not None
    assert (card.generate.context_length, card.generate.eos_token_ids) == (64, (END_OF_TEXT,))


def test_limit_of_a_file_is_the_context_of_a_stub_that_generates() -> None:
    spec = msgspec.structs.replace(parse_model_spec("a=stub:generate"), max_sequence_length=32)
    card = make_card(spec, "")
    assert card.generate is not None
    assert (card.generate.context_length, card.max_sequence_length) == (32, 32)


def test_stub_with_images_takes_both() -> None:
    card = stub_card(parse_model_spec("a=stub:image"))
    assert card.inputs == ("text", "image")
    assert card.image == ImageRule()


def test_card_of_a_model_that_is_no_stub_is_refused() -> None:
    with pytest.raises(BadRequest, match="not a stub"):
        stub_card(parse_model_spec("a"))


@pytest.mark.parametrize(("num_bytes", "tokens"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (10_000, 16)])
def test_stub_token_is_four_bytes(num_bytes: int, tokens: int) -> None:
    assert count_stub_tokens(num_bytes, 16) == tokens
