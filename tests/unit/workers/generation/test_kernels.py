"""The Triton kernels of a decode step: in Triton's interpreter on a CPU, as they are on a GPU, and compiled for a GPU
without one.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sie.workers.generation.paged_cache import Rule
from tests import paged_reference
from tests.triton_interpreter import IS_INTERPRETED, interpreted, needs_triton, run_interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest distance to sums in float32: outputs are about 1, and rounded to the format."""
needs_gpu = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


class Form(NamedTuple):
    positions: tuple[int, ...]
    heads: int = 4
    keys: int = 2
    width: int = 16
    value_width: int = 16
    block_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


FORMS = {
    "one token, one tile, several parts": Form((0, 5, 63, 64, 200)),
    "one long sequence": Form((900,), heads=2, keys=1, block_tokens=32),
    "odd groups and widths": Form((3, 70), heads=6, keys=2, width=40, value_width=24),
    "no groups": Form((40, 129), heads=3, keys=3, block_tokens=8),
    "a window": Form((5, 99, 100, 300), window=100),
    "capped scores": Form((33, 150), softcap=3.0),
    "sinks": Form((0, 31, 190), has_sinks=True),
    "wide heads with all of it": Form((20, 140), heads=2, keys=1, width=192, value_width=128, window=70, softcap=5.0, has_sinks=True),
}  # fmt: skip


class Case(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: paged_reference.Tables
    rule: Rule


def build(form, dtype, device):
    """Return random states; rows that no token has written are NaN, blocks lie in any order."""
    generator = torch.Generator().manual_seed(1)
    count, most = len(form.positions), max(form.positions) // form.block_tokens + 1
    blocks = torch.randperm(count * most, generator=generator).view(most, count).int()
    states = []
    for width in (form.width, form.value_width):
        rows = torch.randn(count * most + 1, form.block_tokens, form.keys, width, generator=generator).to(dtype)
        for i, position in enumerate(form.positions):
            rows[blocks[position // form.block_tokens, i], position % form.block_tokens + 1 :] = torch.nan
            rows[blocks[position // form.block_tokens + 1 :, i].long()] = torch.nan
        states.append(rows.to(device))
    query = torch.randn(count, form.heads, form.width, generator=generator).to(dtype).transpose(0, 1).to(device)
    sinks = torch.randn(form.heads, generator=generator).to(dtype).to(device) if form.has_sinks else None
    tables = paged_reference.Tables(torch.tensor(form.positions, device=device), blocks.to(device))
    return Case(query, *states, tables, Rule(form.width**-0.5 * 2, form.softcap, sinks))


def check(kernels, form, dtype, device="cpu"):
    case = build(form, dtype, device)
    found = torch.full((len(form.positions), form.heads, form.value_width), torch.nan, dtype=dtype, device=device)
    expected = torch.empty_like(found, dtype=torch.float32)
    states = case.query, case.keys, case.values
    kernels.attend_blocks(*states, kernels.Tables(*case.tables), form.window, case.rule, found)
    paged_reference.attend_blocks(*states, case.tables, form.window, case.rule, expected)
    assert float((found.float() - expected).abs().max()) < TOLERANCE[dtype]


@needs_triton
def test_the_kernels_compute_on_a_cpu_what_they_are_to():
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("name", FORMS)
def test_attention_in_place_is_that_over_the_same_tokens_side_by_side(name):
    from sie.workers.generation import kernels

    check(kernels, FORMS[name], torch.float16 if name == "no groups" else torch.float32)


@needs_triton
def test_a_sequence_is_cut_the_less_the_more_there_are():
    from sie.workers.generation import kernels

    assert kernels._cut(1) == (64, 1)
    assert kernels._cut(64) == (16, 1)
    assert kernels._cut(2048) == (4, 8)


@interpreted
def test_parts_of_many_tiles_give_the_same(monkeypatch):
    """As with so many sequences that the device is busy without parts."""
    from sie.workers.generation import kernels

    monkeypatch.setattr(kernels, "_BUSY_PROGRAMS", 1)
    check(kernels, Form((10, 700), heads=2, keys=1), torch.float32)


def check_writing(kernels, device):
    key = torch.randn(2, 3, 20, device=device)
    value = torch.randn(3, 5, 12, device=device)[:, :3].transpose(0, 1).contiguous().transpose(0, 1)
    keys, values = torch.zeros(9, 2, 20, device=device), torch.zeros(9, 3, 12, device=device)
    expected = keys.clone(), values.clone()
    rows = torch.tensor([4, 0, 8], device=device)
    kernels.write_rows(keys, values, rows, key, value)
    paged_reference.write_rows(*expected, rows, key, value)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@interpreted
def test_keys_and_values_go_to_their_rows_and_nowhere_else():
    from sie.workers.generation import kernels

    check_writing(kernels, "cpu")


@needs_triton
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_kernel_builds_for_a_hopper_and_three_programs_fit_on_a_multiprocessor(width):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sie.workers.generation import kernels

    pointers = {"positions": "*i64", "blocks": "*i32", "sums": "*fp32", "maxima": "*fp32", "totals": "*fp32"}
    pointers |= dict.fromkeys(("query", "keys", "values", "sinks", "out"), "*bf16")
    numbers = dict.fromkeys(("query_head", "query_token", "blocks_row", "num_heads", "num_parts", "least_tiles"), "i32")
    types = pointers | numbers | {"scaling": "fp32", "softcap": "fp32"}
    form = kernels._Form.of(width, width)
    fixed = {
        "HAS_CAP": False, "GROUP": 4, "ROWS": 16, "WIDTH": width, "PADDED": form.padded, "NUM_KEYS": 8, "BLOCK_TOKENS": 32,
        "WINDOW": 0, "TILE": form.tile, "HAS_SINKS": False, "VALUE_WIDTH": width, "VALUE_PADDED": form.value_padded,
    }  # fmt: skip
    names = kernels._attend.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "query_head", "query_token")}
    source = ASTSource(
        kernels._attend, {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()}, aligned,
    )  # fmt: skip
    options = {"num_warps": 4, "num_stages": kernels._NUM_STAGES}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024 // 3
    assert "cp.async" in built.asm["ptx"]  # keys are fetched while others are attended


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_attention_in_place_is_that_over_the_same_tokens(name, dtype):
    from sie.workers.generation import kernels

    check(kernels, FORMS[name], dtype, "cuda")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_keys_and_values_go_to_their_rows():
    from sie.workers.generation import kernels

    check_writing(kernels, "cuda")
