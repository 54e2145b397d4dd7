"""Owns tensor requests to models that generate: `text_input` and parameters in, the whole text in `text_output`.

What they run is what `/v2/models/{model}/generate` runs, and the parameters are the same. It imports a template engine, so
it is imported by the first such request.
"""

from __future__ import annotations

from collections.abc import Callable

from sie.frontend.dialects.kserve.generate import read_parameters, text_request
from sie.frontend.engine.worker_link import Pending
from sie.frontend.generation.start import Generator
from sie.frontend.tensors.held_reply import HeldReply
from sie.ipc.messages import ModelEntry
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import ClientGone
from sie.values.tensor import Tensor, TensorReply, TensorRequest


async def generate_tensor(
    generator: Generator,
    entry: ModelEntry,
    request: TensorRequest,
    text: str,
    *,
    owner: str,
    began_ns: int,
    deadline_ns: int,
    watch: Callable[[Pending], None] | None,
) -> HeldReply:
    """Return the text that follows `text`, as a reply whose output nobody else holds.

    Raises BadRequest for a parameter at fault, and as `Generator.start` and `Run.whole` do.
    """
    given = read_parameters(request.parameters)
    run = await generator.start(
        entry, text_request([text], given, is_stream=False), deadline_ns, salt=owner.encode(),
        echoes=given.exclude_input_in_output is False,
    )  # fmt: skip
    try:
        if watch is not None:
            for pending in run.pendings:
                watch(pending)
        reply = await run.whole()
    finally:
        run.give_up(ClientGone("nobody waits for the answer any more"))
    written = "".join(run.prompts) + reply.choices[0].text
    output = Tensor("text_output", "BYTES", (1,), memoryview(frame_elements([written.encode()])))
    return HeldReply(TensorReply(model=entry.card.id, outputs=[output], timing=run.timing(began_ns)))
