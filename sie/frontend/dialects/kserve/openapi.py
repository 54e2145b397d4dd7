"""Defines the OpenAPI rows of KServe v2, and the types of its answers and errors. Source: KServe v2 sheet."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.kserve.generate import TextInputBody
from sie.frontend.dialects.kserve.infer import InferBody
from sie.frontend.dialects.operation import (
    BAD,
    BINARY,
    EVENTS,
    GENERATE_FAULTS,
    INTERNAL,
    JSON,
    LATE,
    NO_LOAD,
    POISON,
    STALLED,
    Answer,
    Fault,
    Operation,
    Reply,
)


class TextOutput(Reply, kw_only=True):
    id: str | UnsetType = UNSET
    model_name: str
    model_version: str
    text_output: str


class TensorError(Struct, kw_only=True):
    error: str


_TAG: Final = "KServe v2"
TAGS: Final = {_TAG: 'Tensors, in the Open Inference Protocol. Every error is `{"error": text}`.'}
_MISSING: Final = Fault(404, ("MODEL_NOT_FOUND",), "The model, version or path was not found.")
_TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_body_bytes`, as sent or decompressed.")
_NOT_NOW: Final = Fault(
    503,
    ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "SHUTTING_DOWN"),
    "The server cannot serve this now; retry.",
)
_INFER: Final = (
    BAD, _MISSING, STALLED, _TOO_LARGE,
    Fault(415, ("UNSUPPORTED_MEDIA_TYPE",), "`Content-Encoding` is neither gzip nor deflate."),
    POISON, INTERNAL, NO_LOAD, _NOT_NOW, LATE,
)  # fmt: skip
_CONTROL: Final = (
    BAD, STALLED, _TOO_LARGE,
    Fault(503, ("NOT_ALLOWED",), "`repository_control` is not `explicit`."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the load ended; the load continues."),
)  # fmt: skip
_UNSUPPORTED: Final = (Fault(400, ("UNSUPPORTED",), "This is not supported."),)
_REGION: Final = (
    *_UNSUPPORTED,
    _MISSING,
    Fault(405, ("METHOD_NOT_ALLOWED",), "The path does not support this method."),
)
_SETTINGS: Final = (BAD, STALLED, _TOO_LARGE)
_MODEL: Final = "densenet"
_TEXT_EXAMPLE: Final = {"text_input": "A fox is", "parameters": {"max_tokens": 16}}


def _row(template: str, summary: str, answer: Answer | str, faults: tuple[Fault, ...] = ()) -> Operation:
    model = _MODEL if "{model}" in template else ""
    answers = (Answer(200, answer) if isinstance(answer, str) else answer,)
    return Operation(template=template, tag=_TAG, summary=summary, answers=answers, faults=faults, model=model)


def _bare(description: str) -> Answer:
    return Answer(200, description, ())


def _list(description: str) -> Answer:
    return Answer(200, description, is_list=True)


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v2/models/{model}/generate",
        tag=_TAG,
        summary="Text generation, as in Triton",
        description="The request does not wait for a model that is loading. For a model that does not generate text, members "
        "with the names of its inputs are the inputs, and its outputs are members of the answer.",
        request=TextInputBody,
        model="org/model",
        example=_TEXT_EXAMPLE,
        answers=(Answer(200, "The text.", (JSON,), TextOutput),),
        faults=GENERATE_FAULTS,
    ),
    Operation(
        template="/v2/models/{model}/generate_stream",
        tag=_TAG,
        summary="Text generation as a stream",
        description="Each event has the form of `/generate`'s answer, with a piece of the text. With `stream` false, one event "
        "has the whole text.",
        request=TextInputBody,
        model="org/model",
        example=_TEXT_EXAMPLE,
        answers=(Answer(200, "Events. An error after the first event is an event, too.", (EVENTS,)),),
        faults=GENERATE_FAULTS,
    ),
    _row("/v2", "The server", "Its name, version and extensions."),
    _row("/v2/health/live", "Whether the process is alive", _bare("It is.")),
    Operation(
        template="/v2/health/ready", tag=_TAG, summary="Whether requests can be served",
        answers=(_bare("They can."), Answer(503, "The server is starting or stopping.", (JSON,))),
    ),
    _row("/v2/models/stats", "Statistics of every model", "The statistics of each version."),
    _row("/v2/models/{model}", "A model's inputs and outputs", "Its metadata.", (_MISSING,)),
    _row("/v2/models/{model}/ready", "Whether a model is ready", _bare("It is."), (_MISSING, _NOT_NOW)),
    _row("/v2/models/{model}/config", "A model's configuration", "ModelConfig as JSON.", (_MISSING,)),
    _row("/v2/models/{model}/stats", "A model's statistics", "The statistics of its versions.", (BAD, _MISSING)),
    Operation(
        template="/v2/models/{model}/infer",
        tag=_TAG,
        summary="Run a model on tensors",
        description="In requests and answers, tensors are JSON, or binary data after the JSON. Then the header "
        "`Inference-Header-Content-Length` has the length of the JSON. `/versions/N` before `/infer` names a version.",
        request=InferBody,
        model=_MODEL,
        example={"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}]},
        answers=(Answer(200, "The outputs.", (JSON, BINARY)),),
        faults=_INFER,
        may_cut=True,
    ),
    _row("/v2/repository/index", "Every version of every model, with its state", _list("All of them."), (BAD, STALLED, _TOO_LARGE)),
    _row("/v2/repository/models/{model}/load", "Load a model of a repository", _bare("It is loaded."), _CONTROL),
    _row("/v2/repository/models/{model}/unload", "Unload a model of a repository", _bare("The unload has begun."), _CONTROL),
    _row("/v2/repository/{model}", "The index of one repository, which is the index of all", _list("All of them."), _REGION),
    _row("/v2/systemsharedmemory/status", "Regions of clients' shared memory", _list("Those of the same API key.")),
    _row("/v2/systemsharedmemory/unregister", "Unregister all regions", _bare("The API key has no region.")),
    _row("/v2/systemsharedmemory/region/{model}", "Register, show or unregister a region", _bare("It is done."), (BAD, *_REGION, STALLED, _TOO_LARGE)),
    _row("/v2/cudasharedmemory/status", "Regions of clients' device memory", _list("An empty list.")),
    _row("/v2/cudasharedmemory/unregister", "Unregister all regions", _bare("No region is registered.")),
    _row("/v2/cudasharedmemory/region/{model}", "Register or unregister a region", _bare("No region is registered."), _REGION),
    _row("/v2/trace/setting", "Trace settings", "All of them; POST changes nothing.", _SETTINGS),
    _row(
        "/v2/models/{model}/trace/setting", "A model's trace settings",
        "All of them; POST changes nothing.", (*_SETTINGS, _MISSING),
    ),
    _row("/v2/logging", "Log settings", "All of them; POST changes nothing.", _SETTINGS),
    _row("/v1/config", "The state of every version", "In the form of OpenVINO Model Server."),
    Operation(
        template="/v1/config/reload", tag=_TAG, summary="Read the repositories again",
        answers=(Answer(200, "Nothing has changed.", (JSON,)), Answer(201, "Something has changed.", (JSON,))),
        faults=_CONTROL,
    ),
)  # fmt: skip
