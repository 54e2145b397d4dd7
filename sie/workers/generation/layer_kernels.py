"""The Triton kernels for a model's norms, rotations of queries and keys, gates, activations, and products with one row.

The library computes each with five to ten launches. In a captured step of one sequence, a layer has about forty such
launches of about two microseconds. Together they take half as long as its products. All kernels compute in float32 and round once. The
speed of a product with one row is limited by reading its weights, and the library's kernel may be designed for more
rows.
Imported only if Triton is installed, like `kernels`.
"""

# Triton is installed only with a GPU, and the arguments of a call decide its functions' types.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 2048
_GATES = 1024
"""For each program."""
_OUTPUTS, _INPUTS = 4, 1024
"""For each program and iteration: 8 KiB of weights in flight, 64 bytes a thread."""


def normalise(states: Tensor, factors: Tensor, epsilon: float) -> Tensor:
    """Divide each row of states (..., d) by the root of its mean square plus epsilon; multiply by factors (d,) float32.

    Source: Root Mean Square Layer Normalization, arXiv 1910.07467, equation 4.
    """
    width = states.shape[-1]

    is_heads = states.dim() == 4 and states.shape[0] == 1  # (1, heads, tokens, width), or tokens first
    rows = states[0] if is_heads else states.reshape(-1, 1, width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _normalise[rows.shape[0] * rows.shape[1],](
        rows, factors, out, rows.shape[1], rows.stride(0), rows.stride(1), epsilon,
        WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=8 if width > _WIDE else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["inner"])
def _normalise(
    states, factors, out, inner, outer_stride, inner_stride, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Normalise one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    place = (row // inner) * outer_stride + (row % inner) * inner_stride + column
    values = tl.load(states + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    normed = values * scale * tl.load(factors + column, mask=column < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=column < WIDTH)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head's number pairs half a width apart, (1, h, t, d) and (1, h_kv, t, d), by cos and sin (1, t, d).

    Returns both as new tensors, tokens before heads in memory. Source: RoFormer, arXiv 2104.09864, section 3.4.2;
    GPT-NeoX for the choice of pairs.
    """
    _, num_heads, num_tokens, width = query.shape
    num_keys = key.shape[1]
    query, key, cos, sin = (
        states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, cos, sin)
    )
    found = query.new_empty(1, num_tokens, num_heads + num_keys, width)
    _rotate[num_tokens, num_heads + num_keys](
        query, key, cos, sin, found, query.stride(1), query.stride(2), key.stride(1), key.stride(2), cos.stride(1),
        sin.stride(1), HEADS=num_heads, ALL_HEADS=num_heads + num_keys, HALF=width // 2,
        PADDED=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    both = found.transpose(1, 2)
    return both[:, :num_heads], both[:, num_heads:]


@triton.jit
def _rotate(
    query, key, cos, sin, out, query_head, query_token, key_head, key_token, cos_token, sin_token,
    HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    is_own = column < HALF
    if head < HEADS:
        source = query + head * query_head + token * query_token + column
    else:
        source = key + (head - HEADS) * key_head + token * key_token + column
    first = tl.load(source, mask=is_own, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_own, other=0.0).to(tl.float32)
    cosine, sine = cos + token * cos_token + column, sin + token * sin_token + column
    rotated = first * tl.load(cosine, mask=is_own, other=0.0) - second * tl.load(sine, mask=is_own, other=0.0)
    other = second * tl.load(cosine + HALF, mask=is_own, other=0.0) + first * tl.load(
        sine + HALF, mask=is_own, other=0.0
    )
    target = out + (token * ALL_HEADS + head) * (2 * HALF) + column
    tl.store(target, rotated.to(out.dtype.element_ty), mask=is_own)
    tl.store(target + HALF, other.to(out.dtype.element_ty), mask=is_own)


def gate(gates: Tensor, states: Tensor, *, is_silu: bool) -> Tensor:
    """Return states (..., d) times SiLU of gates (..., d), or times the tanh approximation of GELU."""
    width = states.shape[-1]
    gates, rows = gates.reshape(-1, width), states.reshape(-1, width)
    gates, rows = (own if own.stride(1) == 1 else own.contiguous() for own in (gates, rows))
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _gate[rows.shape[0], triton.cdiv(width, _GATES)](
        gates, rows, out, gates.stride(0), rows.stride(0), WIDTH=width, BLOCK=_GATES, IS_SILU=is_silu
    )
    return out


@triton.jit
def _gate(gates, states, out, gates_row, states_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    """Gate some numbers of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(gates + row * gates_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if IS_SILU:
        opened = own / (1.0 + tl.exp(-own))
    else:
        # tanh(x) is 2 sigmoid(2 x) - 1, so the approximation is x sigmoid(2 x').
        opened = own / (1.0 + tl.exp(-1.5957691216057308 * (own + 0.044715 * own * own * own)))
    values = tl.load(states + row * states_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (opened * values).to(out.dtype.element_ty), mask=column < WIDTH)


def activate(states: Tensor, bias: Tensor | None, *, is_exact: bool) -> Tensor:
    """Return GELU of states (..., d) plus bias (d,), if given: by the error function, or in its tanh approximation.

    Source: Gaussian Error Linear Units, arXiv 1606.08415, section 2.
    """
    width = states.shape[-1]
    rows = states.reshape(-1, width).contiguous()
    out = torch.empty_like(rows)
    _activate[rows.shape[0], triton.cdiv(width, _GATES)](
        rows,
        rows if bias is None else bias,
        out,
        WIDTH=width,
        BLOCK=_GATES,
        IS_EXACT=is_exact,
        HAS_BIAS=bias is not None,
    )
    return out.view(states.shape)


@triton.jit
def _activate(
    states, bias, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_EXACT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Activate some numbers of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(states + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if IS_EXACT:
        active = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    else:  # as in `_gate`
        active = values / (1.0 + tl.exp(-1.5957691216057308 * (values + 0.044715 * values * values * values)))
    tl.store(out + row * WIDTH + column, active.to(out.dtype.element_ty), mask=column < WIDTH)


def add_and_normalise(
    states: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float
) -> Tensor:
    """Return the layer norm of states plus residual, both (..., d), plus bias (d,), if given.

    weight and shift (d,) are applied to the normalised sum. Source: Layer Normalization, arXiv 1607.06450, equation 4.
    """
    width = states.shape[-1]
    rows, others = (own.reshape(-1, width).contiguous() for own in (states, residual.expand_as(states)))
    out = torch.empty_like(rows)
    _add_and_normalise[rows.shape[0],](
        rows, rows if bias is None else bias, others, weight, shift, out, epsilon, WIDTH=width,
        PADDED=triton.next_power_of_2(width), HAS_BIAS=bias is not None, num_warps=8 if width > _WIDE else 4,
    )  # fmt: skip
    return out.view(states.shape)


@triton.jit
def _add_and_normalise(
    states, bias, residual, weight, shift, out, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add and normalise one row, which stays in registers: the deviations need a mean first."""
    place = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    is_own = column < WIDTH
    values = tl.load(states + place + column, mask=is_own, other=0.0).to(tl.float32)
    values += tl.load(residual + place + column, mask=is_own, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=is_own, other=0.0).to(tl.float32)
    deviations = tl.where(is_own, values - tl.sum(values, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(deviations * deviations, 0) / WIDTH + epsilon)
    factors = tl.load(weight + column, mask=is_own, other=0.0).to(tl.float32)
    normed = deviations * scale * factors + tl.load(shift + column, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out + place + column, normed.to(out.dtype.element_ty), mask=is_own)


def multiply_row(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer's outputs (..., n) for one row of inputs: (..., k) with k numbers in total.

    weight (n, k) has contiguous rows. Each row is read from memory once, and this takes nearly all of the time.
    """
    num_outputs, width = weight.shape
    states = states if states.stride(-1) == 1 else states.contiguous()
    out = torch.empty(*states.shape[:-1], num_outputs, dtype=states.dtype, device=states.device)
    _multiply_row[triton.cdiv(num_outputs, _OUTPUTS),](
        states, weight, out if bias is None else bias, out, num_outputs,
        WIDTH=width, OUTPUTS=_OUTPUTS, BLOCK=_INPUTS, HAS_BIAS=bias is not None,
    )  # fmt: skip
    return out


@triton.jit
def _multiply_row(
    states, weight, bias, out, num_outputs,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one row."""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_own = output < num_outputs
    sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        own = tl.load(states + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        weights = tl.load(
            weight + output[:, None] * WIDTH + column[None, :],
            mask=is_own[:, None] & (column < WIDTH)[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        sums += weights.to(tl.float32) * own[None, :]
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=is_own)
