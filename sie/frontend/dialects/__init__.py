"""Holds one package for each API: bytes to a typed request, a typed reply to bytes, an error to a body.

A package's `dialect.py` describes the API to the rest of the frontend, with the types of `description.py`; `registry.py`
lists these descriptions. Its `openapi.py` holds the rows of the OpenAPI document, with the types of `operation.py`, and
its `words.toml` the meaning of each field. The wire modules import none of these. A dialect never sees a ring, a socket
or the clock. It may use `openai`, because several APIs share its forms, but no other dialect. `trtis` also uses `kserve`.
"""
