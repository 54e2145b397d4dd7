"""The fields that vLLM's routes of pooling models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.vllm.classify import decode_classify
from sie.frontend.dialects.vllm.score import decode_pairs
from sie.values.errors import BadRequest


@pytest.mark.parametrize(
    ("decode", "texts"), [(decode_pairs, b'"queries":"a","documents":"b"'), (decode_classify, b'"input":"a"')]
)
def test_limit_of_no_tokens_is_refused_by_the_clients_own_name(decode: Callable[..., Any], texts: bytes):
    with pytest.raises(BadRequest, match=r"\$\.truncate_prompt_tokens") as caught:
        decode(b'{%b,"truncate_prompt_tokens":0}' % texts, Limits())
    assert caught.value.extras["param"] == "truncate_prompt_tokens"
    for good in (-1, 1):
        assert decode(b'{%b,"truncate_prompt_tokens":%d}' % (texts, good), Limits()).model == "default"
