"""Defines the fallbacks of a loaded model: the slower ways in which a worker may run it, and their reasons."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

FallbackName = Literal[
    "cpu", "float32", "unpacked", "gathered_blocks", "gathered_prompts", "no_kernels", "no_graphs", "uncompiled_int8"
]

MEANINGS: Final[dict[FallbackName, str]] = {
    "cpu": "it runs on the CPU of a worker that has a GPU",
    "float32": "it computes in float32, because it does not run in 16 bits",
    "unpacked": "steps run in several batches instead of packed",
    "gathered_blocks": "keys and values are gathered before attention instead of read in place",
    "gathered_prompts": "keys and values of prompts are gathered before attention, which is not flash attention",
    "no_kernels": "layers run as the library's many small kernels",
    "no_graphs": "small steps are launched kernel by kernel instead of as CUDA graphs",
    "uncompiled_int8": "torch computes the layers of encoder_weights int8, slower than without int8",
}
"""The meaning of each fallback, as printed after `model: `."""


class Fallback(msgspec.Struct, frozen=True):
    """One fallback of a loaded model; reason is a sentence for an operator."""

    name: FallbackName
    reason: str
