"""Text generation in a frontend: a typed request of any dialect to a prompt, and its tokens to events.

    dialect ─► GenerateRequest ─► templates ─► prompt ─► vocabulary ─► run ═► engine ═► worker
    dialect ◄─ GenerateEvent ◄── reader ◄── stops ◄── detokenise ◄── run ◄═ token_stream ◄═ worker

`sie.frontend.routes.generate` has the routes, `sie.frontend.http.stream` writes events as they come. A dialect knows
`GenerateRequest`, the events and `GenerateReply`, and nothing of the rest.
"""
