from __future__ import annotations

from sie.cards import ModelCard
from sie.tensors import TensorRule
from sie.workers.pace import Pace

RULE = TensorRule(name="t", version="1", platform="onnxruntime_onnx", inputs=(), outputs=())
TENSORS = ModelCard(id="t", kind="tensor", tensor=RULE)
TOKENS = ModelCard(id="m", kind="encoder")


def test_tensors_cost_the_tokens_that_would_have_run_meanwhile():
    pace = Pace({})
    for _ in range(200):
        assert pace.learn(TOKENS, 1000, 1_000_000) == 0  # 1,000 ns a token
    late = pace.learn(TENSORS, 4, 5_000_000)
    assert abs(late - 4996) < 100
    assert pace.learn(TENSORS, 100, 1000) == 0


def test_a_models_own_pace_decides_what_its_steps_are_allowed():
    pace = Pace({})
    for _ in range(200):
        pace.learn(TENSORS, 1, 10_000_000_000)
        pace.learn(TOKENS, 1000, 1_000_000)
    assert pace.allowed_ns(TENSORS, 1) > 50_000_000_000
    assert pace.allowed_ns(TOKENS, 1) < 1_100_000_000
