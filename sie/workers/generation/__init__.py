"""Text generation on a worker: the engine decides what runs, and a loaded model computes it.

The engine (`engine`, with the pure `kv` and `planner`) decides what runs and keeps the books. A `GenerateRunner`
(`sie.workers.model_api`) computes, and keeps nothing but the weights and the memory of keys and values. Both are called
from the loop's thread only, but for `compile_grammar`.
"""
