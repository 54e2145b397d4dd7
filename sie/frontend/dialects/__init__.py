"""Holds one package for each API: bytes to a typed request, a typed reply to bytes, an error to a body.

A package's `openapi.py` holds the API's rows of the OpenAPI document, with the types of `operation.py`. Only
`sie.frontend.openapi` imports it. A dialect never sees a ring, a socket or the clock. It may use `openai`, because
several APIs share its forms, but no other dialect. `trtis` also uses `kserve`.
"""
