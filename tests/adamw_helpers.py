"""Shared by the tests of the optimizer's arithmetic: tensors of a step, comparison to the bit, the native kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload import native
from heavylift.offload.noise import noise_of
from heavylift.offload.quantised import EXP_AVG, EXP_AVG_SQ, block_scales, encode
from heavylift.offload.tensors import StepTensors

SPECIALS = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38, 1e20, 1e-20, 1.0, -1.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of gradients and parameters."""
KERNEL = native.load()
ISAS = [] if KERNEL is None else KERNEL.available_isas()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the native kernel is not built on this machine")
each_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)


def the_kernel() -> native.NativeKernel:
    """The compiled kernel, in tests that need it."""
    assert KERNEL is not None
    return KERNEL


@contextmanager
def using_isa(name: str) -> Iterator[str]:
    """The native kernel computes with this instruction set inside."""
    before = the_kernel().isa
    the_kernel().set_isa(name)
    yield name
    the_kernel().set_isa(before)


def draw_state(n: int, grad_dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """master, exp_avg, exp_avg_sq, grad: magnitudes over many binades, so that every rounding differs; no step need
    have led there. A float16 gradient has denormals and infinities."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        exponent = torch.empty(n).uniform_(low, high, generator=generator)
        return torch.randn(n, generator=generator) * torch.exp2(exponent)

    return [draw(-12, 2), draw(-30, 4), draw(-60, 8).abs(), draw(-30, 6).to(grad_dtype)]


def special_states(grad_dtype: torch.dtype, specials: tuple[float, ...] = SPECIALS) -> list[Tensor]:
    """All combinations of special values in master, exp_avg, exp_avg_sq and grad."""
    values = torch.tensor(specials)
    p, m, v, g = (x.reshape(-1).clone() for x in torch.meshgrid(values, values, values.abs(), values, indexing="ij"))
    return [p, m, v, g.to(grad_dtype)]


def with_output(state: list[Tensor], out_dtype: torch.dtype | None) -> StepTensors:
    """Copies of a state, and a place for the parameters (None: nobody wants them)."""
    out = None if out_dtype is None else torch.full_like(state[0], 7, dtype=out_dtype)
    return StepTensors(*(t.clone() for t in state), out)


def coded(state: list[Tensor], out_dtype: torch.dtype, first: int = 0, name: str = "weight") -> StepTensors:
    """Copies of a state with its moments in 8 bits, and a place for the parameters."""
    master, exp_avg, exp_avg_sq, grad = (t.clone() for t in state)
    scales = block_scales(exp_avg), block_scales(exp_avg_sq)
    codes = encode(exp_avg, scales[0], EXP_AVG, None), encode(exp_avg_sq, scales[1], EXP_AVG_SQ, None)
    out, noise = torch.zeros(master.numel(), dtype=out_dtype), noise_of(name, 5, first)
    return StepTensors(master, *codes, grad, out, StateFormat.INT8, noise, scales)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a float tensor as integers."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    """NaN equals NaN whatever its payload; -0.0 is not 0.0."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    nan_got, nan_expected = got.isnan(), expected.isnan()
    assert torch.equal(nan_got, nan_expected), f"{what}: NaN in other places"
    differ = (bits(got) != bits(expected)) & ~nan_got
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {got.numel()} differ, first {got[differ][0]} for {expected[differ][0]}"
    )


def assert_same_step(got: StepTensors, expected: StepTensors, what: str) -> None:
    """All tensors of a step, to the bit."""
    for name, tensor in got.named().items():
        assert_same_bits(tensor, expected.named()[name], f"{name}, {what}, n={tensor.numel()}")
