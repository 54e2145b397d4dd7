"""The overlapping spans that remain, against a reference that compares every two by the library's rule."""

from __future__ import annotations

import time

from hypothesis import event, given
from hypothesis import strategies as st

from sie.values.spans import choose_spans

SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda at: (at[0], at[0] + at[1])), max_size=40)


def excludes(one, other, *, flat, multi_label):
    if one == other:
        return not multi_label
    if one[1] <= other[0] or other[1] <= one[0]:
        return False
    is_nested = (one[0] <= other[0] and other[1] <= one[1]) or (other[0] <= one[0] and one[1] <= other[1])
    return flat or not is_nested


@given(spans=SPANS, flat=st.booleans(), multi_label=st.booleans())
def test_chosen_are_those_that_no_better_one_excludes(spans, flat, multi_label):
    kept = []
    for number, span in enumerate(spans):
        if not any(excludes(span, spans[other], flat=flat, multi_label=multi_label) for other in kept):
            kept.append(number)
    event(f"{'some' if len(kept) < len(spans) else 'none'} excluded")
    assert choose_spans(spans, flat=flat, multi_label=multi_label) == kept


def test_many_spans_of_many_labels_take_no_time():
    spans = [(start, start + width) for start in range(384) for width in range(1, 13)] * 20
    began_s = time.process_time()
    kept = choose_spans(spans, flat=False, multi_label=True)
    assert len(kept) > 10_000
    assert time.process_time() - began_s < 5.0, "comparing every two takes minutes"
