"""Text generation on a worker: the engine decides what runs, and a loaded model computes it.

The engine (`model_engine`, with the pure `kv` and `planner`) schedules steps and tracks their state. A `GenerateRunner`
(`sie.workers.model_api`) computes them, and holds only the weights and the key/value cache. Only the loop's thread
calls either of them, except `compile_grammar`.
"""
