"""The benchmarks. `python -m bench NAME` measures this server, its parts, its machine and its peers (README.md)."""
