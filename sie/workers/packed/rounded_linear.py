"""Computes an encoder's linear layers in eight bits: rounded weights and inputs, exact sums, float results.

A weight is an integer from -127 to 127 times its output's scale. A row of inputs is rounded on arrival to 256 even
steps from its minimum to its maximum. The compiled encoder computes the same (`sie/native/src/products_int8.h`). This
torch version is its reference. It also serves steps with an adapter and hosts without kernels, and is slower than float
layers.

Rows have their own minimum, not only a scale, because outputs of GELU are nearly all above zero, and a few values of a
hidden state are far from the others on one side. On MiniLM that halves the loss of rounding around zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_INPUTS = (2**31 - 1) // (255 * 127)
"""With more inputs, a sum of products could exceed 32 bits."""
_STEPS = 255
_LEAST_RANGE = 1e-30
"""A row with a smaller range is treated as its minimum, because its steps would have no reciprocal."""


class RoundedLinear(nn.Module):
    """A linear layer in eight bits, in place of `nn.Linear`. Converting a model leaves its buffers unchanged."""

    numbers: Tensor
    """(outputs, inputs) int8."""
    scales: Tensor
    """(outputs,) float32."""
    sums: Tensor
    """(outputs,) float32: the sum of each output's weights."""
    bias: Tensor | None
    """(outputs,) float32."""

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of a layer. The layer itself is not kept."""
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        numbers = (weight / scales[:, None]).round()
        bias: Tensor | None = linear.bias  # torch's annotation omits None
        self.register_buffer("numbers", numbers.to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("sums", numbers.sum(1) * scales)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def nbytes(self) -> int:
        """The bytes of its weights."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., outputs) for (..., inputs), in the format of the input.

        A row with a non-finite value gives only non-finite outputs.
        """
        wide = states.float()
        low = wide.amin(-1, keepdim=True)
        extent = wide.amax(-1, keepdim=True) - low
        factor = torch.where(extent > _LEAST_RANGE, _STEPS / extent, 0)
        steps = ((wide - low) * factor).round_()
        # In float32, whose sums of such integers are exact up to 2**24: oneDNN's own product of bytes saturates in 16 bits
        # on processors without VNNI, which use this path.
        products = nn.functional.linear(steps, self.numbers.float())
        found = products * (extent / _STEPS * self.scales) + low * self.sums
        return (found if self.bias is None else found + self.bias).to(states.dtype)
