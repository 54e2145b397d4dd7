"""Defines the OpenAPI rows of the TensorRT Inference Server v1 API. Source: TRTIS v1 sheet."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.operation import BINARY, JSON, TEXT, Answer, Operation

_TAG: Final = "TensorRT Inference Server v1"
TAGS: Final = {_TAG: "Tensors, in the older API. Every error is a 400 without a body; `NV-Status` has the reason."}


def _row(template: str, summary: str, media: tuple[str, ...], description: str = "") -> Operation:
    model = "densenet" if "{model}" in template else ""
    return Operation(
        template=template, tag=_TAG, summary=summary, description=description, model=model,
        answers=(Answer(200, "With `NV-Status: code: SUCCESS ...`.", media), Answer(400, "`NV-Status` has the reason.", ())),
    )  # fmt: skip


OPERATIONS: Final[tuple[Operation, ...]] = (
    _row("/api/health/live", "Whether the process is alive", ()),
    _row("/api/health/ready", "Whether requests can be served", (), "`strict_readiness` says for which models."),
    _row("/api/status", "Server and models", (TEXT, BINARY, JSON), "`?format=` is text, binary or json."),
    _row("/api/status/{model}", "Server and one model", (TEXT, BINARY, JSON), "`?format=` is text, binary or json."),
    _row(
        "/api/infer/{model}", "Run a model on tensors", (BINARY,),
        "The header `NV-InferRequest` has an InferRequestHeader as protobuf text, and the body has the inputs' bytes. `/N` "
        "after the model names a version.",
    ),
    _row("/api/modelcontrol/{model}", "Load or unload a model", (), "The path is `load/NAME` or `unload/NAME`."),
    _row("/api/repository/index", "Names of all models", (TEXT, BINARY)),
    _row("/api/sharedmemorycontrol/{model}", "Clients' shared memory, which is not supported", ()),
    _row("/api/profile", "A profiler, which is not supported", ()),
)  # fmt: skip
