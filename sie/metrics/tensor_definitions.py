"""Defines the statistics of tensor models by batch size, which the tensor dialects return.

They are not on `/metrics`: each model would have a series for each of its batch sizes.
"""

from __future__ import annotations

from typing import Final

from sie.metrics.family import Family

COMPUTE_PHASES: Final = ("input", "infer", "output")
"""Inputs are made into the runtime's arrays; the model runs; its outputs are made into replies."""
OTHER_ROWS: Final = "other"
"""The label `rows` of batch sizes that found no room on the page."""

TENSOR_STEPS = Family(
    name="sie_tensor_steps_total",
    kind="counter",
    help="Steps of a tensor model, by the rows that ran together.",
    labels=("model", "rows"),
)
TENSOR_STEP_TIME = Family(
    name="sie_tensor_step_seconds_total",
    kind="counter",
    help="Time of such steps, by phase (input, infer, output).",
    labels=("model", "rows", "phase"),
)
TENSOR_REQUESTS = Family(
    name="sie_tensor_requests_total",
    kind="counter",
    help="Tensor requests that a worker answered, by their own rows and status (success, failed).",
    labels=("model", "rows", "status"),
)
TENSOR_REQUEST_TIME = Family(
    name="sie_tensor_request_seconds_total",
    kind="counter",
    help="Time of such requests in the worker, by phase (success, failed: all of it; queue, input, infer, output).",
    labels=("model", "rows", "phase"),
)

TENSOR_FAMILIES: Final = (TENSOR_STEPS, TENSOR_STEP_TIME, TENSOR_REQUESTS, TENSOR_REQUEST_TIME)
