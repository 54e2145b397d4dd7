"""Owns one row for each route: what it is for, what it takes, what it answers and how it can fail.

The rows stand in the order of the document and are keyed by the template of `sie.frontend.http.routes`; tests hold that no
route is without one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sie.frontend.dialects.cohere.rerank import RerankBody
from sie.frontend.dialects.native.encode import EncodeBody
from sie.frontend.dialects.native.extract import ExtractBody
from sie.frontend.dialects.native.negotiate import JSON, MSGPACK
from sie.frontend.dialects.native.score import ScoreBody
from sie.frontend.dialects.openai.embeddings import EmbeddingsBody
from sie.frontend.models.admin import ModelBody
from sie.frontend.openapi import (
    generation_operations,
    messages_operations,
    path_operations,
    replies,
    responses_operations,
    tensor_operations,
)
from sie.frontend.openapi.rows import Answer, Fault, Operation

HTML: Final = "text/html"
TEXT: Final = "text/plain"


TAGS: Final = {
    "Inference": "Ask a model. Bodies may be JSON or, on the SIE routes, msgpack.",
    "Models": "What is served, and for administrators: what is in memory.",
    "Operation": "Health, metrics and this document.",
    **generation_operations.TAGS,
    **messages_operations.TAGS,
    **responses_operations.TAGS,
    **tensor_operations.TAGS,
}

_BAD: Final = Fault(400, ("INVALID_INPUT", "INPUT_TOO_LONG"), "The request is wrong; the message names the field.")
_NOT_FOUND: Final = Fault(404, ("MODEL_NOT_FOUND",), "No such model; the message names near ones.")
_STALLED: Final = Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline.")
_TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_body_bytes`.")
_POISON: Final = Fault(422, ("POISON_INPUT",), "This input was running each time a worker died.")
_SCHEMA: Final = Fault(
    422, ("INVALID_INPUT", "POISON_INPUT"), "The body breaks the schema; or the input was running when workers died."
)
_FAILED: Final = Fault(
    500,
    ("INFERENCE_ERROR",),
    "Something of the server's failed, or the model gave a value that is not finite.",
)
_NO_LOAD: Final = Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed.")
_NOT_NOW: Final = Fault(
    503,
    (
        "QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "LORA_LOADING", "RESOURCE_EXHAUSTED", "WORKER_LOST",
        "SHUTTING_DOWN",
    ),
    "Not now; `Retry-After` says when to ask again.",
)  # fmt: skip
_LATE: Final = Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the answer was there.")
_FORBIDDEN: Final = Fault(
    403, ("FORBIDDEN",), "Not for this client; the message names the setting or the API key's scope that decides."
)
ACCESS: Final = (
    Fault(401, ("UNAUTHORIZED",), "The server asks for an API key, and none that it knows came."),
    _FORBIDDEN,
    Fault(429, ("RATE_LIMIT",), "A limit of the API key is reached; `Retry-After` says when to ask again."),
)
"""How every route can fail that asks for a key where there are keys."""
_INFERENCE: Final = (_BAD, _NOT_FOUND, _STALLED, _TOO_LARGE, _POISON, _FAILED, _NO_LOAD, _NOT_NOW, _LATE)
_NO_DEFAULT: Final = Fault(404, ("MODEL_NOT_FOUND",), "No such model, or none named and no default.")
_OPENAI: Final = (_BAD, _NO_DEFAULT, _STALLED, _TOO_LARGE, _SCHEMA, _FAILED, _NO_LOAD, _NOT_NOW, _LATE)
_ADMIN: Final = (
    Fault(400, ("INVALID_INPUT",), 'The body is not `{"model_id": text}`.'),
    _FORBIDDEN,
    Fault(404, ("MODEL_NOT_FOUND",), "No such model.", replies.ModelStatus),
    _STALLED,
    _TOO_LARGE,
    _FAILED,
    Fault(502, ("MODEL_LOAD_FAILED",), "It could not be loaded.", replies.ModelStatus),
    _LATE,
)
_BOTH: Final = (JSON, MSGPACK)
_NEGOTIATED: Final = (
    "The answer is msgpack unless `Accept` names `application/json` and no msgpack type; errors are always JSON. "
    "In msgpack an array of numbers is a map in the convention of msgpack-numpy."
)


def _admin(verb: str, summary: str, description: str) -> Operation:
    moving = Answer(202, "The deadline came first; it goes on.", type=replies.ModelStatus)
    return Operation(
        template=f"/v1/models/{verb}",
        tag="Models",
        summary=summary,
        description=description,
        request=ModelBody,
        example={"model_id": "org/model"},
        answers=(
            Answer(200, "How the model is now.", type=replies.ModelStatus),
            *(() if verb == "status" else (moving,)),
        ),
        faults=_ADMIN,
    )


def _text(template: str, summary: str, *answers: Answer) -> Operation:
    return Operation(template=template, tag="Operation", summary=summary, answers=answers)


_OK: Final = Answer(200, "It lives.", (TEXT,))
_DOCUMENT: Final = Answer(200, "An OpenAPI document, version 3.1.")

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/encode/{model}",
        tag="Inference",
        summary="Vectors of texts or images",
        description=_NEGOTIATED,
        request=EncodeBody,
        media=_BOTH,
        model="sentence-transformers/all-MiniLM-L6-v2",
        example={"items": [{"id": "a", "text": "A quick brown fox"}], "params": {"output_dtype": "float16"}},
        answers=(Answer(200, "A result for each item.", _BOTH, replies.EncodeAnswer),),
        faults=_INFERENCE,
        has_timing=True,
    ),
    Operation(
        template="/v1/score/{model}",
        tag="Inference",
        summary="Scores of items against a query",
        description=_NEGOTIATED,
        request=ScoreBody,
        media=_BOTH,
        model="BAAI/bge-reranker-v2-m3",
        example={"query": {"text": "what is a fox?"}, "items": [{"text": "A quick brown fox"}, {"text": "A stone"}]},
        answers=(Answer(200, "A score for each item, best first.", _BOTH, replies.ScoreAnswer),),
        faults=_INFERENCE,
        has_timing=True,
    ),
    Operation(
        template="/v1/extract/{model}",
        tag="Inference",
        summary="Entities, relations and classes of texts, objects in images",
        description=_NEGOTIATED,
        request=ExtractBody,
        media=_BOTH,
        model="dslim/bert-base-NER",
        example={"items": [{"text": "Ada met Charles in London"}], "params": {"labels": ["PER", "LOC"]}},
        answers=(Answer(200, "What was found in each item.", _BOTH, replies.ExtractAnswer),),
        faults=_INFERENCE,
        has_timing=True,
    ),
    Operation(
        template="/v1/rerank",
        tag="Inference",
        summary="Documents ranked for a query",
        description="In Cohere's form. A model that loads is waited for.",
        request=RerankBody,
        example={
            "model": "BAAI/bge-reranker-v2-m3",
            "query": "what is a fox?",
            "documents": ["A quick brown fox", "A stone"],
            "top_n": 1,
        },
        answers=(Answer(200, "The best documents, best first.", type=replies.RerankAnswer),),
        faults=_OPENAI,
        has_timing=True,
    ),
    Operation(
        template="/v1/embeddings",
        tag="Inference",
        summary="Embeddings, in OpenAI's form",
        description="Dense float32 vectors. A model that loads is waited for.",
        request=EmbeddingsBody,
        example={"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["A quick brown fox", "jumps over"]},
        answers=(Answer(200, "An embedding for each input.", type=replies.EmbeddingsAnswer),),
        faults=_OPENAI,
    ),
    Operation(
        template="/v1/models",
        tag="Models",
        summary="Every model, with its state",
        answers=(Answer(200, "All models.", type=replies.ModelList),),
    ),
    Operation(
        template="/v1/models/{model}",
        tag="Models",
        summary="One model",
        model="sentence-transformers/all-MiniLM-L6-v2",
        answers=(Answer(200, "The model.", type=replies.ModelInfo),),
        faults=(msgspec.structs.replace(_NOT_FOUND, type=replies.ModelMissing),),
    ),
    _admin("load", "Load a model", "Answers when it is loaded. `admin_from` says who may."),
    _admin("unload", "Unload a model", "What is queued for it is answered first. `admin_from` says who may."),
    _admin("reload", "Load a model anew", "Its files are read again. `admin_from` says who may."),
    _admin("status", "How a model is", "`admin_from` says who may ask."),
    Operation(
        template="/v1/admin",
        tag="Models",
        summary="Whether this client may manage models",
        answers=(Answer(200, "It may.", type=replies.AdminAllowed),),
        faults=(_FORBIDDEN,),
    ),
    Operation(
        template="/v1/watch-ticket",
        tag="Operation",
        summary="A ticket for the live feed",
        description="Opens `/ws/status?ticket=...` for half a minute: in a browser, which can set no header there.",
        answers=(Answer(200, "The ticket; empty where no API key is asked for.", type=replies.WatchTicket),),
    ),
    _text("/healthz", "Whether the process lives", _OK),
    _text(
        "/readyz",
        "Whether requests can be served",
        Answer(200, "`ok`: every model named at the start is loaded.", (TEXT,)),
        Answer(503, "`not ready`: it starts or stops.", (TEXT,)),
    ),
    _text(
        "/health",
        "Whether the process lives, and what it is",
        Answer(200, "`OK`, or where `Accept` has JSON `type`: `worker`, as this is no gateway.", (TEXT, JSON)),
    ),
    _text("/metrics", "Counters for Prometheus", Answer(200, "Its text format, version 0.0.4.", (TEXT,))),
    _text("/", "A dashboard for browsers", Answer(200, "The page if `Accept` has it, else `OK`.", (HTML, TEXT))),
    _text("/docs", "This document as a page", Answer(200, "A page that fetches nothing from elsewhere.", (HTML,))),
    _text("/openapi.json", "This document", _DOCUMENT),
    _text("/api-doc/openapi.json", "This document, where other servers have it", _DOCUMENT),
    *generation_operations.OPERATIONS,
    *messages_operations.OPERATIONS,
    *responses_operations.OPERATIONS,
    *path_operations.OPERATIONS,
    *tensor_operations.OPERATIONS,
)
