"""The load generator behind `sie bench` and the scripts in `bench/`: makes a load and counts the answers.

`texts` makes the inputs, `dialects` and `tensor_dialects` make requests of them and read the answers, `channels` and
`grpc_channel` say where an answer ends, `arrivals` when requests are due, `generator` sends, `runs` and `histogram`
count, `judge` tells right from wrong, `plan` puts it together for one command line. Requests are built before a run and
answers judged after it: neither is part of what is measured. Imports no part of the server but its protobuf messages.
"""

from __future__ import annotations

from typing import Final

DIALECTS: Final = ("sie-encode", "sie-score", "sie-extract", "openai", "kserve", "trtis", "kserve-grpc", "trtis-grpc")
"""Names of the dialects; `plan.make_dialect` knows what they stand for."""
