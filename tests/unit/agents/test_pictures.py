"""The pictures of a call, within the room that is left."""

from __future__ import annotations

from sie.agents.pictures import bound_pictures


def test_pictures_that_fit_are_kept_in_order() -> None:
    data = {
        "stdout": "x",
        "images_base64": ["a" * 1000, "b" * 9000, "c" * 1000],
        "video_frames_base64": ["d" * 1000, "e" * 1000],
    }
    bounded, room, num_left_out = bound_pictures(data, 7000)
    assert bounded == {
        "stdout": "x", "images_base64": ["a" * 1000, "c" * 1000], "video_frames_base64": ["d" * 1000],
    }  # fmt: skip
    assert (num_left_out, bound_pictures(data, room)[2]) == (2, 5)


def test_many_empty_pictures_are_bounded_too() -> None:
    bounded, _, num_left_out = bound_pictures({"images_base64": [""] * 100_000}, 1 << 20)
    assert len(bounded["images_base64"]) + num_left_out == 100_000
    assert len(bounded["images_base64"]) <= 1024


def test_calls_without_pictures_stay_as_they_are() -> None:
    assert bound_pictures({"content": "x"}, 10) == ({"content": "x"}, 10, 0)
