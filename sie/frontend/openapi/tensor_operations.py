"""Owns the rows of the tensor dialects' routes. Source: KServe v2 sheet; TRTIS v1 sheet."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.kserve.infer import InferBody
from sie.frontend.dialects.native.negotiate import JSON
from sie.frontend.openapi.rows import Answer, Fault, Operation

_BINARY: Final = "application/octet-stream"
_TEXT: Final = "text/plain"
_KSERVE: Final = "KServe v2"
_V1: Final = "TensorRT Inference Server v1"
TAGS: Final = {
    _KSERVE: 'Tensors, in the Open Inference Protocol. Every error is `{"error": text}`.',
    _V1: "Tensors, in the older API. Every failure is a 400 without a body; `NV-Status` says why.",
}
_BAD: Final = Fault(400, ("INVALID_INPUT", "INPUT_TOO_LONG"), "The request is wrong; the message names the field.")
_MISSING: Final = Fault(404, ("MODEL_NOT_FOUND",), "No such model, version or path.")
_STALLED: Final = Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline.")
_TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_body_bytes`, as sent or decompressed.")
_INFER: Final = (
    _BAD, _MISSING, _STALLED, _TOO_LARGE,
    Fault(415, ("UNSUPPORTED_MEDIA_TYPE",), "`Content-Encoding` is neither gzip nor deflate."),
    Fault(422, ("POISON_INPUT",), "This input was running each time a worker died."),
    Fault(500, ("INFERENCE_ERROR",), "Something of the server's failed."),
    Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed."),
    Fault(503, ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "SHUTTING_DOWN"), "Not now; ask again."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the answer was there."),
)  # fmt: skip
_CONTROL: Final = (
    _BAD, _STALLED, _TOO_LARGE,
    Fault(503, ("NOT_ALLOWED",), "`repository_control` is not `explicit`."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed first; the load goes on."),
)  # fmt: skip
_UNSUPPORTED: Final = (Fault(400, ("UNSUPPORTED",), "This is not supported."),)
_REGION: Final = (*_UNSUPPORTED, _MISSING, Fault(405, ("METHOD_NOT_ALLOWED",), "Not the method of this path."))
_SETTINGS: Final = (_BAD, _STALLED, _TOO_LARGE)
_MODEL: Final = "densenet"


def _v2(template: str, summary: str, answer: Answer | str, faults: tuple[Fault, ...] = ()) -> Operation:
    model = _MODEL if "{model}" in template else ""
    answers = (Answer(200, answer) if isinstance(answer, str) else answer,)
    return Operation(template=template, tag=_KSERVE, summary=summary, answers=answers, faults=faults, model=model)


def _bare(description: str) -> Answer:
    return Answer(200, description, ())


def _list(description: str) -> Answer:
    return Answer(200, description, is_list=True)


def _v1(template: str, summary: str, media: tuple[str, ...], description: str = "") -> Operation:
    model = _MODEL if "{model}" in template else ""
    return Operation(
        template=template, tag=_V1, summary=summary, description=description, model=model,
        answers=(Answer(200, "With `NV-Status: code: SUCCESS ...`.", media), Answer(400, "`NV-Status` says why.", ())),
    )  # fmt: skip


OPERATIONS: Final[tuple[Operation, ...]] = (
    _v2("/v2", "The server", "Its name, version and extensions."),
    _v2("/v2/health/live", "Whether the process lives", _bare("It does.")),
    Operation(
        template="/v2/health/ready", tag=_KSERVE, summary="Whether requests can be served",
        answers=(_bare("They can."), Answer(503, "It starts or stops.", (JSON,))),
    ),
    _v2("/v2/models/stats", "Figures of every model", "What each version has done."),
    _v2("/v2/models/{model}", "A model's inputs and outputs", "Its metadata.", (_MISSING,)),
    _v2("/v2/models/{model}/ready", "Whether a model can be asked", _bare("It can."), (_MISSING, _INFER[-2])),
    _v2("/v2/models/{model}/config", "A model's configuration", "ModelConfig as JSON.", (_MISSING,)),
    _v2("/v2/models/{model}/stats", "A model's figures", "What its versions have done.", (_BAD, _MISSING)),
    Operation(
        template="/v2/models/{model}/infer",
        tag=_KSERVE,
        summary="Run a model on tensors",
        description="Tensors are JSON, or binary behind the JSON, whose length the header "
        "`Inference-Header-Content-Length` tells, both ways. `/versions/N` before `/infer` names a version.",
        request=InferBody,
        model=_MODEL,
        example={"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}]},
        answers=(Answer(200, "The outputs.", (JSON, _BINARY)),),
        faults=_INFER,
    ),
    _v2("/v2/repository/index", "Every version of every model, with its state", _list("All of them."), (_BAD, _STALLED, _TOO_LARGE)),
    _v2("/v2/repository/models/{model}/load", "Load a model of a repository", _bare("It is loaded."), _CONTROL),
    _v2("/v2/repository/models/{model}/unload", "Unload a model of a repository", _bare("It has begun."), _CONTROL),
    _v2("/v2/repository/{model}", "The index of one repository, which is that of all", _list("All of them."), _REGION),
    _v2("/v2/systemsharedmemory/status", "Regions of clients' shared memory", _list("Always empty.")),
    _v2("/v2/systemsharedmemory/unregister", "Forget all regions", _bare("There are none.")),
    _v2("/v2/systemsharedmemory/region/{model}", "Register or forget a region", _bare("There is none to forget."), _REGION),
    _v2("/v2/cudasharedmemory/status", "Regions of clients' device memory", _list("Always empty.")),
    _v2("/v2/cudasharedmemory/unregister", "Forget all regions", _bare("There are none.")),
    _v2("/v2/cudasharedmemory/region/{model}", "Register or forget a region", _bare("There is none to forget."), _REGION),
    _v2("/v2/trace/setting", "Trace settings", "All of them; POST changes nothing.", _SETTINGS),
    _v2(
        "/v2/models/{model}/trace/setting", "A model's trace settings",
        "All of them; POST changes nothing.", (*_SETTINGS, _MISSING),
    ),
    _v2("/v2/logging", "Log settings", "All of them; POST changes nothing.", _SETTINGS),
    _v2("/v1/config", "The state of every version", "As OpenVINO Model Server has it."),
    Operation(
        template="/v1/config/reload", tag=_KSERVE, summary="Read the repositories anew",
        answers=(Answer(200, "Nothing had changed.", (JSON,)), Answer(201, "Something had.", (JSON,))),
        faults=_CONTROL,
    ),
    _v1("/api/health/live", "Whether the process lives", ()),
    _v1("/api/health/ready", "Whether requests can be served", (), "`strict_readiness` says for which models."),
    _v1("/api/status", "Server and models", (_TEXT, _BINARY, JSON), "`?format=` is text, binary or json."),
    _v1("/api/status/{model}", "Server and one model", (_TEXT, _BINARY, JSON), "`?format=` is text, binary or json."),
    _v1(
        "/api/infer/{model}", "Run a model on tensors", (_BINARY,),
        "The header `NV-InferRequest` has an InferRequestHeader as protobuf text, the body the inputs' bytes. `/N` behind "
        "the model names a version.",
    ),
    _v1("/api/modelcontrol/{model}", "Load or unload a model", (), "The path is `load/NAME` or `unload/NAME`."),
    _v1("/api/repository/index", "Names of all models", (_TEXT, _BINARY)),
    _v1("/api/sharedmemorycontrol/{model}", "Clients' shared memory, which is not supported", ()),
    _v1("/api/profile", "A profiler, which is not supported", ()),
)  # fmt: skip
