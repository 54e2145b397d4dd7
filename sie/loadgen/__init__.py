"""The load generator of `sie bench` and the scripts in `bench/`: makes a load and counts the answers.

`sample_texts` makes the inputs. `dialects` and `tensor_dialects` build requests from them and read the answers.
`channels` and `grpc_channel` find the end of an answer. `arrivals` plans when requests are due. `generator` sends,
`runs` and `histogram` count, and `judge` compares answers. `plan` combines them for one command line. Requests are
built before a run and answers are judged after it, so the measurement includes neither. From the server, it imports
only the protobuf messages.
"""

from __future__ import annotations

from typing import Final

DIALECTS: Final = ("sie-encode", "sie-score", "sie-extract", "openai", "kserve", "trtis", "kserve-grpc", "trtis-grpc")
"""Names of the dialects, as `plan.make_dialect` reads them."""
