"""Turns a typed request of any dialect into a prompt, and the generated tokens into events.

    dialect ─► GenerateRequest ─► templates ─► prompt ─► vocabulary ─► run ═► engine ═► worker
    dialect ◄─ GenerateEvent ◄── reader ◄── stops ◄── detokenise ◄── run ◄═ token_stream ◄═ worker

`sie.frontend.routes.generate` has the routes, and `sie.frontend.http.stream` writes events as they come. A dialect
knows only `GenerateRequest`, the events and `GenerateReply`.
"""
