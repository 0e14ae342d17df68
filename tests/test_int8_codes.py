"""8-bit moments: what the codes stand for, how they are rounded, and that every kernel computes the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from adamw_helpers import (
    DTYPES,
    assert_same_bits,
    coded,
    draw_state,
    each_isa,
    needs_kernel,
    special_states,
    using_isa,
)
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.kernels import Kernel, PlainKernel, host_kernel
from heavylift.offload.noise import noise_bits, noise_of
from heavylift.offload.quantised import BLOCK, EXP_AVG, EXP_AVG_SQ, GRIDS, Grid, block_scales, decode, encode
from heavylift.offload.tensors import StepTensors

CPU = torch.device("cpu")
HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=5)
PLAIN = PlainKernel()
each_grid = pytest.mark.parametrize("grid", [EXP_AVG, EXP_AVG_SQ], ids=["exp_avg", "exp_avg_sq"])


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_isa(request.param) as name:
        yield name


# ---- codes ----------------------------------------------------------------------------------------------------------


def listed(ends: tuple[int, ...], count: int) -> Tensor:
    """0 and the `count` highest numbers of a grid, as its description has them: float64, ascending."""
    numbers = [1.0]
    exponent = 1
    while len(numbers) < count:
        steps = next((n for n, end in zip((16, 8, 4), ends, strict=True) if exponent <= end), 2)
        numbers += [2.0**-exponent * (1 + step / steps) for step in reversed(range(steps))]
        exponent += 1
    assert len(numbers) == count, "the last power of two is not whole"
    return torch.tensor([0.0, *reversed(numbers)], dtype=torch.float64)


def magnitudes(grid: Grid) -> Tensor:
    return grid.numbers()[: grid.highest + 1]


def test_codes_stand_for_the_numbers_that_are_written_down() -> None:
    assert torch.equal(magnitudes(EXP_AVG).double(), listed((2, 6, 14), 127))
    assert torch.equal(magnitudes(EXP_AVG_SQ).double(), listed((4, 12, 28), 255))
    assert magnitudes(EXP_AVG)[1] == 2.0**-29 and magnitudes(EXP_AVG_SQ)[1] == 2.0**-59
    assert_same_bits(EXP_AVG.numbers()[128:], -EXP_AVG.numbers()[:128], "negative codes")


def drawn(numel: int, grid: Grid, seed: int = 0) -> Tensor:
    """Values over many powers of two, with a sign where the grid has one."""
    _, exp_avg, exp_avg_sq, _ = draw_state(numel, torch.float32, seed)
    return exp_avg if grid.signed else exp_avg_sq


def stored(values: Tensor, grid: Grid, random: Tensor | None = None) -> Tensor:
    """The values, as they come back."""
    scales = block_scales(values)
    return decode(encode(values, scales, grid, random), scales, grid)


def gap(x: Tensor, grid: Grid) -> Tensor:
    """Between the two numbers of the grid around each x (0 to 1), float64."""
    numbers = magnitudes(grid).double()
    above = torch.bucketize(x.double(), numbers).clamp(1)
    return numbers[above] - numbers[above - 1]


@each_grid
def test_the_error_is_below_the_distance_of_neighbours(grid: Grid) -> None:
    """Half of it, rounded to nearest; and that is 1/16 to 1/2 of the value, finer near the scale."""
    values = drawn(50 * BLOCK + 17, grid)
    values.view(-1)[:BLOCK] = 0  # a block of zeros
    scales = block_scales(values)
    assert torch.equal(scales[1:2], values[BLOCK : 2 * BLOCK].abs().amax(keepdim=True))
    scale = scales.repeat_interleave(BLOCK)[: values.numel()].double()
    x = (values.double().abs() / scale).nan_to_num(0)
    bound = gap(x, grid) * scale
    random = noise_bits(noise_of("weight", 1, 0), values.numel(), CPU)
    smallest = magnitudes(grid)[1] * (x > 0)  # what is below becomes 0, or this
    for got, share in ((stored(values, grid), 0.5), (stored(values, grid, random), 1.0)):
        error = (got.double() - values.double()).abs()
        assert (error <= (bound * share * (1 + 1e-6)).maximum(smallest * scale)).all()
        assert torch.equal(got[:BLOCK], torch.zeros(BLOCK))
        assert torch.equal(torch.signbit(got), torch.signbit(values))
    for end, share in zip(grid.ends, (1 / 16, 1 / 8, 1 / 4), strict=True):
        inside = x >= 2.0**-end
        assert inside.any() and (gap(x, grid)[inside] <= share * x[inside] * (1 + 1e-6)).all()


@each_grid
def test_numbers_of_the_grid_stay_whatever_the_noise(grid: Grid) -> None:
    """So what was read from codes gives the same codes again; in float32's denormals, the same values."""
    random = torch.tensor([0, 0xFFFF] * 128)
    for scale in (1.0, 3e-5, 7.7e11, 1.2e-37):
        codes = torch.arange(256, dtype=torch.uint8)
        values = decode(codes, torch.tensor([scale]), grid)
        assert block_scales(values) == torch.tensor(scale)
        for some in (None, random):
            again = encode(values, block_scales(values), grid, some)
            if scale * 2.0**-59 > 2.0**-126 or grid.signed and scale * 2.0**-29 > 2.0**-126:
                assert torch.equal(again, codes), f"{scale=}"
            if some is None:
                assert_same_bits(decode(again, torch.tensor([scale]), grid), values, f"{scale=}")


@each_grid
def test_rounding_takes_a_neighbour_and_keeps_the_mean(grid: Grid) -> None:
    draws = 2**16
    random = noise_bits(noise_of("weight", 3, 0), draws, CPU)
    for x in (0.97, 0.2503, 0.0312, 3.1e-3, 7.7e-5, 1.9e-8):
        values = torch.full((draws,), x)
        got = decode(encode(values, torch.ones(draws // BLOCK), grid, random), torch.ones(draws // BLOCK), grid)
        numbers = magnitudes(grid).double()
        above = int(torch.bucketize(values[:1].double(), numbers))
        low, high = numbers[above - 1].item(), numbers[above].item()
        assert set(got.double().unique().tolist()) == {low, high}
        share = (values[0].double().item() - low) / (high - low)
        deviation = (high - low) * math.sqrt(share * (1 - share) / draws)
        assert abs(got.double().mean().item() - values[0].double().item()) < 5 * deviation


def test_second_moments_are_never_rounded_to_zero() -> None:
    values = torch.tensor([1.0, 1e-20, 1e-44, 0.0, 5e-19])
    for random in (None, torch.zeros(5, dtype=torch.int64)):
        got = stored(values, EXP_AVG_SQ, random)
        assert got.tolist() == [1.0, 2.0**-59, 2.0**-59, 0.0, 2.0**-59]


@each_grid
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(grid: Grid, bad: float) -> None:
    values = drawn(4 * BLOCK, grid)
    clean = stored(values, grid)
    values[BLOCK + 3] = bad
    got = stored(values, grid)
    assert got[BLOCK : 2 * BLOCK].isnan().all()
    assert_same_bits(got[:BLOCK], clean[:BLOCK], "the block before")
    assert_same_bits(got[2 * BLOCK :], clean[2 * BLOCK :], "the blocks behind")


# ---- steps ----------------------------------------------------------------------------------------------------------


def assert_same_states(got: StepTensors, expected: StepTensors, what: str) -> None:
    assert got.param_out is not None and expected.param_out is not None and got.scales and expected.scales
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(got.named()[name], expected.named()[name]), f"{name}, {what}"
    for name, one, other in zip(("exp_avg", "exp_avg_sq"), got.scales, expected.scales, strict=True):
        assert_same_bits(one, other, f"scales of {name}, {what}")
    assert_same_bits(got.master, expected.master, f"master, {what}")
    assert_same_bits(got.param_out, expected.param_out, f"param_out, {what}")


def test_a_step_uses_the_moments_before_they_are_rounded() -> None:
    state = draw_state(1000, torch.float32)
    rounded = coded(state, torch.float32)
    assert rounded.scales is not None
    moments = (
        decode(rounded.exp_avg, rounded.scales[0], EXP_AVG),
        decode(rounded.exp_avg_sq, rounded.scales[1], EXP_AVG_SQ),
    )
    exact = StepTensors(state[0].clone(), *moments, state[3], torch.zeros(1000))
    for tensors in (rounded, exact):
        PLAIN.step(tensors, HYPER)
    assert_same_bits(rounded.master, exact.master, "master")
    for name, scales in zip(GRIDS, rounded.scales, strict=True):
        assert_same_bits(scales, block_scales(exact.named()[name]), name)
        assert not torch.equal(decode(rounded.named()[name], scales, GRIDS[name]), exact.named()[name])


@needs_kernel
@each_isa
def test_the_kernel_has_its_twins_bits(isa: str) -> None:
    kernels: list[Kernel] = [PLAIN, host_kernel(True, 1), host_kernel(True, 3)]
    for n, dtype in itertools.product((0, 1, 255, 257, 1025, 33_300), DTYPES):
        results = [coded(draw_state(n, dtype), dtype, 2**32 - 500) for _ in kernels]
        for kernel, tensors in zip(kernels, results, strict=True):
            for lr in (1e-3, 0.0):
                kernel.step(tensors, replace(HYPER, lr=lr))
        for other in results[1:]:
            assert_same_states(other, results[0], f"{n=}, {dtype}")
    state = special_states(torch.bfloat16)
    shuffled = torch.randperm(state[0].numel(), generator=torch.Generator().manual_seed(1))
    for order in (slice(None), shuffled):
        special = [coded([t[order] for t in state], torch.bfloat16) for _ in kernels]
        for kernel, tensors in zip(kernels, special, strict=True):
            kernel.step(tensors, HYPER)
        assert_same_states(special[2], special[0], "special values")
    for kernel in kernels:
        tensors = coded(draw_state(8, torch.float32), torch.float32)
        with pytest.raises(AssertionError, match="cannot be taken back"):
            kernel.correct(tensors, HYPER, 0.3)
        with pytest.raises(AssertionError, match="cannot be taken back"):
            kernel.undo(tensors, HYPER)
        kernel.close()


@needs_kernel
def test_the_kernel_decodes_and_rounds_every_code() -> None:
    """Each code under many scales, with a gradient of 0 and betas that keep the moments: the kernel, against the twin,
    on numbers that lie on the grid and between."""
    kernel = host_kernel(True, 2)
    still = replace(HYPER, beta1=0.0, beta2=0.0)
    state = draw_state(64 * BLOCK, torch.float32)
    for hyper in (HYPER, still):
        results = [coded(state, torch.float32) for _ in range(2)]
        for tensors in results:
            tensors.exp_avg.copy_(torch.arange(256, dtype=torch.uint8).repeat(64))
            tensors.exp_avg_sq.copy_(torch.arange(256, dtype=torch.uint8).flip(0).repeat(64))
        for computing, tensors in zip((PLAIN, kernel), results, strict=True):
            computing.step(tensors, hyper)
        assert_same_states(results[1], results[0], f"{hyper}")
    kernel.close()


def test_halves_at_a_block_step_as_the_whole() -> None:
    """So ranks whose shards begin at blocks do not show."""
    state = draw_state(5 * BLOCK + 7, torch.bfloat16)
    whole, cut = (coded(state, torch.bfloat16, 100) for _ in range(2))
    PLAIN.step(whole, HYPER)
    for where in (slice(0, 2 * BLOCK), slice(2 * BLOCK, 5 * BLOCK + 7)):
        PLAIN.step(cut.part(where), HYPER)
    assert_same_states(cut, whole, "in two")
    with pytest.raises(AssertionError, match="inside of a block"):
        whole.part(slice(5, 10))


def test_a_second_moment_decays_where_rounded_to_nearest_it_stands_still() -> None:
    """Half of a block gets gradients, the other half none any more: its moments fall by themselves, not with the
    scale."""
    n, steps = 8 * BLOCK, 300
    grad = torch.cat([torch.ones(n // 2 // 8), torch.zeros(n // 2 // 8)]).repeat(8)
    v = torch.ones(n)
    scales = block_scales(v)
    tensors = StepTensors(
        torch.zeros(n), torch.zeros(n, dtype=torch.uint8), encode(v, scales, EXP_AVG_SQ, None), grad, None,
        StateFormat.INT8, noise_of("weight", 1, 0), (torch.zeros(8), scales),
    )  # fmt: skip
    nearest = v.clone()
    for step in range(1, steps + 1):
        PLAIN.step(replace(tensors, noise=noise_of("weight", step, 0)), replace(HYPER, step=step))
        nearest = stored(nearest * HYPER.beta2 + grad * (1 - HYPER.beta2), EXP_AVG_SQ)
    got = decode(tensors.exp_avg_sq, scales, EXP_AVG_SQ)
    assert got[grad == 0].mean().item() == pytest.approx(HYPER.beta2**steps, rel=0.02)
    assert got[grad == 1].mean().item() == pytest.approx(1, rel=0.02)
    assert nearest[grad == 0].mean().item() == pytest.approx(1, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 4097, 5_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_on_coded_states(numel: int, dtype: torch.dtype) -> None:
    from heavylift.offload.fused_gpu import FusedGpuKernel

    expected, cpu = (coded(draw_state(numel, dtype), dtype) for _ in range(2))
    assert cpu.scales is not None and cpu.param_out is not None
    states = cpu.master.cuda(), cpu.exp_avg.cuda(), cpu.exp_avg_sq.cuda(), cpu.grad.cuda(), cpu.param_out.cuda()
    scales = cpu.scales[0].cuda(), cpu.scales[1].cuda()
    got = StepTensors(*states, StateFormat.INT8, cpu.noise, scales)
    for _ in range(2):
        PLAIN.step(expected, HYPER)
        FusedGpuKernel().step(got, HYPER)
    master, exp_avg, exp_avg_sq, grad, out = (tensor.cpu() for tensor in got.named().values())
    back = StepTensors(master, exp_avg, exp_avg_sq, grad, out, scales=(scales[0].cpu(), scales[1].cpu()))
    assert_same_states(back, expected, f"{numel=}")
