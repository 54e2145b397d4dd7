"""Owns linear layers of encoders in eight bits: weights and inputs are rounded, sums are exact, and the result is a float.

A weight is an integer from -127 to 127 times its output's scale. A row of inputs is rounded when it comes: to 256 even steps
from its least value to its largest. The compiled encoder computes the same (`sie/native/src/products_int8.h`); by torch it
serves as its reference, for steps with an adapter, and where there are no kernels, and is slower than layers of floats.

Rows have a low end of their own, not only a size, because what comes out of GELU is nearly all above zero, and a few
numbers of a hidden state are far from the others on one side. On MiniLM that halves the loss of rounding around zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_INPUTS = (2**31 - 1) // (255 * 127)
"""Of more than these a sum of products could leave 32 bits."""
_STEPS = 255
_LEAST_RANGE = 1e-30
"""A row whose values lie no further apart is all its low end: its steps would have no reciprocal."""


class RoundedLinear(nn.Module):
    """A linear layer in eight bits, in place of `nn.Linear`. Its buffers stay as they are when a model is converted."""

    numbers: Tensor
    """(outputs, inputs) int8."""
    scales: Tensor
    """(outputs,) float32."""
    sums: Tensor
    """(outputs,) float32: of each output's weights."""
    bias: Tensor | None
    """(outputs,) float32."""

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of a layer; nothing of it is kept but the format that adapters beside it have."""
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        numbers = (weight / scales[:, None]).round()
        bias: Tensor | None = linear.bias  # torch's annotation leaves None out
        self.register_buffer("numbers", numbers.to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("sums", numbers.sum(1) * scales)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., outputs) for (..., inputs), in the format of the input.

        A row that holds a value which is not finite gives none that is.
        """
        wide = states.float()
        low = wide.amin(-1, keepdim=True)
        extent = wide.amax(-1, keepdim=True) - low
        factor = torch.where(extent > _LEAST_RANGE, _STEPS / extent, 0)
        steps = ((wide - low) * factor).round_()
        # In float32, whose sums of such integers are exact up to 2**24: oneDNN's own product of bytes saturates in 16 bits
        # on processors without VNNI, which are those that come here.
        products = nn.functional.linear(steps, self.numbers.float())
        found = products * (extent / _STEPS * self.scales) + low * self.sums
        return (found if self.bias is None else found + self.bias).to(states.dtype)
