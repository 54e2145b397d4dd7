"""Requests as work items and replies of items as one reply; versions and names."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.cluster.payloads import VERSION, Result, Work, Works, decode, encode, works_decoder
from sie.cluster.reply_forms import join_replies, pack_arrays, read_arrays, with_times
from sie.cluster.request_forms import encode_items, extract_items, read_item
from sie.cluster.subjects import Lane, consumer_name, lane_of, token, work_subject
from sie.values.errors import ProtocolError
from sie.values.extract import Entity, ExtractTask
from sie.values.inference import EncodeRequest, ExtractRequest
from sie.values.muvera import Muvera

_SAFE = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=")


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6))
def test_joined_replies_are_the_reply_of_the_whole_request(rows: list[list[int]]):
    def reply(parts: list[list[int]]) -> memoryview:
        return pack_arrays({
            "times": np.array([1, 2, 3], np.int64),
            "dense": np.array([[len(part), 1] for part in parts], np.float32),
            "sparse_offsets": np.cumsum([0, *map(len, parts)]).astype(np.int32),
            "sparse_indices": np.array([value for part in parts for value in part], np.int32),
        })  # fmt: skip

    joined = join_replies([read_arrays(reply([row])) for row in rows], (1, 2, 3))
    assert joined == reply(rows)
    assert with_times(reply(rows[:1]), (4, 5, 6)) == join_replies([read_arrays(reply(rows[:1]))], (4, 5, 6))


def test_replies_that_do_not_fit_together_are_refused():
    dense = {"times": np.array([1, 2, 3], np.int64), "dense": np.zeros((1, 4), np.float32)}
    for other in ({"dense": np.zeros((1, 5), np.float32)}, {"dense": np.zeros((1, 4), np.float16)}):
        with pytest.raises(ProtocolError):
            join_replies([dense, {**dense, **other}], (1, 2, 3))
    with pytest.raises(ProtocolError):
        join_replies([dense, {"times": dense["times"]}], (1, 2, 3))


def test_short_inputs_share_an_item_and_arrive_as_a_request_of_their_own():
    request = EncodeRequest(
        model="m", texts=["a", "b", "", "c"], images={2: [memoryview(b"png")]}, output_types=("dense", "sparse"),
        output_dtype="float16", instruction="find", dimensions=8, options={"is_query": True}, muvera=Muvera(num_repetitions=2),
    )  # fmt: skip
    pieces = encode_items(request)
    items = [read_item("encode", "m", piece.body) for piece in pieces]
    assert [item.texts for item in items] == [["a", "b"], [""], ["c"]]
    assert [piece.first for piece in pieces] == [0, 2, 3]
    assert [bytes(item.images[0][0]) if item.images else None for item in items] == [None, b"png", None]
    for item in items:
        for name in ("output_types", "output_dtype", "instruction", "dimensions", "options", "muvera"):
            assert getattr(item, name) == getattr(request, name)


def test_the_entities_of_an_item_go_with_it():
    entities = (Entity("X", 1.0, 0, 1, "a"),)
    request = ExtractRequest(model="m", texts=["a", "b"], given={0: entities}, task=ExtractTask(labels=("l",)))
    assert [read_item("extract", "m", piece.body).given for piece in extract_items(request)] == [{0: entities}, {0: ()}]


def test_token_lists_stay_token_lists():
    request = EncodeRequest(model="m", token_lists=[[1, 2], [3]])
    assert [read_item("encode", "m", piece.body).token_lists for piece in encode_items(request)] == [[[1, 2], [3]]]


def test_short_texts_share_an_item_up_to_its_bounds():
    def firsts(sizes: list[int]) -> list[int]:
        return [piece.first for piece in encode_items(EncodeRequest(model="m", texts=["x" * size for size in sizes]))]

    assert firsts([1] * 40) == [0, 16, 32]
    assert firsts([700, 300, 300, 5000, 10]) == [0, 2, 3, 4]


def test_what_is_no_item_is_refused():
    for body in (b"", b"\xc1", b"\x93\x01\x02\x03", b"[" * 5000):
        with pytest.raises(ProtocolError):
            read_item("encode", "m", body)


def test_another_version_is_refused_by_name():
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}; this process reads version {VERSION}"):
        decode(encode(Works(VERSION + 1, [])), works_decoder)


def test_fields_that_a_later_release_appends_are_ignored():
    known = msgspec.msgpack.decode(encode(Work(VERSION, "id", "to", 0, "encode", "m")))
    (work,) = decode(msgspec.msgpack.encode([VERSION, [[*known, "new"]], "newer"]), works_decoder).items
    assert work.id == "id"
    assert Result(VERSION, "id", "host").error is None


@given(st.text(max_size=80))
def test_a_name_is_one_token_of_a_subject(name: str):
    assert set(token(name)) <= _SAFE
    assert 0 < len(token(name)) < 80


def test_names_that_differ_have_subjects_that_differ():
    names = ["a/b", "a__b*", "a b", "a>b", "a.b", "a*b", "é", "x" * 61, "x" * 62, "org/model:p", "org/model"]
    assert len({token(name) for name in names}) == len(names)
    lane = Lane("p", "l4", "b")
    assert len({consumer_name(lane, name) for name in names}) == len(names)
    assert consumer_name(Lane("p", "l4", "b-c"), "m") != consumer_name(Lane("p", "l4-b", "c"), "m")
    assert consumer_name(Lane("p", "l4", "b", "x"), "m") != consumer_name(lane, "m-x")
    assert work_subject(lane, "org/m.1") == "sie.v1.p.work.l4.b.org__m_dot_1"
    assert lane_of("", "L4", "") == Lane("default", "l4", "any")
